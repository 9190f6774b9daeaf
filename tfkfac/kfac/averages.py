"""State of one block: averages of its factors, and their decomposition.

Of micro-batches, the sums of statistics before them.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, Statistic
from tfkfac.compat.functions import Kind, Member, when
from tfkfac.factors import Factor, Tensors, kind_of
from tfkfac.linalg.tensors import all_finite, rounding, select
from tfkfac.saving.entries import Spread
from tfkfac.saving.slots import Slots
from tfkfac.solvers import Solver
from tfkfac.training.accumulation import Accumulation
from tfkfac.training.job import Job

# Name of the section of momenta in a saved file.
SPECTRAL = "spectral"


class FactorAverages(Slots, Member):
    """Bias-corrected exponential averages of A and G.

    `M_t = decay M_{t-1} + (1 - decay) batch`, `M_0 = 0`, and the factor is
    `M_t / (1 - decay^t)` (Distributed K-FAC, eq. 14 and 15, with the correction
    of Adam in place of a start at the identity). `t` counts the updates of
    this block that were taken.

    They are kept in the dtype of the statistics, float32 or better: half
    precision would round away a new batch's share once `1 - decay` of the
    difference is less than half a unit in the last place. Of factors that are
    not named only the mean eigenvalue is kept.
    """

    held = ("averages", "other_means", "weight")

    def __init__(self, block: Block, names: Sequence[str]) -> None:
        super().__init__("factors", spread=Spread.OWNED)
        self._kinds = kinds = block.factors
        self.names = tuple(names)
        self.other_names = tuple(n for n in kinds if n not in self.names)
        self.averages = [
            self.slot(f"factor_{name}", kinds[name].shape, block.dtype)
            for name in self.names
        ]
        self.other_means = [
            self.slot(
                f"mean_{name}",
                kinds[name].stack_shape,
                block.dtype,
            )
            for name in self.other_names
        ]
        self.weight = self.slot("weight", (), block.dtype, least=0.0)

    @property
    @override
    def like(self) -> Kind:
        return kind_of(self._kinds, self.names)

    def update(
        self,
        statistics: Mapping[str, Statistic],
        decay: float,
        wanted: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Takes in the wanted statistics of one batch if they are good.

        Averages that are not finite are dropped: they begin anew with these
        statistics.

        Returns:
            Three bools: the statistics were taken, they are finite, and false
            if averages were dropped for them.
        """
        full, finite = quality(self._kinds, statistics)
        take = wanted & full & finite
        variables = [*self.averages, *self.other_means, self.weight]
        healthy = ~take | all_finite(variables)
        kept = decay * tf.cast(healthy, self.weight.dtype)
        share = tf.constant(1 - decay, self.weight.dtype)

        def mix() -> None:
            for name, average in zip(self.names, self.averages, strict=True):
                _mix(average, *statistics[name], kept, share)
            others = zip(self.other_names, self.other_means, strict=True)
            for name, mean in others:
                total, count = statistics[name]
                new = self._kinds[name].mean_eigenvalue(total)
                _mix(mean, new, count, kept, share)
            old = tf.math.multiply_no_nan(self.weight, kept)
            self.weight.assign(old + share)

        when(take, mix)
        return take, finite, healthy

    def values(self) -> dict[str, tf.Tensor]:
        """The factors kept, by name; zeros before the first update."""
        return _corrected(self.names, self.averages, self.weight)

    def decompose(self, solver: Solver, damping: tf.Tensor) -> Tensors:
        """Decomposes the factors kept."""
        values = self.values()
        means = _corrected(self.other_names, self.other_means, self.weight)
        for name, value in values.items():
            means[name] = self._kinds[name].mean_eigenvalue(value)
        return solver.decompose(self._kinds, values, means, damping)


def quality(
    kinds: Mapping[str, Factor], statistics: Mapping[str, Statistic]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Two bools: there are statistics of every factor, and all are finite.

    They are sums of outer products: no element is larger than the trace, and
    what is not finite in a row is so in the trace.
    """
    full = tf.reduce_all(tf.stack([s.count for s in statistics.values()]) > 0)
    traces = [
        kinds[name].mean_eigenvalue(statistic.total)
        for name, statistic in statistics.items()
    ]
    return full, all_finite(traces)


def _corrected(
    names: Sequence[str], averages: Sequence[tf.Variable], weight: tf.Variable
) -> dict[str, tf.Tensor]:
    """Averages without the bias to the zeros at the start, by name."""
    return {
        name: tf.math.divide_no_nan(average, weight)
        for name, average in zip(names, averages, strict=True)
    }


def _mix(
    average: tf.Variable,
    total: tf.Tensor,
    count: tf.Tensor,
    kept: tf.Tensor,
    share: tf.Tensor,
) -> None:
    """Makes an average `kept` of itself and `share` of `total / count`."""
    # NaN times zero is zero here.
    average.assign(tf.math.multiply_no_nan(average, kept))
    # Adds a multiple in one pass, where the average is.
    tf.raw_ops.ResourceApplyGradientDescent(
        var=average.handle, alpha=-share / count, delta=total
    )


class Decomposition(Slots, Member):
    """The last good decomposition of one block; the identity at first.

    It is kept in a dtype of its own, by default that of the statistics.
    """

    held = ("tensors",)

    def __init__(
        self, solver: Solver, block: Block, dtype: tf.DType | None = None
    ) -> None:
        super().__init__("decomposition", spread=Spread.OWNED, part=solver.name)
        self.solver = solver
        self._block = block
        self._dtype = dtype or block.dtype
        kept = solver.kept(block.factors)
        self.names = tuple(kept)
        self.tensors = [
            self.slot(
                f"solver_{name}",
                part.shape,
                self._dtype,
                functools.partial(part.identity, block.dtype),
            )
            for name, part in kept.items()
        ]

    @property
    @override
    def like(self) -> Kind:
        return kind_of(self._block.factors, (self.solver, self._dtype))

    def replace(
        self, parts: Tensors, damping: tf.Tensor, wanted: tf.Tensor
    ) -> tf.Tensor:
        """Takes a new decomposition if it is wanted and finite.

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

    def renew(self, momentum: "Momentum") -> tf.Tensor:
        """Preconditions a momentum that another one has preconditioned."""
        plain = MatrixGradient(tf.convert_to_tensor(momentum.value))
        momentum.preconditioned.assign(self.apply(plain).matrix)
        return tf.constant(0)


class Momentum(Slots, Member):
    """Nesterov momentum of the gradient matrix of one block.

    `M_t = mu M_{t-1} + W_t` with `M_0 = 0`; what is kept is `mu M`. Beside it
    is `mu A^-1 M G^-1`, for as long as the decomposition stays a sum of the
    `A^-1 W G^-1`, which take few products where a batch has few rows.
    """

    held = ("value", "preconditioned")

    def __init__(self, block: Block) -> None:
        super().__init__("momentum", spread=Spread.OWNED, part=SPECTRAL)
        shape, dtype = block.gradient_shape, block.dtype
        self.value = self.slot("momentum", shape, dtype)
        self.preconditioned = self.slot("preconditioned_momentum", shape, dtype)

    @property
    @override
    def like(self) -> Kind:
        return Kind("momentum", any_size=True)

    def add(
        self, matrix: tf.Tensor, preconditioned: tf.Tensor, decay: float
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Takes in W and `A^-1 W G^-1`.

        Returns:
            `N_t = W_t + mu M_t` and `A^-1 N_t G^-1`, which is zero in rows
            where `N_t` is zero and in columns where `N_t` is below its
            rounding errors. An orthogonalisation would make them as long as
            the others.
        """
        N = _nesterov(self.value, matrix, decay)
        P = _nesterov(self.preconditioned, preconditioned, decay)
        sizes = tf.abs(N)
        rows, columns = (
            tf.reduce_max(sizes, axis, keepdims=True) for axis in (-1, -2)
        )
        least = rounding(N.dtype) * tf.reduce_max(rows, -2, keepdims=True)
        # The row of a bias before a normalisation is rounding noise in N, but
        # not in P: A couples it with the other rows.
        P *= tf.cast(rows > 0, P.dtype)
        P *= tf.cast(columns > least, P.dtype)
        return N, P


def _nesterov(kept: tf.Variable, new: tf.Tensor, decay: float) -> tf.Tensor:
    """Moves a momentum; one that has overflowed begins anew."""
    total = kept + new
    healthy = tf.cast(all_finite([total]), total.dtype)
    # NaN times zero is zero here.
    total = tf.math.multiply_no_nan(total, decay * healthy)
    kept.assign(total)
    return new + total


class Pending(Accumulation):
    """Sums over the micro-batches of one step so far, of one replica.

    Gradients and statistics are sums, so that the memory does not depend on
    the number of micro-batches, and many of them are as one batch. Blocks are
    those whose statistics the replica takes, by position.
    """

    def __init__(
        self, steps: int, job: Job, blocks: Mapping[int, Block]
    ) -> None:
        super().__init__(steps, job)
        self._blocks = dict(blocks)
        self._totals = [
            [self._sum(b, name, kind.shape) for name, kind in b.factors.items()]
            for b in blocks.values()
        ]
        self._counts = [
            self._sum(b, "counts", [len(b.factors)]) for b in blocks.values()
        ]

    def _sum(self, block: Block, name: str, shape: Sequence[int]) -> Any:
        fields: Any = {"spread": Spread.PARTIAL, "is_finite": False}
        return self.slot(name, shape, block.dtype, layer=block.path, **fields)

    def is_for(self, blocks: Mapping[int, Block]) -> bool:
        """True if these are the blocks, as far as sums of theirs go."""
        return [(i, b.path, b.factors) for i, b in blocks.items()] == [
            (i, b.path, b.factors) for i, b in self._blocks.items()
        ]

    def add_statistics(
        self, statistics: Mapping[int, Mapping[str, Statistic]]
    ) -> tf.Tensor:
        """Adds the statistics of a micro-batch, by position."""
        for i, block, totals, counts in self._rows():
            if i in statistics:
                new = [statistics[i][name] for name in block.factors]
                for total, one in zip(totals, new, strict=True):
                    total.assign_add(one.total)
                counts.assign_add(tf.stack([one.count for one in new]))
        return tf.constant(0)

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """The statistics that have been added, by position."""
        found = {}
        for i, block, totals, counts in self._rows():
            numbers = tf.unstack(tf.convert_to_tensor(counts))
            sums = map(Statistic, map(tf.convert_to_tensor, totals), numbers)
            found[i] = dict(zip(block.factors, sums, strict=True))
        return found

    def _rows(self) -> Iterator[tuple[int, Block, list[Any], Any]]:
        """Position and block of each, its totals and counts."""
        pairs = zip(self._totals, self._counts, strict=True)
        for (i, block), (totals, counts) in zip(
            self._blocks.items(), pairs, strict=True
        ):
            yield i, block, totals, counts


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[None]:
    """Names a layer, by its path, in the error when there is no memory for it.

    In a graph it is the operations that bear the name, which TensorFlow's
    error says. Eagerly it would be the variables, each of which then has a
    kernel of its own: half a millisecond.

    Raises:
        MemoryError: If memory was exhausted.
    """
    # A scope's name allows less than a layer's.
    scope = re.sub(r"[^A-Za-z0-9_./-]", "_", f"kfac/{path}")
    eager = tf.executing_eagerly()
    try:
        with contextlib.nullcontext() if eager else tf.name_scope(scope):
            yield
    except (MemoryError, tf.errors.ResourceExhaustedError) as error:
        raise MemoryError(
            f"No memory for the factors of layer '{path}' and their "
            "decomposition. Have them approximated, with a smaller "
            "`max_factor_dim`, or leave the layer to the inner optimizer, with "
            f"skip_layers=['{path}']. {error}"
        ) from error
