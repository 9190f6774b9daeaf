"""A kind of factor (`Factor`), and the tensors that it is made of (`Part`)."""

import abc
import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import ClassVar, Literal

import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.functions import Kind
from tfkfac.linalg.symmetric import pack, packed_size, unpack


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of a factor or decomposition that acts element by element.

    Attributes:
        shape: Its shape.
    """

    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements that are kept."""
        return math.prod(self.shape)

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Shape of the result of `pack`."""
        return self.shape

    def pack(self, value: tf.Tensor) -> tf.Tensor:
        """Leaves out the entries that a receiver can tell from the rest."""
        return value

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return packed

    @property
    def axes(self) -> list[int]:
        """The axes of what may be of any size beside the rest."""
        return list(range(len(self.shape)))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of what `largest` returns."""
        sizes = enumerate(self.shape)
        return tuple(1 if i in self.axes else size for i, size in sizes)

    def largest(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the largest absolute entries, in a shape to divide by."""
        return tf.reduce_max(tf.abs(value), self.axes, keepdims=True)

    def identity(self, dtype: tf.DType) -> tf.Tensor:
        """The value that leaves a gradient as it is."""
        return tf.ones(self.shape, dtype)


@dataclasses.dataclass(frozen=True)
class MatrixPart(Part):
    """Matrices `(..., n, m)` that a gradient is multiplied with.

    Attributes:
        shape: Its shape.
        symmetric: True if a triangle tells the rest, and only that travels.
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
        return super().axes[-2:]  # of each matrix

    @override
    def identity(self, dtype: tf.DType) -> tf.Tensor:
        *stack, rows, columns = self.shape
        return tf.eye(rows, columns, batch_shape=stack, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Wire:
    """The form in which parts travel between workers."""

    symmetric: bool = False
    """True if symmetric matrices travel as triangles."""
    factor_dtype: tf.DType | None = None
    """Dtype of statistics; None is their own."""
    inverse_dtype: tf.DType | None = None
    """Dtype of decompositions, kept or sent; None is their own."""

    def shape(self, part: Part) -> tuple[int, ...]:
        """Shape of a tensor on the wire."""
        return part.packed_shape if self.symmetric else part.shape

    def pack(self, part: Part, value: tf.Tensor) -> tf.Tensor:
        """A tensor as it travels."""
        return part.pack(value) if self.symmetric else value

    def unpack(self, part: Part, value: tf.Tensor) -> tf.Tensor:
        """Inverse of `pack`."""
        return part.unpack(value) if self.symmetric else value


Tensors = Mapping[str, tf.Tensor]
Side = Literal["left", "right"]

# Name of the eigenvalues among the parts of an eigen-decomposition.
VALUES = "_values"


class Factor(abc.ABC):
    """A kind of factor: a symmetric positive semi-definite matrix.

    It is kept as one tensor, linear in the matrix, which is added up over
    rows, calls and workers, and averaged over time. An object of this class
    holds no tensor; it knows what to do with one.

    A decomposition is made of parts, tensors named by a suffix: they are what
    a worker sends and keeps. The main one has the empty suffix. The explicit
    solver asks for `inverse` and `multiply`, the implicit one for `eigen` and
    `rotate`.

    Attributes:
        size: Number of rows of the matrix.
        any_size: True if one function serves all factors of the kind, whatever
            their sizes.
    """

    size: int
    any_size: ClassVar[bool] = True

    # -------------------------------------------------------- how it is kept
    @property
    @abc.abstractmethod
    def storage(self) -> Part:
        """The tensor that stands for the matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of that tensor."""
        return self.storage.shape

    @property
    def elements(self) -> int:
        """Number of elements of that tensor."""
        return self.storage.elements

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """Shape of the stack of matrices if this is one, else empty."""
        return ()

    @property
    def whole_size(self) -> int:
        """Number of rows of the largest matrix kept whole; 0 if none is."""
        return self.size

    @property
    @abc.abstractmethod
    def operations(self) -> int:
        """Rough number of operations of a decomposition."""

    @property
    def multiplications(self) -> int:
        """Multiplications of an inverse with one vector.

        Of a stack, the products of all with a vector each.
        """
        return self.elements

    @property
    def text(self) -> str:
        """The kind and its size, for a table."""
        stack = "".join(f"{count} of " for count in self.stack_shape)
        return f"{stack}{self.size} x {self.size}"

    # ------------------------------------------------------------- what it is
    @abc.abstractmethod
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        """Sum of the outer products of rows with themselves.

        Args:
            rows: `(batch, shared, *stack_shape, size)`.

        Returns:
            The tensor that stands for the sum.
        """

    @abc.abstractmethod
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        """Trace over dimension, of shape `stack_shape`."""

    @abc.abstractmethod
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        """The matrix written out, `(*stack_shape, size, size)`."""

    def shown(self, value: tf.Tensor) -> tf.Tensor:
        """The factor as users see it: the matrix, or only its diagonal."""
        return value

    # ---------------------------------------------------- the explicit solver
    @abc.abstractmethod
    def inverse_parts(self) -> dict[str, Part]:
        """The tensors that `inverse` returns, by suffix."""

    @abc.abstractmethod
    def inverse(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Parts of `(F + damping I)^-1`.

        Args:
            value: The tensor that stands for `F`.
            damping: Scalar, or of shape `stack_shape`; not negative.

        Returns:
            The parts. They are not finite if there is no inverse.
        """

    def for_products(self, inverse: Tensors, dtype: tf.DType) -> Tensors:
        """The parts of an inverse in the dtype in which it is multiplied.

        Args:
            inverse: The parts; in bfloat16 they may be kept so.
            dtype: Dtype of the gradients.
        """
        return {name: tf.cast(part, dtype) for name, part in inverse.items()}

    @abc.abstractmethod
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        """Multiplies a gradient matrix with an inverse.

        Args:
            inverse: The result of `for_products`.
            matrix: `(*stack_shape, inputs, outputs)`. On the right side also
                rows, any number of them.
            side: The side on which the inverse stands.
        """

    # ---------------------------------------------------- the implicit solver
    @abc.abstractmethod
    def eigen_parts(self) -> dict[str, Part]:
        """The tensors that `eigen` returns, the eigenvalues as `VALUES`."""

    @abc.abstractmethod
    def eigen(self, value: tf.Tensor) -> dict[str, tf.Tensor]:
        """Parts of the eigen-decomposition, no eigenvalue below zero.

        Args:
            value: The tensor that stands for the matrix.

        Returns:
            The parts. They are not finite if there is no decomposition.
        """

    @abc.abstractmethod
    def rotate(
        self, eigen: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        """Brings a gradient matrix to the eigenbasis, or back from it.

        Args:
            eigen: The parts; the eigenvalues may be missing.
            matrix: `(*stack_shape, inputs, outputs)`.
            side: The side on which the factor stands.
            back: True for the way back from the eigenbasis.
        """

    def widen(self, values: tf.Tensor, side: Side) -> tf.Tensor:
        """One number for each coordinate in the eigenbasis.

        Args:
            values: One for each eigenvalue of `eigen` along an axis of a
                gradient matrix, which several coordinates may share.
            side: The side on which the factor stands.
        """
        return values


def kind_of(factors: Mapping[str, Factor], key: Hashable) -> Kind:
    """Kind of blocks in `each`: their factors may differ in size only.

    Args:
        factors: The kinds of the block's factors by name.
        key: Distinguishes blocks with equal factors.
    """
    if all(kind.any_size for kind in factors.values()):
        kinds = tuple((name, type(kind)) for name, kind in factors.items())
        return Kind((key, kinds), any_size=True)
    return Kind((key, tuple(factors.items())))
