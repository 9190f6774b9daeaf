"""State of groups of blocks: factor averages, decompositions, momenta."""

import dataclasses
import math
import weakref
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, LayerGradient
from tfkfac.blocks.registry import EXCLUDED, Leftover
from tfkfac.capture.taps import NESTED
from tfkfac.capture.walk import SKIPPED
from tfkfac.factors import Tensors
from tfkfac.linalg.tensors import row_sums, select
from tfkfac.saving.entries import STATE, Entry, Row, Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver

# Name of the section of saved files with the state of spectral steps.
SPECTRAL = "spectral"


# Maximum number of elements of the gradients and factors of a group, and of the
# weights whose directions are computed at the same time. The memory of a
# language model with 23 M weights (6 layers) was 1.48 times that of Adam
# without this limit and 1.30 times with it, when momenta were twice as large.
MAX_ELEMENTS = 1 << 22
# Maximum number of elements of a group in natural-gradient steps on a CPU, so
# that operations read stacks from the cache of a core: a step of 10 layers of
# 256 takes 0.7 times the processor seconds that it takes with `MAX_ELEMENTS`.
# The processor seconds of spectral steps do not depend on it.
CACHED_ELEMENTS = 1 << 18


T = TypeVar("T")


class Group(Slots):
    """State of blocks with equal factors, as stacks: row i is block i's.

    Args:
        name: Name of the state.
        members: The blocks, by position among all blocks.
        section: Section of saved files.
    """

    def __init__(
        self, name: str, members: Mapping[int, Block], section: str = STATE
    ) -> None:
        super().__init__(name, spread=Spread.OWNED, section=section)
        self.place(members)
        self.factor_types = self.blocks[0].factors
        self.dtype = self.blocks[0].dtype

    def place(self, members: Mapping[int, Block]) -> None:
        """Set the blocks of the rows, and their positions."""
        self.positions, self.blocks = tuple(members), tuple(members.values())

    def stacked(
        self, name: str, shape: Sequence[int], dtype: Any, **fields: Any
    ) -> tf.Variable:
        """Declare a tensor of each block, see `slot`."""
        return self.slot(name, (len(self.blocks), *shape), dtype, **fields)

    @override
    def entries(self) -> list[Entry]:
        return [
            dataclasses.replace(
                entry, layer=block.path, variable=Row(entry.variable, row)
            )
            for row, block in enumerate(self.blocks)
            for entry in super(Group, self).entries()
        ]

    def per_matrix(self, damping: tf.Tensor) -> tf.Tensor:
        """Reshape a damping per row to broadcast over stacks of matrices."""
        stack_shape = self.factor_types["G"].stack_shape
        return tf.reshape(damping, [-1, *[1] * len(stack_shape)])

    def rows_of(self, positions: Container[int]) -> list[int]:
        """Return the rows of the blocks at some positions."""
        return [row for row, i in enumerate(self.positions) if i in positions]

    def read(self, variable: tf.Variable, rows: Sequence[int]) -> tf.Tensor:
        """Read some rows of a stack."""
        if len(rows) == len(self.blocks):
            return tf.convert_to_tensor(variable)
        return tf.gather(variable, rows)

    def write(
        self, variable: tf.Variable, rows: Sequence[int], value: tf.Tensor
    ) -> None:
        """Assign some rows of a stack."""
        if len(rows) == len(self.blocks):
            variable.assign(value)
        else:
            variable.scatter_update(tf.IndexedSlices(value, list(rows)))


def partition(
    blocks: Mapping[int, Block],
    key: Callable[[int], Hashable],
    limit: int = MAX_ELEMENTS,
) -> list[dict[int, Block]]:
    """Group blocks of equal factors, dtype and `key(position)`.

    A group has at most `limit` elements, or one block.
    """
    groups: dict[Hashable, dict[int, Block]] = {}
    for i, block in blocks.items():
        full_key = key(i), tuple(sorted(block.factors.items())), block.dtype
        groups.setdefault(full_key, {})[i] = block
    result: list[dict[int, Block]] = []
    for members in groups.values():
        first = next(iter(members.values()))
        size = sum(factor.elements for factor in first.factors.values())
        sizes = [size + math.prod(first.gradient_shape)] * len(members)
        result += map(dict, chunks(list(members.items()), sizes, limit))
    return result


def chunks(
    items: Sequence[T], sizes: Sequence[int], limit: int
) -> list[list[T]]:
    """Split items into lists with a sum of sizes up to a limit, or one item."""
    result: list[list[T]] = []
    total = 0
    for item, size in zip(items, sizes, strict=True):
        if not result or total + size > limit:
            result.append([])
            total = 0
        result[-1].append(item)
        total += size
    return result


def per_row(values: tf.Tensor, stack: tf.Tensor) -> tf.Tensor:
    """Reshape a vector to multiply the rows of a stack."""
    return tf.reshape(values, [-1] + [1] * (stack.shape.rank - 1))


def rows_finite(stacks: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool per row, True if it is finite in all stacks."""
    wide = [tf.cast(x, tf.float32) if x.dtype.size < 4 else x for x in stacks]
    sums = [row_sums(x) for x in wide]
    return tf.math.is_finite(tf.add_n(sums) if sums else tf.zeros([]))


class FactorAverages(Group):
    """Bias-corrected exponential averages of A and G.

    `M_t = decay M_{t-1} + (1 - decay) batch`, `M_0 = 0`, and the factor is
    `M_t / (1 - decay^t)` (Distributed K-FAC, eq. 14 and 15, with Adam's bias
    correction instead of a start at the identity). `t` counts a block's
    accepted updates. The papers print the weight in [0.9, 1) at the new batch;
    the authors' code has it at the old average, as here. Half precision would
    round `(1 - decay) batch` to zero, so the dtype is at least float32.

    Of factors that are not in `names`, only the mean eigenvalue is averaged.
    """

    def __init__(
        self, members: Mapping[int, Block], names: Sequence[str]
    ) -> None:
        super().__init__("factors", members)
        specs, self.names = self.factor_types, tuple(names)
        self.other_names = tuple(n for n in specs if n not in self.names)
        self.averages = [
            self.stacked(f"factor_{name}", specs[name].shape, self.dtype)
            for name in self.names
        ]
        self.other_means = [
            self.stacked(
                f"mean_{name}",
                specs[name].stack_shape,
                self.dtype,
                # Compute the mean eigenvalue if a saved file lacks it.
                derive=lambda read, name=name: specs[name].mean_eigenvalue(
                    tf.convert_to_tensor(read(f"factor_{name}"))
                ),
            )
            for name in self.other_names
        ]
        self.weight = self.stacked("weight", (), self.dtype, least=0.0)

    def update(
        self,
        rows: Sequence[int],
        totals: Mapping[str, tf.Tensor],
        counts: Mapping[str, tf.Tensor],
        accepted: tf.Tensor,
        decay: float,
    ) -> tf.Tensor:
        """Add accepted statistics to the averages M of some rows.

        Averages that are not finite restart from the statistics. Products with
        0 are 0, even for NaN.

        Args:
            rows: The rows.
            totals: Sums of the statistics, by name.
            counts: Numbers of terms of the sums, by name.
            accepted: Bool per row, True to update it.
            decay: Factor of the old averages.

        Returns:
            A bool per row, False if the average restarts.
        """
        variables = self._by_name()
        old = {k: self.read(v, rows) for k, v in variables.items()}
        old_weight = self.read(self.weight, rows)
        valid = ~accepted | rows_finite([*old.values(), old_weight])
        old_decay = tf.where(accepted, decay * tf.cast(valid, self.dtype), 1.0)
        new_weight = (1 - decay) * tf.cast(accepted, self.dtype)
        for name, variable in variables.items():
            new = totals[name]
            if name in self.other_names:
                new = self.factor_types[name].mean_eigenvalue(new)
            # A rejected count may be 0 or NaN; its weight is 0.
            scale = tf.math.divide_no_nan(new_weight, counts[name])
            scale = select(accepted, scale, new_weight)
            mixed = tf.math.multiply_no_nan(
                old[name], per_row(old_decay, old[name])
            )
            mixed += tf.math.multiply_no_nan(new, per_row(scale, new))
            self.write(variable, rows, mixed)
        weight = tf.math.multiply_no_nan(old_weight, old_decay) + new_weight
        self.write(self.weight, rows, weight)
        return valid

    def values(self) -> dict[str, tf.Tensor]:
        """Return the averaged factors; zeros before the first update."""
        values = self._corrected(range(len(self.blocks)))
        return {name: values[name] for name in self.names}

    def decompose(
        self, rows: Sequence[int], solver: Solver, damping: tf.Tensor
    ) -> Tensors:
        """Decompose the averaged factors of some rows."""
        specs, means = self.factor_types, self._corrected(rows)
        values = {name: means[name] for name in self.names}
        for name, value in values.items():
            means[name] = specs[name].mean_eigenvalue(value)
        return solver.decompose(specs, values, means, self.per_matrix(damping))

    def _corrected(self, rows: Sequence[int]) -> dict[str, tf.Tensor]:
        """Return some rows of the bias-corrected averages, by name."""
        weight = self.read(self.weight, rows)
        result = {}
        for name, variable in self._by_name().items():
            average = self.read(variable, rows)
            result[name] = tf.math.divide_no_nan(
                average, per_row(weight, average)
            )
        return result

    def _by_name(self) -> dict[str, tf.Variable]:
        """Return the variable of each factor, or of its mean eigenvalue."""
        names = (*self.names, *self.other_names)
        variables = (*self.averages, *self.other_means)
        return dict(zip(names, variables, strict=True))


class Preconditioner(Group):
    """Decompositions of blocks, and the momenta of spectral steps.

    The decompositions are the last finite ones, initially the identity.

    The momenta are `M_t = mu M_{t-1} + W_t` with `M_0 = 0`. `momentum` holds
    `mu R_A^T M R_G`, a sum of `R_A^T W R_G`: for few rows W is not computed.
    Only the roots give it a meaning, so files store both in one section.

    Args:
        members: The blocks, by position among all blocks.
        solver: The solver.
        is_stored: True on gradient workers. Other workers store nothing.
        dtype: Dtype of the decompositions; None for the blocks' dtype.
        has_momenta: True for spectral steps.

    Attributes:
        extents: Running maxima of the extents of W, which decay like M.
    """

    def __init__(
        self,
        members: Mapping[int, Block],
        solver: Solver,
        is_stored: bool,
        dtype: tf.DType | None = None,
        has_momenta: bool = False,
    ) -> None:
        super().__init__("preconditioner", members, solver.section)
        self.solver, self.is_stored = solver, is_stored
        self._stored_dtype = dtype or self.dtype
        specs = solver.kept(self.factor_types) if is_stored else {}
        self.names = tuple(specs)
        self.tensors = [
            self.stacked(
                f"solver_{name}",
                spec.shape,
                self._stored_dtype,
                value=lambda spec=spec: tf.broadcast_to(
                    spec.identity(self._stored_dtype),
                    [len(self.blocks), *spec.shape],
                ),
            )
            for name, spec in specs.items()
        ]
        self.momentum: tf.Variable | None = None
        self.extents: tf.Variable | None = None
        if is_stored and has_momenta:
            shape = self.blocks[0].gradient_shape
            self.momentum = self.stacked("whitened_momentum", shape, self.dtype)
            self.extents = self.stacked(
                "extents", extents_shape(shape), self.dtype
            )

    def replace(
        self,
        rows: Sequence[int],
        parts: Tensors,
        damping: tf.Tensor,
        due: tf.Tensor,
    ) -> tf.Tensor:
        """Replace decompositions that are due and finite.

        Convert the momenta to the new roots. Return a bool per row, True if
        its new decomposition is finite.
        """
        damping = self.per_matrix(damping)
        combined = self.solver.combine(parts, damping)
        new = {k: tf.cast(v, self._stored_dtype) for k, v in combined.items()}
        finite = rows_finite(list(new.values()))
        finite = tf.broadcast_to(finite, [len(rows)])  # if nothing is stored
        accepted = finite & due
        if self.momentum is not None:
            X = self.read(self.momentum, rows)
            roots = self.stored(rows), self._readable(new)
            whitened = self.solver.change_root(self.factor_types, *roots, X)
            is_valid = tf.cast(rows_finite([whitened]), X.dtype)
            whitened = tf.math.multiply_no_nan(whitened, per_row(is_valid, X))
            self.write(self.momentum, rows, select(accepted, whitened, X))
        for name, tensor in zip(self.names, self.tensors, strict=True):
            old = self.read(tensor, rows)
            self.write(tensor, rows, select(accepted, new[name], old))
        return finite

    def stored(self, rows: Sequence[int]) -> Tensors:
        """Return the decompositions of some rows, in a dtype for solvers."""
        pairs = zip(self.names, self.tensors, strict=True)
        return self._readable({k: self.read(v, rows) for k, v in pairs})

    def _readable(self, tensors: Tensors) -> Tensors:
        # Keep bfloat16: solvers cast it where they need more precision.
        if self._stored_dtype == tf.bfloat16:
            return tensors
        return {k: tf.cast(v, self.dtype) for k, v in tensors.items()}

    def apply(
        self, rows: Sequence[int], gradient: LayerGradient
    ) -> LayerGradient:
        """Precondition the gradients of some rows, see `Solver.apply`."""
        return self.solver.apply(self.factor_types, self.stored(rows), gradient)

    def apply_back(self, rows: Sequence[int], matrix: tf.Tensor) -> tf.Tensor:
        """Multiply directions by the roots R, see `Solver.apply_back`."""
        stored = self.stored(rows)
        return self.solver.apply_back(self.factor_types, stored, matrix)

    def add_gradient(
        self,
        rows: Sequence[int],
        whitened: tf.Tensor,
        extents: tf.Tensor,
        decay: float,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Add `R_A^T W R_G` and the extents of W to some momenta.

        Return `R_A^T N R_G` of `N = W + mu M`, and the extents of N.
        """
        # Forget NaN and overflow, as `add_momentum` does.
        old = decay * self.read(self.extents, rows)
        old = tf.where(tf.math.is_finite(old), old, tf.zeros_like(old))
        maxima = tf.maximum(old, extents)
        is_finite = tf.math.is_finite(maxima)
        kept = tf.where(is_finite, maxima, tf.zeros_like(maxima))
        self.write(self.extents, rows, kept)
        old = self.read(self.momentum, rows)
        momentum, nesterov = add_momentum(old, whitened, decay)
        self.write(self.momentum, rows, momentum)
        return nesterov, maxima

    def reset_momenta(self) -> None:
        """Set the momenta to zero."""
        for variable in (self.momentum, self.extents):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))


def extents_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the extents of a stack of matrices."""
    *stack, rows, columns = shape
    return (*stack, rows + columns)


def add_momentum(
    momentum: tf.Tensor, new: tf.Tensor, decay: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the momenta, reset on overflow, and `new` plus the momenta."""
    total = momentum + new
    finite = tf.cast(rows_finite([total]), total.dtype)
    # Reset on overflow: `multiply_no_nan(NaN, 0) = 0`.
    total = tf.math.multiply_no_nan(total, per_row(decay * finite, total))
    return total, new + total


def plain_matrices(
    leftovers: Sequence[Leftover],
) -> list[tuple[str, keras.Variable]]:
    """Return the layer path and the variable of each uncovered matrix.

    Exclude embedding tables, recognised by the layer's name: an example uses
    only some of their rows. Exclude layers in a `tf.cond`, which may not run
    in a step.
    """
    return [
        (leftover.path, variable)
        for leftover in leftovers
        if leftover.reason not in (SKIPPED, EXCLUDED, NESTED)
        for variable in leftover.variables
        if sum(size > 1 for size in variable.shape) > 1
        and "embedding" not in "/".join(variable.path.lower().split("/")[-2:])
    ]


class PlainMatrix(Slots):
    """Momentum of a weight without a block, as a matrix `(-1, last axis)`."""

    def __init__(self, path: str, variable: keras.Variable) -> None:
        super().__init__("plain", section=SPECTRAL)
        # Keep a weak reference: checkpoints save attributes that are variables.
        self._variable = weakref.ref(variable)
        self.shape = (math.prod(variable.shape[:-1]), variable.shape[-1])
        dtype = tf.as_dtype(variable.dtype)
        self._dtype = tf.float32 if dtype.size < 4 else dtype
        self.value = self.slot(
            f"momentum_{variable.name}", self.shape, self._dtype, layer=path
        )

    @property
    def variable(self) -> keras.Variable | None:
        """The variable; None if it has been deleted."""
        return self._variable()

    def add(
        self, gradient: tf.Tensor, scale: tf.Tensor, decay: float
    ) -> tf.Tensor:
        """Update the momentum; return the Nesterov momentum, a stack of one."""
        W = tf.cast(tf.reshape(gradient, [1, *self.shape]), self._dtype)
        W *= tf.cast(scale, W.dtype)
        old = tf.expand_dims(self.value, 0)
        momentum, nesterov = add_momentum(old, W, decay)
        self.value.assign(tf.squeeze(momentum, [0]))
        return nesterov
