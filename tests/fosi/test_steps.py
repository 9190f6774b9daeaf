"""Steps of FOSI against a NumPy program with exact Hessians."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import SGD, Adam, AdamW
from keras.optimizers.schedules import ExponentialDecay, PolynomialDecay

from tests.support.fosi_reference import (
    BETAS,
    ROWS,
    SIZE,
    Fosi,
    Network,
    Rule,
    adam,
    assert_follows,
    assert_path,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    sgd,
)
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.schedules import Formula

ORACLE = pathlib.Path(__file__).parents[1] / "data" / "fosi_mlp.npz"


# -------------------------------------------------------------- the reference
def test_reference_hessian() -> None:
    """Complex steps give the stored Hessian and gradient."""
    with np.load(ORACLE) as arrays:
        m = {k: arrays[k] for k in arrays.files}
    names = [k for k in m if k.startswith("weights0/")]
    w = np.concatenate([m[k].ravel().astype("float64") for k in names])
    network = Network(m["x"].astype("float64"), m["y"], hidden=16)
    np.testing.assert_allclose(network.gradient(w), m["gradient"], atol=1e-14)
    np.testing.assert_allclose(network.hessian(w), m["hessian"], atol=1e-13)


def test_case_is_not_trivial(double: None) -> None:
    """The test problem has distinct extreme curvatures, one negative."""
    x, y = data()
    values = np.linalg.eigvalsh(Network(x, y).hessian(flat(mlp())))
    assert (values[:2] < -0.005).all()
    assert np.diff(values[-4:]).min() > 0.01
    assert np.diff(values[:3]).min() > 1e-3


# --------------------------------------------------------------- trajectories
def clipped(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
    return -0.1 * g * min(1.0, 0.05 / np.linalg.norm(g))


def decayed(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
    move = sgd(0.1, 0.9)(np.clip(g, -0.05, 0.05), w, slots, t)
    return move - 0.1 * 0.3 * w


def slowing(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
    return sgd(0.1 * (1 - (t - 1) / 12), 0.9)(g, w, slots, t)


class Case(NamedTuple):
    """An inner optimizer, and arguments of `FOSI` and of the NumPy program."""

    inner: Callable[[], Any]
    rule: Rule
    options: Any = {}  # noqa: RUF012 (never changed)
    settings: Any = {}  # noqa: RUF012
    estimated: Any = [2, 5, 8]  # noqa: RUF012


def in_two(t: Any) -> Any:
    return 2 if t < 6 else 3


CASES = {
    # Newton steps go downhill where the curvature is negative.
    "momentum": Case(
        lambda: SGD(0.1, 0.9),
        sgd(0.1, 0.9),
        {"num_smallest": 2, "alpha": 0.1},
        {"num_smallest": 2, "alpha": lambda t: 0.1},
    ),
    "adam": Case(lambda: Adam(0.03, **BETAS), adam(0.03)),
    "adamw": Case(lambda: AdamW(0.03, 0.3, **BETAS), adam(0.03, 0.3)),
    # The rate is clipped for SGD alone.
    "nesterov, rate": Case(
        lambda: SGD(0.1, 0.9, True),
        sgd(0.1, 0.9, True),
        {"learning_rate_clip": 2.5, "warmup_steps": 0},
        {"clip": 2.5, "warmup": 0},
        [0, 3, 6, 9],
    ),
    "adam, rate": Case(
        lambda: Adam(0.03, **BETAS), adam(0.03), {"learning_rate_clip": 2.5}
    ),
    # The Newton part has its own scale and is not clipped.
    "clipping": Case(lambda: SGD(0.1, global_clipnorm=0.05), clipped),
    "decay": Case(
        lambda: SGD(0.1, 0.9, weight_decay=0.3, clipvalue=0.05), decayed
    ),
    "one": Case(
        lambda: SGD(0.1),
        sgd(0.1),
        {"update_interval": None},
        {"interval": lambda t: 10**6},
        [2],
    ),
    # A number follows the inner rate, anything else is left alone.
    "rate of time": Case(
        lambda: SGD(PolynomialDecay(0.1, 12, 0.0), 0.9),
        slowing,
        {},
        {"alpha": lambda t: 0.5 * (1 - t / 12)},
    ),
    "schedule": Case(
        lambda: SGD(PolynomialDecay(0.1, 12, 0.0), 0.9),
        slowing,
        {"alpha": ExponentialDecay(0.5, 4, 0.5), "update_interval": 4},
        {"alpha": lambda t: 0.5 * 0.5 ** (t / 4), "interval": lambda t: 4},
        [2, 6],
    ),
    "formulas": Case(
        lambda: SGD(0.1, 0.9),
        sgd(0.1, 0.9),
        {
            "alpha": Formula(lambda t: 0.5 / (1.0 + t)),
            "update_interval": Formula(in_two),
            "momentum": 0.5,
        },
        {
            "alpha": lambda t: 0.5 / (1 + t),
            "interval": in_two,
            "momentum": 0.5,
        },
        [2, 4, 8],
    ),
}
QUICK = "momentum", "nesterov, rate", "adam", "rate of time", "formulas"


@pytest.mark.parametrize(
    "name", with_slow(CASES, *(case for case in CASES if case not in QUICK))
)
def test_trajectory(name: str, double: None) -> None:
    case = CASES[name]
    program = Fosi(case.rule, **case.settings)
    optimizer = fosi(case.inner(), **case.options)
    assert_follows(optimizer, program)
    assert program.estimated == case.estimated
    assert int(optimizer.estimations) == len(case.estimated)
    values = optimizer.spectrum()
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, program.values, rtol=1e-7)
    assert (max(program.scales) > 1.5) == (name == "nesterov, rate")


def test_single_precision() -> None:
    program = Fosi(sgd(0.1, 0.9), num_smallest=1)
    assert_follows(fosi(SGD(0.1, 0.9), num_smallest=1), program, rtol=1e-4)


def test_sample_weights(double: None) -> None:
    """Sample weights weigh the loss and its Hessian."""
    program = Fosi(sgd(0.1), warmup=1)
    weight = np.linspace(0, 2, ROWS)
    assert_follows(fosi(SGD(0.1), warmup_steps=1), program, 6, weight=weight)


def test_only_smallest(double: None) -> None:
    """Without largest directions `s` is 1."""
    options = {"num_largest": 0, "num_smallest": 2, "alpha": 0.05}
    x, y = data()
    model, network = mlp(), Network(x, y)
    model.compile(fosi(SGD(0.1), **options), loss())
    got = fit(model, x, y, 4)
    values, vectors = np.linalg.eigh(network.hessian(got[2]))
    g, V = network.gradient(got[2]), vectors[:, :2]
    c = V.T @ g
    want = -0.1 * (g - V @ c) - 0.05 * V @ (c / np.abs(values[:2]))
    np.testing.assert_allclose(got[3] - got[2], want, rtol=0, atol=1e-8)


def test_changed_numbers(double: None) -> None:
    """Changed arguments take effect in the next step without a new trace."""
    x, y = data()
    model, optimizer = mlp(), fosi(SGD(0.1))
    model.compile(optimizer, loss())
    first = fit(model, x, y, 4)
    optimizer.alpha, optimizer.update_interval = 0.25, 2
    optimizer.learning_rate = 0.05
    got = np.concatenate([first, fit(model, x, y, 5)[1:]])

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        return -(0.1 if t <= 4 else 0.05) * g

    program = Fosi(
        rule,
        # It follows the learning rate, which is half as large then.
        alpha=lambda t: 0.5 if t < 4 else 0.25 * 0.05 / 0.1,
        interval=lambda t: 3 if t < 4 else 2,
    )
    network = Network(x, y)
    want = program.run(network.gradient, network.hessian, got[0], 9)
    assert program.estimated == [2, 4, 6, 8]
    assert_path(got, want, 1e-6)


@pytest.mark.slow
def test_more_directions_than_weights(double: None) -> None:
    """Warns; directions without curvature are left to the inner optimizer."""
    program = Fosi(adam(0.03), num_largest=SIZE, warmup=1, momentum=0.0)
    options = {"num_largest": 99, "warmup_steps": 1, "momentum": 0.0}
    optimizer = fosi(Adam(0.03, **BETAS), lanczos_steps=None, **options)
    with pytest.warns(UserWarning, match=f"uses {SIZE} directions, not 99"):
        assert_follows(optimizer, program)
    assert program.values is not None
    sizes = np.abs(program.values)
    shares = sizes / sizes.max()
    assert 2 < np.sum(shares <= 1e-3) < SIZE - 3
    assert not ((shares > 5e-4) & (shares < 2e-3)).any()
    assert optimizer.spectrum().shape == (SIZE,)


# ------------------------------------------------------------------ quadratic
@pytest.mark.parametrize(
    ("curvature", "options", "want"),
    [
        # A negative curvature among the largest: `s` is the limit.
        (
            [3.0, 1.0, -1.0, -2.0],
            {"num_largest": 3, "learning_rate_clip": 1.5},
            [0.25, 0.25, -0.25, -1.5 * 0.1 * 2],
        ),
        # Weak ones, below a thousandth of the largest, of either sign.
        (
            [1.0, -1.1e-3, 0.9e-3, -0.9e-3],
            {"num_largest": 4},
            [0.25, -0.25, 0.9e-4, -0.9e-4],
        ),
    ],
)
def test_diagonal_curvature(
    curvature: list[float], options: Any, want: list[float], double: None
) -> None:
    """One step on a diagonal quadratic loss, from weights of 1."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, use_bias=False)]
    )
    model.layers[0].set_weights([np.ones((4, 1))])
    own = {"lanczos_steps": 4, "warmup_steps": 0, "alpha": 0.25}
    model.compile(fosi(SGD(0.1), **own, **options), "mse", run_eagerly=True)
    x, y = np.eye(4) * np.sqrt(2), np.zeros((4, 1))
    model.train_on_batch(x, y, sample_weight=np.array(curvature))
    np.testing.assert_allclose(1 - flat(model), want, rtol=1e-7)


def least_squares(
    inner: Any, num_largest: int, start: float, rank: int = 5, **options: Any
) -> tuple[Any, Array, Array]:
    """A model of one unit with a quadratic loss."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, rank)) @ rng.normal(size=(rank, 5))
    x, y = x.astype(keras.config.floatx()), rng.normal(size=(20, 1))
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, name="unit")])
    model.layers[0].set_weights([np.full((5, 1), start), np.ones(1)])
    own = {"warmup_steps": 0, "lanczos_steps": 6, "update_interval": 1}
    optimizer = fosi(
        inner, num_largest=num_largest, momentum=0.0, **own, **options
    )
    model.compile(optimizer, "mse")
    return model, x, y


@pytest.mark.parametrize("num_largest", [2, 6])
def test_newton_step_is_exact(num_largest: int, double: None) -> None:
    """One Newton step reaches the minimiser in the span of the directions."""
    model, x, y = least_squares(SGD(1e-3), num_largest, 2.0, alpha=1.0)
    model.train_on_batch(x, y)
    ones = np.hstack([x, np.ones((20, 1))])
    _, vectors = np.linalg.eigh(ones.T @ ones)
    residual = ones @ flat(model) - y[:, 0]
    slope = vectors.T @ (ones.T @ residual) / 10
    np.testing.assert_allclose(slope[-num_largest:], 0, atol=1e-11)
    if num_largest == 6:
        best = np.linalg.lstsq(ones, y[:, 0], rcond=None)[0]
        np.testing.assert_allclose(flat(model), best, atol=1e-11)
    else:
        assert np.abs(slope[:-num_largest]).min() > 1e-2


@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_more_directions_than_rank(inner: str) -> None:
    """Zero curvature is not inverted: the loss only decreases."""
    make = SGD(1e-3) if inner == "sgd" else Adam(1e-3)
    model, x, y = least_squares(make, 5, 1.0, rank=1)
    history = [model.evaluate(x, y, verbose=0)]
    for _ in range(6):
        model.train_on_batch(x, y)
        history.append(model.evaluate(x, y, verbose=0))
    assert np.isfinite(history).all()
    assert np.diff(history).max() < 1e-6
    assert history[-1] < 0.7 * history[0]
