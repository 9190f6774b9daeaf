"""Skipped steps change nothing; many in a row, or empty ones, are reported."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.reference import Array
from tests.support.small import CLASSES, data, gradients_of, loss
from tests.support.summaries import sequential
from tfkfac.loss.terms import LossTerms
from tfkfac.training.guards import count_empty_batches

X, Y = data(64)
BATCH = 16


def compiled(optimizer: Any) -> Any:
    """A model with moving statistics, seeds, and metrics that can be NaN."""
    keras.utils.set_random_seed(0)
    model = sequential(
        layers.Dense(5),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(CLASSES),
    )
    entropy = keras.metrics.SparseCategoricalCrossentropy(
        from_logits=True, name="entropy"
    )
    metrics = ["accuracy", entropy]
    model.compile(optimizer, loss(), metrics=metrics, run_eagerly=True)
    return model


def batches(bad: bool) -> Iterator[Any]:
    """Return two steps of two batches, with a NaN at first, or the second."""
    for i in range(0 if bad else 2, 4):
        x = X[BATCH * i : BATCH * (i + 1)].copy()
        if i == 0:
            x[0, 0] = np.nan
        yield x, Y[BATCH * i : BATCH * (i + 1)]


def test_no_trace() -> None:
    """Statistics, seeds, loss and metrics equal those without the step.

    See `integration/test_same_runs.py` for the state of all optimizers.
    """
    found = []
    for bad in (True, False):
        optimizer = tfkfac.KFAC(step="natural", gradient_accumulation_steps=2)
        model = compiled(optimizer)
        done = model.fit(batches(bad), shuffle=False, verbose=0)
        assert int(optimizer.skipped_steps) == bad
        found.append((done.history, [np.array(v) for v in model.variables]))
    (history, state), (want_history, want_state) = found
    assert history == want_history
    assert np.isfinite(list(history.values())).all()
    np.testing.assert_equal(state, want_state)


# ------------------------------------------------------------- too many of them
def lost(count: int) -> Array:
    x = X.copy()
    x[: BATCH * count] = np.nan
    return x


def test_other_loops() -> None:
    """`train_on_batch`, eager loops and graphs."""
    model = sequential(layers.Dense(CLASSES))
    optimizer = tfkfac.KFAC(step="natural", max_skipped_steps=2)
    model.compile(optimizer, loss(), run_eagerly=True)
    bad = lost(1)[:BATCH]
    model.train_on_batch(bad, Y[:BATCH])
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        model.train_on_batch(bad, Y[:BATCH])
    model = sequential(layers.Dense(CLASSES))
    optimizer = tfkfac.KFAC(step="natural", max_skipped_steps=2).attach(model)

    def step() -> None:
        gradients = gradients_of(model, bad, Y[:BATCH])
        optimizer.apply(gradients, model.trainable_variables)

    step()
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        step()
    compiled_step = tf.function(step)
    compiled_step()
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        optimizer.check_skipped_steps()


def test_fit_ends_with_a_report_of_events(capfd: Any) -> None:
    model = compiled(tfkfac.KFAC(step="natural"))
    for count in (1, 2, 0):
        capfd.readouterr()
        x = lost(count)[: 2 * BATCH]
        model.fit(x, Y[: 2 * BATCH], BATCH, shuffle=False, verbose=0)
        said = f"in this fit: steps skipped, gradients not finite: {count}\n"
        assert (said in capfd.readouterr().err) == bool(count)
    assert model.optimizer.events() == {
        "steps skipped, gradients not finite": 3
    }


def test_one_gradient_of_many() -> None:
    model = sequential(layers.Dense(5), layers.Dense(CLASSES))
    optimizer = tfkfac.KFAC(step="natural", max_skipped_steps=1).attach(model)
    gradients = gradients_of(model, X, Y)
    gradients[3] *= np.inf
    path = model.trainable_variables[3].path
    with pytest.raises(FloatingPointError, match=f"1 of 4 .* that of '{path}'"):
        optimizer.apply(gradients, model.trainable_variables)


# ---------------------------------------------------------------- empty batches
def test_many_empty_batches_in_a_row(capfd: Any) -> None:
    empty = tf.Variable(0, dtype=tf.int64)
    unit = tf.constant(1, tf.float64)

    @tf.function
    def batch(first: tf.Tensor, second: tf.Tensor) -> None:
        count_empty_batches(
            [LossTerms(n, unit) for n in (first, second)], empty, 3
        )

    def feed(count: float, batches: int, second: float = 0) -> int:
        for _ in range(batches):
            batch(*(tf.constant(n, tf.float64) for n in (count, second)))
        text = capfd.readouterr().err
        return str(text).count("tfkfac: the last 20 batches of replica 3 had")

    assert feed(0, 19) == 0
    assert feed(0, 1, second=2) == 0
    assert feed(0, 19) == 0
    assert feed(0, 30) == 1
    assert feed(8, 1) == 0
    assert feed(0, 20) == 1
