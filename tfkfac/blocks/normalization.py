"""Blocks of elementwise weights: normalisation layers and `PReLU`."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Block, PerExampleBlock
from tfkfac.blocks.rows import Rows, fold_axes, with_shape
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey, shared_call
from tfkfac.compat.overrides import given_moments
from tfkfac.factors import Dense, Factor

# Attributes that may hold the scale: `gamma`, `scale` of `RMSNormalization` (in
# other layers a bool), `weight` of the T5 layer of keras-hub.
_SCALES = ("gamma", "scale", "weight")


class NormalizationBlock(Block):
    """Exact Fisher matrix of scale and offset, a 2x2 matrix per feature.

    The gradient of an example for a feature is `u = sum_s g_s [xhat_s, 1]`,
    where `xhat` is the normalised input of the current step. The factor G is
    the mean of `u u^T` over examples for all values of `weight_sharing`.
    There is no factor A.
    """

    kind = "Normalization"
    examples_first = True

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        scales = [weight_of(layer, name) for name in _SCALES]
        self._scale = next((w for w in scales if w is not None), None)
        scale_and_offset = [self._scale, weight_of(layer, "beta")]
        self._scale_and_offset = [w for w in scale_and_offset if w is not None]
        self._weights = [w for w in self._scale_and_offset if w.trainable]

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if 0 in axes_of(layer):
            return "normalises over the batch axis"
        if getattr(layer, "renorm", False):
            return "batch renormalisation"
        return None

    @property
    @override
    def variables(self) -> list[keras.Variable]:
        return list(self._weights)

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        return {"G": Dense(len(self._weights), (self._features,))}

    @override
    def trace_key(self, record: Record) -> TraceKey | None:
        layer = self.layer
        if (
            type(layer) is not keras.layers.BatchNormalization
            or record.moments is None
            or any(tf.is_tensor(value) for value in record.kwargs.values())
            or layer.axis not in (-1, record.inputs.shape.rank - 1)
        ):
            return None
        is_scale = tuple(weight is self._scale for weight in self._weights)
        return TraceKey((type(self), self.dtype, layer.epsilon, is_scale))

    @override
    def rows(self, record: Record) -> Rows:
        if self.trace_key(record) is not None:
            return Rows(None, self._batch_norm_sums(record), None)
        tensors: dict[str, tf.Tensor] = {}
        constants: dict[str, Any] = {}
        for name, value in record.kwargs.items():
            (tensors if tf.is_tensor(value) else constants)[name] = value

        def sums(
            inputs: tf.Tensor,
            gradient: tf.Tensor,
            moments: Sequence[tf.Tensor],
            tensors: Mapping[str, tf.Tensor],
            statistics: Sequence[tf.Tensor],
        ) -> tf.Tensor:
            kwargs = constants | dict(tensors)
            arguments = inputs, moments or None, kwargs, statistics
            return self._sums(gradient, lambda: self._normalized(*arguments))

        return Rows(
            None,
            shared_call(
                ("normalization", self._signature, tuple(constants.items())),
                sums,
                record.inputs,
                record.gradient,
                record.moments or (),
                tensors,
                [tf.convert_to_tensor(w) for w in self._other_variables],
            ),
            None,
        )

    def _batch_norm_sums(self, record: Record) -> tf.Tensor:
        """Compute `_sums` from the recorded batch moments."""
        mean, variance = (self.cast(m) for m in record.moments or ())
        g, epsilon = self.cast(record.gradient), self.layer.epsilon
        positions = list(range(1, g.shape.rank - 1))
        sums = []
        for weight in self._weights:
            gradient = g
            if weight is self._scale:
                inputs = self.cast(record.inputs)
                gradient *= tf.nn.batch_normalization(
                    inputs, mean, variance, None, None, epsilon
                )
            sums.append(tf.reduce_sum(gradient, positions))
        return tf.expand_dims(tf.stack(sums, -1), 1)

    @property
    def _signature(self) -> Hashable:
        """Cache key of the layer's computation."""
        layer, layer_class = self.layer, type(self.layer)
        # The config of a custom layer may not describe its computation.
        if getattr(keras.layers, layer_class.__name__, None) is not layer_class:
            return id(layer)
        config = {k: v for k, v in layer.get_config().items() if k != "name"}
        weights = tuple((tuple(w.shape), w.trainable) for w in layer.variables)
        return layer_class, self.dtype, str(config), weights

    @property
    def _other_variables(self) -> list[keras.Variable]:
        """Variables of the layer except scale and offset."""
        excluded = [id(weight) for weight in self._scale_and_offset]
        return [w for w in self.layer.variables if id(w) not in excluded]

    def _sums(
        self, gradient: tf.Tensor, normalize: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """Gradients per example: `(batch, 1, features, weights)`."""
        g = self._features_last(self.cast(gradient))
        products = [
            g * self._features_last(self.cast(normalize()))
            if weight is self._scale
            else g
            for weight in self._weights
        ]
        # Sum before stacking: `tf.stack` on the last axis copies slowly.
        sums = [tf.reduce_sum(p, 1, keepdims=True) for p in products]
        return tf.stack(sums, -1)

    @property
    def _features(self) -> int:
        return math.prod(self._weights[0].shape)

    def _normalized(self, *arguments: Any) -> tf.Tensor:
        """Normalised input: the output for scale 1 and offset 0."""
        return self._output(True, *arguments)

    def _output(
        self,
        unit_scale: bool,
        inputs: tf.Tensor,
        moments: Sequence[tf.Tensor] | None,
        kwargs: Mapping[str, Any],
        statistics: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Output of the layer for scale 1 or 0 and offset 0.

        Moving statistics are not updated a second time. Recorded batch moments
        are reused, because synchronised moments need a collective.
        """
        scale = self._scale if unit_scale else None
        values = [
            (w, (tf.ones if w is scale else tf.zeros)(w.shape, w.dtype))
            for w in self._scale_and_offset
        ]
        values += zip(self._other_variables, statistics, strict=True)
        layer = self.layer
        with (
            keras.StatelessScope(state_mapping=values),
            given_moments(layer, moments),
        ):
            return type(layer).call(layer, self.cast(inputs), **kwargs)

    def _features_last(self, tensor: tf.Tensor) -> tf.Tensor:
        """Reshape `(batch, ...)` to `(batch, shared, features)`."""
        rank = tensor.shape.rank
        axes = [axis % rank for axis in axes_of(self.layer)]
        shared = [i for i in range(1, rank) if i not in axes]
        order = [0, *shared, *axes]
        if order != sorted(order):
            tensor = tf.transpose(tensor, order)
        return fold_axes(tensor, len(shared), self._features)

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [with_shape(self.cast(g), [self._features]) for g in gradients]
        return tf.reshape(tf.stack(flat, -1), self.gradient_shape)

    @override
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.unstack(tf.squeeze(matrix, 1), len(self._weights), axis=1)
        return [
            with_shape(gradient, weight.shape)
            for gradient, weight in zip(flat, self._weights, strict=True)
        ]


class ShiftedNormalizationBlock(NormalizationBlock):
    """Normalisation that may multiply by `1 + scale` instead of `scale`.

    The derivative of the output by the scale is the normalised input in both
    cases: the output for scale 1 minus the output for scale 0.
    """

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if getattr(layer, "data_format", None) == "channels_first":
            return "normalises channels in the first axis"
        return NormalizationBlock.unsupported(layer)

    @override
    def _normalized(self, *arguments: Any) -> tf.Tensor:
        unshifted = self._output(False, *arguments)
        return self._output(True, *arguments) - unshifted


def axes_of(layer: keras.layers.Layer) -> list[int]:
    """Axes with a scale: the layer's `axis`, by default the last."""
    axes = getattr(layer, "axis", -1)
    return list(axes) if isinstance(axes, (list, tuple)) else [axes]


def weight_of(layer: keras.layers.Layer, name: str) -> keras.Variable | None:
    """Return an attribute of a layer if it is a variable, else None."""
    value = getattr(layer, name, None)
    return value if isinstance(value, keras.Variable) else None


class PReLUBlock(PerExampleBlock):
    """Diagonal of the exact Fisher matrix of the slopes of a PReLU.

    The layer computes `z = max(x, 0) + alpha min(x, 0)`. It may have as many
    slopes as inputs, too many for a full matrix.
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
