"""Block of `keras.layers.Embedding`."""

from collections.abc import Sequence

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.matrix import MatrixBlock
from tfkfac.blocks.rows import Rows, Statistic, fold_positions
from tfkfac.capture.record import Record
from tfkfac.factors import Dense, Diagonal, Factor


class EmbeddingBlock(MatrixBlock):
    """Embedding as a dense layer on one-hot tokens: A is diagonal.

    Its diagonal is the frequency of each token. With "reduce" it is the
    diagonal of the full factor, the mean over examples of the squared share
    of the token in the example.
    """

    kind = "Embedding"

    def _find_kernel(self) -> keras.Variable:
        return self.layer.embeddings

    def _find_bias(self) -> keras.Variable | None:
        return None

    @property
    @override
    def factors(self) -> dict[str, Factor]:
        tokens, width = self.matrix_shape
        return {"A": Diagonal(tokens), "G": Dense(width)}

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
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        # A lookup's gradient is sparse; the preconditioned one is as sparse,
        # but its duplicates have to be added up before the clip.
        return self.cast(tf.convert_to_tensor(gradients[0]))
