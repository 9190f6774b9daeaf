"""Exact factor types: one matrix or a stack of matrices, and a diagonal."""

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.functions import shared_call
from tfkfac.compat.graphs import in_xla
from tfkfac.factors.base import (
    VALUES,
    Factor,
    MatrixPart,
    Part,
    Side,
    Tensors,
    TrianglePart,
)
from tfkfac.linalg.symmetric import (
    LARGE,
    damped_inverse,
    damped_inverse_root,
    eigh,
)
from tfkfac.linalg.tensors import rounding, size_of


@dataclasses.dataclass(frozen=True)
class Dense(Factor):
    """Dense matrix, or a stack of matrices: one per group or feature.

    Attributes:
        size: Number of rows of a matrix.
        stack_shape: Shape of a stack of matrices. Defaults to a single matrix.
    """

    size: int
    stack_shape: tuple[int, ...] = ()

    @property
    def _shape(self) -> tuple[int, ...]:
        return (*self.stack_shape, self.size, self.size)

    @property
    @override
    def storage(self) -> Part:
        return MatrixPart(self._shape, symmetric=True)

    @property
    @override
    def operations(self) -> int:
        return self.elements * self.size

    @override
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        # In a shared traced function only the dynamic sizes are known.
        sizes = [size_of(rows, axis) for axis in range(2, rows.shape.rank)]
        rows = tf.reshape(rows, [-1, *sizes])
        if self.stack_shape:
            rows = tf.transpose(rows, [1, 0, 2])
        return tf.matmul(rows, rows, transpose_a=True)

    @override
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.linalg.diag_part(value), -1)

    @override
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        return value

    @override
    def inverse_parts(self) -> dict[str, Part]:
        return {"": MatrixPart(self._shape, symmetric=True)}

    @override
    def inverse(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        return self._decompose(damped_inverse, value, damping)

    def _decompose(
        self,
        decompose: Callable[..., tf.Tensor],
        value: tf.Tensor,
        damping: tf.Tensor,
    ) -> Tensors:
        """Call `decompose(matrices, damping)`; all sizes share one trace."""
        large = self.size >= LARGE  # the traced function has no static sizes
        function = functools.partial(decompose, large=large)
        key = None if in_xla() else (decompose, large)
        result = shared_call(key, function, value, damping, any_size=True)
        result.set_shape(value.shape)
        return {"": result}

    @override
    def for_products(self, inverse: Tensors, dtype: tf.DType) -> Tensors:
        return inverse  # `multiply` uses the stored dtype, maybe bfloat16.

    @override
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        left, right = inverse[""], tf.cast(matrix, inverse[""].dtype)
        if side == "right":
            left, right = right, left
        return tf.cast(tf.matmul(left, right), matrix.dtype)

    @override
    def root_parts(self) -> dict[str, Part]:
        return {"": TrianglePart(self._shape)}

    @override
    def root(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        return self._decompose(damped_inverse_root, value, damping)

    @override
    def multiply_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        R, W = root[""], tf.cast(matrix, root[""].dtype)
        if side == "left":
            product = tf.matmul(R, W, transpose_a=not back)
        else:
            product = tf.matmul(W, R, transpose_b=back)
        return tf.cast(product, matrix.dtype)

    @override
    def divide_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        R = tf.cast(root[""], matrix.dtype)
        if side == "left":
            return tf.linalg.triangular_solve(R, matrix, False, adjoint=True)
        transposed = tf.linalg.matrix_transpose(matrix)
        solved = tf.linalg.triangular_solve(R, transposed, False, adjoint=True)
        return tf.linalg.matrix_transpose(solved)

    @override
    def eigen_parts(self) -> dict[str, Part]:
        return {
            "": MatrixPart(self._shape),
            VALUES: Part((*self.stack_shape, self.size)),
        }

    @override
    def eigen(self, value: tf.Tensor) -> Tensors:
        key = None if in_xla() else "eigh"
        values, vectors = shared_call(key, eigh, value, any_size=True)
        values.set_shape(value.shape[:-1])
        vectors.set_shape(value.shape)
        return {"": vectors, VALUES: values}

    @override
    def rotate(
        self, eigen: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        if side == "left":
            return tf.matmul(eigen[""], matrix, transpose_a=not back)
        return tf.matmul(matrix, eigen[""], transpose_b=back)


@dataclasses.dataclass(frozen=True)
class Diagonal(Factor):
    """A diagonal matrix, stored as a vector, with eigenvectors I.

    Attributes:
        size: Number of elements of the diagonal.
    """

    size: int

    @property
    @override
    def storage(self) -> Part:
        return Part((self.size,))

    @property
    @override
    def operations(self) -> int:
        return self.size

    @property
    @override
    def text(self) -> str:
        return f"diagonal {self.size}"

    @override
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(rows), [0, 1])

    @override
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(value, -1)

    @override
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        return tf.linalg.diag(value)

    @override
    def inverse_parts(self) -> dict[str, Part]:
        return {"": Part((self.size,))}

    @override
    def inverse(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        floor = rounding(value.dtype) * tf.reduce_max(value, -1)
        shift = tf.maximum(damping, floor)
        # For a zero diagonal and damping 0, return the identity.
        shift = tf.where(shift > 0, shift, tf.ones_like(shift))
        return {"": 1 / (value + tf.expand_dims(shift, -1))}

    @override
    def root(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        return {"": tf.sqrt(self.inverse(value, damping)[""])}

    @override
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        axis = -1 if side == "left" else -2
        return matrix * tf.expand_dims(inverse[""], axis)

    @override
    def divide_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        return self.multiply({"": 1 / root[""]}, matrix, side)

    @override
    def eigen_parts(self) -> dict[str, Part]:
        return {VALUES: Part((self.size,))}

    @override
    def eigen(self, value: tf.Tensor) -> Tensors:
        return {VALUES: tf.maximum(value, 0)}

    @override
    def rotate(
        self, eigen: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        return matrix
