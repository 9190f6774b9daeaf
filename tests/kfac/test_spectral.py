"""Spectral steps against NumPy, and their guards."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.definition import by_definition
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.small import (
    CLASSES,
    FEATURES,
    compiled_mlp,
    data,
    gradients_of,
    mlp,
    rows_of,
)
from tests.support.training import (
    DEFAULTS,
    FEEDS,
    OBJECTS,
    SPECTRAL,
    assert_close,
    cnn,
    exact_polar_factors,
    images,
    shares,
)
from tfkfac.kfac import spectral

STEPS = shares(FEEDS["even"], 1)[:6]


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, dtype="float64"
    )


LEFT = {"rest_optimizer": "warm-up", "skip_layers": ("hidden",)}


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"solver": "eigen"}, 8),  # a loss of several nats
        ({"weight_decay": 0.5, **LEFT}, 1),
    ],
)
def test_steps_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], scale: float
) -> None:
    """In a graph, one block after the other, as in large models."""
    if scale == 1:
        monkeypatch.setattr(spectral, "MAX_ELEMENTS", 1)
    rest = OBJECTS["warm-up"]() if "rest_optimizer" in options else None
    arguments = DEFAULTS | SPECTRAL | options | {"rest_optimizer": rest}
    with floats("float64"), exact_polar_factors():
        keras.utils.set_random_seed(0)
        model = cnn()
        start = [scale * w for w in model.get_weights()]
        model.set_weights(start)
        optimizer = tfkfac.KFAC(**arguments)
        model.compile(optimizer, cross_entropy(), run_eagerly=scale > 1)
        x, y = images()
        for (rows,) in STEPS:
            model.train_on_batch(x[rows], y[rows])
    want = by_definition(start, STEPS, inner="default", **SPECTRAL, **options)
    assert_close({"start": start, "weights": model.get_weights()}, want)


def test_learning_rate_is_a_factor() -> None:
    """Steps of both optimizers are proportional to the learning rate."""
    moves = []
    for start, rate in ((1.0, 1.0), (0.25, 0.0), (None, 4.0), (0.0, 0.1)):
        model = mlp()
        optimizer = tfkfac.KFAC(start, step="spectral", skip_layers=["hidden"])
        model.compile(optimizer, cross_entropy(), run_eagerly=True)
        model.train_on_batch(0 * X, Y, np.zeros(len(X)))
        optimizer.learning_rate = rate
        moves.append((rate, moved(model)))
    (_, wholes), *others = moves
    assert min(np.abs(whole).max() for whole in wholes) > 5e-4
    for rate, changes in others:
        for move, whole in zip(changes, wholes, strict=True):
            np.testing.assert_allclose(move, rate * whole, 1e-4, 1e-6)


# ------------------------------------------------------ gradients of nothing
@pytest.mark.parametrize(("solver", "block"), [("inverse", 6), ("eigen", 32)])
def test_weights_without_a_gradient_do_not_move(
    monkeypatch: pytest.MonkeyPatch, solver: str, block: int
) -> None:
    """With W = 0, the direction D is 0."""
    dead, pruned, missing = np.s_[7:39], np.s_[41:44], np.s_[2:4]
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(50, "relu")
    model = keras.Sequential(
        [keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES)]
    )
    kernel, bias = hidden.get_weights()
    bias[dead] = -1e3
    hidden.set_weights([kernel, bias])
    monkeypatch.setattr(spectral, "BLOCK", block)
    optimizer = tfkfac.KFAC(step="spectral", solver=solver)
    optimizer.attach(model, loss_terms=32)
    before, weights = model.get_weights(), model.trainable_variables
    for seed in range(4):
        x, y = data(32, seed)
        x[:, missing] = 0
        # Pruned by the loop: the gradients at the outputs are not zero.
        kernel, bias, *others = (g.numpy() for g in gradients_of(model, x, y))
        kernel[:, pruned] = bias[pruned] = 0
        optimizer.apply(
            [tf.constant(g) for g in (kernel, bias, *others)], weights
        )
    pairs = zip(model.get_weights(), before, strict=True)
    kernel, bias, last, _ = (new - old for new, old in pairs)
    assert not kernel[missing].any()
    assert not last[dead].any()
    for change in (kernel, bias):
        for where in (dead, pruned):
            assert not change[..., where].any()
    living = np.delete(kernel, np.r_[dead, pruned], 1)
    living = np.delete(living, np.r_[missing], 0)
    assert np.abs(living).min() > 1e-6


def test_rows_without_a_gradient_do_not_move() -> None:
    """Gradients as rows (a, g); g is 0 where an example has no weight.

    Used weights move on for some steps after their last gradient.
    """
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(50, "relu")
    model = keras.Sequential(
        [keras.Input((60,)), hidden, keras.layers.Dense(CLASSES)]
    )
    kernel, bias = hidden.get_weights()
    bias[7:39] = -1e3
    hidden.set_weights([kernel, bias])
    model.compile(tfkfac.KFAC(momentum=0.5), cross_entropy())
    x, y = np.random.default_rng(0).normal(size=(16, 60)), np.arange(16) % 3
    x[:, 5], x[8:, 6], x[:8, 7] = 0, 0, 0
    weight = np.repeat([1.0, 0.0], 8)
    before = hidden.kernel.numpy()
    for weights in (weight, weight, 1 - weight):
        model.train_on_batch(x, y, weights)
        change, before = hidden.kernel.numpy() - before, hidden.kernel.numpy()
        assert not change[5].any()
        assert not change[:, 7:39].any()
        is_last = weights[-1] == 1
        assert change[7, :7].any() == is_last
        assert change[6, :7].all()


# ---------------------------------------------------------------- bad numbers
X, Y = data()


def moved(model: Any, weight: Any = None) -> list[Array]:
    """Length of a step; weights stay finite."""
    before = model.get_weights()
    model.train_on_batch(X, Y, weight)
    after = model.get_weights()
    assert all(np.isfinite(w).all() for w in after)
    return [a - b for a, b in zip(after, before, strict=True)]


def rms(array: Array) -> float:
    return float(np.sqrt(np.mean(array**2)))


def state_of(model: Any) -> Any:
    (state,) = model.optimizer.method.states
    return state


# Names of the state of a layer.
STATE = {
    "decomposition": ("solver_",),
    "momentum": ("whitened_momentum", "extents"),
}


@pytest.mark.parametrize("part", STATE)
def test_nan_in_the_state(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """NaN in a decomposition gives W with the RMS 0.2; momenta restart."""
    monkeypatch.setattr(spectral, "ITERATIONS", 7)
    model = compiled_mlp(step="spectral", eager=True, fisher="empirical")
    model.train_on_batch(X, Y)
    W = gradients_of(model, X, Y)[:2]
    states = [state_of(model)]
    for row in rows_of(states, "hidden", STATE[part]):
        row.assign(np.full(row.shape, np.nan))
    kernel, bias, *others = moved(model)
    hidden, logits = np.vstack([kernel, bias]), np.vstack(others)
    assert rms(logits) > 1e-4
    np.testing.assert_allclose(rms(hidden), rms(logits), rtol=1e-4)
    events = {}
    if part == "decomposition":
        gradient = np.vstack(W)
        want = -rms(logits) / rms(gradient) * gradient
        np.testing.assert_allclose(hidden, want, rtol=1e-3, atol=1e-6)
        events = {"plain gradients in hidden": 1}
    assert model.optimizer.events() == events
    moved(model)
    assert model.optimizer.events() == events
    assert all(
        np.isfinite(v).all()
        for group in state_of(model).preconditioners
        for v in group.variables
    )


def test_a_batch_that_weighs_nothing() -> None:
    model = compiled_mlp(step="spectral", eager=True)
    assert not any(map(np.any, moved(model, weight=np.zeros(len(X)))))
    assert np.abs(moved(model)[0]).max() > 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e10, 1e30])
def test_gradients_whose_squares_underflow(scale: float) -> None:
    model = mlp()
    optimizer = tfkfac.KFAC(step="spectral").attach(model)
    before, weights = model.get_weights(), model.trainable_variables
    optimizer.apply([scale * g for g in gradients_of(model, X, Y)], weights)
    assert all(np.isfinite(w).all() for w in model.get_weights())
    is_moved = np.any(model.get_weights()[0] != before[0])
    assert is_moved == (1e-20 < scale < 1e20)


def test_a_gradient_that_overflows_is_forgotten() -> None:
    """Finite, but not after the division by the unit of the labels."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(size) for size in (6, 2)]
    model = keras.Sequential([keras.Input((FEATURES,)), *hidden])
    model.compile(tfkfac.KFAC(), "mse")
    y = 1e-3 * X[:, :2]
    model.fit(X, y, batch_size=len(X), epochs=12, verbose=0)
    model.train_on_batch(np.where(np.arange(len(X)) == 3, 5e18, X.T).T, y)
    assert int(model.optimizer.skipped_steps) == 0
    before = model.get_weights()
    model.train_on_batch(X, y)
    for new, old in zip(model.get_weights(), before, strict=True):
        assert np.any(new != old)


# ------------------------------------------------------- losses of a loop
def own_steps(optimizer: Any, scale: Any = None, steps: int = 3) -> Any:
    """A model after steps of a loop that does not call `compute_loss`."""
    model = mlp()
    optimizer.attach(model)
    for _ in range(steps):
        with tf.GradientTape() as tape:
            value = cross_entropy()(Y, model(X, training=True))
            value = value if scale is None else scale(value)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return model


def test_unknown_loss() -> None:
    """All weights of a block move by an RMS of 0.01 times the rate."""
    optimizer = tfkfac.KFAC(step="spectral", learning_rate=0.5)
    with pytest.warns(UserWarning, match="root mean square 0.01"):
        model = own_steps(optimizer, steps=1)
    pairs = zip(model.get_weights(), mlp().get_weights(), strict=True)
    kernel, bias, *others = (a - b for a, b in pairs)
    for block in ([kernel, bias], others):
        assert rms(np.vstack(block)) == pytest.approx(0.005, rel=1e-4)


def test_scale_loss_passes_the_loss() -> None:
    """The last loss counts: `r^2 sum |Q|^2 = (w kappa)^2` for `rho = 1`."""
    optimizer = tfkfac.KFAC()
    values = []

    def scale(value: Any) -> Any:
        optimizer.scale_loss(1e4 * value)  # of a batch that is dropped
        values.append(float(value) / 10)
        return optimizer.scale_loss(value / 10)

    with pytest.warns(UserWarning, match="did not observe") as caught:
        own_steps(optimizer, scale)
    assert not any("scale_loss" in str(w.message) for w in caught)
    warmup, kappa = 3 / 10, 0.6 * np.sqrt(values[-1])
    length = optimizer.last_step["length"]
    assert length == pytest.approx((warmup * kappa) ** 2, rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_hint_at_inputs_far_from_unit_scale(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, scale: float
) -> None:
    monkeypatch.setattr(spectral, "HINT_STEP", 2)
    model = mlp()
    model.compile(tfkfac.KFAC(), cross_entropy(), run_eagerly=True)
    for _ in range(2):
        model.train_on_batch(scale * X, Y)
    text = "inputs of layer 'hidden' are far from unit scale"
    assert (text in capfd.readouterr().err) == (scale != 1)
