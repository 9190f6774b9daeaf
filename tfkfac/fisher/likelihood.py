"""The outputs of a step as parameters of distributions of labels."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfkfac.capture.model_taps import Pullback
from tfkfac.compat.losses import LossCall
from tfkfac.fisher.distributions import Distribution, OneOf, distribution_of
from tfkfac.loss.terms import LossTerms

# Makes a tensor of the shape of some outputs, of these and their distribution.
Maker = Callable[[Distribution, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Output:
    """The predictions that one loss was computed from.

    Attributes:
        predictions: `(examples, positions..., outputs of a term)`.
        distribution: The distribution of the labels.
        weights: The weight of each term, to be multiplied with the
            predictions; None if all are 1.
    """

    predictions: tf.Tensor
    distribution: Distribution
    weights: tf.Tensor | None

    def gradient(self, make: Maker, weight: tf.Tensor | None) -> tf.Tensor:
        """A gradient at the predictions, or a column of the root there.

        The Fisher matrix of a term counts by its weight, so its root is
        multiplied by the root of that.

        Args:
            make: Makes it of the distribution and its outputs.
            weight: That of the whole loss; None is 1.
        """
        outputs = self.predictions
        wide = tf.float64 if outputs.dtype == tf.float64 else tf.float32
        # A single number for each example is a term of one output.
        single = outputs.shape.rank == 1
        parameters = tf.cast(outputs[:, None] if single else outputs, wide)
        result = make(self.distribution, parameters)
        result = result[:, 0] if single else result
        for factor in (self.weights, weight):
            if factor is not None:
                result *= tf.sqrt(tf.abs(tf.cast(factor, wide)))
        return tf.cast(result, outputs.dtype)

    def sample(self, seed: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        """Gradient of labels that are drawn from the distribution."""
        return self.gradient(lambda d, z: d.sample(z, seed), weight)

    def column(self, index: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        """Column of a root of the Fisher matrix of whole examples.

        Args:
            index: Its number, below `size`.
            weight: That of the whole loss; None is 1.
        """
        *positions, size = self.predictions.shape[1:].as_list() or [1]
        here = tf.equal(tf.range(math.prod(positions)), index // size)
        here = tf.reshape(here, [1, *positions, 1])

        def make(distribution: Distribution, outputs: tf.Tensor) -> tf.Tensor:
            column = distribution.column(outputs, index % size)
            return tf.where(here, column, tf.zeros_like(column))

        return self.gradient(make, weight)

    @property
    def size(self) -> int | None:
        """Number of outputs of an example, None if that is not fixed."""
        shape = self.predictions.shape[1:]
        return math.prod(shape) if shape.is_fully_defined() else None


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The outputs of a step, and the way back from them to the layers."""

    outputs: tuple[Output, ...]
    pullback: Pullback

    @property
    def is_categorical(self) -> bool:
        """True if the labels of all outputs are classes."""
        return all(x.distribution.categorical for x in self.outputs)

    def applies(self, to_classes: bool) -> tf.Tensor | None:
        """True in a step whose losses are likelihoods; None if they always are.

        Args:
            to_classes: True if they may be of classes alone.
        """
        own = [output.distribution for output in self.outputs]
        unknown = [d for d in own if isinstance(d, OneOf)]
        if not unknown:
            return None
        known = tf.reduce_all([d.is_known for d in unknown])
        if to_classes or not all(
            d.categorical or isinstance(d, OneOf) for d in own
        ):
            return known
        classes = [d.is_categorical for d in unknown]
        return known & tf.logical_not(tf.reduce_all(classes))


def find_likelihood(
    losses: Sequence[LossTerms], calls: Sequence[Pullback]
) -> Likelihood | str:
    """Finds the distributions of the losses of a step.

    Args:
        losses: The terms of the losses.
        calls: The calls of the model.

    Returns:
        The outputs with their distributions, or the reason why there are none.
    """
    if all(terms.call is None for terms in losses):
        return "no loss was computed by `model.compute_loss`"
    outputs = []
    for terms in losses:
        output = output_of(terms)
        if isinstance(output, str):
            return output
        outputs.append(output)
    for call in reversed(calls):
        if all(call.returned(output.predictions) for output in outputs):
            return Likelihood(tuple(outputs), call)
    return "the loss is not of what a call of the model returned"


def output_of(terms: LossTerms) -> Output | str:
    """The output of one loss, or why its distribution is unknown."""
    distribution = distribution_of(terms)
    if terms.call is None or distribution is None:
        name = "" if terms.call is None else terms.call.loss.name
        return f"the distribution of loss '{name}' is not known"
    weights = _weights(terms.call)
    return Output(terms.call.y_pred, distribution, weights)


def _weights(call: LossCall) -> tf.Tensor | None:
    """Weights of the terms, to multiply predictions with; None if all are 1."""
    reduction, predictions = call.reduction, call.y_pred
    assert reduction is not None
    rank = reduction.values.shape.rank
    given = [w for w in (reduction.weights, reduction.mask) if w is not None]
    if not rank or not given:
        return None
    shape = tf.shape(reduction.values)
    product = tf.ones(shape, tf.float32)
    for weights in given:
        if weights.shape.rank == rank + 1:  # a last axis of one
            weights = tf.squeeze(weights, -1)
        product *= tf.cast(weights, product.dtype)
    missing = predictions.shape.rank - rank
    return tf.reshape(product, tf.concat([shape, [1] * missing], 0))
