"""What a kind of factor has to know."""

import abc
from collections.abc import Hashable, Mapping
from typing import ClassVar, Literal

import tensorflow as tf

from tfkfac.compat.functions import Kind
from tfkfac.factors.parts import Part

Tensors = Mapping[str, tf.Tensor]
Side = Literal["left", "right"]

# Name of the eigenvalues among the parts of an eigen-decomposition.
VALUES = "_values"


class Factor(abc.ABC):
    """A kind of factor: a symmetric positive semi-definite matrix.

    Whatever stands for the matrix is one tensor, linear in the matrix: it is
    added up over rows, calls and workers, and averaged over time. An object
    of this class holds no tensor; it knows what to do with one.

    A decomposition is made of parts, tensors named by a suffix: they are what
    a worker sends and keeps. The main one has the empty suffix. The explicit
    solver asks for `inverse` and `multiply`, the implicit one for `eigen` and
    `rotate`.

    Attributes:
        size: Number of rows of the matrix.
        any_size: Whether what is done with a factor is the same for all of
            its kind, whatever their sizes.
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
        """About how many operations a decomposition takes."""

    @property
    def multiplications(self) -> int:
        """How many the product of an inverse with one vector takes.

        Of a stack, the products of all with a vector each.
        """
        return self.size**2

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The kind and its size, for a table."""

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
        """Returns what `inverse` makes."""

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
            inverse: What `for_products` returned.
            matrix: `(*stack_shape, inputs, outputs)`. On the right side also
                rows, any number of them.
            side: The side on which the inverse stands.
        """

    # ---------------------------------------------------- the implicit solver
    @abc.abstractmethod
    def eigen_parts(self) -> dict[str, Part]:
        """Returns what `eigen` makes, the eigenvalues by the name `VALUES`."""

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
        self,
        eigen: Tensors,
        matrix: tf.Tensor,
        side: Side,
        back: bool = False,
    ) -> tf.Tensor:
        """Brings a gradient matrix to the eigenbasis, or back from it.

        Args:
            eigen: The parts; the eigenvalues may be missing.
            matrix: `(*stack_shape, inputs, outputs)`.
            side: The side on which the factor stands.
            back: Whether from the eigenbasis.
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
