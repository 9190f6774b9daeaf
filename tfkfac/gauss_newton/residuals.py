"""A loss as a sum of squares of residuals, to second order.

A loss that is `s sum_t w_t nll_t`, with the negative log-likelihoods of its
terms, has at what it reads of the model the Fisher matrices `s w_t F_t` of the
terms, which for squares, and for cross-entropies at the logits, are its
Hessian. With a square root, `s w_t F_t = B B^T`, and J the Jacobian of what is
read, `B^T J` are the rows of the residuals' Jacobian. The residuals r
themselves, `B r = dL/dz`, are those of least length.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.curvature.gauss_newton import Reading
from tfkfac.fisher import Bernoulli, Categorical, Distribution, Independent
from tfkfac.fisher.distributions import OneOf, Output, output_of
from tfkfac.loss.terms import LossTerms
from tfkfac.training.step import Step


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


class Read(NamedTuple):
    """The output of the model that one loss reads."""

    position: int  # among the model's outputs
    is_logits: bool  # whether it is the logits behind that output
    output: tf.Tensor  # its value
    slopes: tf.Tensor  # gradient of the loss there, `(examples, outputs)`
    root: Root  # of the Hessian there
    size: int  # number of outputs of an example

    def residuals(self) -> tf.Tensor:
        """r, `(examples, outputs)`."""
        return self.root.residuals(self.slopes)


def read_outputs(
    step: Step,
    call: ForwardCall,
    readings: Sequence[Reading],
    slopes: Sequence[Sequence[tf.Tensor | None]],
    dtype: tf.DType,
) -> list[Read]:
    """Finds what each loss of a step reads.

    There are readings of each output of the call, with the slopes of the loss
    at their leaves. The dtype is that of the weights' vectors.
    """
    flat = keras.tree.flatten(call.outputs)
    position = {id(output): i for i, output in enumerate(flat)}
    terms, replicas = step.loss.losses, step.job.topology.replicas
    shares = step.loss.shares or [tf.ones([], tf.float64)] * len(terms)
    reads = []
    for one, share in zip(terms, shares, strict=True):
        output = output_of(one)
        assert isinstance(output, Output)
        place = position[id(output.predictions)]
        # The logits, if there are any, come before the output.
        behind, here = readings[place].leaves, slopes[place]
        chosen = next(i for i, slope in enumerate(here) if slope is not None)
        is_logits = chosen < len(behind) - 1
        size = math.prod(behind[chosen].shape[1:])
        slope = tf.reshape(tf.cast(here[chosen], dtype), [-1, size])
        scale = scale_of(one, share, replicas)
        values = tf.cast(behind[chosen], dtype)
        root = root_of(output, values, is_logits, scale)
        reads.append(Read(place, is_logits, behind[chosen], slope, root, size))
    return reads


def scale_of(terms: LossTerms, share: tf.Tensor, replicas: int) -> tf.Tensor:
    """The factor of its terms' sum in a replica's loss, see `weigh_loss`."""
    if terms.summed:
        return terms.unit
    return tf.math.divide_no_nan(terms.unit * share, replicas * terms.count)


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
