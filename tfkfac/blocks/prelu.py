"""Block of `keras.layers.PReLU`."""

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.per_example import PerExampleBlock
from tfkfac.capture.record import Record


class PReLUBlock(PerExampleBlock):
    """Diagonal of the exact Fisher matrix of the slopes of a PReLU.

    `z = max(x, 0) + alpha min(x, 0)`, so an example's gradient is the sum of
    `g min(x, 0)` over the axes that share a slope. There may be as many slopes
    as inputs, hence the diagonal.
    """

    kind = "PReLU"
    diagonal = True

    @property
    @override
    def variables(self) -> list[keras.Variable]:
        return [self.layer.alpha]

    @override
    def example_gradients(self, record: Record) -> list[tf.Tensor]:
        negative = tf.minimum(self.cast(record.inputs), 0)
        products = self.cast(record.gradient) * negative
        shared = self.layer.shared_axes or []
        return [tf.reduce_sum(products, shared, keepdims=True)]
