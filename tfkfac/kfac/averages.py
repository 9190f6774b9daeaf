"""State of groups of blocks: factor averages, decompositions, momenta."""

import contextlib
import dataclasses
import functools
import math
import re
import weakref
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol, TypeVar

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, LayerGradient, Statistic
from tfkfac.blocks.registry import EXCLUDED, Leftover
from tfkfac.capture.taps import NESTED
from tfkfac.capture.walk import SKIPPED
from tfkfac.factors import Factor, Part, Tensors
from tfkfac.linalg.tensors import select
from tfkfac.saving.entries import STATE, Entry, Read, Row, Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver

# Name of the section of saved files with the state of spectral steps.
SPECTRAL = "spectral"


# Maximum number of elements of the gradients and factors of a group, and of the
# weights whose directions are computed at the same time. The memory of a
# language model with 23 M weights (6 layers) was 1.48 times that of Adam
# without this limit and 1.30 times with it, when momenta were twice as large.
MAX_ELEMENTS = 1 << 22


T = TypeVar("T")
S = TypeVar("S", bound="Stacked")


class Stacked(Protocol):
    """State of the blocks of a group."""

    blocks: tuple[Block, ...]
    variables: Sequence[tf.Variable]

    def place(self, members: Mapping[int, Block]) -> None:
        """Set the blocks of the rows, and their positions."""


class Group(Slots):
    """State of blocks with equal factors, as stacks: row i is of block i.

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
        self.factor_types, self.dtype = (
            self.blocks[0].factors,
            self.blocks[0].dtype,
        )

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
    blocks: Mapping[int, Block], key: Callable[[int], Hashable]
) -> list[dict[int, Block]]:
    """Group blocks of equal factors, dtype and `key(position)`.

    A group has at most `MAX_ELEMENTS` elements, or one block.
    """
    groups: dict[Hashable, dict[int, Block]] = {}
    for i, block in blocks.items():
        factors = tuple(sorted(block.factors.items()))
        full_key = key(i), factors, block.dtype
        groups.setdefault(full_key, {})[i] = block
    result: list[dict[int, Block]] = []
    for members in groups.values():
        first = next(iter(members.values()))
        size = sum(factor.elements for factor in first.factors.values())
        sizes = [size + math.prod(first.gradient_shape)] * len(members)
        parts = chunks(list(members.items()), sizes, MAX_ELEMENTS)
        result += map(dict, parts)
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


def refill(
    old: Sequence[S],
    groups: Sequence[Mapping[int, Block]],
    make: Callable[[Mapping[int, Block]], S],
) -> tuple[S, ...]:
    """Create the state of groups; keep the state of blocks in old groups."""
    places = {
        same_block_key(block): (group, row)
        for group in old
        for row, block in enumerate(group.blocks)
    }
    result = []
    for members in groups:
        old_places = [places.get(same_block_key(b)) for b in members.values()]
        existing = old_places[0][0] if old_places[0] is not None else None
        rows = [(existing, row) for row in range(len(old_places))]
        if (
            existing is not None
            and old_places == rows
            and len(existing.blocks) == len(rows)
        ):
            existing.place(members)
            result.append(existing)
            continue
        with name_in_memory_errors(next(iter(members.values())).path):
            group = make(members)
        for row, place in enumerate(old_places):
            if place is not None:
                pairs = zip(group.variables, place[0].variables, strict=False)
                for variable, source in pairs:
                    Row(variable, row).assign(Row(source, place[1]).numpy())
        result.append(group)
    return tuple(result)


def same_block_key(block: Block) -> Hashable:
    """Return the key by which `refill` finds the state of a block."""
    factors = tuple(sorted(block.factors.items()))
    return (id(block.layer), block.kind, factors)


def per_row(values: tf.Tensor, stack: tf.Tensor) -> tf.Tensor:
    """Reshape a vector to multiply the rows of a stack."""
    return tf.reshape(values, [-1] + [1] * (stack.shape.rank - 1))


def rows_finite(stacks: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool per row, True if it is finite in all stacks."""
    flags = tf.constant(True)
    for x in stacks:
        wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
        sums = tf.reduce_sum(wide, list(range(1, x.shape.rank)))
        flags &= tf.math.is_finite(sums)
    return flags


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
                derive=functools.partial(_derive_mean, specs[name], name),
            )
            for name in self.other_names
        ]
        self.weight = self.stacked("weight", (), self.dtype, least=0.0)

    def update(
        self,
        rows: Sequence[int],
        statistics: Mapping[str, Statistic],
        decay: float,
        accepted: tf.Tensor,
    ) -> tf.Tensor:
        """Add the statistics of some rows to the averages if accepted.

        Averages that are not finite restart from the statistics.

        Returns:
            A bool per row, False if its averages were restarted.
        """
        names = (*self.names, *self.other_names)
        variables = [*self.averages, *self.other_means]
        olds = [self.read(variable, rows) for variable in variables]
        weight = self.read(self.weight, rows)
        valid = ~accepted | rows_finite([*olds, weight])
        # The weight 0 of a restart clears NaN: `multiply_no_nan(NaN, 0) = 0`.
        old_decay = decay * tf.cast(valid, weight.dtype)
        old_decay = tf.where(accepted, old_decay, tf.ones_like(weight))
        new_weight = (1 - decay) * tf.cast(accepted, weight.dtype)
        for name, variable, old in zip(names, variables, olds, strict=True):
            new, count = statistics[name]
            if name in self.other_names:
                new = self.factor_types[name].mean_eigenvalue(new)
            # Rows that are not accepted may have a count of 0.
            scale = tf.math.divide_no_nan(new_weight, count)
            # A rejected count may be NaN.
            scale = tf.where(accepted, scale, tf.zeros_like(scale))
            mixed = tf.math.multiply_no_nan(old, per_row(old_decay, old))
            mixed += tf.math.multiply_no_nan(new, per_row(scale, new))
            self.write(variable, rows, mixed)
        weight = tf.math.multiply_no_nan(weight, old_decay) + new_weight
        self.write(self.weight, rows, weight)
        return valid

    def values(self) -> dict[str, tf.Tensor]:
        """Return the averaged factors; zeros before the first update."""
        return self._corrected(
            self.names, self.averages, range(len(self.blocks))
        )

    def decompose(
        self, rows: Sequence[int], solver: Solver, damping: tf.Tensor
    ) -> Tensors:
        """Decompose the averaged factors of some rows."""
        specs = self.factor_types
        values = self._corrected(self.names, self.averages, rows)
        means = self._corrected(self.other_names, self.other_means, rows)
        for name, value in values.items():
            means[name] = specs[name].mean_eigenvalue(value)
        return solver.decompose(specs, values, means, self.per_matrix(damping))

    def _corrected(
        self,
        names: Sequence[str],
        averages: Sequence[tf.Variable],
        rows: Sequence[int],
    ) -> dict[str, tf.Tensor]:
        """Return some rows of the bias-corrected averages, by name."""
        weight = self.read(self.weight, rows)
        result = {}
        for name, variable in zip(names, averages, strict=True):
            average = self.read(variable, rows)
            result[name] = tf.math.divide_no_nan(
                average, per_row(weight, average)
            )
        return result


def _derive_mean(factor: Factor, name: str, read: Read) -> tf.Tensor:
    """Compute the mean eigenvalue of a saved factor if the file lacks it."""
    return factor.mean_eigenvalue(tf.convert_to_tensor(read(f"factor_{name}")))


def check_statistics(
    specs: Mapping[str, Factor], statistics: Mapping[str, Statistic]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return two bools per row: no count is zero, and all sums are finite.

    Traces suffice: a sum of outer products has no element larger than its
    trace, and a row that is not finite makes the trace not finite.
    """
    counts = tf.stack([s.count for s in statistics.values()])
    traces = [
        specs[name].mean_eigenvalue(statistic.total)
        for name, statistic in statistics.items()
    ]
    return tf.reduce_all(counts > 0, 0), rows_finite(traces)


class Decomposition(Group):
    """The last finite decompositions of blocks; initially the identity."""

    def __init__(
        self,
        members: Mapping[int, Block],
        solver: Solver,
        dtype: tf.DType | None = None,
    ) -> None:
        super().__init__("decomposition", members, solver.section)
        self.solver = solver
        self._stored_dtype = dtype or self.dtype
        specs = solver.kept(self.factor_types)
        self.names = tuple(specs)
        self.tensors = [
            self.stacked(
                f"solver_{name}",
                spec.shape,
                self._stored_dtype,
                value=functools.partial(self._identities, spec),
            )
            for name, spec in specs.items()
        ]

    def _identities(self, spec: Part) -> tf.Tensor:
        identity = spec.identity(self._stored_dtype)
        return tf.broadcast_to(identity, [len(self.blocks), *spec.shape])

    def replace(
        self,
        rows: Sequence[int],
        parts: Tensors,
        damping: tf.Tensor,
        due: tf.Tensor,
        momentum: "Momentum | None",
    ) -> tf.Tensor:
        """Replace decompositions that are due and finite.

        The momenta are then whitened by the new roots. Return a bool per row,
        True if it is finite.
        """
        damping = self.per_matrix(damping)
        combined = self.solver.combine(parts, damping)
        new = {k: tf.cast(v, self._stored_dtype) for k, v in combined.items()}
        finite = rows_finite(list(new.values()))
        finite = tf.broadcast_to(finite, [len(rows)])  # if nothing is stored
        accepted = finite & due
        if momentum is not None:
            X = self.read(momentum.value, rows)
            roots = self.stored(rows), self._readable(new)
            whitened = self.solver.change_root(self.factor_types, *roots, X)
            is_valid = tf.cast(rows_finite([whitened]), X.dtype)
            whitened = tf.math.multiply_no_nan(whitened, per_row(is_valid, X))
            self.write(momentum.value, rows, select(accepted, whitened, X))
        for name, tensor in zip(self.names, self.tensors, strict=True):
            old = self.read(tensor, rows)
            self.write(tensor, rows, select(accepted, new[name], old))
        return finite

    def stored(self, rows: Sequence[int]) -> Tensors:
        """Return some rows by name, in a dtype that solvers accept."""
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


class Momentum(Group):
    """Whitened Nesterov momenta of blocks.

    `M_t = mu M_{t-1} + W_t` with `M_0 = 0`. The variable holds
    `mu R_A^T M R_G`, a sum of `R_A^T W R_G`. For few rows W is not computed.
    The roots are needed to read it, so files contain both in one section.

    Attributes:
        extents: Running maxima of the extents of W, which decay like M.
    """

    def __init__(self, members: Mapping[int, Block], section: str) -> None:
        super().__init__("momentum", members, section)
        shape = self.blocks[0].gradient_shape
        *stack, rows, columns = shape
        self.value = self.stacked("whitened_momentum", shape, self.dtype)
        self.extents = [
            self.stacked("row_extents", [*stack, rows], self.dtype),
            self.stacked("column_extents", [*stack, columns], self.dtype),
        ]

    def add(
        self,
        rows: Sequence[int],
        whitened: tf.Tensor,
        extents: Sequence[tf.Tensor],
        decay: float,
    ) -> tuple[tf.Tensor, ...]:
        """Add `R_A^T W R_G` and the extents of W to some rows.

        Return `R_A^T N R_G` of `N = W + mu M`, and the extents of N.
        """
        totals = []
        for maxima, new in zip(self.extents, extents, strict=True):
            old = decay * self.read(maxima, rows)
            # Forget NaN and overflow, as `add_momentum` does.
            old = tf.where(tf.math.is_finite(old), old, tf.zeros_like(old))
            totals.append(tf.maximum(old, new))
            is_finite = tf.math.is_finite(totals[-1])
            kept = tf.where(is_finite, totals[-1], tf.zeros_like(old))
            self.write(maxima, rows, kept)
        old = self.read(self.value, rows)
        momentum, nesterov = add_momentum(old, whitened, decay)
        self.write(self.value, rows, momentum)
        return nesterov, *totals


def add_momentum(
    momentum: tf.Tensor, new: tf.Tensor, decay: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the new momenta, reset on overflow, and `new` plus these."""
    total = momentum + new
    finite = tf.cast(rows_finite([total]), total.dtype)
    # Reset on overflow: `multiply_no_nan(NaN, 0) = 0`.
    total = tf.math.multiply_no_nan(total, per_row(decay * finite, total))
    return total, new + total


def plain_matrices(
    leftovers: Sequence[Leftover],
) -> list[tuple[str, keras.Variable]]:
    """Return the layer path and the variable of each uncovered matrix.

    Embedding tables are left out: an example uses only some of their rows. So
    are layers in a `tf.cond`, which may not run in a step.
    """
    return [
        (leftover.path, variable)
        for leftover in leftovers
        if leftover.reason not in (SKIPPED, EXCLUDED, NESTED)
        for variable in leftover.variables
        if _is_matrix(variable)
    ]


def _is_matrix(variable: keras.Variable) -> bool:
    """True for a matrix that is not an embedding table, by the layer's name."""
    axes = sum(size > 1 for size in variable.shape)
    names = variable.path.lower().split("/")[-2:]
    return axes > 1 and not any("embedding" in name for name in names)


def _momentum_dtype(variable: keras.Variable) -> tf.DType:
    dtype = tf.as_dtype(variable.dtype)
    return tf.float32 if dtype.size < 4 else dtype


def plain_bytes(leftovers: Sequence[Leftover]) -> int:
    """Return the bytes of the momenta of uncovered matrices."""
    return sum(
        math.prod(variable.shape) * _momentum_dtype(variable).size
        for _, variable in plain_matrices(leftovers)
    )


class PlainMatrix(Slots):
    """Momentum of a weight without a block, as a matrix `(-1, last axis)`."""

    def __init__(self, path: str, variable: keras.Variable) -> None:
        super().__init__("plain", section=SPECTRAL)
        # Keep a weak reference: checkpoints save attributes that are variables.
        self._variable = weakref.ref(variable)
        columns = variable.shape[-1]
        self.shape = (math.prod(variable.shape[:-1]), columns)
        self._dtype = _momentum_dtype(variable)
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


@contextlib.contextmanager
def name_in_memory_errors(path: str) -> Iterator[None]:
    """Context manager that adds a layer's path to out-of-memory errors.

    In a graph a name scope does so, as TensorFlow reports operation names.
    Eagerly each unique name would create a kernel (0.5 ms).
    """
    # Replace characters that are not allowed in name scopes.
    scope = re.sub(r"[^A-Za-z0-9_./-]", "_", f"kfac/{path}")
    eager = tf.executing_eagerly()
    try:
        with contextlib.nullcontext() if eager else tf.name_scope(scope):
            yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise MemoryError(
            f"No memory for the factors of layer '{path}' and their "
            "decomposition. Have them approximated, with a smaller "
            "`max_factor_dim`, or leave the layer to the rest optimizer, with "
            f"skip_layers=['{path}']. {error}"
        ) from error
