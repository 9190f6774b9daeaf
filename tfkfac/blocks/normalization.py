"""Blocks of elementwise weights: normalisation layers and `PReLU`."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Alike, Block, PerExampleBlock
from tfkfac.blocks.rows import Rows, fold_axes, with_shape
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import shared_call
from tfkfac.compat.overrides import given_moments
from tfkfac.factors import Factor, Stack

# Names of the scale. Keras' `scale` is a weight in `RMSNormalization` alone,
# elsewhere a flag; T5 of keras-hub has a `weight`.
_GAINS = ("gamma", "scale", "weight")


class NormalizationBlock(Block):
    """Exact Fisher of each feature's scale and offset, one 2x2 matrix each.

    An example's gradient for one feature is `u = sum_s g_s [xhat_s, 1]`, with
    the normalised input `xhat` of the current step. The factor is the mean of
    `u u^T` over examples, for both ways of weight sharing. There is no A.
    """

    kind = "Normalization"
    examples_first = True

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        gains = [weight_of(layer, name) for name in _GAINS]
        self._gain = next((w for w in gains if w is not None), None)
        both = [self._gain, weight_of(layer, "beta")]
        self._all = [w for w in both if w is not None]
        self._weights = [w for w in self._all if w.trainable]

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

    @property
    @override
    def factors(self) -> dict[str, Factor]:
        return {"G": Stack(self._features, len(self._weights))}

    @override
    def alike(self, record: Record) -> Alike | None:
        layer = self.layer
        if (
            type(layer) is not keras.layers.BatchNormalization
            or record.moments is None
            or any(tf.is_tensor(value) for value in record.kwargs.values())
            or layer.axis not in (-1, record.inputs.shape.rank - 1)
        ):
            return None
        gains = tuple(weight is self._gain for weight in self._weights)
        return Alike((type(self), self.dtype, layer.epsilon, gains))

    @override
    def rows(self, record: Record) -> Rows:
        if self.alike(record) is not None:
            return Rows(None, self._plain_sums(record), None)
        tensors: dict[str, tf.Tensor] = {}
        plain: dict[str, Any] = {}
        for name, value in record.kwargs.items():
            (tensors if tf.is_tensor(value) else plain)[name] = value

        def sums(
            inputs: tf.Tensor,
            gradient: tf.Tensor,
            moments: Sequence[tf.Tensor],
            tensors: Mapping[str, tf.Tensor],
            statistics: Sequence[tf.Tensor],
        ) -> tf.Tensor:
            call = inputs, moments or None, plain | dict(tensors), statistics
            return self._sums(gradient, lambda: self._normalized(*call))

        return Rows(
            None,
            shared_call(
                ("normalization", self._signature, tuple(plain.items())),
                sums,
                record.inputs,
                record.gradient,
                record.moments or (),
                tensors,
                [tf.convert_to_tensor(w) for w in self._statistics],
            ),
            None,
        )

    def _plain_sums(self, record: Record) -> tf.Tensor:
        """`_sums` for features of any number, by the moments of the batch."""
        mean, variance = (self.cast(m) for m in record.moments or ())
        g, epsilon = self.cast(record.gradient), self.layer.epsilon
        positions = list(range(1, g.shape.rank - 1))
        sums = []
        for weight in self._weights:
            part = g
            if weight is self._gain:
                inputs = self.cast(record.inputs)
                part *= tf.nn.batch_normalization(
                    inputs, mean, variance, None, None, epsilon
                )
            sums.append(tf.reduce_sum(part, positions))
        return tf.expand_dims(tf.stack(sums, -1), 1)

    @property
    def _signature(self) -> Hashable:
        """Key of the layer's computation.

        That is what Keras' own layers save of themselves. Of other classes it
        need not be all.
        """
        layer, kind = self.layer, type(self.layer)
        if getattr(keras.layers, kind.__name__, None) is not kind:
            return id(layer)
        config = {k: v for k, v in layer.get_config().items() if k != "name"}
        weights = tuple((tuple(w.shape), w.trainable) for w in layer.variables)
        return kind, self.dtype, str(config), weights

    @property
    def _statistics(self) -> list[keras.Variable]:
        """The layer's variables besides scale and offset."""
        own = [id(weight) for weight in self._all]
        return [w for w in self.layer.variables if id(w) not in own]

    def _sums(
        self, gradient: tf.Tensor, normalize: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """One row an example, whatever the weight sharing."""
        g = self._features_last(self.cast(gradient))
        parts = [
            g * self._features_last(self.cast(normalize()))
            if weight is self._gain
            else g
            for weight in self._weights
        ]
        # Summed before they are stacked, which copies numbers one by one.
        sums = [tf.reduce_sum(part, 1, keepdims=True) for part in parts]
        return tf.stack(sums, -1)

    @property
    def _features(self) -> int:
        return math.prod(self._weights[0].shape)

    def _normalized(self, *call: Any) -> tf.Tensor:
        """The normalised input: the output with a scale of one, no offset."""
        return self._output(True, *call)

    def _output(
        self,
        scaled: bool,
        inputs: tf.Tensor,
        moments: Sequence[tf.Tensor] | None,
        kwargs: Mapping[str, Any],
        statistics: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """The layer's output with a scale of one or zero, and no offset.

        The layer itself computes it, in a scope that takes the substitutes
        and keeps its moving statistics from being updated once more. Batch
        moments are not computed again: synchronised ones are a collective.
        """
        one = self._gain if scaled else None
        substitutes = [
            (w, (tf.ones if w is one else tf.zeros)(w.shape, w.dtype))
            for w in self._all
        ]
        substitutes += zip(self._statistics, statistics, strict=True)
        layer = self.layer
        with (
            keras.StatelessScope(state_mapping=substitutes),
            given_moments(layer, moments),
        ):
            return type(layer).call(layer, self.cast(inputs), **kwargs)

    def _features_last(self, tensor: tf.Tensor) -> tf.Tensor:
        """`(batch, ...)` to `(batch, shared, features)`."""
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
        parts = tf.unstack(tf.squeeze(matrix, 1), len(self._weights), axis=1)
        return [
            with_shape(part, weight.shape)
            for part, weight in zip(parts, self._weights, strict=True)
        ]


class ShiftedNormalizationBlock(NormalizationBlock):
    """The same for layers some of which multiply by 1 + scale.

    What a change of the scale makes of the output is the normalised input.
    """

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if getattr(layer, "data_format", None) == "channels_first":
            return "normalises channels that come first"
        return NormalizationBlock.unsupported(layer)

    @override
    def _normalized(self, *call: Any) -> tf.Tensor:
        return self._output(True, *call) - self._output(False, *call)


def axes_of(layer: keras.layers.Layer) -> list[int]:
    """The axes that have a scale; the last one if the layer does not say."""
    axes = getattr(layer, "axis", -1)
    return list(axes) if isinstance(axes, (list, tuple)) else [axes]


def weight_of(layer: keras.layers.Layer, name: str) -> keras.Variable | None:
    """Returns an attribute of a layer if it is a weight."""
    value = getattr(layer, name, None)
    return value if isinstance(value, keras.Variable) else None


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
