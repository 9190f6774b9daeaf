"""Running averages of the Kronecker factors of one block."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.compat.graphs import state_variable, zeros_variable
from tfkfac.compat.tracking import Tracked


class FactorAverages(Tracked):
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

    def __init__(
        self, block: Block, names: Sequence[str] | None = None
    ) -> None:
        super().__init__(name="factors")
        kinds = block.factors
        self._block = block
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
        self.rejected = state_variable(0, "int64", "rejected_statistics")

    def update(
        self,
        statistics: Mapping[str, Statistic],
        decay: float,
        wanted: tf.Tensor,
    ) -> None:
        """Takes in the statistics of one batch.

        Args:
            statistics: The statistics of all factors by name.
            decay: Weight of the old average.
            wanted: Whether to; if not, the averages stay as they are.
        """
        share = tf.cast(wanted, self.weight.dtype) * (1 - decay)
        for name, average in zip(self.names, self.averages, strict=True):
            _mix(average, *statistics[name], share)
        for name, mean in zip(self.other_names, self.other_means, strict=True):
            total, count = statistics[name]
            new = self._block.factors[name].mean_eigenvalue(total)
            _mix(mean, new, count, share)
        self.weight.assign((1 - share) * self.weight + share)

    def values(self) -> dict[str, tf.Tensor]:
        """The factors kept, by name; zeros before the first update."""
        return {name: self.value(name) for name in self.names}

    def value(self, name: str) -> tf.Tensor:
        """One of the factors kept."""
        average = self.averages[self.names.index(name)]
        return tf.math.divide_no_nan(average, self.weight)

    def means(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Mean eigenvalue of every factor of the block.

        Args:
            values: What `values` returned.
        """
        kinds = self._block.factors
        means = {
            name: kinds[name].mean_eigenvalue(value)
            for name, value in values.items()
        }
        for name, mean in zip(self.other_names, self.other_means, strict=True):
            means[name] = tf.math.divide_no_nan(mean, self.weight)
        return means


def _mix(
    average: tf.Variable, total: tf.Tensor, count: tf.Tensor, share: tf.Tensor
) -> None:
    """Moves an average by `share` towards `total / count`."""
    # NaN times a share of zero is zero here.
    new = tf.math.multiply_no_nan(total, tf.math.divide_no_nan(share, count))
    average.assign((1 - share) * average + new)
