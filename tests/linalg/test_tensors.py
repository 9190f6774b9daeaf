"""Finiteness checks, selection by a flag, and flat vectors of tensors."""

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.linalg.tensors import all_finite, are_finite, select
from tfkfac.linalg.vectors import CHUNK, FlatSpace, row_products

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
    # Infinities do not cancel, sums do not overflow, dtypes may differ.
    count = 99 if dtype == "float16" else 1
    large = tf.fill([count], tf.cast(0.9 * fine.dtype.max, dtype))
    assert bool(check([large] * 5))
    assert bool(check([fine, tf.ones([2], "float32")]))
    assert not bool(check([fine, tf.constant([INF]), tf.constant([-INF])]))


# --------------------------------------------------------------- flat vectors
SHAPES = [(2, 3), (), (4,), (0, 2), (1, 1, 2)]


def tensors(dtypes: list[str]) -> list[tf.Tensor]:
    """Multiples of 0.5, exact in every dtype."""
    count = iter(np.arange(100) / 2)
    return [
        tf.constant(
            [next(count) for _ in range(int(np.prod(shape)))], dtype, shape
        )
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def space(dtypes: list[str]) -> FlatSpace:
    return FlatSpace(SHAPES, [tf.as_dtype(d) for d in dtypes])


@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        (["float16", "float32", "bfloat16", "float32", "float16"], "float32"),
        (["float32", "float64", "float32", "bfloat16", "float32"], "float64"),
    ],
)
def test_round_trip(dtypes: list[str], wide: str) -> None:
    """In row-major order, padded with zeros to a length."""
    flat, given = space(dtypes), tensors(dtypes)
    assert flat.size == 13
    for length in (13, 16):
        vector = tf.function(flat.join)(given, length)
        assert vector.dtype == flat.dtype == wide
        want = [*(np.arange(13) / 2), *np.zeros(length - 13)]
        np.testing.assert_array_equal(vector, want)
        for part, tensor in zip(flat.split(vector), given, strict=True):
            assert (part.dtype, part.shape) == (tensor.dtype, tensor.shape)
            np.testing.assert_array_equal(part, tensor)
    given[2] = None  # zeros
    want[7:11] = [0] * 4
    np.testing.assert_array_equal(flat.join(given, 16), want)


def test_length_is_static() -> None:
    """The static shape of a densified sparse gradient is unknown."""
    flat = FlatSpace([(4, 2), (3,)], [tf.float32] * 2)

    @tf.function
    def join(rows: tf.Tensor, indices: tf.Tensor, shape: tf.Tensor) -> None:
        dense = tf.convert_to_tensor(tf.IndexedSlices(rows, indices, shape))
        assert dense.shape != (4, 2)
        assert flat.join([dense, tf.ones(3)]).shape == (11,)

    join(tf.ones([2, 2]), tf.constant([1, 3]), tf.constant([4, 2]))


# ------------------------------------------------------------------------ sums
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (3, CHUNK), (1, CHUNK + 1), (1, 1_000_003)]
)
def test_products(rows: int, size: int) -> None:
    """The first product, x . x, has the largest rounding error."""
    rng = np.random.default_rng(size)
    matrix = rng.normal(size=(rows, size)).astype("float32")
    got = tf.function(row_products)(tf.constant(matrix), matrix[0])
    exact = matrix.astype("float64")
    scale = np.linalg.norm(exact[0]) * np.linalg.norm(exact, axis=1)
    assert got.dtype == tf.float32
    np.testing.assert_array_less(abs(got - exact @ exact[0]), 3e-7 * scale)
