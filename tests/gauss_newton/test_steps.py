"""Steps against NumPy; the search for a damping; unusual batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.curvature_models import ready
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Reference,
    get_flat,
    loss_of,
    squares,
    squares_pull,
)
from tests.support.marks import with_slow
from tfkfac.gauss_newton.solve import LARGEST, NormalEquations, Search, search

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, size=(40, 2))
Y = np.sin(3 * X[:, :1]) * X[:, 1:]


def compiled(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    hidden, last = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), hidden, last])
    # Eager unless the test counts traces.
    eager = type(optimizer) is tfkfac.GaussNewton
    model.compile(optimizer, "mse", run_eagerly=eager)
    return model


@pytest.mark.slow
def test_one_trace_for_all_batches() -> None:
    """32 and 8 examples for 25 weights use different spaces."""
    traces = []

    class Traces(tfkfac.GaussNewton):
        def apply(self, *args: Any, **kwargs: Any) -> None:
            traces.append(1)
            super().apply(*args, **kwargs)

    model = compiled(Traces())
    model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.last_step["residuals"] == 8
    assert len(traces) == 1


def test_a_batch_of_zero_weight_is_not_rejected() -> None:
    """A zero step: one try, and the damping stays."""
    for solve in ("parameters", "residuals"):
        model = compiled(tfkfac.GaussNewton(solve=solve, damping=0.25))
        before = model.get_weights()
        model.train_on_batch(X[:8], Y[:8], sample_weight=np.zeros(8))
        np.testing.assert_equal(model.get_weights(), before)
        assert model.optimizer.last_step["tries"] == 1
        (state,) = model.optimizer.method.states
        assert float(state.damping.numpy()) == 0.25
        assert int(state.rejected.numpy()) == 0


# ----------------------- steps of all layer types against NumPy, in both spaces
STEPS = 4
# In the space of residuals; all others in the space of parameters. Grouped
# convolutions and masks loop over examples.
RESIDUALS = ("layer_two_axes", "lstm")
CASES = ["tanh", "conv_groups", "attention", "masked_rnn", *RESIDUALS]


@pytest.mark.parametrize("case", with_slow(CASES, *CASES[1:]))
def test_every_layer(case: str) -> None:
    solve = "residuals" if case in RESIDUALS else "parameters"
    with floats("float64"):
        model, x, y = ready(case)
        start, done = get_flat(model), []
        optimizer = tfkfac.GaussNewton(solve=solve)
        model.compile(optimizer, "mse")
        for _ in range(STEPS):
            model.train_on_batch(x, y)
            done.append(optimizer.last_step)
        got = get_flat(model)
        reference = Reference(
            loss_of(model, x, y),
            squares(model, x, y),
            start,
            squares_pull(model, x),
        )
        for _ in done:
            reference.step()
    want = reference.weights
    assert np.linalg.norm(got - want) <= 1e-7 * np.linalg.norm(want - start)
    assert [d["tries"] for d in done] == reference.tries
    assert [d["accepted"] for d in done] == reference.accepted
    np.testing.assert_allclose(
        [d["damping"] for d in done], reference.dampings, rtol=1e-5
    )


# --------------------------------------------------------- search for a damping
ROWS = RNG.normal(size=(6, 4))
OFFSETS = RNG.normal(size=6)


def quadratic(change: Any) -> Any:
    """A quadratic loss, equal to its Gauss-Newton model."""
    errors = OFFSETS + tf.linalg.matvec(tf.constant(ROWS), change)
    return tf.reduce_sum(errors**2) / 2


def tries(
    loss: Callable[[Any], Any], damping: float = 0.5, max_tries: int = 6
) -> Search:
    zero = tf.zeros([4], tf.float64)
    return search(
        NormalEquations.of_residuals(tf.constant(ROWS), tf.constant(OFFSETS)),
        loss,
        tf.convert_to_tensor(loss(zero)),
        tf.constant(damping, tf.float64),
        zero,
        tf.constant(1.0, tf.float64),
        max_tries,
        tf.float64,
        lambda change: tf.zeros([6], tf.float64),  # linear residuals
    )


@pytest.mark.parametrize("value", [1e9, float("nan")])
def test_no_step_without_descent(value: float) -> None:
    def infeasible(change: Any) -> Any:
        here = tf.reduce_all(change == 0)
        return tf.where(here, quadratic(change), value)

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
