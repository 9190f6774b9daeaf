"""Warnings about replicas without examples."""

from typing import Any

import tensorflow as tf

from tfkfac.loss.terms import LossTerms
from tfkfac.training.guards import count_empty_batches


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
