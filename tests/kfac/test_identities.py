"""Cases in which the step is known without a decomposition."""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    compiled,
    flat,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import deep_model
from tests.support.reference import Array

SOLVERS = ["eigen", "inverse"]
DAMPING = 0.05
LOGITS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def per_example_fisher(model: Any, x: Array, y: Array) -> tuple[Array, Array]:
    """Empirical Fisher 1/B sum vec vec^T and mean gradient, by tape.

    `model` is a float64 twin; vec runs over its trainable variables in order.
    """
    rows = []
    for n in range(len(x)):
        with tf.GradientTape() as tape:
            loss = half_squared_error(y[n : n + 1], model(x[n : n + 1]))
        values = [v.value for v in model.trainable_variables]
        grads = tape.gradient(loss, values)
        rows.append(np.concatenate([np.ravel(g.numpy()) for g in grads]))
    stack = np.stack(rows)
    return stack.T @ stack / len(x), stack.mean(0)


def linear_model(dtype: str, scale: float = 0.0) -> Any:
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2, dtype=dtype, name="linear")]
    )
    for v in model.trainable_variables:
        v.assign(scale * np.ones(v.shape))
    return model


def test_equals_the_dense_fisher_of_a_linear_layer() -> None:
    """Every input paired with every residual: a and g are independent.

    At zero weights g is minus the label, so the Kronecker product of the
    factors is the whole empirical Fisher, not an approximation of it.
    """
    inputs = make_input("", (3,), 4)
    labels = make_input("", (2,), 3, seed=9)
    x = np.repeat(inputs, 3, axis=0)
    y = np.tile(labels, (4, 1))
    fisher, grad = per_example_fisher(linear_model("float64"), x, y)
    want = np.linalg.solve(fisher + DAMPING * np.eye(8), grad)
    step = train_once(
        linear_model("float32"), x, y, solver="eigen", damping=DAMPING
    )
    assert_close(flat(step.delta), want, SOLVE_RTOL, "natural gradient")


@pytest.mark.parametrize("copies", [1, 3])
def test_one_example_is_exact_in_every_layer(copies: int) -> None:
    """With a single example each layer's Fisher block is A (x) G.

    It has rank one, so the step is W / (damping + |W|^2).
    """
    x = np.tile(make_input("", (3,), 1), (copies, 1))
    y = np.tile(make_input("", (2,), 1, seed=8), (copies, 1))

    def build(dtype: str) -> Any:
        model = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4, activation="tanh", dtype=dtype),
                layers.Dense(5, activation="sigmoid", dtype=dtype),
                layers.Dense(2, dtype=dtype),
            ]
        )
        randomize(model)
        return model

    twin = build("float64")
    fisher, grad = per_example_fisher(twin, x, y)
    step = train_once(build("float32"), x, y, solver="eigen", damping=DAMPING)
    at = 0
    for i in range(0, 6, 2):
        got = flat(step.delta[i : i + 2])
        block = slice(at, at + got.size)
        at += got.size
        W, F = grad[block], fisher[block, block]
        want = np.linalg.solve(F + DAMPING * np.eye(got.size), W)
        assert_close(want, W / (DAMPING + W @ W), 1e-10, "rank one")
        assert_close(got, want, SOLVE_RTOL, f"layer {i // 2}")


def white_batch(d_in: int, d_out: int) -> tuple[Array, Array]:
    """A = G = I for a layer with zero weights and no bias."""
    x = np.repeat(math.sqrt(d_in) * np.eye(d_in), d_out, axis=0)
    y = np.tile(math.sqrt(d_out) * np.eye(d_out), (d_in, 1))
    # Signs break the symmetry, so the mean gradient is not all ones.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=len(x))
    return x.astype("float32"), (signs[:, None] * y).astype("float32")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_white_factors_leave_the_inner_optimizer(
    solver: str, inner: str
) -> None:
    """A = G = I, no damping to speak of: the run is the inner one's."""
    x, y = white_batch(3, 4)
    runs = []
    for second_order in (True, False):
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, use_bias=False, name="white")]
        )
        model.layers[0].set_weights([np.zeros((3, 4))])
        optimizer: Any = (
            keras.optimizers.SGD(0.1, momentum=0.9)
            if inner == "sgd"
            else keras.optimizers.Adam(0.1)
        )
        if second_order:
            # The factors of the first step serve all five.
            found = compiled(
                model,
                inner=optimizer,
                solver=solver,
                damping=1e-12,
                factor_update_interval=100,
                inverse_update_interval=100,
            )
        else:
            model.compile(
                optimizer=optimizer, loss=half_squared_error, run_eagerly=True
            )
        for _ in range(5):
            model.train_on_batch(x, y)
        if second_order:
            (block,) = found.factors().values()
            assert_close(block["A"], np.eye(3), 1e-6)
            assert_close(block["G"], np.eye(4), 1e-6)
        runs.append(weights_of(model)[0])
    assert np.linalg.norm(runs[1]) > 0.1
    assert_close(runs[0], runs[1], 3e-5, "weights")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eager", [True, False])
def test_huge_damping_is_the_gradient(solver: str, eager: bool) -> None:
    """damping * P -> W in every block of a deep model."""
    huge = 1e8
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    step = train_once(
        deep_model("float32"),
        x,
        labels,
        inner=huge,
        damping=huge,
        solver=solver,
        loss=LOGITS_LOSS,
        eager=eager,
    )
    plain = deep_model("float32")
    before = weights_of(plain)
    plain.compile(optimizer=keras.optimizers.SGD(1.0), loss=LOGITS_LOSS)
    plain.train_on_batch(x, labels)
    names = [v.path for v in plain.trainable_variables]
    for name, got, start, end in zip(
        names, step.delta, before, weights_of(plain), strict=True
    ):
        assert_close(got, start - end, 1e-3, name)
