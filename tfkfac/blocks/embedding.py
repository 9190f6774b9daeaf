"""Blocks of embeddings: of tokens, reversible ones, and of positions."""

from collections.abc import Sequence

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.matrix import MatrixBlock
from tfkfac.blocks.rows import Rows, Statistic, fold_mask, fold_positions
from tfkfac.capture.record import Record
from tfkfac.compat.layers import called_with
from tfkfac.factors import Diagonal, Factor

_TIED = "used in reverse with tied weights"


class EmbeddingBlock(MatrixBlock):
    """Embedding as a dense layer on one-hot tokens: A is diagonal.

    Its diagonal is the frequency of each token. With "reduce" it is the
    diagonal of the full factor, the mean over examples of the squared share
    of the token in the example.
    """

    kind = "Embedding"
    examples_first = True

    def _find_kernel(self) -> keras.Variable:
        return self.layer.embeddings

    def _find_bias(self) -> keras.Variable | None:
        return None

    @property
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
        shares = tf.math.divide_no_nan(weights, positions)
        example = tf.range(tf.shape(a)[0])[:, None]
        shares = tf.math.unsorted_segment_sum(
            shares, a + vocabulary * example, vocabulary * tf.shape(a)[0]
        )
        squares = tf.square(tf.reshape(shares, [-1, vocabulary]))
        examples = tf.reduce_sum(tf.cast(positions > 0, self.dtype))
        return Statistic(tf.reduce_sum(squares, 0), examples)

    @override
    def gradient(self, rows: Rows) -> tf.Tensor:
        flat = tf.reshape(rows.g, [-1, self.matrix_shape[1]])
        tokens = tf.reshape(rows.a, [-1])
        return tf.math.unsorted_segment_sum(flat, tokens, self.matrix_shape[0])

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        # A lookup's gradient is sparse; the preconditioned one is as sparse,
        # but its duplicates have to be added up before the clip.
        return self.cast(tf.convert_to_tensor(gradients[0]))


class ReversibleEmbeddingBlock(EmbeddingBlock):
    """Embedding that can also project back to the tokens.

    The block is that of the embeddings. With tied weights the projection uses
    the same ones, and the sum of two Kronecker products is none: then the
    layer has no block. Weights of the projection alone have none either.
    """

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if layer.tie_weights and called_with(layer, "reverse"):
            return _TIED
        return EmbeddingBlock.unsupported(layer)

    @override
    def relevant(
        self, calls: Sequence[Sequence[Record]]
    ) -> list[Sequence[Record]]:
        forward = [c for c in calls if not c[0].kwargs.get("reverse")]
        reversed_ = len(forward) < len(calls)
        tied = reversed_ and self.layer.tie_weights
        self.left_out = _TIED if tied else None
        return forward


class PositionEmbeddingBlock(EmbeddingBlock):
    """Embedding of positions, as keras-hub has it: tokens are the positions.

    The layer adds up its embeddings over all examples, each of which has the
    same positions unless the call says otherwise.
    """

    kind = "PositionEmbedding"

    def _find_kernel(self) -> keras.Variable:
        return self.layer.position_embeddings

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
