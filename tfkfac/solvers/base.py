"""A solver: it decomposes factors now and then, and applies them."""

import abc
import math
from collections.abc import Mapping
from typing import TypeVar

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, LayerGradient, MatrixGradient
from tfkfac.compat.functions import Kind, Member
from tfkfac.compat.graphs import state_variable
from tfkfac.factors import (
    Factor,
    Part,
    Side,
    Tensors,
    kind_of,
)
from tfkfac.linalg.tensors import all_finite, select

T = TypeVar("T")

# The kinds of a block's factors by name, "A" missing for the identity.
Factors = Mapping[str, Factor]

# On which side of the gradient matrix a factor stands; G first.
SIDES: dict[str, Side] = {"G": "right", "A": "left"}


class Solver(abc.ABC):
    """Turns factors and damping into a preconditioner.

    The parts of a factor's decomposition are named after it, "A" or "G", and
    the suffix that its kind gives them.

    Attributes:
        whole_layers: Whether all factors of a layer must have one owner.
        takes_rows: Whether `apply` keeps a gradient of rows in that form.
        is_explicit: Whether it inverts factors, by which a gradient is
            multiplied once; if not, it turns it to their eigenbases and back.
    """

    whole_layers = False
    takes_rows = False
    is_explicit = False

    @abc.abstractmethod
    def parts(self, factors: Factors, name: str) -> dict[str, Part]:
        """Returns what `decompose` makes of one factor, by name."""

    @abc.abstractmethod
    def kept(self, factors: Factors) -> dict[str, Part]:
        """Returns the tensors of a block's decomposition, by name."""

    def all_parts(self, factors: Factors) -> dict[str, Part]:
        """Returns what `decompose` makes of all factors of a block."""
        return {
            part_name: part
            for name in factors
            for part_name, part in self.parts(factors, name).items()
        }

    @abc.abstractmethod
    def decompose(
        self,
        factors: Factors,
        values: Tensors,
        means: Tensors,
        damping: tf.Tensor,
    ) -> Tensors:
        """Decomposes the factors of a block that a worker keeps.

        Args:
            factors: The kinds of the block's factors.
            values: The factors by name, all of them or some.
            means: Mean eigenvalue of each factor of the block.
            damping: The damping.

        Returns:
            The parts by name.
        """

    @abc.abstractmethod
    def combine(self, parts: Tensors, damping: tf.Tensor) -> Tensors:
        """Makes the decomposition of a block of the parts of its factors."""

    @abc.abstractmethod
    def apply(
        self,
        factors: Factors,
        decomposition: Tensors,
        gradient: LayerGradient,
    ) -> LayerGradient:
        """Preconditions the gradient of a layer.

        Args:
            factors: The kinds of the block's factors.
            decomposition: The tensors that are kept, by name; in bfloat16 if
                they are kept so.
            gradient: The gradient.
        """


class Decomposition(Member):
    """The last good decomposition of one block; the identity at first.

    Args:
        solver: The solver.
        block: The block.
        dtype: Dtype of storage; None is that of the statistics.
    """

    held = ("tensors",)

    def __init__(
        self, solver: Solver, block: Block, dtype: tf.DType | None = None
    ) -> None:
        super().__init__(name="decomposition")
        self.solver = solver
        self._block = block
        self._dtype = dtype or block.dtype
        kept = solver.kept(block.factors)
        with tf.init_scope():
            self.tensors = [
                state_variable(part.identity(block.dtype), self._dtype, name)
                for name, part in kept.items()
            ]
        self.names = tuple(kept)

    @property
    @override
    def like(self) -> Kind:
        return kind_of(self._block.factors, (self.solver, self._dtype))

    def replace(
        self, parts: Tensors, damping: tf.Tensor, wanted: tf.Tensor
    ) -> tf.Tensor:
        """Takes a new decomposition unless it is not finite.

        Args:
            parts: What the solver made of the block's factors.
            damping: The damping.
            wanted: Scalar bool. If it is false the old one stays.

        Returns:
            Scalar bool, false if the new one is not finite.
        """
        made = self.solver.combine(parts, damping)
        stored = {k: tf.cast(v, self._dtype) for k, v in made.items()}
        good = all_finite(list(stored.values()))
        take = tf.logical_and(good, wanted)
        for name, old in zip(self.names, self.tensors, strict=True):
            old.assign(select(take, stored[name], old))
        return good

    def apply(self, gradient: LayerGradient) -> LayerGradient:
        """Preconditions the gradient of the layer."""
        tensors: Tensors = dict(zip(self.names, self.tensors, strict=True))
        # In bfloat16 as they are: solvers know what can be done in it.
        if self._dtype != tf.bfloat16:
            dtype = self._block.dtype
            tensors = {k: tf.cast(v, dtype) for k, v in tensors.items()}
        return self.solver.apply(self._block.factors, tensors, gradient)

    def precondition(
        self, matrix: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a gradient matrix times a number, and that preconditioned."""
        plain = MatrixGradient(matrix).scaled(scale)
        return plain.value, self.apply(plain).matrix


def with_prefix(name: str, parts: Mapping[str, T]) -> dict[str, T]:
    """Names the parts of one factor as those of a block."""
    return {name + suffix: part for suffix, part in parts.items()}


def of_factor(name: str, tensors: Tensors) -> dict[str, tf.Tensor]:
    """The parts of one factor among the tensors of a block, by suffix."""
    return {
        key.removeprefix(name): tensor
        for key, tensor in tensors.items()
        if key == name or key.startswith(f"{name}_")
    }


def most_rows(factors: Factors, workers: int) -> int:
    """The largest number of rows that take fewer products than the matrix.

    With `N` rows, `n` inputs, `m` outputs and `p`, `q` multiplications for the
    product of a vector with the inverse of A and of G, those are
    `N (p + q) + N^2 (n + m)`, the second for `<P, W>`, against `p m + q n`.
    (`a^T g` is formed once in either way.) Where the matrices are added up
    over several workers, `<P, W>` takes `N n m`.

    Args:
        factors: The factors of a block, both of them.
        workers: Number of workers that add up their gradients.
    """
    a, g = factors["A"], factors["G"]
    n, m, p, q = a.size, g.size, a.multiplications, g.multiplications
    matrix = p * m + q * n
    if workers > 1:
        return matrix // (p + q + n * m)
    root = math.sqrt((p + q) ** 2 + 4 * (n + m) * matrix)
    return int((root - (p + q)) / (2 * (n + m)))
