"""Running averages of the Kronecker factors of one block."""

import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.linalg.symmetric import all_finite
from tfkfac.variables import count_event, state_variable


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
        self._path = block.path
        self.names = tuple(block.factor_shapes)
        self.averages = [
            state_variable(np.zeros(shape), block.dtype, name)
            for name, shape in block.factor_shapes.items()
        ]
        self.weight = state_variable(0.0, block.dtype, "weight")
        self.rejected = state_variable(0, "int64", "rejected_statistics")

    def update(
        self, statistics: Mapping[str, Statistic], decay: tf.Tensor | float
    ) -> None:
        """Takes in the statistics of one batch.

        Statistics that are not finite leave the averages alone and are
        counted; an empty batch just leaves them alone.
        """
        ordered = [statistics[name] for name in self.names]
        finite = all_finite([s.total for s in ordered])
        empty = tf.reduce_any(tf.stack([s.count for s in ordered]) <= 0)
        decay = tf.cast(decay, self.weight.dtype)

        def take() -> tf.Tensor:
            for average, new in zip(self.averages, ordered, strict=True):
                share = (1 - decay) / new.count
                average.assign(decay * average + share * new.total)
            return self.weight.assign(decay * self.weight + (1 - decay))

        tf.cond(
            tf.logical_and(finite, tf.logical_not(empty)),
            take,
            lambda: tf.convert_to_tensor(self.weight),
        )
        count_event(
            tf.logical_not(finite),
            self.rejected,
            f"the statistics of layer '{self._path}' are not finite; its "
            "factors keep their last values.",
        )

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
