"""What FOSI leaves to the inner optimizer."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import constraints, layers
from keras.optimizers import SGD, Adam

from tests.support.fosi_reference import (
    BETAS,
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    Fosi,
    Network,
    Record,
    adam,
    assert_path,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    sgd,
    small,
)
from tests.support.reference import Array
from tests.support.small import assert_same, curvature, slots

Maker = Callable[[], Any]
NEVER = 100


# ------------------------------------------------------- before the first time
PLAIN: dict[str, Maker] = {
    "sgd": lambda: SGD(0.1, clipnorm=0.3),
    "adam": lambda: Adam(0.03, weight_decay=0.1, clipvalue=0.1),
    "averages": lambda: SGD(
        0.1, 0.9, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: Adam(
        0.03, gradient_accumulation_steps=2, global_clipnorm=0.3
    ),
}


@pytest.mark.parametrize("inner", PLAIN)
def test_warmup_is_the_inner_optimizer(inner: str) -> None:
    """To the last bit, with a constraint on a layer."""
    x, y = data()
    paths = []
    for wrap in (False, True):
        optimizer = PLAIN[inner]()
        if wrap:
            optimizer = small(optimizer, warmup_steps=NEVER)
        model = mlp(kernel_constraint=constraints.MaxNorm(0.8))
        model.compile(optimizer, loss())
        paths.append(fit(model, x, y, 7))
        paths.append([np.array(v) for v in model.optimizer.variables])
    np.testing.assert_array_equal(paths[2], paths[0])
    assert len(paths[3]) == len(paths[1])
    for got, want in zip(paths[3], paths[1], strict=True):
        np.testing.assert_array_equal(got, want)
    assert len(np.unique(paths[0], axis=0)) > 3


def test_warmup_with_sparse_gradients() -> None:
    """As above, but for the order in which equal rows are added."""
    x = np.array([[0, 1, 1], [2, 2, 2], [3, 4, 0], [1, 0, 3]])
    paths = []
    for wrap in (False, True):
        keras.utils.set_random_seed(0)
        optimizer = SGD(0.1, 0.9)
        if wrap:
            optimizer = small(optimizer, warmup_steps=NEVER)
        stack = [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 2),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
        model = keras.Sequential(stack)
        model.compile(optimizer, loss())
        paths.append(fit(model, x, np.array([0, 1, 1, 0]), 4))
    assert_path(paths[1], paths[0], 1e-5)


@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_no_curvature_is_the_inner_optimizer(inner: str) -> None:
    """A loss linear in the weights: the Hessian is zero, and never NaN."""
    x, y = data()

    def linear(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sum(y_pred * keras.ops.cos(y_true), axis=-1)

    target = np.stack([y, y + 1.0], axis=1).astype("float32")
    paths = []
    for wrap in (False, True):
        model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2)])
        for v in model.trainable_variables:
            v.assign(np.ones(v.shape))
        optimizer = PLAIN[inner]()
        if wrap:
            optimizer = small(
                optimizer,
                num_smallest=1,
                warmup_steps=0,
                learning_rate_clip=3.0,
            )
        model.compile(optimizer, linear)
        paths.append(fit(model, x, target, 4))
    np.testing.assert_array_equal(paths[1], paths[0])
    assert optimizer.spectrum().size == 0


def test_slots_see_the_split_gradient_only(double: None) -> None:
    """With all directions nothing is left for the inner optimizer."""
    x = np.random.default_rng(0).normal(size=(8, 3))
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    optimizer = small(
        SGD(0.1, 0.9), num_largest=4, warmup_steps=0, alpha=0.5, momentum=0.0
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(x, x[:, :1] + x[:, 1:2] ** 2)
    velocities = optimizer.variables[2:]
    assert len(velocities) == 2
    for v in velocities:
        np.testing.assert_allclose(np.array(v), 0, atol=1e-14)


# ---------------------------------------------------------------- accumulation
ACCUMULATING: dict[str, tuple[Callable[..., Any], Any]] = {
    "sgd": (lambda **kw: SGD(0.1, 0.9, **kw), sgd(0.1, 0.9)),
    "adam": (lambda **kw: Adam(0.03, **BETAS, **kw), adam(0.03)),
}


def test_accumulation_of_equal_batches(double: None) -> None:
    """Is no accumulation, and intervals count updates."""
    x, y = data()
    make, _ = ACCUMULATING["sgd"]
    model, twin = mlp(), mlp()
    model.compile(fosi(make(gradient_accumulation_steps=2)), loss())
    twin.compile(fosi(make()), loss())
    got = fit(model, np.concatenate([x, x]), np.concatenate([y, y]), 7)
    want = fit(twin, x, y, 7)
    assert_path(got[::2], want, 1e-6)
    np.testing.assert_array_equal(got[1::2], got[:-1:2])
    assert int(model.optimizer.iterations) == 7
    new, old = curvature(model.optimizer), curvature(twin.optimizer)
    for name, value in old.items():
        # Signs of directions are free; without accumulation, SGD's momentum is
        # known in them.
        if name.split(":")[1] not in ("directions", "inner_momentum"):
            np.testing.assert_allclose(
                abs(new[name]), abs(value), rtol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("inner", ACCUMULATING)
def test_accumulation_of_different_batches(inner: str, double: None) -> None:
    """The gradient is their mean, the curvature that of the first."""
    make, rule = ACCUMULATING[inner]
    x, y = data(2 * ROWS)
    model = mlp()
    model.compile(fosi(make(gradient_accumulation_steps=2)), loss())
    got = fit(model, x, y, 8)
    whole, first = Network(x, y), Network(x[:ROWS], y[:ROWS])
    program = Fosi(rule)
    want = program.run(whole.gradient, first.hessian, got[0], 8)
    assert program.estimated == [2, 5]
    assert_path(got[::2], want, 1e-6)


# ------------------------------------------------------------- after the split
def test_averages_and_constraints(double: None) -> None:
    """Of the weights after the Newton part; averages come first."""
    x, y = data()
    model = mlp(kernel_constraint=constraints.NonNeg())
    inner = SGD(0.1, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=4)
    model.compile(fosi(inner), loss())
    start = flat(model)
    average = np.zeros_like(start)
    begin = (FEATURES + 1) * HIDDEN
    constrained = slice(begin, begin + HIDDEN * CLASSES)

    def finish(w: Array, t: int) -> Array:
        nonlocal average
        average = w if t == 0 else 0.75 * average + 0.25 * w
        w = average.copy() if t % 4 == 3 else w.copy()
        w[constrained] = np.maximum(w[constrained], 0)
        return w

    network = Network(x, y)
    program = Fosi(sgd(0.1), finish=finish)
    want = program.run(network.gradient, network.hessian, start, 10)
    record = Record()
    model.fit(x, y, ROWS, 10, 0, [record], shuffle=False)
    assert_path(np.stack(record.path), want, 1e-6)
    # Keras leaves the averages in the model at the end of a fit.
    np.testing.assert_allclose(flat(model), average, rtol=0, atol=1e-7)
    assert (want[1:, constrained] == 0).any()


def test_clipping_is_of_the_split_gradient(double: None) -> None:
    """The Newton part has its own scale and is not clipped."""
    x, y = data()
    model = mlp()
    model.compile(fosi(SGD(0.1, global_clipnorm=0.05)), loss())

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        return -0.1 * g * min(1.0, 0.05 / np.linalg.norm(g))

    network = Network(x, y)
    start = flat(model)
    want = Fosi(rule).run(network.gradient, network.hessian, start, 8)
    assert_path(fit(model, x, y, 8), want, 1e-6)


def test_state_is_the_inner_optimizers() -> None:
    """Variables, rate and clock are shown; directions are not among them."""
    x, y = data()
    model = mlp()
    optimizer = small(Adam(0.03))
    model.compile(optimizer, loss())
    fit(model, x, y, 3)
    shown = [
        v is w
        for v, w in zip(
            optimizer.variables,
            optimizer.inner_optimizer.variables,
            strict=True,
        )
    ]
    assert all(shown)
    assert len(shown) == 2 + 2 * 4
    assert int(optimizer.iterations) == 3
    before = slots(optimizer)
    optimizer.set_weights([np.array(v) for v in optimizer.variables])
    assert_same(slots(optimizer), before)
