"""Base class of factor types (`Factor`), and specs of their tensors."""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

import tensorflow as tf
from typing_extensions import override

from tfkfac.linalg.symmetric import pack, packed_size, unpack


@dataclasses.dataclass(frozen=True)
class Part:
    """Spec of one tensor of a factor or decomposition.

    The tensor multiplies gradients elementwise, see also `MatrixPart`.

    Attributes:
        shape: Shape of the tensor.
    """

    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of stored elements."""
        return math.prod(self.shape)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the result of `pack`."""
        return self.shape

    def pack(self, value: tf.Tensor) -> tf.Tensor:
        """Remove redundant entries before a transfer."""
        return value

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return packed

    @property
    def axes(self) -> list[int]:
        """Axes over which `largest` takes the maximum."""
        return list(range(len(self.shape)))

    def largest(self, value: tf.Tensor) -> tf.Tensor:
        """Largest absolute entry along `axes`, which are kept with size 1."""
        return tf.reduce_max(tf.abs(value), self.axes, keepdims=True)

    def identity(self, dtype: tf.DType) -> tf.Tensor:
        """Initial value: an identity, which leaves gradients unchanged."""
        return tf.ones(self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class MatrixPart(Part):
    """Spec of matrices `(..., n, m)`, applied by a matrix product.

    Attributes:
        shape: Shape of the tensor.
        symmetric: True if the matrices are symmetric and `pack` returns their
            triangles.
    """

    symmetric: bool = False

    @property
    @override
    def packed_shape(self) -> tuple[int, ...]:
        return (packed_size(self.shape),) if self.symmetric else self.shape

    @override
    def pack(self, value: tf.Tensor) -> tf.Tensor:
        return pack(value) if self.symmetric else value

    @override
    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        return unpack(packed, self.shape) if self.symmetric else packed

    @property
    @override
    def axes(self) -> list[int]:
        return super().axes[-2:]  # one maximum per matrix of a stack

    @override
    def identity(self, dtype: tf.DType) -> tf.Tensor:
        *stack, rows, columns = self.shape
        return tf.eye(rows, columns, batch_shape=stack, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class TrianglePart(MatrixPart):
    """Spec of upper triangular matrices `(..., n, n)`."""

    symmetric: bool = True  # so that `pack` stores the upper triangle

    @override
    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        return tf.linalg.band_part(super().unpack(packed), 0, -1)


@dataclasses.dataclass(frozen=True)
class Wire:
    """Format of tensors that are sent between workers."""

    symmetric: bool = False
    """True to send symmetric matrices as triangles."""
    factor_dtype: tf.DType | None = None
    """Dtype in which statistics are sent; None for the dtype of the block."""
    inverse_dtype: tf.DType | None = None
    """Dtype of stored and sent decompositions; None as for factors."""

    def shape(self, part: Part) -> tuple[int, ...]:
        """Shape of a tensor in this format."""
        return part.packed_shape if self.symmetric else part.shape

    def pack(self, part: Part, value: tf.Tensor) -> tf.Tensor:
        """Convert a tensor to this format."""
        return part.pack(value) if self.symmetric else value

    def unpack(self, part: Part, value: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return part.unpack(value) if self.symmetric else value


Tensors = Mapping[str, tf.Tensor]
"""Tensors by name."""

Side = Literal["left", "right"]
"""Side of the gradient matrix on which a factor is multiplied."""

VALUES = "_values"
"""Suffix of the eigenvalues in an eigendecomposition."""


class Factor(abc.ABC):
    """Factor type: representation of a symmetric positive semidefinite matrix.

    A factor is stored as one tensor that is linear in the matrix. So stored
    tensors can be summed over rows, calls and workers, and averaged over time.
    A `Factor` holds no tensor; its methods take the stored tensor as `value`.

    Except for `gram` and the specs, all methods also accept stacks: every
    tensor then has an additional first axis, over blocks with equal factors.

    A decomposition is a dict of tensors by suffix; the main tensor has the
    empty suffix. `solver="inverse"` uses `inverse` and `multiply`, in spectral
    steps `root` and `multiply_root`; `solver="eigen"` uses `eigen` and
    `rotate`.

    Attributes:
        size: Number of rows of the matrix.
        stack_shape: Shape of a stack of matrices; empty for a single matrix.
    """

    size: int
    stack_shape: tuple[int, ...] = ()

    # --------------------------------------------------------------- storage
    @property
    @abc.abstractmethod
    def storage(self) -> Part:
        """Spec of the stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        return self.storage.shape

    @property
    def elements(self) -> int:
        """Number of elements of the stored tensor."""
        return self.storage.elements

    @property
    @abc.abstractmethod
    def operations(self) -> int:
        """Approximate number of operations of a decomposition."""

    @property
    def multiplications(self) -> int:
        """Multiplications of the product of an inverse and a vector.

        For a stack, the total of one product per matrix.
        """
        return self.elements

    @property
    def text(self) -> str:
        """Type and size of the factor, for the summary table."""
        stack = "".join(f"{count} of " for count in self.stack_shape)
        return f"{stack}{self.size} x {self.size}"

    # ---------------------------------------------------------------- values
    @abc.abstractmethod
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        """Sum `x x^T` over rows `x`.

        Args:
            rows: `(batch, shared, *stack_shape, size)`.

        Returns:
            The stored tensor of the sum.
        """

    def repeated_gram(
        self, dtype: tf.DType
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        """Return `gram` for use in a loop; compute its constants here, once."""
        return self.gram

    @abc.abstractmethod
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        """Trace divided by `size`, of shape `stack_shape`."""

    @abc.abstractmethod
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        """The dense matrix, `(*stack_shape, size, size)`."""

    def shown(self, value: tf.Tensor) -> tf.Tensor:
        """Value for `KFAC.factors()`: the matrix, or a vector if diagonal."""
        return value

    # ------------------------------------------------------ solver="inverse"
    @abc.abstractmethod
    def inverse_parts(self) -> dict[str, Part]:
        """Specs of the tensors that `inverse` returns, by suffix."""

    @abc.abstractmethod
    def inverse(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        """Compute `(F + damping I)^-1`.

        Args:
            value: The stored tensor of `F`.
            damping: Scalar, or of shape `stack_shape`; at least 0.

        Returns:
            Tensors by suffix. They are not finite if the inverse does not
            exist.
        """

    def for_products(self, inverse: Tensors, dtype: tf.DType) -> Tensors:
        """Cast an inverse to the dtype in which it is multiplied.

        Args:
            inverse: Tensors of the inverse, possibly stored in bfloat16.
            dtype: Dtype of the gradients.
        """
        return {name: tf.cast(x, dtype) for name, x in inverse.items()}

    @abc.abstractmethod
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        """Multiply a gradient matrix by an inverse.

        Args:
            inverse: The result of `for_products`.
            matrix: `(*stack_shape, inputs, outputs)`. For the right side, any
                number of rows.
            side: Side of the gradient on which the inverse is multiplied.
        """

    def root_parts(self) -> dict[str, Part]:
        """Specs of the tensors that `root` returns; by default as `inverse`."""
        return self.inverse_parts()

    @abc.abstractmethod
    def root(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        """Compute a root R, `R R^T = (F + damping I)^-1`; see `inverse`."""

    def multiply_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        """Multiply a gradient matrix W by R.

        Args:
            root: The result of `for_products`.
            matrix: As in `multiply`.
            side: "left" for `R^T W`, "right" for `W R`.
            back: True for `R W` and `W R^T`. Defaults to False.
        """
        # R is symmetric by default, so `back` has no effect.
        return self.multiply(root, matrix, side)

    @abc.abstractmethod
    def divide_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        """Invert `multiply_root`: return `R^-T W` or `W R^-1`."""

    # -------------------------------------------------------- solver="eigen"
    @abc.abstractmethod
    def eigen_parts(self) -> dict[str, Part]:
        """Specs of the tensors that `eigen` returns, by suffix."""

    @abc.abstractmethod
    def eigen(self, value: tf.Tensor) -> Tensors:
        """Compute the eigendecomposition, with eigenvalues of at least 0.

        Args:
            value: The stored tensor of the matrix.

        Returns:
            Tensors by suffix, the eigenvalues as `VALUES`. They are not finite
            if the decomposition fails.
        """

    @abc.abstractmethod
    def rotate(
        self, eigen: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        """Transform a gradient matrix to the eigenbasis, or back.

        Args:
            eigen: The result of `eigen`, optionally without eigenvalues.
            matrix: `(*stack_shape, inputs, outputs)`.
            side: Side of the gradient on which the factor is multiplied.
            back: True to transform back from the eigenbasis. Defaults to
                False.
        """

    def widen(self, values: tf.Tensor, side: Side) -> tf.Tensor:
        """Repeat a value of each eigenvalue for all its eigenbasis coordinates.

        Args:
            values: One value for each eigenvalue, along the axis of `side`.
                Several coordinates may share an eigenvalue.
            side: Side of the gradient on which the factor is multiplied.
        """
        return values
