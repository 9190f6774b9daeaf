"""FOSI with different inner optimizers."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import constraints, layers
from keras.optimizers import SGD, Adam

from tests.support.dtypes import floats
from tests.support.fosi_reference import (
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    Fosi,
    Network,
    Record,
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
from tfkfac.fosi.update import is_plain_sgd
from tfkfac.training.job import Job


# ---------------------------------------------------------- without directions
def averaging() -> Any:
    """A model with a constraint, and SGD with averages."""
    model = mlp(kernel_constraint=constraints.MaxNorm(0.8))
    average = {"ema_momentum": 0.5, "ema_overwrite_frequency": 3}
    return model, loss(), SGD(0.1, 0.9, use_ema=True, **average)


def linear() -> Any:
    """A model, a loss without curvature, and SGD with clipping."""

    def loss(y_true: Any, y_pred: Any) -> Any:
        target = keras.ops.cos(keras.ops.stack([y_true, y_true + 1], -1))
        return keras.ops.sum(y_pred * target, axis=-1)

    model = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(2)])
    for v in model.trainable_variables:
        v.assign(np.ones(v.shape))
    return model, loss, SGD(0.1, clipnorm=0.3)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (averaging, {"warmup_steps": 100}),
        (linear, {"warmup_steps": 0, "learning_rate_clip": 3.0}),
    ],
)
def test_steps_are_the_inner_optimizers(make: Any, options: Any) -> None:
    """In the warm-up, and for a zero Hessian: bit for bit."""
    x, y = data()
    paths = []
    for wrap in (False, True):
        model, objective, optimizer = make()
        if wrap:
            optimizer = small(optimizer, num_smallest=1, **options)
        model.compile(optimizer, objective, run_eagerly=make is averaging)
        paths.append(fit(model, x, y.astype("float32"), 7))
        paths.append([np.array(v) for v in model.optimizer.variables])
    np.testing.assert_array_equal(paths[2], paths[0])
    np.testing.assert_equal(paths[3], paths[1])
    assert len(np.unique(paths[0], axis=0)) > 3
    assert optimizer.spectrum().size == 0


# ---------------------------------------------------------------- accumulation
def test_accumulation(double: None) -> None:
    """The gradient is the mean over batches; the Hessian is of the first."""
    x, y = data(2 * ROWS)
    model = mlp()
    model.compile(fosi(SGD(0.1, 0.9, gradient_accumulation_steps=2)), loss())
    got = fit(model, x, y, 8)
    whole, first = Network(x, y), Network(x[:ROWS], y[:ROWS])
    program = Fosi(sgd(0.1, 0.9))
    want = program.run(whole.gradient, first.hessian, got[0], 8)
    assert program.estimated == [2, 5]
    assert_path(got[::2], want, 1e-6)
    np.testing.assert_array_equal(got[1::2], got[:-1:2])
    assert int(model.optimizer.iterations) == 8


# ------------------------------------------------------------- after the split
def test_averages_and_constraints(double: None) -> None:
    """Averages, then constraints, apply after the Newton step."""
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


# ----------------------------------------------------------------- plain SGD
def test_is_plain_sgd() -> None:
    """Its momentum is projected; decay, clipping and half precision forbid it.

    In half precision, rounded changes are not orthogonal to the directions.
    """

    def is_plain(inner: Any) -> bool:
        return is_plain_sgd(Job("fosi", mlp(), inner))

    for options in ({}, {"nesterov": True, "momentum": 0.9}, {"use_ema": True}):
        assert is_plain(SGD(0.1, **options)), options
    for name, value in {
        "weight_decay": 0.1,
        "clipnorm": 1.0,
        "clipvalue": 1.0,
        "global_clipnorm": 1.0,
        "gradient_accumulation_steps": 2,
    }.items():
        assert not is_plain(SGD(0.1, **{name: value})), name
    for inner in (type("Other", (SGD,), {})(0.1), Adam(0.1)):
        assert not is_plain(inner)
    with floats("bfloat16"):
        assert not is_plain(SGD(0.1))


def momentum_of(optimizer: Any) -> Array:
    """SGD's momentum as a flat vector."""
    momenta = optimizer.inner_optimizer.momentums
    return np.concatenate([np.ravel(b) for b in momenta])


@pytest.mark.slow
def test_gradients_of_some_weights_between(double: None) -> None:
    """Some weights without gradient: the momentum along V is projected anew."""
    x, y = data()
    model = mlp()
    optimizer = fosi(SGD(0.1, 0.9))
    model.compile(optimizer, loss())
    weights = model.trainable_variables
    optimizer.build(weights)

    @tf.function
    def train(trained: tuple[int, ...]) -> None:
        with tf.GradientTape() as tape:
            value = model.compute_loss(x, y, model(x, training=True))
        chosen = [weights[i] for i in trained]
        optimizer.apply(tape.gradient(value, chosen), chosen)

    for count in range(10):
        train((2, 3) if count % 3 == 1 else (0, 1, 2, 3))
        subspace = optimizer.method.states[0].subspace
        inside = subspace.directions.numpy() @ momentum_of(optimizer)
        known = subspace.inner_momentum.numpy()
        np.testing.assert_allclose(known, inside, atol=1e-14)
        assert count < 2 or np.abs(inside).max() > 1e-4
