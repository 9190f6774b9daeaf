"""Predictive distributions of labels, and their assignment to losses.

The loss of a term is the negative log-likelihood of its labels under a
distribution whose parameters are the model outputs. The Fisher matrix of the
term at the outputs is the covariance of the loss gradient for sampled labels
(Martens & Grosse, 2015, section 5). It equals the Hessian of the loss if the
outputs are natural parameters (logits, means).
"""

import abc
import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import Pullback
from tfkfac.loss import recognition
from tfkfac.loss import terms as loss_terms
from tfkfac.loss.terms import LossTerms

# Keras' epsilon for Poisson rates; also the minimum of uniform samples.
_EPSILON = 1e-7


class Distribution(abc.ABC):
    """Predictive distribution of labels, given the outputs of a model.

    Outputs have shape `(..., n)` and dtype float32 or float64, where `n` is
    the number of outputs of a loss term.

    Attributes:
        categorical: True if labels are classes. The default Fisher matrix is
            then empirical. Defaults to False.
    """

    categorical: bool = False

    @abc.abstractmethod
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Sample labels and return the gradient of their loss.

        Args:
            outputs: Model outputs `(..., n)`.
            seed: int64 `(2,)`, for the stateless functions of `tf.random`.

        Returns:
            Gradient of the negative log-likelihood of sampled labels with
            respect to the outputs, `(..., n)`.
        """

    @abc.abstractmethod
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """Column of a square root of each term's Fisher matrix.

        Args:
            outputs: Model outputs `(..., n)`.
            index: Index of the column, an int32 scalar below `n`.

        Returns:
            Columns `b` of shape `(..., n)`. For each term, the sum of `b b^T`
            over all `n` columns is the Fisher matrix at the outputs.
        """


class Independent(Distribution):
    """Distribution of independent labels, one for each output.

    A subclass implements `sample` and `fisher`.
    """

    @abc.abstractmethod
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        """Diagonals of the Fisher matrices, `(..., n)`."""

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        unit = tf.one_hot(index, tf.shape(outputs)[-1], dtype=outputs.dtype)
        return unit * tf.sqrt(self.fisher(outputs))


class Normal(Independent):
    """Normal distribution with means `outputs` and variance 1."""

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.random.stateless_normal(
            tf.shape(outputs), seed, dtype=outputs.dtype
        )

    @override
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        return tf.ones_like(outputs)


@dataclasses.dataclass(frozen=True)
class Bernoulli(Independent):
    """Bernoulli distribution of labels 0 and 1.

    Args:
        from_logits: True if the outputs are logits, False if they are
            probabilities of label 1. Defaults to False.
    """

    from_logits: bool = False

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        p = tf.sigmoid(outputs) if self.from_logits else outputs
        draws = tf.random.stateless_uniform(tf.shape(p), seed, dtype=p.dtype)
        labels = tf.cast(draws < p, p.dtype)
        if self.from_logits:
            return p - labels
        return tf.math.divide_no_nan(1 - labels, 1 - p) - (
            tf.math.divide_no_nan(labels, p)
        )

    @override
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        if self.from_logits:
            p = tf.sigmoid(outputs)
            return p * (1 - p)
        return tf.math.divide_no_nan(
            tf.ones_like(outputs), outputs * (1 - outputs)
        )


@dataclasses.dataclass(frozen=True)
class Categorical(Distribution):
    """Categorical distribution: the label is one of `n` classes.

    Args:
        from_logits: True if the outputs are logits, False if they are
            probabilities, which are normalised to the sum 1. Defaults to
            False.
    """

    categorical = True
    from_logits: bool = False

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        # Use the Gumbel-max trick: XLA cannot compile `stateless_categorical`.
        draws = tf.random.stateless_uniform(
            tf.shape(outputs), seed, _EPSILON, 1, outputs.dtype
        )
        logits = outputs if self.from_logits else tf.math.log(outputs)
        noisy = logits - tf.math.log(-tf.math.log(draws))
        return self._gradient(outputs, tf.argmax(noisy, -1))

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        if self.from_logits:
            p = tf.nn.softmax(outputs)
        else:
            p = outputs / tf.reduce_sum(outputs, -1, keepdims=True)
        classes = tf.fill(tf.shape(outputs)[:-1], index)
        return tf.sqrt(p[..., index, None]) * self._gradient(outputs, classes)

    def _gradient(self, outputs: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        """Gradient of the negative log-likelihood of given classes."""
        hot = tf.one_hot(classes, tf.shape(outputs)[-1], dtype=outputs.dtype)
        if self.from_logits:
            return tf.nn.softmax(outputs) - hot
        total = tf.reduce_sum(outputs, -1, keepdims=True)
        return 1 / total - tf.math.divide_no_nan(hot, outputs)


class Poisson(Independent):
    """Poisson distribution of counts, with means `outputs`.

    `sample` returns gradients with random signs and the exact mean 0 and
    variance instead of sampling counts. XLA cannot sample counts, and for
    small means the gradients of sampled counts have heavy tails.
    """

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        draws = tf.random.stateless_uniform(
            tf.shape(outputs), seed, -1, 1, outputs.dtype
        )
        return tf.sign(draws) * tf.sqrt(self.fisher(outputs))

    @override
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        return 1 / (tf.maximum(outputs, 0) + _EPSILON)


DistributionFunction = Callable[[keras.losses.Loss], Distribution | None]

_DISTRIBUTIONS: dict[str | None, Distribution] = {
    recognition.NORMAL: Normal(),
    recognition.RESIDUALS: Normal(),
    recognition.POISSON: Poisson(),
    recognition.BERNOULLI: Bernoulli(),
    recognition.BERNOULLI_LOGITS: Bernoulli(from_logits=True),
    recognition.CATEGORICAL: Categorical(),
    recognition.CATEGORICAL_LOGITS: Categorical(from_logits=True),
}


# Distributions registered by the user, by loss class or loss function.
_registered: dict[Any, DistributionFunction] = {}


def register_distribution(
    loss: type[keras.losses.Loss] | Callable[..., Any],
    distribution: Distribution | DistributionFunction,
    *,
    unit: float | None = None,
    features: str = "sum",
) -> None:
    """Register the predictive distribution of a loss.

    The loss is the negative log-likelihood of this distribution.
    `KFAC(fisher="monte_carlo")` and `KFAC(fisher="type2")` need it. It is
    known for Keras' mean squared error, binary, categorical and sparse
    categorical cross-entropy, Kullback-Leibler divergence and Poisson loss.
    Custom functions that compute a multiple of one of the first four losses,
    plus a constant, are recognised, such as a sum of squares. They are compared
    once, on synthetic labels and outputs, and must have no effects other than
    writing variables. `summary()` of the optimizer shows the result.

    `tfkfac.fisher` has the distributions `Normal`, `Bernoulli`, `Categorical`
    and `Poisson`, and the base classes `Distribution` and `Independent` for
    others. For example, labels whose logarithm is normally distributed around
    the outputs with a standard deviation of 0.1:

    ```python
    class LogNormal(tfkfac.fisher.Independent):
        def sample(self, outputs, seed):
            return 10 * tf.random.stateless_normal(tf.shape(outputs), seed)

        def fisher(self, outputs):
            return tf.fill(tf.shape(outputs), 100.0)

    def log_squares(y_true, y_pred):
        return 50 * tf.reduce_sum((tf.math.log(y_true) - y_pred) ** 2, -1)

    tfkfac.register_distribution(log_squares, LogNormal())
    ```

    Args:
        loss: A loss class (subclasses excluded), or the loss function that is
            passed to `compile`. The last axis of its predictions holds the
            outputs of a term.
        distribution: The distribution; or a function from the loss, a
            `keras.losses.Loss`, to its distribution or None.
        unit: Loss of a term divided by the negative log-likelihood of its
            labels; positive. With a `unit`, spectral steps do not follow the
            standard deviation of the labels. Defaults to None, for 1 or the
            recognised multiple of a known loss.
        features: With a `unit`, "sum" if the loss of a term is the sum over
            its outputs, "mean" if it is their mean. Keras' `mse` has "mean"
            and the unit 2. Defaults to "sum".

    Raises:
        TypeError: If `loss` or `distribution` has the wrong type.
        ValueError: If `unit` or `features` is invalid.
    """
    is_class = inspect.isclass(loss) and issubclass(loss, keras.losses.Loss)
    if not is_class and not inspect.isroutine(loss):
        raise TypeError(
            "Argument `loss` must be a subclass of `keras.losses.Loss` or a "
            f"function. Received: loss={loss!r}"
        )
    is_distribution = isinstance(distribution, Distribution)
    if not is_distribution and not inspect.isroutine(distribution):
        raise TypeError(
            "Argument `distribution` must be a `tfkfac.fisher.Distribution` "
            "or a function from the loss to its distribution. Received: "
            f"distribution={distribution!r}"
        )
    if features not in ("sum", "mean"):
        raise ValueError(
            'Argument `features` must be "sum" or "mean". '
            f"Received: features={features!r}"
        )
    if unit is not None and not unit > 0:
        raise ValueError(
            f"Argument `unit` must be positive. Received: unit={unit!r}"
        )
    loss_terms.REGISTERED.add(loss)
    if unit is not None:  # None keeps the built-in or recognized unit, else 1
        known = loss_terms.Known(None, unit, features == "mean")
        loss_terms.KNOWN_LOSSES[loss] = known
    if isinstance(distribution, Distribution):
        constant = distribution
        _registered[loss] = lambda _: constant
    else:
        _registered[loss] = distribution


@dataclasses.dataclass(frozen=True)
class Output:
    """Predictions that were passed to a loss, and their distribution.

    Predictions are `(examples, positions..., outputs of a term)`. The weights
    of the terms broadcast to the predictions; None if all are 1.
    """

    predictions: tf.Tensor
    distribution: Distribution
    weights: tf.Tensor | None

    def gradient(
        self,
        compute: Callable[[Distribution, tf.Tensor], tf.Tensor],
        weight: tf.Tensor | None,
    ) -> tf.Tensor:
        """Call `compute(distribution, predictions)`, and apply the weights.

        Weights of the terms and the loss multiply the Fisher matrix, so the
        result is multiplied by their square root.
        """
        outputs = self.predictions
        dtype = tf.float64 if outputs.dtype == tf.float64 else tf.float32
        # Add an axis of one output to predictions of shape (examples,).
        is_flat = outputs.shape.rank == 1
        parameters = tf.cast(outputs[:, None] if is_flat else outputs, dtype)
        result = compute(self.distribution, parameters)
        result = result[:, 0] if is_flat else result
        for factor in (self.weights, weight):
            if factor is not None:
                result *= tf.sqrt(tf.abs(tf.cast(factor, dtype)))
        return tf.cast(result, outputs.dtype)

    def sample(self, seed: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        """Gradient of the loss for sampled labels."""
        return self.gradient(lambda d, z: d.sample(z, seed), weight)

    def column(self, index: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
        """Column of a root of each example's block-diagonal Fisher matrix."""
        *positions, size = self.predictions.shape[1:].as_list() or [1]
        at_position = tf.equal(tf.range(math.prod(positions)), index // size)
        at_position = tf.reshape(at_position, [1, *positions, 1])

        def compute(d: Distribution, outputs: tf.Tensor) -> tf.Tensor:
            column = d.column(outputs, index % size)
            return tf.where(at_position, column, tf.zeros_like(column))

        return self.gradient(compute, weight)

    @property
    def size(self) -> int | None:
        """Number of outputs of an example; None if it is not static."""
        shape = self.predictions.shape[1:]
        return math.prod(shape) if shape.is_fully_defined() else None


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Outputs of all losses of a step, and the backward pass to the layers."""

    outputs: tuple[Output, ...]
    pullback: Pullback


def find_likelihood(
    losses: Sequence[LossTerms], calls: Sequence[Pullback]
) -> Likelihood | str:
    """Return the `Likelihood` of a step, or the reason why it is unknown."""
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
    return "the loss is not computed on the outputs of a call of the model"


def output_of(
    terms: LossTerms, fallback: Distribution | None = None
) -> Output | str:
    """Return the `Output` of a loss, or why its distribution is unknown.

    A custom loss with an unknown distribution uses `fallback`.
    """
    if terms.call is None:
        return "the distribution of loss '' is not known"
    loss = terms.call.loss
    registered = loss_terms.look_up(_registered, loss)
    if registered is not None:
        distribution = registered(loss)
    else:
        distribution = _DISTRIBUTIONS.get(terms.likelihood.name)
    if distribution is None and loss_terms.needs_recognition(loss):
        distribution = fallback
    if distribution is None:
        return f"the distribution of loss '{loss.name}' is not known"
    reduction, y_pred = terms.call.reduction, terms.call.y_pred
    assert reduction is not None
    weights = reduction.term_weights()
    if weights is not None:
        missing = y_pred.shape.rank - reduction.values.shape.rank
        shape = tf.concat([tf.shape(weights), [1] * missing], 0)
        weights = tf.reshape(weights, shape)
    return Output(y_pred, distribution, weights)
