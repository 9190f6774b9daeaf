"""Steps by their definition for losses, weights, masks and layers.

Also the search for a damping, and unusual batches.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.curvature_models import TEXT, ZOO, inputs, noise
from tests.support.curvature_models import network as zoo_network
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Reference,
    get_flat,
    loss_of,
    outputs_and_jacobians,
    second,
    set_flat,
)
from tests.support.harness import randomize
from tests.support.marks import with_slow
from tests.support.reference import Array
from tfkfac.gauss_newton.solve import LARGEST, NormalEquations, Search, search

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
COUNTS = np.arange(2.0 * ROWS).reshape(ROWS, 2) % 5
# For each tensor z that a loss uses: diagonal of the Fisher matrix with respect
# to z, and gradient of the loss.
Curve = Callable[[list[Array]], list[tuple[Array, Array]]]


def log_odds(p: Any) -> Any:
    return tf.math.log(p / (1 - p))


class Case(NamedTuple):
    model: Callable[[], Any]
    loss: Any
    x: Array
    y: Any
    curve: Curve
    options: Any = {}  # noqa: RUF012 (never changed)
    weights: Any = None
    # Functions from outputs to z, up to a constant, which does not matter.
    links: tuple[Callable[[Any], Any], ...] = (tf.identity,)


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
    def curve(z: list[Array]) -> list[tuple[Array, Array]]:
        weight = scale * np.ones_like(z[0])
        return [(weight, weight * (z[0] - y))]

    return curve


def counts(z: list[Array]) -> list[tuple[Array, Array]]:
    rate = z[0] + 1e-7  # as in the loss
    return [(1 / rate / rate.size, (1 - COUNTS / rate) / rate.size)]


def categorical(labels: Array, weights: Any) -> Curve:
    """For z = log p, `sum_c p_c dz_c = 0`, so diagonal terms suffice."""

    def curve(z: list[Array]) -> list[tuple[Array, Array]]:
        scale = np.reshape(weights, (-1, 1)) / ROWS
        return [(scale * np.exp(z[0]), -scale * labels)]

    return curve


def both(z: list[Array]) -> list[tuple[Array, Array]]:
    p, real = 1 / (1 + np.exp(-z[0])), z[1]  # by name
    scale = 3 * 2 / real.size * np.ones_like(real)
    weight = WEIGHTS[:, None] * 0.5 / p.size
    bits = weight * p * (1 - p), weight * (p - BITS)
    return [bits, (scale, scale * (real - REAL))]


SERIES_Y = RNG.normal(size=(ROWS, 4, 2))
VALID = np.any(SERIES != 0, -1, keepdims=True)
SPARSE = keras.losses.SparseCategoricalCrossentropy


class Registered(keras.losses.Loss):
    """A Poisson loss of the user, with a registered distribution."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        log = keras.ops.log(y_pred + 1e-7)
        return keras.ops.mean(y_pred - y_true * log, -1)


tfkfac.register_distribution(
    Registered, tfkfac.fisher.Poisson(), unit=1.0, features="mean"
)
CASES = {
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
        categorical(HOT, WEIGHTS), {"solve": "parameters"}, WEIGHTS,
        (tf.math.log,),
    ),
    "logits": Case(
        network(3), lambda: SPARSE(from_logits=True), X, CLASSES,
        categorical(HOT, 1.0), links=(tf.nn.log_softmax,),
    ),
    "registered": Case(
        network(2, "exponential"), Registered, X, COUNTS, counts,
    ),
    "two outputs": Case(
        two_outputs,
        lambda: {"real": "mse", "bits": "binary_crossentropy"},
        X, {"real": REAL, "bits": BITS}, both,
        {"loss_weights": {"real": 3.0, "bits": 0.5}, "solve": "parameters"},
        {"real": None, "bits": WEIGHTS}, (log_odds, tf.identity),
    ),
}  # fmt: skip


def layer_case(name: str, solve: str) -> Case:
    """Mean squared error of a model with a type of layers."""
    body, shape = ZOO[name]
    x, y = inputs(shape), noise(len(inputs(shape)), 2).astype(float)
    x = x if shape == TEXT else x.astype(float)
    model = functools.partial(zoo_network, body, shape)
    return Case(model, "mse", x, y, normal(y, 2 / y.size), {"solve": solve})


# Grouped convolutions and masks loop over examples.
CASES |= {
    name: layer_case(name, solve)
    for name, solve in {
        "tanh": "parameters",
        "conv_groups": "parameters",
        "masked_rnn": "parameters",
        "layer_two_axes": "residuals",
    }.items()
}
FEW = "logits", "tanh", "registered"


def reference_of(model: Any, case: Case, start: Array) -> Reference:
    """The steps by their definition."""

    def read(outputs: Any) -> list[Any]:
        pairs = zip(case.links, tf.nest.flatten(outputs), strict=True)
        return [link(output) for link, output in pairs]

    @functools.cache
    def at(key: bytes) -> tuple[Array, Array, Array]:
        """Root B of the Fisher matrix, `K = B^T J` and residuals."""
        point = np.frombuffer(key)
        result = outputs_and_jacobians(model, case.x, point, read)
        curves = case.curve([z for z, _ in result])
        root = np.sqrt(np.concatenate([np.ravel(f) for f, _ in curves]))
        slopes = np.concatenate([np.ravel(q) for _, q in curves])
        rows = [j.reshape(-1, len(point)) for _, j in result]
        residuals = slopes / np.where(root > 0, root, np.inf)
        return root, root[:, None] * np.concatenate(rows), residuals

    def rows(point: Array) -> tuple[Array, Array]:
        return at(point.tobytes())[1:]

    def pull(point: Array, direction: Array) -> Array:
        root, matrix, _ = at(point.tobytes())

        def flat_z(weights: Array) -> Array:
            set_flat(model, weights)
            z = read(model(case.x, training=True))
            return np.concatenate([np.ravel(x) for x in z])

        return matrix.T @ (root * second(flat_z, point, direction))

    penalties = [
        np.full(v.shape, 0.04 if v.regularizer else 0.0).ravel()
        for v in model.trainable_variables
    ]
    loss = loss_of(model, case.x, case.y, sample_weight=case.weights)
    return Reference(loss, rows, start, pull, ridge=np.concatenate(penalties))


@pytest.mark.parametrize(
    "name", with_slow(CASES, *(case for case in CASES if case not in FEW))
)
def test_steps(name: str) -> None:
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
        start, done = get_flat(model), []
        for _ in range(STEPS):
            model.train_on_batch(case.x, case.y, sample_weight=case.weights)
            done.append(optimizer.last_step)
        got = get_flat(model)
        reference = reference_of(model, case, start)
        for _ in range(STEPS):
            reference.step()
        set_flat(model, got)
    travelled = np.linalg.norm(reference.weights - start)
    assert travelled > 0.1
    assert np.linalg.norm(got - reference.weights) <= 1e-7 * travelled
    assert [d["tries"] for d in done] == reference.tries
    assert [d["accepted"] for d in done] == reference.accepted
    dampings = [d["damping"] for d in done]
    np.testing.assert_allclose(dampings, reference.dampings, rtol=1e-5)
    assert any(reference.bent)


# ------------------------------------------------------------- unusual batches
POINTS = RNG.uniform(-1, 1, size=(8, 2))
VALUES = np.sin(3 * POINTS[:, :1]) * POINTS[:, 1:]


def test_a_batch_of_zero_weight_is_not_rejected() -> None:
    """A zero step: one try, and the damping stays."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    optimizer = tfkfac.GaussNewton(damping=0.25)
    model.compile(optimizer, "mse", run_eagerly=True)
    before = model.get_weights()
    model.train_on_batch(POINTS, VALUES, sample_weight=np.zeros(8))
    np.testing.assert_equal(model.get_weights(), before)
    assert model.optimizer.last_step["tries"] == 1
    (state,) = model.optimizer.method.states
    assert float(state.damping.numpy()) == 0.25
    assert int(state.rejected.numpy()) == 0


def test_one_trace_for_all_batches() -> None:
    """6 and 2 examples for 3 weights use different spaces."""
    traces = []

    class Traces(tfkfac.GaussNewton):
        def apply(self, *args: Any, **kwargs: Any) -> None:
            traces.append(1)
            super().apply(*args, **kwargs)

    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(Traces(), "mse")
    model.fit(POINTS, VALUES, 6, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.last_step["residuals"] == 2
    assert len(traces) == 1


# ---------------------------------------------- shared outputs, frozen layers
def test_losses_of_a_tensor_returned_twice() -> None:
    """The step of a linear model minimises the sum of both losses.

    The loss of the name "b" alone, or of the tensor's first name, is smaller.
    """
    x = keras.Input((2,))
    y = layers.Dense(1)(x)
    model = keras.Model(x, {"c": y, "b": y, "a": y})
    mse, weights = {"c": "mse", "b": "mse"}, {"c": 1.0, "b": 3.0}
    optimizer = tfkfac.GaussNewton(1e-6, momentum=0.0)
    model.compile(optimizer, mse, loss_weights=weights, run_eagerly=True)
    labels = {"b": VALUES, "c": 1 - VALUES, "a": VALUES}
    model.fit(POINTS, labels, len(POINTS), 3, verbose=0)
    matrix = np.c_[POINTS, np.ones(len(POINTS))]
    want = np.linalg.lstsq(matrix, (1 - VALUES + 3 * VALUES) / 4, rcond=None)[0]
    got = np.concatenate([np.reshape(w, [-1, 1]) for w in model.get_weights()])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled_again", [False, True])
def test_freezing_a_layer(compiled_again: bool, tmp_path: pathlib.Path) -> None:
    """The next step starts from zero; a saved model continues."""
    first, last = layers.Dense(3, "tanh"), layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), first, last])
    model.compile(tfkfac.GaussNewton(), "mse", run_eagerly=True)
    model.train_on_batch(POINTS, VALUES)
    first.trainable = False
    if compiled_again:
        model.compile(model.optimizer, "mse", run_eagerly=True)
    frozen = first.get_weights()
    model.train_on_batch(POINTS, VALUES)
    assert model.optimizer.last_step["accepted"]
    np.testing.assert_equal(first.get_weights(), frozen)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.run_eagerly = True
    for trained in model, loaded:
        trained.train_on_batch(POINTS, VALUES)
    pairs = zip(loaded.get_weights(), model.get_weights(), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-4)


# --------------------------------------------------------- search for a damping
MATRIX = RNG.normal(size=(6, 4))
OFFSETS = RNG.normal(size=6)


def quadratic(change: Any) -> Any:
    """A quadratic loss, equal to its Gauss-Newton model."""
    errors = OFFSETS + tf.linalg.matvec(tf.constant(MATRIX), change)
    return tf.reduce_sum(errors**2) / 2


def tries(
    loss: Callable[[Any], Any], damping: float = 0.5, max_tries: int = 6
) -> Search:
    zero = tf.zeros([4], tf.float64)
    return search(
        NormalEquations.of_residuals(tf.constant(MATRIX), tf.constant(OFFSETS)),
        loss,
        tf.convert_to_tensor(loss(zero)),
        tf.constant(damping, tf.float64),
        zero,
        tf.constant(1.0, tf.float64),
        max_tries,
        tf.float64,
        lambda change: tf.zeros([6], tf.float64),  # linear residuals
    )


def test_no_step_without_descent() -> None:
    def infeasible(change: Any) -> Any:
        here = tf.reduce_all(change == 0)
        return tf.where(here, quadratic(change), np.nan)

    result = tries(infeasible, damping=2.0**-10)
    assert not result.accepted
    assert not result.settled
    assert int(result.tries) == 6
    np.testing.assert_array_equal(result.change, 0)
    # By 4, 8, 16, ... 128.
    np.testing.assert_allclose(result.damping, 2.0 ** (27 - 10))
    assert float(tries(infeasible, damping=LARGEST).damping) == LARGEST
    assert int(tries(infeasible, max_tries=2).tries) == 2


def test_rounding_of_the_loss_ends_the_tries() -> None:
    """1e18 hides every reduction: one try, and the damping stays."""
    result = tries(lambda change: quadratic(change) + 1e18)
    assert bool(result.settled)
    assert int(result.tries) == 1
    np.testing.assert_array_equal(result.damping, 0.5)
    np.testing.assert_array_equal(result.change, 0)
