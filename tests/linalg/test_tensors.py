"""Finiteness checks, and selection by a flag."""

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.linalg.tensors import all_finite, are_finite, select

NAN, INF = float("nan"), float("inf")
DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize(
    ("way", "dtype"),
    [("eager", "float16"), ("graph", "bfloat16"), ("xla", "float32")],
)
def test_select_ignores_the_other_tensor(way: str, dtype: str) -> None:
    """Even if it is NaN."""
    run = select
    if way != "eager":
        run = tf.function(select, jit_compile=way == "xla")
    for shape in [(), (2, 3, 4)]:
        right = tf.cast(tf.fill(shape, 0.1), dtype)
        wrong = tf.cast(tf.fill(shape, NAN), dtype)
        for flag, x, y in ((True, right, wrong), (False, wrong, right)):
            got = run(tf.constant(flag), x, y)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.numpy(), right.numpy())


def test_variables_keep_their_values() -> None:
    """A tensor selected from a variable is not an alias."""
    kept, new = tf.Variable(tf.ones([5, 5])), tf.zeros([5, 5])

    @tf.function
    def run(flag: tf.Tensor) -> tf.Tensor:
        before = select(flag, new, kept)
        kept.assign(select(~flag, new, kept))
        return before

    np.testing.assert_array_equal(run(tf.constant(False)), np.ones([5, 5]))
    np.testing.assert_array_equal(kept, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite(dtype: str) -> None:
    check = tf.function(all_finite, reduce_retracing=True)
    fine = tf.ones([2, 3], dtype)
    assert bool(check([fine, tf.zeros([0], dtype), fine]))
    for bad in ([NAN, 0], [INF, 1], [-INF, 1], [INF, -INF], [NAN, INF]):
        values = tf.constant(bad, dtype)
        assert not bool(check([fine, values]))
        assert not bool(check([values, fine]))
        np.testing.assert_array_equal(are_finite([fine, values]), [True, False])


def test_tensors_are_checked_separately() -> None:
    """Infinities do not cancel, sums do not overflow, dtypes may differ."""
    assert not bool(all_finite([tf.constant(INF), tf.constant(-INF)]))
    assert bool(all_finite([tf.constant(3e38)] * 5))
    fine = [tf.ones([2], dtype) for dtype in ("float32", "float64")]
    assert bool(all_finite(fine))
    assert not bool(all_finite([*fine, tf.constant(NAN, tf.float16)]))
    assert bool(all_finite([tf.fill([99], tf.constant(6e4, tf.float16))]))
