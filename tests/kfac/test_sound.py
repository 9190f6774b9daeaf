"""A bad decomposition or factor of one block never reaches the weights."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.small import (
    CLASSES,
    FEATURES,
    compiled_mlp,
    curvature,
    data,
    gradients_of,
    kfac_of,
    loss,
    summary_text,
)
from tfkfac.blocks import MatrixGradient, RowGradient
from tfkfac.kfac.precondition import sound_ones

X, Y = data()
NAN = float("nan")


def block_of(optimizer: Any, path: str) -> Any:
    (state,) = optimizer.method.states
    (one,) = (p for p in state.preconditioners if p.block.path == path)
    return one


def spoil(optimizer: Any, path: str, value: float) -> None:
    """Fills one tensor of a decomposition."""
    tensor = block_of(optimizer, path).decomposition.tensors[0]
    tensor.assign(np.full(tensor.shape, value))


def counts(optimizer: Any, name: str) -> list[int]:
    (state,) = optimizer.method.states
    return [int(n) for n in getattr(state.counters, name).numpy()]


@pytest.mark.parametrize(
    ("solver", "value", "eager"),
    [
        ("inverse", 1e30, True),
        pytest.param("inverse", 1e30, False, marks=pytest.mark.slow),
        pytest.param("eigen", 1e30, False, marks=pytest.mark.slow),
        pytest.param("eigen", NAN, False, marks=pytest.mark.slow),
        pytest.param("inverse", NAN, True, marks=pytest.mark.slow),
    ],
)
def test_the_plain_gradient_of_that_block_alone(
    solver: str, value: float, eager: bool, capfd: Any
) -> None:
    """The others' steps are what they were; the next step makes it anew."""
    model, twin = (
        compiled_mlp(
            keras.optimizers.SGD(0.1),
            solver=solver,
            kl_clip=None,
            factor_update_interval=100,
            inverse_update_interval=100,
            eager=eager,
        )
        for _ in range(2)
    )
    for one in (model, twin):
        one.train_on_batch(X, Y)
    optimizer = kfac_of(model)
    spoil(optimizer, "hidden", value)
    gradients = [np.array(g) for g in gradients_of(model, X, Y)]
    before = model.get_weights()
    capfd.readouterr()
    for one in (model, twin):
        one.train_on_batch(X, Y)
    after, usual = model.get_weights(), twin.get_weights()
    for i in (0, 1):  # hidden
        assert_close(before[i] - after[i], 0.1 * gradients[i], 1e-5)
    for i in (2, 3):  # logits
        np.testing.assert_array_equal(after[i], usual[i])
    err = capfd.readouterr().err
    assert "hidden: the preconditioned gradient" in err
    assert "logits" not in err
    assert counts(optimizer, "plain") == [1, 0]
    assert "plain gradients in hidden: 1" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 0
    # The step after that has a new decomposition, of that block alone.
    twin.set_weights(after)
    renewed = int(optimizer.inverse_updates)
    for one in (model, twin):
        one.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    assert counts(optimizer, "plain") == [1, 0]
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        assert_close(got, want, 1e-5)


CASES: dict[str, Callable[[], Any]] = {
    "clip": lambda: tfkfac.KFAC(),
    "sketch": lambda: tfkfac.KFAC(max_factor_dim=10, factor_rank=3),
    "quadratic": lambda: tfkfac.KFAC(step="quadratic"),
    "accumulation": lambda: tfkfac.KFAC(gradient_accumulation_steps=2),
    "rows without a clip": lambda: tfkfac.KFAC(kl_clip=None),
}


def wide() -> Any:
    """One layer by its rows, of which there are few, and one not."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(60, activation="tanh", name="hidden"),
            layers.Dense(60, activation="tanh", name="second"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [NAN, 1e30])
def test_weights_stay_near(name: str, value: float) -> None:
    """In every kind of step; a healthy run moves by less than 1 in all."""
    model = wide()
    model.compile(CASES[name](), loss())
    for _ in range(2):
        model.train_on_batch(X[:4], Y[:4])
    optimizer = kfac_of(model)
    before = model.get_weights()
    for path in ("second", "hidden"):
        spoil(optimizer, path, value)
    for _ in range(2):
        model.train_on_batch(X[:4], Y[:4])
    for new, old in zip(model.get_weights(), before, strict=True):
        assert np.abs(new - old).max() < 10
    assert counts(optimizer, "plain") == [1, 1, 0]
    for _ in range(2):
        model.train_on_batch(X[:4], Y[:4])
    assert counts(optimizer, "plain") == [1, 1, 0]
    for key, tensor in curvature(optimizer).items():
        assert np.isfinite(tensor).all(), key
        assert np.abs(tensor).max() < 1e20, key


@pytest.mark.slow
def test_rows_take_the_plain_gradient() -> None:
    """Where the gradient itself is never formed."""
    model = wide()
    model.compile(tfkfac.KFAC(keras.optimizers.SGD(0.1), kl_clip=None), loss())
    x, y = X[:4], Y[:4]
    model.train_on_batch(x, y)
    spoil(kfac_of(model), "second", NAN)
    gradients = [np.array(g) for g in gradients_of(model, x, y)]
    before = model.get_weights()
    model.train_on_batch(x, y)
    for i in (2, 3):
        moved = before[i] - model.get_weights()[i]
        assert_close(moved, 0.1 * gradients[i], 1e-4)


@pytest.mark.parametrize(
    ("solver", "eager"),
    [
        ("inverse", True),
        pytest.param("inverse", False, marks=pytest.mark.slow),
        pytest.param("eigen", False, marks=pytest.mark.slow),
    ],
)
def test_a_bad_factor_is_gathered_anew(
    solver: str, eager: bool, capfd: Any
) -> None:
    """The next statistics are all there is of the block, as at the start."""
    model, fresh = (
        compiled_mlp(
            solver=solver,
            fisher="empirical",
            factor_update_interval=1,
            inverse_update_interval=100,
            eager=eager,
        )
        for _ in range(2)
    )
    for _ in range(3):
        model.train_on_batch(X, Y)
    optimizer = kfac_of(model)
    average = block_of(optimizer, "hidden").factors.averages[0]
    average.assign(np.full(average.shape, NAN))
    fresh.set_weights(model.get_weights())
    capfd.readouterr()
    for one in (model, fresh):
        one.train_on_batch(X, Y)
    err = capfd.readouterr().err
    assert "hidden: the factors are not finite" in err
    assert "logits" not in err
    assert counts(optimizer, "dropped") == [1, 0]
    got, want = optimizer.factors(), kfac_of(fresh).factors()
    for kind in ("A", "G"):
        assert_close(got["hidden"][kind], want["hidden"][kind], 1e-6)
        assert not np.allclose(got["logits"][kind], want["logits"][kind])
    # It is decomposed anew in the next step, out of turn.
    renewed = int(optimizer.inverse_updates)
    model.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    model.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    assert counts(optimizer, "dropped") == [1, 0]


def test_a_damping_that_grows_is_no_fault() -> None:
    """Decompositions of a smaller damping make longer gradients."""
    model = compiled_mlp(damping=1e-3, inverse_update_interval=100, eager=True)
    model.train_on_batch(X, Y)
    kfac_of(model).damping = 10.0
    model.train_on_batch(X, Y)
    assert counts(kfac_of(model), "plain") == [0, 0]


def test_a_sound_gradient_is_passed_on_as_it_is() -> None:
    """To look whether it is sound takes sums, and no new tensor of its size."""

    @tf.function
    def check(a: tf.Tensor, g: tf.Tensor) -> list[tf.Tensor]:
        plain = [RowGradient(a, g), MatrixGradient(a)]
        damping = tf.constant(1.0, tf.float64)
        made = [gradient.scaled(tf.constant(2.0)) for gradient in plain]
        (rows, whole), _ = sound_ones(made, plain, damping)
        return [rows.a, rows.g, whole.matrix]

    spec = tf.TensorSpec([9, 30])
    graph = check.get_concrete_function(spec, spec).graph
    large = {op.type for op in graph.get_operations() if is_large(op)}
    assert large == {"Placeholder", "Mul", "Select", "Identity"}


def is_large(operation: tf.Operation) -> bool:
    return any(x.shape.num_elements() > 9 for x in operation.outputs)
