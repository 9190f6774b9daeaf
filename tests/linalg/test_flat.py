"""Tensors as one vector and back."""

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.linalg.flat import FlatSpace

SHAPES = [(2, 3), (), (4,), (0, 2), (1, 1, 2)]


def tensors(dtypes: list[str]) -> list[tf.Tensor]:
    """Halves, which every dtype can hold."""
    count = iter(np.arange(100) / 2)
    return [
        tf.constant(
            [next(count) for _ in range(int(np.prod(shape)))], dtype, shape
        )
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


def space(dtypes: list[str]) -> FlatSpace:
    return FlatSpace(SHAPES, [tf.as_dtype(d) for d in dtypes])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("dtypes", "wide"),
    [
        (["float32"] * 5, "float32"),
        (["bfloat16"] * 5, "float32"),
        (["float16", "float32", "bfloat16", "float32", "float16"], "float32"),
        (["float32", "float64", "float32", "bfloat16", "float32"], "float64"),
    ],
)
def test_round_trip(dtypes: list[str], wide: str, graph: bool) -> None:
    flat, given = space(dtypes), tensors(dtypes)
    join, split = flat.join, flat.split
    if graph:
        join, split = tf.function(join), tf.function(split)
    vector = join(given)
    assert flat.size == 13
    assert vector.dtype == flat.dtype == wide
    np.testing.assert_array_equal(vector, np.arange(13) / 2)
    for got, want in zip(split(vector), given, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        np.testing.assert_array_equal(
            tf.cast(got, tf.float64), tf.cast(want, tf.float64)
        )


def test_vector_of_split() -> None:
    vector = tf.random.stateless_normal([13], [1, 2])
    flat = space(["float32"] * 5)
    np.testing.assert_array_equal(flat.join(flat.split(vector)), vector)


def test_the_length_is_static() -> None:
    """A graph does not know the shape of a sparse gradient made dense."""
    flat = FlatSpace([(4, 2), (3,)], [tf.float32] * 2)

    @tf.function
    def join(rows: tf.Tensor, indices: tf.Tensor, shape: tf.Tensor) -> None:
        dense = tf.convert_to_tensor(tf.IndexedSlices(rows, indices, shape))
        assert dense.shape != (4, 2)
        assert flat.join([dense, tf.ones(3)]).shape == (11,)

    join(tf.ones([2, 2]), tf.constant([1, 3]), tf.constant([4, 2]))


@pytest.mark.parametrize("length", [5, 6, 9])
def test_zeros_at_the_end(length: int) -> None:
    flat = FlatSpace([(2, 2), (1,)], [tf.float32] * 2)
    given = [tf.ones([2, 2]), tf.constant([5.0])]
    vector = flat.join(given, length)
    np.testing.assert_array_equal(vector, [1, 1, 1, 1, 5, 0, 0, 0, 0][:length])
    for got, want in zip(flat.split(vector), given, strict=True):
        np.testing.assert_array_equal(got, want)


def test_order_is_row_major() -> None:
    flat = FlatSpace([(2, 2), (1,)], [tf.float32] * 2)
    vector = flat.join([tf.constant([[1.0, 2], [3, 4]]), tf.constant([5.0])])
    np.testing.assert_array_equal(vector, [1, 2, 3, 4, 5])


def test_none_is_zero() -> None:
    given = [*tensors(["float32"] * 5)]
    given[2] = None
    vector = space(["float32"] * 5).join(given)
    np.testing.assert_array_equal(vector[7:11], np.zeros(4))
    np.testing.assert_array_equal(vector[11:], [5.5, 6.0])


def test_wrong_number_of_tensors() -> None:
    with pytest.raises(ValueError, match="zip"):
        space(["float32"] * 5).join(tensors(["float32"] * 5)[:-1])
