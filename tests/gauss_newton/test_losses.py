"""Losses, weights, masks and several outputs against NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Pull,
    Reference,
    Rows,
    get_flat,
    loss_of,
    outputs_and_jacobians,
    second,
    set_flat,
)
from tests.support.harness import randomize
from tests.support.marks import with_slow
from tests.support.reference import Array

ROWS, STEPS = 9, 4
RNG = np.random.default_rng(5)
X = RNG.normal(size=(ROWS, 3))
SERIES = RNG.normal(size=(ROWS, 4, 3))
SERIES[2, 1:] = SERIES[5, 3:] = 0
WEIGHTS = RNG.integers(0, 4, ROWS) / 2
REAL = RNG.normal(size=(ROWS, 2))
CLASSES = RNG.integers(0, 3, ROWS)
HOT = np.eye(3)[CLASSES]
BITS = RNG.integers(0, 2, (ROWS, 2)).astype(float)
COUNTS = RNG.integers(0, 5, (ROWS, 2)).astype(float)
# For each output: diagonal of the Fisher matrix, gradient of the loss.
Curve = Callable[[list[Array]], list[tuple[Array, Array]]]
# Function from outputs to logits, and its derivative.
Link = tuple[Callable[[Array], Array], Callable[[Array], Array]]
SAME: Link = (lambda z: z, np.ones_like)
LOG: Link = (np.log, lambda z: 1 / z)  # up to a constant, which does not matter
LOGIT: Link = (lambda z: np.log(z / (1 - z)), lambda z: 1 / z / (1 - z))


class Case(NamedTuple):
    model: Callable[[], Any]
    loss: Any
    x: Array
    y: Any
    curve: Curve
    options: Any = {}  # noqa: RUF012 (never changed)
    weights: Any = None
    links: tuple[Link, ...] = (SAME,)  # functions to the logits, see `pull_of`


def network(
    units: int = 2, activation: str | None = None, penalty: Any = None
) -> Callable[[], Any]:
    def make() -> Any:
        x = keras.Input((3,))
        h = layers.Dense(4, "tanh", kernel_regularizer=penalty)(x)
        return keras.Model(x, layers.Dense(units, activation)(h))

    return make


def two_outputs() -> Any:
    x = keras.Input((3,))
    h = layers.Dense(4, "tanh")(x)
    return keras.Model(
        x,
        {
            "real": layers.Dense(2, name="real")(h),
            "bits": layers.Dense(2, "sigmoid", name="bits")(h),
        },
    )


def masked() -> Any:
    x = keras.Input((4, 3))
    h = layers.Dense(4, "tanh")(layers.Masking()(x))
    return keras.Model(x, layers.Dense(2)(h))


def normal(y: Array, scale: Any) -> Curve:
    def curve(outputs: list[Array]) -> list[tuple[Array, Array]]:
        weight = scale * np.ones_like(outputs[0])
        return [(weight, weight * (outputs[0] - y))]

    return curve


def bernoulli(z: Array, y: Array, scale: Any) -> tuple[Array, Array]:
    fisher = scale / (z * (1 - z))
    return fisher, fisher * (z - y)


def counts(outputs: list[Array]) -> list[tuple[Array, Array]]:
    (z,) = outputs
    rate = z + 1e-7
    return [(1 / rate / z.size, (1 - COUNTS / rate) / z.size)]


def categorical(labels: Array, weights: Any) -> Curve:
    def curve(outputs: list[Array]) -> list[tuple[Array, Array]]:
        scale = np.reshape(weights, (-1, 1)) / ROWS
        return [(scale / outputs[0], -scale * labels / outputs[0])]

    return curve


def both(outputs: list[Array]) -> list[tuple[Array, Array]]:
    bits, real = outputs  # by name
    scale = 3 * 2 / real.size * np.ones_like(real)
    weight = WEIGHTS[:, None] * 0.5 / bits.size
    return [bernoulli(bits, BITS, weight), (scale, scale * (real - REAL))]


SERIES_Y = RNG.normal(size=(ROWS, 4, 2))
VALID = np.any(SERIES != 0, -1, keepdims=True)
SPARSE = keras.losses.SparseCategoricalCrossentropy
CASES = {
    "weights": Case(
        network(), "mse", X, REAL,
        normal(REAL, WEIGHTS[:, None] * 2 / REAL.size), weights=WEIGHTS,
    ),
    "penalty": Case(
        network(penalty=keras.regularizers.L2(0.02)), "mse", X, REAL,
        normal(REAL, 2 / REAL.size), {"solve": "parameters"},
    ),
    "mask": Case(
        masked, "mse", SERIES, SERIES_Y,
        normal(SERIES_Y, VALID * 2 / (2 * VALID.sum())),
        {"solve": "parameters"},
    ),
    "softmax": Case(
        network(3, "softmax"), "sparse_categorical_crossentropy", X, CLASSES,
        categorical(HOT, WEIGHTS), {"solve": "parameters"}, WEIGHTS, (LOG,),
    ),
    "logits": Case(
        network(3), lambda: SPARSE(from_logits=True), X, CLASSES,
        categorical(HOT, 1.0), links=(LOG,),
    ),
    "counts": Case(network(2, "exponential"), "poisson", X, COUNTS, counts),
    "two outputs": Case(
        two_outputs,
        lambda: {"real": "mse", "bits": "binary_crossentropy"},
        X, {"real": REAL, "bits": BITS}, both,
        {"loss_weights": {"real": 3.0, "bits": 0.5}, "solve": "parameters"},
        {"real": None, "bits": WEIGHTS}, (LOGIT, SAME),
    ),
}  # fmt: skip
FEW = ("logits",)


def rows_of(model: Any, case: Case) -> Rows:
    """Rows and residuals of all outputs (probabilities, not logits)."""

    def rows(point: Array) -> tuple[Array, Array]:
        result = outputs(model, case, point)
        curves = case.curve([output for output, _ in result])
        parts = [
            (np.sqrt(f)[..., None] * j, np.divide(q, np.sqrt(f), where=f > 0))
            for (f, q), (_, j) in zip(curves, result, strict=True)
        ]
        size = len(point)
        return (
            np.concatenate([k.reshape(-1, size) for k, _ in parts]),
            np.concatenate([np.where(np.isfinite(r), r, 0).ravel()
                            for _, r in parts]),
        )  # fmt: skip

    return rows


def outputs(model: Any, case: Case, point: Array) -> list[tuple[Array, Array]]:
    """Values of the outputs (logits as probabilities) and Jacobians."""
    result = outputs_and_jacobians(model, case.x, point)
    if case.loss is CASES["logits"].loss:
        result = [probabilities(*pair) for pair in result]
    return result


def pull_of(model: Any, case: Case) -> Pull:
    """J^T W y'' of all outputs, with y the logits of probabilities.

    With J of the probabilities, `J_y = (dy/dp) J` and `W = F (dp/dy)^2`.
    """

    def linked(point: Array) -> Array:
        result = outputs(model, case, point)
        parts = zip(case.links, result, strict=True)
        return np.concatenate([link(z).ravel() for (link, _), (z, _) in parts])

    def pull(point: Array, direction: Array) -> Array:
        result = outputs(model, case, point)
        curves = case.curve([z for z, _ in result])
        parts = zip(case.links, curves, result, strict=True)
        pulls = [
            (f / slope(z))[..., None] * j
            for (_, slope), (f, _), (z, j) in parts
        ]
        rows = np.concatenate([p.reshape(-1, len(point)) for p in pulls])
        return rows.T @ second(linked, point, direction)

    return pull


def probabilities(logits: Array, jacobian: Array) -> tuple[Array, Array]:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    mean = np.einsum("bc,bcn->bn", p, jacobian)
    return p, p[..., None] * (jacobian - mean[:, None])


@pytest.mark.parametrize(
    "name", with_slow(CASES, *(case for case in CASES if case not in FEW))
)
def test_every_loss(name: str) -> None:
    case = CASES[name]
    # In the space of residuals if it is supported, see test_limits.py.
    options = dict(case.options)
    solve = options.pop("solve", "residuals")
    with floats("float64"):
        keras.utils.set_random_seed(0)
        model = case.model()
        randomize(model)
        optimizer: Any = tfkfac.GaussNewton(solve=solve)
        loss = case.loss() if callable(case.loss) else case.loss
        model.compile(optimizer, loss, **options)
        start = get_flat(model)
        for _ in range(STEPS):
            model.train_on_batch(case.x, case.y, sample_weight=case.weights)
        got = get_flat(model)
        penalties = [
            np.full(v.shape, 0.04 if v.regularizer else 0.0).ravel()
            for v in model.trainable_variables
        ]
        reference = Reference(
            loss_of(model, case.x, case.y, sample_weight=case.weights),
            rows_of(model, case),
            start,
            pull_of(model, case),
            ridge=np.concatenate(penalties),
        )
        for _ in range(STEPS):
            reference.step()
        set_flat(model, got)
    travelled = np.linalg.norm(reference.weights - start)
    assert travelled > 0.1
    assert np.linalg.norm(got - reference.weights) <= 1e-7 * travelled
    assert optimizer.last_step["tries"] == reference.tries[-1]
    assert any(reference.bent)
