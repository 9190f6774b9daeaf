"""Block of the inner layer of a `keras.layers.TimeDistributed`."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Block
from tfkfac.blocks.patches import Patches
from tfkfac.blocks.rows import Rows, Statistic
from tfkfac.capture.model_taps import paused
from tfkfac.capture.taps import Record
from tfkfac.compat.overrides import overridden
from tfkfac.factors import Factor


class TimeDistributedBlock(Block):
    """Block of a layer that is applied at each time step.

    Time steps are shared positions: a `Dense` in a `TimeDistributed` has the
    factors of a `Dense` on sequences. Keras calls the inner layer in a loop,
    where a tap cannot record it. The record therefore holds the input of the
    `TimeDistributed` and the gradient at its output. The block folds the time
    steps into the batch and, if the inner layer has an activation,
    backpropagates the gradient through it with recomputed pre-activations.
    """

    def __init__(
        self, layer: keras.layers.TimeDistributed, block: Block
    ) -> None:
        super().__init__(layer, block.path)
        self.kind, self.dtype = block.kind, block.dtype
        self.examples_first = block.examples_first
        self._block = block

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if isinstance(layer.layer, keras.layers.BatchNormalization):
            return "normalises each time step by itself"
        return None

    @property
    @override
    def variables(self) -> list[keras.Variable]:
        return self._block.variables

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        return self._block.factors

    @override
    def rows(self, record: Record) -> Rows:
        shape = tf.shape(record.gradient)[:2]
        inputs = fold(record.inputs)
        gradient = fold(self.cast(record.gradient))
        mask = None if record.mask is None else fold(record.mask)
        inner = self._block.layer
        activation = getattr(inner, "activation", None)
        if activation not in (None, keras.activations.linear):
            # Backpropagate the gradient through the activation.
            with paused():  # Taps must not record the recomputation.
                with overridden(inner, "activation", lambda _, z: z):
                    z = inner.call(tf.cast(inputs, inner.variable_dtype))
                z = self.cast(z)
                with tf.GradientTape() as tape:
                    tape.watch(z)
                    out = activation(z)
                gradient = tape.gradient(out, z, output_gradients=gradient)
        rows = self._block.rows(Record(inputs, gradient, mask))
        if "A" not in self.factors:
            # Blocks without A have one row per example: sum over time steps.
            total = tf.reduce_sum(unfold(rows.g, shape), 1, keepdims=True)
            return Rows(None, total, None)
        mask = None if rows.mask is None else unfold(rows.mask, shape)
        return Rows(
            lambda: unfold(rows.a, shape),
            unfold(rows.g, shape),
            mask,
            rows.gram,
        )

    @override
    def input_statistic(
        self, a: Any, weights: tf.Tensor | None, sharing: str
    ) -> Statistic:
        return self._block.input_statistic(a, weights, sharing)

    @override
    def output_statistic(self, g: Any, sharing: str) -> tf.Tensor:
        return self._block.output_statistic(g, sharing)

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        return self._block.to_matrix(gradients)

    @override
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        return self._block.from_matrix(matrix)


def fold(tensor: tf.Tensor) -> tf.Tensor:
    """Reshape `(batch, time, ...)` to `(batch * time, ...)`."""
    shape = tf.shape(tensor)
    folded = tf.concat([[shape[0] * shape[1]], shape[2:]], 0)
    return tf.ensure_shape(
        tf.reshape(tensor, folded), [None, *tensor.shape[2:]]
    )


def unfold(rows: Any, shape: tf.Tensor) -> Any:
    """Invert `fold` for rows; `shape` is `(batch, time)`."""
    if isinstance(rows, Patches):
        return dataclasses.replace(rows, images_per_example=shape[1])
    folded = tf.shape(rows)
    unfolded = tf.concat([[shape[0], shape[1] * folded[1]], folded[2:]], 0)
    return tf.ensure_shape(
        tf.reshape(rows, unfolded), [None, None, *rows.shape[2:]]
    )
