"""Symmetric matrices as their upper triangle (KAISA, section 4.3)."""

import functools
import math

import numpy as np
import tensorflow as tf


def packed_size(shape: tuple[int, ...]) -> int:
    """Number of entries of packed matrices of shape `(..., n, n)`."""
    size = shape[-1]
    return math.prod(shape[:-2]) * size * (size + 1) // 2


def pack(matrix: tf.Tensor) -> tf.Tensor:
    """Upper triangles of `(..., n, n)`, flattened to one vector."""
    size = matrix.shape[-1]
    flat = tf.reshape(matrix, [-1, size * size])
    return tf.reshape(tf.gather(flat, _upper(size), axis=1), [-1])


def unpack(vector: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Inverse of `pack` for symmetric matrices of shape `(..., n, n)`."""
    size = shape[-1]
    flat = tf.reshape(vector, [-1, size * (size + 1) // 2])
    return tf.reshape(tf.gather(flat, _places(size), axis=1), shape)


@functools.lru_cache(maxsize=256)
def _upper(size: int) -> np.ndarray:
    """Positions of the upper triangle in a flattened matrix."""
    rows, columns = np.triu_indices(size)
    return (rows * size + columns).astype(np.int32)


@functools.lru_cache(maxsize=256)
def _places(size: int) -> np.ndarray:
    """For each entry of a flattened matrix, its position in the triangle."""
    places = np.zeros((size, size), np.int32)
    places[np.triu_indices(size)] = np.arange(size * (size + 1) // 2)
    upper = np.triu(places)
    return (upper + np.triu(places, 1).T).reshape(-1)
