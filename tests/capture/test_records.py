"""Records of taps, and derivatives through taps."""

import gc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import append_one
from tests.support.small import (
    ROWS,
    assert_same,
    compiled_mlp,
    data,
    everything,
    gradients_of,
    loss,
    mlp,
)

X, Y = data()


# -------------------------------------------------------------- records
def test_a_saliency_map_leaves_no_records() -> None:
    """A gradient that is never applied does not reach the next step."""
    models = [compiled_mlp(eager=True) for _ in range(2)]
    for model, saliency in zip(models, (False, True), strict=True):
        for _ in range(2):
            if saliency:
                x = tf.constant(X[:3] + 5.0)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    score = tf.reduce_sum(model(x)[:, 0])
                assert np.asarray(tape.gradient(score, x)).any()
            model.train_on_batch(X, Y)
    assert_same(everything(models[1]), everything(models[0]))


def test_unused_records_are_dropped() -> None:
    """Ten saliency maps keep as many records as one saliency map."""
    model = compiled_mlp(eager=True)

    def count_records() -> int:
        gc.collect()
        records = [o for o in gc.get_objects() if type(o).__name__ == "Record"]
        return len(records)

    gradients_of(model, X, Y)
    num_records = count_records()
    for _ in range(9):
        gradients_of(model, X, Y)
    assert count_records() <= num_records
    model.train_on_batch(X, Y)
    assert count_records() <= num_records - 2


def test_another_tape_between_backward_pass_and_step() -> None:
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    gradients = gradients_of(model, X, Y)
    with tf.GradientTape():
        model(X[:2])
    optimizer.apply(gradients, model.trainable_variables)
    assert optimizer.factors()["hidden"]["A"].any()


# ------------------------------------------------------------- derivatives
def gradient_penalty(model: Any) -> list[Any]:
    """Gradient of an input gradient's norm with respect to the weights."""
    x = tf.constant(X)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = tf.reduce_sum(model(x)[:, 0])
        slope = inner.gradient(score, x)
        penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
        value = penalty + tf.reduce_mean(model(x)[:, 1])
    return list(outer.gradient(value, model.trainable_variables))


def hessian_product(model: Any) -> list[Any]:
    values = [v.value for v in model.trainable_variables]
    ones = [tf.ones_like(v) for v in values]
    with tf.autodiff.ForwardAccumulator(values, ones) as accumulator:
        with tf.GradientTape() as tape:
            value = loss()(Y, model(X))
        gradients = tape.gradient(value, values)
    return [accumulator.jvp(g) for g in (value, *gradients)]


@pytest.mark.parametrize("derivative", [gradient_penalty, hessian_product])
def test_taps_are_transparent_to_derivatives(derivative: Any) -> None:
    """Bitwise equal with and without taps."""
    got, want = derivative(compiled_mlp(eager=True)), derivative(mlp())
    assert len(want) in (4, 5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.asarray(b).any()


def test_gradient_penalty_trains() -> None:
    """Nested tapes record each call of a layer once."""
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    for _ in range(2):
        optimizer.apply(gradient_penalty(model), model.trainable_variables)
    a = append_one(X.astype(np.float64))
    # The inputs are counted twice; their mean does not change.
    got = optimizer.factors()["hidden"]["A"]
    assert_close(got, a.T @ a / ROWS, 1e-5)
