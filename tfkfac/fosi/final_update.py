"""The published end of an interval of MR-DHO2 (DHO2, equation 17)."""

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.distributed.collectives import Communicator
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.subspace import Subspace
from tfkfac.saving.entries import Entry, Spread


class FinalUpdate(Tracked):
    """A Newton step with all gradients of an interval.

    With weights c at the beginning of the interval, `o` the way that the inner
    optimizer went in it, and `p` the sum of its gradients, the weights become
    `c - alpha V (V^T p / |lambda|) + o - V V^T o`: what the inner optimizer
    moved in the directions is taken back.

    Args:
        geometry: Sizes.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(name="final_update")
        zeros, dtype = tf.zeros([geometry.size]), geometry.dtype
        self.start = state_variable(zeros, dtype, "start")
        self.gradient_sum = state_variable(zeros, dtype, "gradient_sum")

    @staticmethod
    def bytes(geometry: Geometry) -> int:
        """Bytes of what a worker keeps."""
        return 2 * geometry.size * geometry.dtype.size

    def entries(self, part: str) -> list[Entry]:
        """All variables to save, of a part of the state."""
        named = [("start", self.start), ("gradient_sum", self.gradient_sum)]
        return [
            Entry("", name, variable, Spread.OWNED, part)
            for name, variable in named
        ]

    @staticmethod
    def moving_bytes(layout: Layout) -> int:
        """Bytes that a worker receives in `move`."""
        return 2 * layout.coefficients_bytes + layout.combine_bytes

    def begin(self, weights: tf.Tensor) -> None:
        """Begins an interval at some weights."""
        self.start.assign(weights)
        self.gradient_sum.assign(tf.zeros_like(weights))

    def add(self, gradient: tf.Tensor) -> None:
        """Adds the gradient of a step."""
        self.gradient_sum.assign_add(gradient)

    def move(
        self,
        weights: tf.Tensor,
        subspace: Subspace,
        alpha: tf.Tensor,
        group: Communicator,
    ) -> tf.Tensor:
        """Returns what is added to the weights at the end of the interval.

        Args:
            weights: The weights after its last step.
            subspace: The directions found in it.
            alpha: Learning rate of the Newton step.
            group: The workers that share the directions.
        """
        total = tf.convert_to_tensor(self.gradient_sum)
        inside = subspace.coefficients(total, group)
        moved = subspace.coefficients(weights - self.start, group)
        newton = alpha * inside * subspace.inverse_curvature(group.rank)
        return -subspace.combine([newton + moved], group)
