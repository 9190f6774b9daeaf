"""Running averages of the factors, and sums over micro-batches before them."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.functions import Kind, Member, when
from tfkfac.compat.graphs import Tracked, state_variable, zeros_variable
from tfkfac.factors import Factor, Tensors, kind_of
from tfkfac.linalg.tensors import all_finite
from tfkfac.saving.entries import Entry, Read, Spread
from tfkfac.solvers import Solver
from tfkfac.training.accumulation import PENDING, Accumulation
from tfkfac.training.step import Step


class FactorAverages(Member):
    """Bias-corrected exponential averages of A and G.

    `M_t = decay M_{t-1} + (1 - decay) batch`, `M_0 = 0`, and the factor is
    `M_t / (1 - decay^t)` (Distributed K-FAC, eq. 14 and 15, with the correction
    of Adam in place of a start at the identity). `t` counts the updates of
    this block that were taken.

    They are kept in the dtype of the statistics, float32 or better: half
    precision would round away a new batch's share once `1 - decay` of the
    difference is less than half a unit in the last place.

    Args:
        block: The block whose factors these are.
        names: The factors to keep; None is all of them. Of the others only
            the mean eigenvalue is kept.
    """

    held = ("averages", "other_means", "weight")

    def __init__(
        self, block: Block, names: Sequence[str] | None = None
    ) -> None:
        super().__init__(name="factors")
        kinds = block.factors
        self._kinds = kinds
        self.names = tuple(kinds if names is None else names)
        self.other_names = tuple(n for n in kinds if n not in self.names)
        self.averages = [
            zeros_variable(kinds[name].shape, block.dtype, name)
            for name in self.names
        ]
        self.other_means = [
            zeros_variable(kinds[name].stack_shape, block.dtype, "mean")
            for name in self.other_names
        ]
        self.weight = state_variable(0.0, block.dtype, "weight")

    def entries(self, path: str) -> list[Entry]:
        """All variables to save.

        The average of mean eigenvalues is the average's mean eigenvalue but
        for rounding, where a file does not have it.

        Args:
            path: The block's path.
        """
        factors = [
            Entry(path, f"factor_{name}", average, Spread.OWNED)
            for name, average in zip(self.names, self.averages, strict=True)
        ]
        means = [
            Entry(
                path,
                f"mean_{name}",
                mean,
                Spread.OWNED,
                derive=self._mean_of(name),
            )
            for name, mean in zip(
                self.other_names, self.other_means, strict=True
            )
        ]
        weight = Entry(path, "weight", self.weight, Spread.OWNED, least=0.0)
        return [*factors, *means, weight]

    def _mean_of(self, name: str) -> Callable[[Read], tf.Tensor]:
        """Function that gives the mean eigenvalue of a factor in a file."""
        kind = self._kinds[name]

        def mean(read: Read) -> tf.Tensor:
            factor = tf.convert_to_tensor(read(f"factor_{name}"))
            return kind.mean_eigenvalue(factor)

        return mean

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
        """Takes in the statistics of one batch if they are good.

        Averages that are not finite are dropped: they begin anew with these
        statistics.

        Args:
            statistics: The statistics of all factors by name.
            decay: Weight of the old average.
            wanted: Scalar bool. If it is false the averages stay.

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

    def value(self, name: str) -> tf.Tensor:
        """One of the factors kept."""
        average = self.averages[self.names.index(name)]
        return tf.math.divide_no_nan(average, self.weight)

    def decompose(self, solver: Solver, damping: tf.Tensor) -> Tensors:
        """Decomposes the factors kept.

        Args:
            solver: The solver.
            damping: The damping.
        """
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

    Args:
        kinds: The factors by name.
        statistics: Their statistics by name.
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


class Pending(Tracked):
    """Sums over the micro-batches of one step so far, of one replica.

    Gradients and statistics are sums, so that the memory does not depend on
    the number of micro-batches, and many of them are as one batch.

    Args:
        gradients: The sums of gradients.
        blocks: The blocks whose statistics the replica takes, by position.
    """

    def __init__(
        self, gradients: Accumulation, blocks: Mapping[int, Block]
    ) -> None:
        super().__init__(name="pending")
        self._gradients = gradients
        self._blocks = dict(blocks)
        self._positions = tuple(blocks)
        self._sums = [StatisticSums(block) for block in blocks.values()]

    def is_for(self, blocks: Mapping[int, Block]) -> bool:
        """True if these are the blocks, as far as sums of theirs go."""
        return [(i, b.path, b.factors) for i, b in blocks.items()] == [
            (i, b.path, b.factors) for i, b in self._blocks.items()
        ]

    def add_gradients(self, step: Step) -> None:
        """Adds the gradients of a micro-batch."""
        self._gradients.add(step)

    def add_statistics(
        self, statistics: Mapping[int, Mapping[str, Statistic]]
    ) -> tf.Tensor:
        """Adds the statistics of a micro-batch."""
        for position, sums in zip(self._positions, self._sums, strict=True):
            if position in statistics:
                sums.add(statistics[position])
        return tf.constant(0)

    @property
    def count(self) -> tf.Tensor:
        """Number of micro-batches that have been added."""
        return tf.convert_to_tensor(self._gradients.count)

    def is_complete(self) -> tf.Tensor:
        """True if the last micro-batch of a step has been added."""
        return self._gradients.is_complete()

    def merged(self, step: Step) -> Step:
        """The step of all micro-batches, in the place of the last one's."""
        return self._gradients.merged(step)

    def statistics(self) -> dict[int, dict[str, Statistic]]:
        """The statistics that have been added, by position."""
        pairs = zip(self._positions, self._sums, strict=True)
        return {position: sums.values() for position, sums in pairs}

    def reset(self) -> tf.Tensor:
        """Forgets what has been added."""
        self._gradients.reset()
        for sums in self._sums:
            sums.reset()
        return tf.constant(0)

    def entries(self) -> list[Entry]:
        """All variables to save."""
        statistics = [entry for sums in self._sums for entry in sums.entries()]
        return [*self._gradients.entries(), *statistics]


class StatisticSums(Tracked):
    """Adds up the statistics of one block.

    Args:
        block: The block.
    """

    def __init__(self, block: Block) -> None:
        super().__init__(name="statistics")
        kinds, dtype = block.factors, block.dtype
        self._path = block.path
        self._names = tuple(kinds)
        self._totals = [
            zeros_variable(kind.shape, dtype, name)
            for name, kind in kinds.items()
        ]
        self._counts = zeros_variable([len(kinds)], dtype, "counts")

    def add(self, statistics: Mapping[str, Statistic]) -> None:
        """Adds those of a micro-batch."""
        for name, total in zip(self._names, self._totals, strict=True):
            total.assign_add(statistics[name].total)
        self._counts.assign_add(
            tf.stack([statistics[name].count for name in self._names])
        )

    def values(self) -> dict[str, Statistic]:
        """Sums by name."""
        counts = tf.unstack(tf.convert_to_tensor(self._counts))
        return {
            name: Statistic(tf.convert_to_tensor(total), count)
            for name, total, count in zip(
                self._names, self._totals, counts, strict=True
            )
        }

    def reset(self) -> None:
        """Forgets what has been added."""
        for variable in (*self._totals, self._counts):
            variable.assign(tf.zeros_like(variable))

    def entries(self) -> list[Entry]:
        """All variables to save."""
        names = [*self._names, "counts"]
        sums = (*self._totals, self._counts)
        return [
            Entry(
                self._path,
                name,
                variable,
                Spread.PARTIAL,
                PENDING,
                is_finite=False,
            )
            for name, variable in zip(names, sums, strict=True)
        ]


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[None]:
    """Names a layer in the error when there is no memory for it.

    In a graph it is the operations that bear the name, which TensorFlow's
    error says. Eagerly it would be the variables, each of which then has a
    kernel of its own: half a millisecond.

    Args:
        path: Path of the layer.

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
