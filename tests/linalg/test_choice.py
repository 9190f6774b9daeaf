"""One of two tensors, by a single flag."""

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.linalg.choice import choose

NAN = float("nan")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("way", ["eager", "graph", "xla"])
def test_the_other_one_leaves_no_trace(
    way: str, shape: tuple[int, ...], dtype: str
) -> None:
    """Not even if it is NaN."""
    right, wrong = tf.cast(tf.fill(shape, 0.1), dtype), tf.fill(shape, NAN)
    wrong = tf.cast(wrong, dtype)
    run = choose
    if way != "eager":
        run = tf.function(choose, jit_compile=way == "xla")
    for flag, one, other in ((True, right, wrong), (False, wrong, right)):
        got = run(tf.constant(flag), one, other)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.numpy(), right.numpy())


def test_variables_keep_their_values() -> None:
    """What is chosen of a variable is no alias of it."""
    kept, new = tf.Variable(tf.ones([5, 5])), tf.zeros([5, 5])

    @tf.function
    def run(flag: tf.Tensor) -> tf.Tensor:
        before = choose(flag, new, kept)
        kept.assign(choose(~flag, new, kept))
        return before

    np.testing.assert_array_equal(run(tf.constant(False)), np.ones([5, 5]))
    np.testing.assert_array_equal(kept, new)


def test_takes_no_longer_than_a_copy() -> None:
    """`tf.where` of one flag is an operation on all elements."""
    graph = tf.function(choose).get_concrete_function(
        tf.TensorSpec([], tf.bool), tf.TensorSpec([9]), tf.TensorSpec([9])
    )
    assert "SelectV2" not in {op.type for op in graph.graph.get_operations()}
