"""Blocks of token, reversible and position embeddings."""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.base import Block, MatrixBlock
from tfkfac.blocks.dense import DenseBlock
from tfkfac.blocks.rows import Rows, Statistic, fold_mask, fold_positions
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey
from tfkfac.factors import Diagonal, Factor


class EmbeddingBlock(MatrixBlock):
    """Embedding as a dense layer on one-hot tokens, with a diagonal A.

    With `weight_sharing="expand"`, the diagonal is the frequency of each
    token. With "reduce", it is the mean over examples of the squared fraction
    of the token in the example, the diagonal of the full factor.
    """

    kind = "Embedding"
    examples_first = True
    _kernel_name = "embeddings"
    _covers_bias = False

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        tokens, width = self.matrix_shape
        return {"A": Diagonal(tokens), "G": self.limit.matrix(width)}

    @override
    def rows(self, record: Record) -> Rows:
        gradient = fold_positions(self.cast(record.gradient)[:, None])
        shape = tf.shape(gradient)
        tokens = tf.reshape(tf.cast(record.inputs, tf.int32), shape[:2])
        mask = tf.not_equal(tokens, 0) if self.layer.mask_zero else None
        return Rows(tokens, gradient, mask)

    @override
    def input_statistic(
        self, a: tf.Tensor, weights: tf.Tensor | None, sharing: str
    ) -> Statistic:
        if weights is None:
            weights = tf.ones(tf.shape(a), self.dtype)
        vocabulary = self.matrix_shape[0]
        if sharing == "expand":
            counts = tf.math.unsorted_segment_sum(weights, a, vocabulary)
            return Statistic(counts, tf.reduce_sum(weights))
        positions = tf.reduce_sum(weights, 1, keepdims=True)
        fractions = tf.math.divide_no_nan(weights, positions)
        example = tf.range(tf.shape(a)[0])[:, None]
        fractions = tf.math.unsorted_segment_sum(
            fractions, a + vocabulary * example, vocabulary * tf.shape(a)[0]
        )
        squares = tf.square(tf.reshape(fractions, [-1, vocabulary]))
        examples = tf.reduce_sum(tf.cast(positions > 0, self.dtype))
        return Statistic(tf.reduce_sum(squares, 0), examples)

    @override
    def gradient(self, rows: Rows) -> tf.Tensor:
        flat = tf.reshape(rows.g, [-1, self.matrix_shape[1]])
        tokens = tf.reshape(rows.a, [-1])
        return tf.math.unsorted_segment_sum(flat, tokens, self.matrix_shape[0])

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        # The gradient is an `IndexedSlices`; convert it to a dense tensor to
        # add up repeated tokens, which the norm for `kl_clip` needs.
        return self.cast(tf.convert_to_tensor(gradients[0]))


class ReversibleEmbeddingBlock(EmbeddingBlock):
    """Block of the token embeddings of a `ReversibleEmbedding` layer.

    With tied weights, the exact curvature is a sum of two Kronecker products,
    which is not a Kronecker product. If the step has a projection to tokens,
    the block uses the factors of the projection alone. Models trained better
    with these factors than with sums of both.
    """

    @override
    def relevant(
        self, calls: Sequence[Sequence[Record]]
    ) -> list[Sequence[Record]]:
        return [call for call in calls if not is_reverse(call)]

    @override
    def used_as(self, calls: Sequence[Sequence[Record]]) -> Block:
        if not (self.layer.tie_weights and any(map(is_reverse, calls))):
            return self
        block = TiedProjectionBlock(self.layer, self.path)
        block.limit = self.limit
        return block


class ProjectionBlock(DenseBlock):
    """Untied projection weights of a `ReversibleEmbedding`: a dense layer."""

    kind = "Projection"
    _kernel_name = "reverse_embeddings"

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        # With a soft cap, `rows` needs the whole `record.output`.
        self.examples_first = layer.logit_soft_cap is None

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if layer.tie_weights:
            return "uses the tied weights of the embedding"
        return DenseBlock.unsupported(layer)

    @override
    def relevant(
        self, calls: Sequence[Sequence[Record]]
    ) -> list[Sequence[Record]]:
        return [call for call in calls if is_reverse(call)]

    @override
    def trace_key(self, record: Record) -> TraceKey | None:
        return super().trace_key(record) if self.examples_first else None

    @override
    def rows(self, record: Record) -> Rows:
        rows, cap = super().rows(record), self.layer.logit_soft_cap
        if cap is None:
            return rows
        # Backpropagate through output = cap * tanh(logits / cap).
        tanh = fold_positions(self.cast(record.output)) / cap
        return Rows(rows.a, rows.g * (1 - tf.square(tanh)), rows.mask)


class TiedProjectionBlock(ProjectionBlock):
    """Projection with tied weights: the kernel is the embedding transposed."""

    swapped = True
    _kernel_name = "embeddings"

    @functools.cached_property
    @override
    def matrix_shape(self) -> tuple[int, ...]:
        tokens, width = self._kernel.shape
        return width, tokens

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        width, tokens = self.matrix_shape
        return {"A": self.limit.matrix(width), "G": Diagonal(tokens)}

    def _split(self, kernel: tf.Tensor) -> tf.Tensor:
        return tf.transpose(tf.convert_to_tensor(kernel))

    def _join(self, matrix: tf.Tensor) -> tf.Tensor:
        return tf.transpose(matrix)


class PositionEmbeddingBlock(EmbeddingBlock):
    """Position embedding of keras-hub, with positions as tokens."""

    kind = "PositionEmbedding"
    _kernel_name = "position_embeddings"

    @override
    def rows(self, record: Record) -> Rows:
        shape = tf.shape(record.gradient)[:-1]
        positions = record.kwargs.get("positions")
        if positions is None:
            start = tf.cast(record.kwargs.get("start_index", 0), tf.int32)
            positions = start + tf.range(shape[-1])
        positions = tf.broadcast_to(tf.cast(positions, tf.int32), shape)
        return Rows(
            tf.reshape(positions, [shape[0], tf.reduce_prod(shape[1:])]),
            fold_positions(self.cast(record.gradient)),
            fold_mask(record.mask, shape),
        )


def is_reverse(call: Sequence[Record]) -> bool:
    """True if a call projects features to tokens."""
    return bool(call[0].kwargs.get("reverse"))
