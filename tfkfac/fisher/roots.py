"""Square roots of the Fisher matrix of a loss at the model outputs.

A loss `s sum_t w_t nll_t`, with negative log-likelihoods of its terms, has the
Fisher matrices `s w_t F_t`. They equal its Hessian for squared errors, and for
cross-entropies with respect to the logits. A root `B` satisfies
`s w_t F_t = B B^T`.
"""

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.fisher.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    Output,
)


class DiagonalRoot(NamedTuple):
    """Diagonal root B of independent outputs, `(examples, outputs)`."""

    diagonal: tf.Tensor

    def times(
        self, rows: tf.Tensor, first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """Multiply `B^T` by rows `(end - first, outputs, n)` of examples."""
        return self.diagonal[first:end, :, None] * rows

    def residuals(self, slopes: tf.Tensor) -> tf.Tensor:
        """Solve `B r = slopes` for `r`; both are `(examples, outputs)`."""
        return tf.math.divide_no_nan(slopes, self.diagonal)


class TermRoot(NamedTuple):
    """Dense root B of each term, `(examples, terms, outputs, outputs)`."""

    columns: tf.Tensor

    def times(
        self, rows: tf.Tensor, first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """Multiply `B^T` by rows of the examples `first` to `end`."""
        _, terms, size, _ = self.columns.shape
        by_term = tf.reshape(rows, [-1, terms, size, rows.shape[-1]])
        product = tf.matmul(self.columns[first:end], by_term, transpose_a=True)
        return tf.reshape(product, [-1, terms * size, rows.shape[-1]])

    def residuals(self, slopes: tf.Tensor) -> tf.Tensor:
        """Solve `B r = slopes` for `r`; both are `(examples, outputs)`."""
        _, terms, size, _ = self.columns.shape
        right_side = tf.reshape(slopes, [-1, terms, size, 1])
        # Use an orthogonal decomposition: B may be rank-deficient.
        solution = tf.linalg.lstsq(self.columns, right_side, fast=False)
        return tf.reshape(solution, [-1, terms * size])


Root = DiagonalRoot | TermRoot


def root_of(
    output: Output, values: tf.Tensor, is_logits: bool, scale: tf.Tensor
) -> Root:
    """Compute a root of the Fisher matrix of one loss, see the module.

    `values` are logits if `is_logits`; `scale` is `s`.
    """
    distribution = output.distribution
    if is_logits:  # the distribution of logits instead of probabilities
        assert isinstance(distribution, Bernoulli | Categorical)
        distribution = type(distribution)(from_logits=True)
    output = Output(values, distribution, output.weights)
    *terms, size = values.shape[1:].as_list() or [1]
    if isinstance(distribution, Independent):

        def diagonal(distribution: Any, outputs: tf.Tensor) -> tf.Tensor:
            return tf.sqrt(distribution.fisher(outputs))

        root = output.gradient(diagonal, scale)
        return DiagonalRoot(tf.reshape(root, [-1, math.prod(terms) * size]))

    def column(index: int) -> tf.Tensor:
        position = tf.constant(index)
        return output.gradient(lambda d, z: d.column(z, position), scale)

    columns = tf.stack([column(index) for index in range(size)], -1)
    return TermRoot(tf.reshape(columns, [-1, math.prod(terms), size, size]))
