"""Guards against values that are not finite, and low precision."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array
from tests.support.small import (
    CLASSES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    slots,
    summary_text,
)
from tests.support.summaries import sequential

X, Y = data()
NAN, INF = float("nan"), float("inf")
INTERVALS = ("factor_update_interval", "inverse_update_interval")


def poisoned(value: float) -> Array:
    x = X.copy()
    x[3, 2] = value
    return x


def assert_finite(model: Any) -> None:
    for name, value in everything(model).items():
        assert np.isfinite(value).all(), name


def assert_same_weights(model: Any, want: list[Array]) -> None:
    np.testing.assert_equal(model.get_weights(), want)


# ----------------------------------------------------------------- bad batches
def test_bad_batch_changes_nothing(capfd: Any) -> None:
    """Weights, factors, slots and iterations stay; the step is counted."""
    model = compiled_mlp("adam", **dict.fromkeys(INTERVALS, 1))
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    weights = model.get_weights()
    state, inner = curvature(optimizer), slots(optimizer)
    capfd.readouterr()
    for bad, value in ((1, NAN), (2, INF)):
        model.train_on_batch(poisoned(value), Y)
        assert int(optimizer.skipped_steps) == bad
    err = capfd.readouterr().err
    assert err.count("not finite") == 1
    assert "kfac" in err
    assert_same_weights(model, weights)
    assert_same(slots(optimizer), inner)
    assert int(optimizer.iterations) == 1
    now = curvature(optimizer)
    (counter,) = (k for k in now if "skipped_steps" in k)
    assert (now.pop(counter), state.pop(counter)) == (2, 0)
    assert_same(now, state)
    assert "gradients not finite: 2" in summary_text(optimizer)


@pytest.mark.parametrize("first", [poisoned(NAN), X[:0]], ids=["NaN", "empty"])
def test_an_unusable_first_batch(first: Array) -> None:
    """After an empty or bad first batch, the second acts as the first."""
    model, twin = (
        compiled_mlp(keras.optimizers.SGD(0.1), eager=True) for _ in range(2)
    )
    model.train_on_batch(first, Y[: len(first)])
    assert int(kfac_of(model).factor_updates) == 0
    assert_same_weights(model, twin.get_weights())
    for each in (model, twin):
        each.train_on_batch(X, Y)
    assert_same_weights(model, twin.get_weights())
    factors = kfac_of(model).factors()
    model.train_on_batch(X[:0], Y[:0])
    for path, block in kfac_of(model).factors().items():
        assert_same(block, factors[path])
    assert_same_weights(model, twin.get_weights())


def test_infinities_that_cancel() -> None:
    """Infinities of both signs and NaN skip the step; 1e18 is valid."""
    model = mlp()
    optimizer = tfkfac.KFAC(1e-30).attach(model)
    before = model.get_weights()
    for bad in ([INF, -INF], [NAN, 0.0], [-INF, -INF], [INF, 1.0]):
        gradients = gradients_of(model, X, Y)
        kernel = np.array(gradients[0])
        kernel[0, :2] = bad
        gradients[0] = tf.constant(kernel)
        optimizer.apply(gradients, model.trainable_variables)
    assert_same_weights(model, before)
    gradients = [1e18 * g for g in gradients_of(model, X, Y)]
    optimizer.apply(gradients, model.trainable_variables)
    assert int(optimizer.skipped_steps) == 4
    assert int(optimizer.iterations) == 1


def test_nan_in_sparse_gradients() -> None:
    """The values of an embedding's sparse gradient are checked."""
    tokens = layers.Embedding(5, 2, name="tokens")
    logits = layers.Dense(CLASSES, name="logits")
    model = sequential(tokens, layers.Flatten(), logits, shape=(3,))
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    x, y = np.array([[0, 1, 2], [2, 3, 4]]), np.array([0, 1])
    model.train_on_batch(x, y)
    before = everything(model)
    weight = np.array([1.0, NAN], "float32")
    model.train_on_batch(x, y, sample_weight=weight)
    optimizer = kfac_of(model)
    assert int(optimizer.skipped_steps) == 1
    optimizer.skipped_steps.assign(0)
    assert_same(everything(model), before)


# -------------------------------------------------------- bad decompositions
def poison(optimizer: Any, factor: str, path: str) -> None:
    """Write NaN into the average of one factor."""
    (state,) = optimizer.method.states
    (block,) = (p for p in state.preconditioners if p.block.path == path)
    average = block.factors.averages[block.factors.names.index(factor)]
    average.assign(np.full(average.shape, NAN))
    # With weight 0, the average would count as zero.
    block.factors.weight.assign(1.0)


@pytest.mark.parametrize(
    ("solver", "factor", "eager"),
    [("inverse", "G", False), ("eigen", "A", True)],
)
def test_failed_decomposition_keeps_the_last_good_one(
    solver: str, factor: str, eager: bool, capfd: Any
) -> None:
    """A failure is counted and logged once; other layers are unaffected."""
    model = compiled_mlp(
        solver=solver,
        factor_update_interval=100,
        inverse_update_interval=1,
        eager=eager,
    )
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    poison(optimizer, factor, "hidden")
    before, weights = curvature(optimizer), model.get_weights()
    capfd.readouterr()
    optimizer.damping = 0.5
    for _ in range(3):
        model.train_on_batch(X, Y)
    err = capfd.readouterr().err
    assert err.count("decomposition") == 1
    assert "hidden" in err
    assert "logits" not in err
    for name, value in curvature(optimizer).items():
        if ":solver_" in name:
            unchanged = np.array_equal(value, before[name])
            # Unchanged factors have the same eigenvectors.
            if solver == "inverse" or ":solver_D:" in name:
                assert unchanged == ("hidden" in name), name
            assert np.isfinite(value).all()
    assert optimizer.events() == {"failed decompositions of hidden": 3}
    assert "failed decompositions of hidden: 3" in summary_text(optimizer)
    for got, old in zip(model.get_weights(), weights, strict=True):
        assert np.isfinite(got).all()
        assert not np.array_equal(got, old)


def test_statistics_that_overflow_are_rejected(capfd: Any) -> None:
    """Inputs with infinite squares are rejected; their gradients are finite."""
    model = sequential(
        layers.Dense(2, use_bias=False, name="huge"),
        layers.Lambda(lambda x: x * 1e-30),
        layers.Dense(CLASSES, name="logits"),
        shape=(2,),
    )
    model.compile(
        tfkfac.KFAC(step="natural", factor_update_interval=1),
        loss(),
        run_eagerly=True,
    )
    x, y = np.ones((4, 2), "float32"), np.zeros(4, "int32")
    model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    before = optimizer.factors()
    for _ in range(2):
        model.train_on_batch(x * 1e25, y)
    after = optimizer.factors()
    assert_same(after["huge"], before["huge"])
    assert not np.array_equal(after["logits"]["G"], before["logits"]["G"])
    err = capfd.readouterr().err
    assert err.count("statistics") == 1
    assert "huge" in err
    assert "statistics not finite in huge: 2" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 0
    assert_finite(model)


# -------------------------------------------------------- degenerate factors
@pytest.mark.parametrize(
    ("zeros", "solver", "damping"),
    [
        ("inputs", "inverse", 0),
        ("gradients", "inverse", 0),
        ("gradients", "eigen", 0.01),
    ],
)
def test_zeros(zeros: str, solver: str, damping: float) -> None:
    """With a zero A or G, weights stay finite and train later."""
    model = compiled_mlp(damping=damping, solver=solver, eager=True)
    before = model.get_weights()
    weight = np.zeros(len(X), "float32") if zeros == "gradients" else None
    for _ in range(3):
        model.train_on_batch(0 * X if weight is None else X, Y, weight)
    assert_finite(model)
    moved = [
        not np.array_equal(a, b)
        for a, b in zip(model.get_weights(), before, strict=True)
    ]
    assert not moved[0]
    assert any(moved) == moved[-1] == (zeros == "inputs")  # the last bias
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert_finite(model)
    if zeros == "gradients":
        assert not np.array_equal(model.get_weights()[0], before[0])
    assert kfac_of(model).events() == {}


# -------------------------------------------------------------- half precision
@pytest.fixture
def policy() -> Iterator[Callable[[str], None]]:
    """Set Keras' dtype policy for one test."""
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)]
)
def test_mixed_precision_has_the_true_scale(
    name: str, tolerance: float, policy: Callable[[str], None]
) -> None:
    """Factors equal those of float32 for any loss scale."""
    x, y = data(64, seed=5)
    want = compiled_mlp(eager=True)
    want.train_on_batch(x, y)
    policy(name)
    model = compiled_mlp(eager=True)
    outer = tfkfac.KFAC
    if name == "mixed_float16":
        outer = keras.optimizers.LossScaleOptimizer
    assert type(model.optimizer) is outer
    model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    assert int(optimizer.iterations) == 1
    for path, block in kfac_of(want).factors().items():
        for factor, value in block.items():
            got = optimizer.factors()[path][factor]
            assert got.dtype == np.float32
            assert_close(got, value, tolerance, f"{factor} of {path}")
    for got, value in zip(model.get_weights(), want.get_weights(), strict=True):
        assert got.dtype == np.float32
        assert_close(got, value, 10 * tolerance)


def test_float16_trains(policy: Callable[[str], None]) -> None:
    """A few epochs with the defaults decrease the loss."""
    policy("float16")
    model = compiled_mlp(eager=True)
    history = model.fit(*data(64, seed=5), epochs=4, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    factors = kfac_of(model).factors()["hidden"].values()
    assert {v.dtype.name for v in factors} == {"float32"}


def test_loss_scale_of_a_custom_loop() -> None:
    """An unknown loss scale is an error; the square of a scale overflows."""

    def scaled_step() -> None:
        gradients = gradients_of(
            model, X, Y, lambda y, p: scaler.scale_loss(loss()(y, p))
        )
        scaler.apply(gradients, model.trainable_variables)

    model, plain = mlp(), compiled_mlp(eager=True)
    scaler = keras.optimizers.LossScaleOptimizer(
        tfkfac.KFAC(step="natural"), initial_scale=2.0**100
    )
    before = model.get_weights()
    scaler.inner_optimizer.attach(model)
    with pytest.raises(ValueError, match=r"attach\(model, loss_scaler=\.\.\."):
        scaled_step()
    assert_same_weights(model, before)
    scaler.inner_optimizer.attach(model, loss_scaler=scaler)
    tf.function(scaled_step)()
    plain.train_on_batch(X, Y)
    factors = scaler.inner_optimizer.factors()
    for path, block in kfac_of(plain).factors().items():
        for name, want in block.items():
            assert_close(factors[path][name], want, 1e-5)


def test_scaler_of_a_compiled_optimizer() -> None:
    """An optimizer compiled again with a loss scaler knows its scale."""
    model = compiled_mlp(eager=True)
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    want = optimizer.factors()["logits"]["G"]
    scaler = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(scaler, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    got = optimizer.factors()["logits"]["G"]
    assert np.trace(got) < 2 * np.trace(want)
