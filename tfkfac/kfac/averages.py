"""State of one block: factor averages, decomposition, momentum.

`Pending` sums the gradients and statistics of the micro-batches of a step.
"""

import contextlib
import functools
import math
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, Statistic
from tfkfac.blocks.registry import EXCLUDED, Leftover
from tfkfac.capture.taps import NESTED
from tfkfac.capture.walk import SKIPPED
from tfkfac.compat.functions import Member, TraceKey, shared, when
from tfkfac.factors import Factor, Tensors, trace_key
from tfkfac.fisher.types import Statistics
from tfkfac.linalg.tensors import all_finite, select
from tfkfac.saving.entries import Read, Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver
from tfkfac.training.accumulation import Accumulation
from tfkfac.training.job import Job

# Name of the section of saved files with the state of spectral steps.
SPECTRAL = "spectral"


class FactorAverages(Slots, Member):
    """Bias-corrected exponential averages of A and G.

    `M_t = decay M_{t-1} + (1 - decay) batch`, `M_0 = 0`, and the factor is
    `M_t / (1 - decay^t)` (Distributed K-FAC, eq. 14 and 15, with Adam's bias
    correction instead of a start at the identity). `t` counts this block's
    accepted updates. The papers print the weight in [0.9, 1) at the new batch;
    the authors' code has it at the old average, as here. Half precision would
    round `(1 - decay) batch` to zero, so the dtype is at least float32.

    Of factors that are not in `names`, only the mean eigenvalue is averaged.
    """

    held = ("averages", "other_means", "weight")

    def __init__(self, block: Block, names: Sequence[str]) -> None:
        super().__init__("factors", spread=Spread.OWNED)
        self._specs = specs = block.factors
        self.names = tuple(names)
        self.other_names = tuple(n for n in specs if n not in self.names)
        self.averages = [
            self.slot(f"factor_{name}", specs[name].shape, block.dtype)
            for name in self.names
        ]
        self.other_means = [
            self.slot(
                f"mean_{name}",
                specs[name].stack_shape,
                block.dtype,
                derive=functools.partial(_derive_mean, specs[name], name),
            )
            for name in self.other_names
        ]
        self.weight = self.slot("weight", (), block.dtype, least=0.0)

    @property
    @override
    def key(self) -> TraceKey:
        return trace_key(self._specs, self.names)

    @shared
    def update(
        self,
        statistics: Mapping[str, Statistic],
        decay: float,
        update_due: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Update the averages if due and if the statistics are usable.

        Usable statistics are complete (no count is 0) and finite. Averages that
        are not finite restart from the statistics.

        Returns:
            Three bools: True if the averages were updated; True if the
            statistics are finite; False if the averages were restarted.
        """
        complete, finite = check_statistics(self._specs, statistics)
        accepted = update_due & complete & finite
        variables = [*self.averages, *self.other_means, self.weight]
        valid = ~accepted | all_finite(variables)
        old_weight = decay * tf.cast(valid, self.weight.dtype)
        new_weight = tf.constant(1 - decay, self.weight.dtype)

        def mix() -> None:
            for name, average in zip(self.names, self.averages, strict=True):
                _mix(average, *statistics[name], old_weight, new_weight)
            means = zip(self.other_names, self.other_means, strict=True)
            for name, mean in means:
                total, count = statistics[name]
                new = self._specs[name].mean_eigenvalue(total)
                _mix(mean, new, count, old_weight, new_weight)
            old = tf.math.multiply_no_nan(self.weight, old_weight)
            self.weight.assign(old + new_weight)

        when(accepted, mix)
        return accepted, finite, valid

    def values(self) -> dict[str, tf.Tensor]:
        """Return the averaged factors; zeros before the first update."""
        return _corrected(self.names, self.averages, self.weight)

    @shared
    def decompose(self, solver: Solver, damping: tf.Tensor) -> Tensors:
        """Decompose the averaged factors."""
        values = self.values()
        means = _corrected(self.other_names, self.other_means, self.weight)
        for name, value in values.items():
            means[name] = self._specs[name].mean_eigenvalue(value)
        return solver.decompose(self._specs, values, means, damping)


def _derive_mean(factor: Factor, name: str, read: Read) -> tf.Tensor:
    """Compute the mean eigenvalue of a saved factor if the file lacks it."""
    return factor.mean_eigenvalue(tf.convert_to_tensor(read(f"factor_{name}")))


def check_statistics(
    specs: Mapping[str, Factor], statistics: Mapping[str, Statistic]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return two bools: no count of rows is zero, and all sums are finite.

    Traces suffice: a sum of outer products has no element larger than its
    trace, and a row that is not finite makes the trace not finite.
    """
    counts = tf.stack([s.count for s in statistics.values()])
    complete = tf.reduce_all(counts > 0)
    traces = [
        specs[name].mean_eigenvalue(statistic.total)
        for name, statistic in statistics.items()
    ]
    return complete, all_finite(traces)


def _corrected(
    names: Sequence[str], averages: Sequence[tf.Variable], weight: tf.Variable
) -> dict[str, tf.Tensor]:
    """Return the bias-corrected averages, by name."""
    return {
        name: tf.math.divide_no_nan(average, weight)
        for name, average in zip(names, averages, strict=True)
    }


def _mix(
    average: tf.Variable,
    total: tf.Tensor,
    count: tf.Tensor,
    old_weight: tf.Tensor,
    new_weight: tf.Tensor,
) -> None:
    """Assign `old_weight average + new_weight total / count` to the average."""
    # A weight of 0 clears NaN: `multiply_no_nan(NaN, 0) = 0`.
    average.assign(tf.math.multiply_no_nan(average, old_weight))
    # Add in place, without a temporary tensor: `var -= alpha delta`.
    tf.raw_ops.ResourceApplyGradientDescent(
        var=average.handle, alpha=-new_weight / count, delta=total
    )


class Decomposition(Slots, Member):
    """The last finite decomposition of one block; initially the identity."""

    held = ("tensors",)

    def __init__(
        self, solver: Solver, block: Block, dtype: tf.DType | None = None
    ) -> None:
        super().__init__(
            "decomposition", spread=Spread.OWNED, section=solver.section
        )
        self.solver = solver
        self._block = block
        self._dtype = dtype or block.dtype
        specs = solver.kept(block.factors)
        self.names = tuple(specs)
        self.tensors = [
            self.slot(
                f"solver_{name}",
                spec.shape,
                self._dtype,
                functools.partial(spec.identity, block.dtype),
            )
            for name, spec in specs.items()
        ]

    @property
    @override
    def key(self) -> TraceKey:
        return trace_key(self._block.factors, (self.solver, self._dtype))

    @shared
    def replace(
        self,
        parts: Tensors,
        damping: tf.Tensor,
        due: tf.Tensor,
        momentum: "Momentum | None",
    ) -> tf.Tensor:
        """Replace the decomposition if due and finite; True if it is finite.

        The momentum is then whitened by the new root.
        """
        combined = self.solver.combine(parts, damping)
        stored = {k: tf.cast(v, self._dtype) for k, v in combined.items()}
        finite = all_finite(list(stored.values()))
        accepted = tf.logical_and(finite, due)
        if momentum is not None:
            X = tf.convert_to_tensor(momentum.value)
            roots = self._stored(), self._stored(stored)
            new = self.solver.change_root(self._block.factors, *roots, X)
            is_valid = tf.cast(all_finite([new]), new.dtype)
            new = tf.math.multiply_no_nan(new, is_valid)
            momentum.value.assign(select(accepted, new, X))
        for name, tensor in zip(self.names, self.tensors, strict=True):
            tensor.assign(select(accepted, stored[name], tensor))
        return finite

    def _stored(self, tensors: Tensors | None = None) -> Tensors:
        """Return the stored tensors by name, in a dtype that solvers accept."""
        tensors = tensors or dict(zip(self.names, self.tensors, strict=True))
        # Keep bfloat16: solvers cast it where they need more precision.
        if self._dtype != tf.bfloat16:
            dtype = self._block.dtype
            tensors = {k: tf.cast(v, dtype) for k, v in tensors.items()}
        return tensors

    def apply(self, gradient: LayerGradient) -> LayerGradient:
        """Precondition the gradient of the block, see `Solver.apply`."""
        return self.solver.apply(self._block.factors, self._stored(), gradient)

    @shared
    def apply_back(self, matrix: tf.Tensor) -> tf.Tensor:
        """Multiply a direction by the root R, see `Solver.apply_back`."""
        factors = self._block.factors
        return self.solver.apply_back(factors, self._stored(), matrix)

    @shared
    def precondition(
        self, matrix: tf.Tensor, scale: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the gradient `W = scale * matrix`, and `apply(W)`."""
        plain = MatrixGradient(matrix).scaled(scale)
        return plain.value, self.apply(plain).matrix


class Momentum(Slots, Member):
    """Whitened Nesterov momentum of one block.

    `M_t = mu M_{t-1} + W_t` with `M_0 = 0`. The variable holds
    `mu R_A^T M R_G`, a sum of `R_A^T W R_G`. For few rows W is not computed.
    The roots are needed to read it, so files contain both in one section.

    Attributes:
        extents: Running maxima of the extents of W, which decay like M.
    """

    held = ("value", "extents")

    def __init__(self, block: Block, section: str) -> None:
        super().__init__("momentum", spread=Spread.OWNED, section=section)
        shape, dtype = block.gradient_shape, block.dtype
        *stack, rows, columns = shape
        self.value = self.slot("whitened_momentum", shape, dtype)
        self.extents = [
            self.slot("row_extents", [*stack, rows], dtype),
            self.slot("column_extents", [*stack, columns], dtype),
        ]

    @property
    @override
    def key(self) -> TraceKey:
        return TraceKey("momentum")

    @shared
    def add(
        self,
        whitened: tf.Tensor,
        extents: Sequence[tf.Tensor],
        decay: float,
    ) -> tuple[tf.Tensor, ...]:
        """Add `R_A^T W R_G` and the extents of W.

        Return `R_A^T N R_G` of `N = W + mu M`, and the extents of N.
        """
        totals = []
        for maxima, new in zip(self.extents, extents, strict=True):
            old = decay * tf.convert_to_tensor(maxima)
            # Forget NaN and overflow, as `add_momentum` does.
            old = tf.where(tf.math.is_finite(old), old, tf.zeros_like(old))
            totals.append(tf.maximum(old, new))
            is_finite = tf.math.is_finite(totals[-1])
            maxima.assign(tf.where(is_finite, totals[-1], tf.zeros_like(old)))
        return add_momentum(self.value, whitened, decay), *totals


def add_momentum(
    momentum: tf.Variable, new: tf.Tensor, decay: float
) -> tf.Tensor:
    """Update a momentum and return `new + momentum`; reset it on overflow."""
    total = momentum + new
    finite = tf.cast(all_finite([total]), total.dtype)
    # Reset on overflow: `multiply_no_nan(NaN, 0) = 0`.
    total = tf.math.multiply_no_nan(total, decay * finite)
    momentum.assign(total)
    return new + total


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
        """Update the momentum; return the Nesterov momentum N as a matrix."""
        W = tf.cast(tf.reshape(gradient, self.shape), self._dtype)
        return add_momentum(self.value, W * tf.cast(scale, W.dtype), decay)


class Pending(Accumulation):
    """Sums of gradients and statistics over the micro-batches of a step.

    `blocks` are, by position, the blocks observed by this replica.
    """

    def __init__(
        self, steps: int, job: Job, blocks: Mapping[int, Block]
    ) -> None:
        super().__init__(steps, job)
        self._blocks = dict(blocks)
        self._totals = [
            [self._sum(b, name, spec.shape) for name, spec in b.factors.items()]
            for b in blocks.values()
        ]
        self._counts = [
            self._sum(b, "counts", [len(b.factors)]) for b in blocks.values()
        ]
        self.moments = self.slot(
            "moments",
            (None,),
            "float64",
            spread=Spread.PARTIAL,
            is_finite=False,
        )

    def _sum(self, block: Block, name: str, shape: Sequence[int]) -> Any:
        fields: Any = {"spread": Spread.PARTIAL, "is_finite": False}
        return self.slot(name, shape, block.dtype, layer=block.path, **fields)

    def is_for(self, blocks: Mapping[int, Block]) -> bool:
        """True if blocks have the positions, paths and factors of the sums."""
        return [(i, b.path, b.factors) for i, b in blocks.items()] == [
            (i, b.path, b.factors) for i, b in self._blocks.items()
        ]

    def add_statistics(self, statistics: Statistics) -> tf.Tensor:
        """Add the statistics of each block in a micro-batch."""
        for (i, block), totals, counts in self._sums_by_block():
            if i in statistics:
                increments = [statistics[i][name] for name in block.factors]
                for total, statistic in zip(totals, increments, strict=True):
                    total.assign_add(statistic.total)
                counts.assign_add(tf.stack([s.count for s in increments]))
        return tf.constant(0)

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """Return the sums of the statistics of each block so far."""
        result = {}
        for (i, block), totals, counts in self._sums_by_block():
            row_counts = tf.unstack(tf.convert_to_tensor(counts))
            sums = map(Statistic, map(tf.convert_to_tensor, totals), row_counts)
            result[i] = dict(zip(block.factors, sums, strict=True))
        return result

    def _sums_by_block(
        self,
    ) -> Iterator[tuple[tuple[int, Block], list[Any], Any]]:
        """Return ((position, block), totals, counts) of every block."""
        items = self._blocks.items()
        return zip(items, self._totals, self._counts, strict=True)


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
