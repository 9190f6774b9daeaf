"""Square roots of the Fisher matrix of a loss.

A loss that is `s sum_t w_t nll_t`, with the negative log-likelihoods of its
terms, has at what it reads of the model the Fisher matrices `s w_t F_t` of the
terms, which for squares, and for cross-entropies at the logits, are its
Hessian. Of a square root, `s w_t F_t = B B^T`.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.fisher.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    OneOf,
    Output,
)


class DiagonalRoot(NamedTuple):
    """The root B for outputs that are independent, `(examples, outputs)`."""

    diagonal: tf.Tensor

    def times(
        self, rows: tf.Tensor, first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """`B^T` times rows `(examples, outputs, n)` of some examples."""
        return self.diagonal[first:end, :, None] * rows

    def residuals(self, slopes: tf.Tensor) -> tf.Tensor:
        """Solves `B r = slopes`, both `(examples, outputs)`."""
        return tf.math.divide_no_nan(slopes, self.diagonal)


class TermRoot(NamedTuple):
    """The roots of whole terms, `(examples, terms, outputs, outputs)`."""

    columns: tf.Tensor

    def times(
        self, rows: tf.Tensor, first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """`B^T` times rows of some examples."""
        _, terms, size, _ = self.columns.shape
        by_term = tf.reshape(rows, [-1, terms, size, rows.shape[-1]])
        made = tf.matmul(self.columns[first:end], by_term, transpose_a=True)
        return tf.reshape(made, [-1, terms * size, rows.shape[-1]])

    def residuals(self, slopes: tf.Tensor) -> tf.Tensor:
        """Solves `B r = slopes`."""
        _, terms, size, _ = self.columns.shape
        right = tf.reshape(slopes, [-1, terms, size, 1])
        # By an orthogonal decomposition: a column may depend on the others.
        found = tf.linalg.lstsq(self.columns, right, fast=False)
        return tf.reshape(found, [-1, terms * size])


Root = DiagonalRoot | TermRoot


def root_of(
    output: Output, values: tf.Tensor, is_logits: bool, scale: tf.Tensor
) -> Root:
    """The root of the Hessian of one loss."""
    distribution = output.distribution
    if is_logits:
        distribution = of_logits(distribution)
    known = Output(values, distribution, output.weights)
    *terms, size = values.shape[1:].as_list() or [1]
    if isinstance(distribution, Independent):

        def diagonal(distribution: Any, outputs: tf.Tensor) -> tf.Tensor:
            return tf.sqrt(distribution.fisher(outputs))

        found = known.gradient(diagonal, scale)
        return DiagonalRoot(tf.reshape(found, [-1, math.prod(terms) * size]))

    def column(index: int) -> tf.Tensor:
        at = tf.constant(index)
        return known.gradient(lambda d, z: d.column(z, at), scale)

    columns = tf.stack([column(index) for index in range(size)], -1)
    return TermRoot(tf.reshape(columns, [-1, math.prod(terms), size, size]))


def of_logits(distribution: Distribution) -> Distribution:
    """The distribution of probabilities in terms of their logits."""
    if isinstance(distribution, OneOf):
        return distribution.map(of_logits)
    if isinstance(distribution, Bernoulli):
        return Bernoulli(from_logits=True)
    assert isinstance(distribution, Categorical)
    return Categorical(from_logits=True)
