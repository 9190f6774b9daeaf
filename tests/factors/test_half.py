"""What stands for a matrix in float16, against its numbers."""

import numpy as np
import pytest
import tensorflow as tf

from tfkfac.factors import (
    MatrixPart,
    Part,
    from_stored,
    stored_parts,
    to_stored,
)

PARTS = {
    "": MatrixPart((3, 2, 4)),
    "_values": Part((5,)),
    "_one": Part(()),
}


@pytest.mark.parametrize("size", [2.0**-60, 1.0, 2.0**99])
def test_small_numbers_beside_large_ones(size: float) -> None:
    """Ten bits of each down to 2^-28 of the largest, of each matrix."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, part in PARTS.items():
        bits = rng.integers(2**10, 2**11, part.shape) / 2.0**10
        powers = rng.integers(-28, 1, part.shape)
        tensors[name] = np.float32(size) * np.float32(bits * 2.0**powers)
    # Matrices of a stack do not know of each other.
    tensors[""] *= np.float32([1, 2.0**-30, 0])[:, None, None]
    given = {name: tf.constant(value) for name, value in tensors.items()}
    stored = to_stored(given, PARTS, tf.float16)
    declared = stored_parts(PARTS, tf.float16)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        name: part.shape for name, part in declared.items()
    }
    assert {t.dtype for t in stored.values()} == {tf.float16}
    for name, value in from_stored(stored, tf.float32).items():
        # Powers of two in float32 are right to a rounding.
        np.testing.assert_allclose(value, tensors[name], rtol=1e-6)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32])
def test_other_dtypes_are_cast(dtype: tf.DType) -> None:
    given = {name: tf.ones(part.shape) for name, part in PARTS.items()}
    assert stored_parts(PARTS, dtype) == PARTS
    stored = to_stored(given, PARTS, dtype)
    assert {t.dtype for t in stored.values()} == {dtype}
    assert set(stored) == set(PARTS)
    for value in from_stored(stored, tf.float32).values():
        np.testing.assert_array_equal(value, np.ones(value.shape))
