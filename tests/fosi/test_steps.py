"""FOSI's steps against a NumPy program with exact Hessians."""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from keras.optimizers import SGD, Adam, AdamW, RMSprop

from tests.support.fosi_reference import (
    BETAS,
    SIZE,
    Fosi,
    Network,
    Rule,
    adam,
    assert_path,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    rmsprop,
    sgd,
)
from tests.support.marks import with_slow
from tests.support.reference import Array

ORACLE = pathlib.Path(__file__).parents[1] / "data" / "fosi_mlp.npz"
STEPS = 10
INNERS: dict[str, tuple[Any, Rule]] = {
    "sgd": (lambda: SGD(0.1), sgd(0.1)),
    "momentum": (lambda: SGD(0.1, 0.9), sgd(0.1, 0.9)),
    "nesterov": (lambda: SGD(0.1, 0.9, True), sgd(0.1, 0.9, True)),
    "adam": (lambda: Adam(0.03, **BETAS), adam(0.03)),
    "rmsprop": (lambda: RMSprop(0.01), rmsprop(0.01)),
    "adamw": (lambda: AdamW(0.03, 0.3, **BETAS), adam(0.03, 0.3)),
}


@functools.cache
def oracle() -> dict[str, Array]:
    with np.load(ORACLE) as arrays:
        return {k: arrays[k] for k in arrays.files}


def both(
    inner: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    steps: int = STEPS,
) -> tuple[Any, Array, Fosi, Array]:
    """Optimizer and path of FOSI; the reference's program and path."""
    make, rule = INNERS[inner]
    x, y = data()
    model, optimizer = mlp(), fosi(make(), **options)
    model.compile(optimizer, loss())
    network, program = Network(x, y), Fosi(rule, **settings)
    start = flat(model).astype("float64")
    want = program.run(network.gradient, network.hessian, start, steps)
    return optimizer, fit(model, x, y, steps), program, want


# -------------------------------------------------------------- the reference
def test_reference_hessian() -> None:
    """Complex steps give the stored Hessian and gradient."""
    m = oracle()
    names = [k for k in m if k.startswith("weights0/")]
    w = np.concatenate([m[k].ravel().astype("float64") for k in names])
    network = Network(m["x"], m["y"], hidden=16)
    np.testing.assert_allclose(network.gradient(w), m["gradient"], atol=1e-14)
    np.testing.assert_allclose(network.hessian(w), m["hessian"], atol=1e-13)


def test_case_is_not_trivial(double: None) -> None:
    """Distinct curvatures at both ends, and a negative one."""
    x, y = data()
    values = np.linalg.eigvalsh(Network(x, y).hessian(flat(mlp())))
    assert (values[:2] < -0.005).all()
    assert np.diff(values[-4:]).min() > 0.01
    assert np.diff(values[:3]).min() > 1e-3


# --------------------------------------------------------------- trajectories
@pytest.mark.parametrize(
    "inner", with_slow(INNERS, "adam", "nesterov", "rmsprop", "adamw")
)
def test_trajectory(inner: str, double: None) -> None:
    optimizer, got, program, want = both(inner, {}, {})
    assert program.estimated == [2, 5, 8]
    assert_path(got, want, 1e-6)
    assert optimizer.spectrum().dtype == np.float64
    np.testing.assert_allclose(optimizer.spectrum(), program.values, rtol=1e-7)


def test_trajectory_in_single_precision() -> None:
    """With directions of negative curvature too."""
    _, got, _, want = both("momentum", {"num_smallest": 1}, {"num_smallest": 1})
    assert got.dtype == np.float32
    assert_path(got, want, 1e-4)


def test_negative_curvature(double: None) -> None:
    """Newton steps go downhill there."""
    _, got, program, want = both(
        "momentum",
        {"num_smallest": 2, "alpha": 0.1},
        {"num_smallest": 2, "alpha": lambda t: 0.1},
    )
    assert program.values is not None
    assert program.values[0] < 0
    assert_path(got, want, 1e-6)


def test_only_smallest(double: None) -> None:
    """No largest directions: `s` is 1 whatever the curvatures are."""
    options = {"num_largest": 0, "num_smallest": 2, "alpha": 0.05}
    x, y = data()
    model, network = mlp(), Network(x, y)
    model.compile(fosi(SGD(0.1), **options), loss())
    start = flat(model)
    got = fit(model, x, y, 4)
    values, vectors = np.linalg.eigh(network.hessian(got[2]))
    g, V = network.gradient(got[2]), vectors[:, :2]
    c = V.T @ g
    want = -0.1 * (g - V @ c) - 0.05 * V @ (c / np.abs(values[:2]))
    np.testing.assert_allclose(got[3] - got[2], want, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(got[0], start)


@pytest.mark.parametrize("inner", ["nesterov", "adam"])
def test_learning_rate_clip(inner: str, double: None) -> None:
    """It scales the steps of SGD; those of Adam are left alone."""
    limit = 1.0 if inner == "adam" else 2.5
    options = {"learning_rate_clip": 2.5, "warmup_steps": 0}
    _, got, program, want = both(inner, options, {"clip": limit, "warmup": 0})
    assert program.estimated == [0, 3, 6, 9]
    if inner == "adam":
        assert set(program.scales) == {1.0}
    else:
        assert max(program.scales) > 1.5
    assert_path(got, want, 1e-6)


def diagonal_step(curvature: list[float], **options: Any) -> Array:
    """A step from weights of 1, where the gradient is the curvature."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, use_bias=False)]
    )
    model.layers[0].set_weights([np.ones((4, 1))])
    own = {"lanczos_steps": 4, "warmup_steps": 0, "alpha": 0.25}
    model.compile(fosi(SGD(0.1), **own, **options), "mse")
    x, y = np.eye(4) * np.sqrt(2), np.zeros((4, 1))
    model.train_on_batch(x, y, sample_weight=np.array(curvature))
    return 1 - flat(model)


def test_learning_rate_clip_of_negative_curvature(double: None) -> None:
    """A negative curvature among the largest: `s` is the limit."""
    options = {"num_largest": 3, "learning_rate_clip": 1.5}
    got = diagonal_step([3.0, 1.0, -1.0, -2.0], **options)
    want = [0.25, 0.25, -0.25, -1.5 * 0.1 * 2]
    np.testing.assert_allclose(got, want, rtol=1e-7)


def test_weak_directions(double: None) -> None:
    """Those below a thousandth of the largest curvature, of either sign."""
    got = diagonal_step([1.0, -1.1e-3, 0.9e-3, -0.9e-3], num_largest=4)
    want = [0.25, -0.25, 0.9e-4, -0.9e-4]
    np.testing.assert_allclose(got, want, rtol=1e-7)


# ------------------------------------------------------------ hyperparameters
@pytest.mark.parametrize("kind", ["schedule", "callable"])
def test_alpha_and_interval_of_time(kind: str, double: None) -> None:
    """Of the iteration; momentum is its own number."""
    if kind == "schedule":
        decay = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5)
        options: dict[str, Any] = {"alpha": decay, "update_interval": 4}
        settings: dict[str, Any] = {"alpha": lambda t: 0.5 * 0.5 ** (t / 4)}
        settings["interval"] = lambda t: 4
    else:
        options = {
            "alpha": lambda t: 0.5 / (1.0 + t),
            "update_interval": lambda t: 2 if t < 6 else 3,
        }
        settings = {
            "alpha": lambda t: 0.5 / (1 + t),
            "interval": lambda t: 2 if t < 6 else 3,
        }
    options |= {"warmup_steps": 1, "momentum": 0.5}
    settings |= {"warmup": 1, "momentum": 0.5}
    _, got, program, want = both("momentum", options, settings, steps=11)
    expected = [1, 5, 9] if kind == "schedule" else [1, 3, 5, 7, 10]
    assert program.estimated == expected
    assert_path(got, want, 1e-6)


def test_changed_numbers(double: None) -> None:
    """New numbers take effect in the next step, without a new trace."""
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


def test_more_directions_than_weights(double: None) -> None:
    """A warning; those without curvature are the inner optimizer's."""
    settings = {"num_largest": SIZE, "warmup": 1, "momentum": 0.0}
    options: dict[str, Any] = {**settings, "num_largest": 99}
    options |= {"warmup_steps": options.pop("warmup"), "lanczos_steps": None}
    with pytest.warns(UserWarning, match=f"uses {SIZE} directions, not 99"):
        optimizer, got, program, want = both("adam", options, settings)
    assert program.values is not None
    sizes = np.abs(program.values)
    shares = sizes / sizes.max()
    assert 2 < np.sum(shares <= 1e-3) < SIZE - 3
    assert not ((shares > 5e-4) & (shares < 2e-3)).any()
    assert_path(got, want, 1e-6)
    assert optimizer.spectrum().shape == (SIZE,)


# ------------------------------------------------------------------ quadratic
def least_squares(
    num_largest: int, start: float, rank: int = 5, **options: Any
) -> tuple[Any, Array, Array]:
    """A model of one unit, whose loss is quadratic."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, rank)) @ rng.normal(size=(rank, 5))
    x, y = x.astype(keras.config.floatx()), rng.normal(size=(20, 1))
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1, name="unit")])
    model.layers[0].set_weights([np.full((5, 1), start), np.ones(1)])
    own = {"warmup_steps": 0, "lanczos_steps": 6, "update_interval": 1}
    optimizer = fosi(SGD(1e-3), num_largest=num_largest, **own, **options)
    model.compile(optimizer, "mse")
    return model, x, y


@pytest.mark.parametrize("num_largest", [2, 6])
def test_newton_step_is_exact(num_largest: int, double: None) -> None:
    """One step lands on the minimiser in the span of the directions."""
    model, x, y = least_squares(num_largest, 2.0, alpha=1.0, momentum=0.0)
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
    """The inverse of no curvature must not get in: the loss only falls."""
    model, x, y = least_squares(5, 1.0, rank=1, momentum=0.0)
    make = SGD(1e-3) if inner == "sgd" else Adam(1e-3)
    optimizer = fosi(
        make, num_largest=5, warmup_steps=0, update_interval=1, momentum=0.0
    )
    model.compile(optimizer, "mse")
    history = [model.evaluate(x, y, verbose=0)]
    for _ in range(6):
        model.train_on_batch(x, y)
        history.append(model.evaluate(x, y, verbose=0))
    assert np.isfinite(history).all()
    assert np.diff(history).max() < 1e-6
    assert history[-1] < 0.7 * history[0]
