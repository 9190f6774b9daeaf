"""Running averages of the Kronecker factors of one block."""

import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.linalg.symmetric import all_finite
from tfkfac.variables import state_variable


class Factors(tf.Module):
    """Bias-corrected exponential averages of A and G.

    `M_t = decay M_{t-1} + (1 - decay) batch`, `M_0 = 0`, and the factor is
    `M_t / (1 - decay^t)` (Distributed K-FAC, eq. 14 and 15, with the correction
    of Adam in place of a start at the identity). `t` counts the updates of
    this block that were taken.

    Args:
        block: The block whose factors these are.
    """

    def __init__(self, block: Block) -> None:
        super().__init__(name="factors")
        self.names = tuple(block.factor_shapes)
        self.averages = [
            state_variable(np.zeros(shape), block.dtype, name)
            for name, shape in block.factor_shapes.items()
        ]
        self.weight = state_variable(0.0, block.dtype, "weight")
        self.rejected = state_variable(0, "int64", "rejected_statistics")

    def update(
        self, statistics: Mapping[str, Statistic], decay: float
    ) -> tf.Tensor:
        """Takes in the statistics of one batch.

        Statistics that are not finite, or of an empty batch, leave the
        averages alone.

        Args:
            statistics: The statistics by name.
            decay: Weight of the old average.

        Returns:
            Scalar bool, False if the statistics are not finite.
        """
        ordered = [statistics[name] for name in self.names]
        finite = all_finite([s.total for s in ordered])
        full = tf.reduce_all(tf.stack([s.count for s in ordered]) > 0)
        take = tf.cast(tf.logical_and(finite, full), self.weight.dtype)
        new_share = take * (1 - decay)
        old_share = 1 - new_share
        for average, new in zip(self.averages, ordered, strict=True):
            share = tf.math.divide_no_nan(new_share, new.count)
            average.assign(
                old_share * average
                # NaN times a share of zero is zero here.
                + tf.math.multiply_no_nan(new.total, share)
            )
        self.weight.assign(old_share * self.weight + new_share)
        return finite

    def values(self) -> dict[str, tf.Tensor]:
        """The factors by name; zeros before the first update."""
        return {
            name: tf.math.divide_no_nan(average, self.weight)
            for name, average in zip(self.names, self.averages, strict=True)
        }


def factor_bytes(block: Block) -> int:
    """Bytes of the averages of a block."""
    sizes = [math.prod(shape) for shape in block.factor_shapes.values()]
    return sum(sizes) * block.dtype.size
