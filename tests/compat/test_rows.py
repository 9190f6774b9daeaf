"""What compat relies on to fill matrices row by row."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.graphs import repeat
from tfkfac.compat.variables import copied_rows, new_rows, set_row

COUNT, LENGTH = 5, 3


def fill(start: Any) -> Any:
    """Makes the rows 1, 2, ... one after the other, and adds them up."""

    def body(index: Any, state: Any) -> Any:
        matrix, total = state
        row = tf.fill([LENGTH], tf.cast(index + 1, tf.float32))
        matrix = set_row(matrix, index, row)
        return matrix, total + tf.reduce_sum(matrix[: index + 1])

    return repeat(body, (start(), tf.constant(0.0)), 0, COUNT)


@pytest.mark.parametrize("xla", [False, True])
@contract(
    "compat.variables.set_row",
    "`InplaceUpdate` changes one row, in each run anew.",
)
def test_rows(xla: bool) -> None:
    def start() -> Any:
        return new_rows(COUNT, LENGTH, tf.float32)

    run = tf.function(lambda: fill(start), jit_compile=xla)
    want = np.repeat(np.arange(1.0, COUNT + 1)[:, None], LENGTH, 1)
    for _ in range(2):
        matrix, total = run()
        np.testing.assert_array_equal(matrix, want)
        assert float(total) == want.cumsum(0).sum()


@contract("compat.variables.new_rows", "`Empty` makes zeros, in each run anew.")
def test_new_rows() -> None:
    @tf.function
    def run() -> Any:
        matrix = new_rows(COUNT, LENGTH, tf.float64)
        before = tf.reduce_sum(matrix)
        with tf.control_dependencies([before]):
            return before, set_row(matrix, 2, tf.ones([LENGTH], tf.float64))

    for _ in range(2):
        before, matrix = run()
        assert float(before) == 0
        np.testing.assert_array_equal(matrix.numpy().sum(1), [0, 0, 3, 0, 0])


@contract("compat.variables.copied_rows", "`DeepCopy` leaves a variable alone.")
def test_copied_rows() -> None:
    kept = tf.Variable(tf.ones([COUNT, LENGTH]))
    run = tf.function(lambda: fill(lambda: copied_rows(kept.read_value())))
    matrix, _ = run()
    assert float(matrix[4, 0]) == COUNT
    np.testing.assert_array_equal(kept, np.ones([COUNT, LENGTH]))
