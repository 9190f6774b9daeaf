"""A replica without examples is told of, once for each time."""

from typing import Any

import tensorflow as tf

from tfkfac.loss.terms import LossTerms
from tfkfac.training.guards import note_batch


def test_many_empty_batches_in_a_row(capfd: Any) -> None:
    empty = tf.Variable(0, dtype=tf.int64)
    one = tf.constant(1, tf.float64)

    @tf.function
    def batch(first: tf.Tensor, second: tf.Tensor) -> None:
        note_batch([LossTerms(n, one) for n in (first, second)], empty, 3)

    def feed(count: float, batches: int, second: float = 0) -> list[str]:
        for _ in range(batches):
            batch(*(tf.constant(n, tf.float64) for n in (count, second)))
        return [
            line
            for line in capfd.readouterr().err.splitlines()
            if line.startswith("tfkfac")
        ]

    assert feed(0, 19) == []
    assert feed(0, 1, second=2) == []
    assert feed(0, 19) == []
    (said,) = feed(0, 30)
    assert said.startswith("tfkfac: the last 20 batches of replica 3 had no")
    assert feed(8, 1) == []
    assert int(empty) == 0
    assert len(feed(0, 20)) == 1
