"""Predictive distributions of labels, and the losses that belong to them.

A loss is the negative log-likelihood of the labels under a distribution whose
parameters are the outputs. The Fisher matrix of a term at its outputs, which
for all of these is the Hessian there where the outputs are natural parameters
(logits, means), is the covariance of the gradient of that for labels drawn
from the distribution itself (Martens & Grosse, 2015, section 5).
"""

import abc
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import Pullback
from tfkfac.compat.losses import LossCall
from tfkfac.loss import recognition
from tfkfac.loss import terms as loss_terms
from tfkfac.loss.terms import LossTerms

# Keras adds it to rates; and a probability or rate of 0 is never divided by.
_EPSILON = 1e-7


class Distribution(abc.ABC):
    """A predictive distribution of labels, given the outputs of a model.

    Outputs are `(..., n)`, float32 or float64, with the `n` outputs of a term
    last.

    Attributes:
        categorical: True if a label is one of several classes. For these the
            empirical Fisher matrix is the default.
    """

    categorical: bool = False

    @abc.abstractmethod
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Draws labels and returns the gradient that they make.

        Args:
            outputs: The outputs.
            seed: int64 `(2,)`, for the stateless functions of `tf.random`.

        Returns:
            The gradient at the outputs of the negative log-likelihood of
            labels drawn from the distribution, of the shape of the outputs.
        """

    @abc.abstractmethod
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        """A column of a square root of each term's Fisher matrix.

        Args:
            outputs: The outputs.
            index: Number of the column, an int32 scalar below `n`.

        Returns:
            The columns `b`, of the shape of the outputs. Of a term they come
            to `sum_index b b^T`, its Fisher matrix at the outputs.
        """


class Independent(Distribution):
    """Labels that are independent of each other, one for each output."""

    @abc.abstractmethod
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        """Diagonals of the Fisher matrices, of the shape of the outputs."""

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        unit = tf.one_hot(index, tf.shape(outputs)[-1], dtype=outputs.dtype)
        return unit * tf.sqrt(self.fisher(outputs))


class Normal(Independent):
    """Normal distribution with the outputs as means and variance 1."""

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
    """Zeros and ones.

    Args:
        from_logits: True if the outputs are logits, not probabilities of 1.
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
    """One of several classes.

    Args:
        from_logits: True if the outputs are logits, not probabilities. These
            need not add up to 1.
    """

    categorical = True
    from_logits: bool = False

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        # The largest of logits with Gumbel's noise. (There is a function for
        # it, which XLA does not compile.)
        draws = tf.random.stateless_uniform(
            tf.shape(outputs), seed, _EPSILON, 1, outputs.dtype
        )
        logits = outputs if self.from_logits else tf.math.log(outputs)
        noisy = logits - tf.math.log(-tf.math.log(draws))
        return self._gradient(outputs, tf.argmax(noisy, -1))

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        p = self._probabilities(outputs)[..., index, None]
        classes = tf.fill(tf.shape(outputs)[:-1], index)
        return tf.sqrt(p) * self._gradient(outputs, classes)

    def _probabilities(self, outputs: tf.Tensor) -> tf.Tensor:
        if self.from_logits:
            return tf.nn.softmax(outputs)
        return outputs / tf.reduce_sum(outputs, -1, keepdims=True)

    def _gradient(self, outputs: tf.Tensor, classes: tf.Tensor) -> tf.Tensor:
        """Gradient of the negative log-likelihood of classes."""
        size = tf.shape(outputs)[-1]
        hot = tf.one_hot(classes, size, dtype=outputs.dtype)
        if self.from_logits:
            return tf.nn.softmax(outputs) - hot
        total = tf.reduce_sum(outputs, -1, keepdims=True)
        return 1 / total - tf.math.divide_no_nan(hot, outputs)


class Poisson(Independent):
    """Counts, with the outputs as their mean numbers.

    Not the counts are drawn, but the signs of the gradients that they make:
    with the same mean, 0, and variance. XLA draws no counts, and where
    they are mostly 0 their gradients vary wildly.
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


class OneOf(Distribution):
    """One of several distributions, by an index known in the step only.

    That is an int32 scalar; their number is none of them, for which the normal
    distribution stands.
    """

    def __init__(self, among: Sequence[Distribution], index: tf.Tensor) -> None:
        self.among = tuple(among)
        self.index = index
        self.categorical = all(each.categorical for each in among)

    @property
    def is_known(self) -> tf.Tensor:
        """True if it is any of them, a scalar bool."""
        return self.index < len(self.among)

    @property
    def is_categorical(self) -> tf.Tensor:
        """True if it is one of classes, a scalar bool."""
        flags = [each.categorical for each in self.among]
        return tf.gather(tf.constant([*flags, False]), self.index)

    def map(
        self, function: Callable[[Distribution], Distribution]
    ) -> "Distribution":
        """Maps each of the distributions to another."""
        return one_of([function(each) for each in self.among], self.index)

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return self._switch(lambda it: it.sample(outputs, seed))

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return self._switch(lambda it: it.column(outputs, index))

    def _switch(self, make: Callable[[Any], tf.Tensor]) -> tf.Tensor:
        """Calls a function with the distribution of the index."""
        every = [*self.among, Normal()]
        return tf.switch_case(
            self.index, [functools.partial(make, each) for each in every]
        )


class OneOfIndependent(OneOf, Independent):
    """One of several distributions of independent labels."""

    @override
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._switch(lambda it: it.fisher(outputs))


def one_of(among: Sequence[Distribution], index: tf.Tensor) -> OneOf:
    """`OneOf` some distributions, independent if all of them are."""
    independent = all(isinstance(each, Independent) for each in among)
    return (OneOfIndependent if independent else OneOf)(among, index)


Maker = Callable[[keras.losses.Loss], Distribution | None]

_NAMED: dict[str | None, Distribution] = {
    recognition.NORMAL: Normal(),
    recognition.POISSON: Poisson(),
    recognition.BERNOULLI: Bernoulli(),
    recognition.BERNOULLI_LOGITS: Bernoulli(from_logits=True),
    recognition.CATEGORICAL: Categorical(),
    recognition.CATEGORICAL_LOGITS: Categorical(from_logits=True),
}


# Distributions that users have registered, by class or function.
_registered: dict[Any, Maker] = {}


def distribution_of(terms: LossTerms) -> Distribution | None:
    """Distribution of a loss, None if it is not known to have one."""
    if terms.call is None:
        return None
    make = loss_terms.declared(_registered, terms.call.loss)
    if make is not None:
        return make(terms.call.loss)
    if terms.verdict is not None:
        among = [_NAMED[name] for name in terms.verdict.names]
        return one_of(among, terms.verdict.index)
    return _NAMED.get(terms.likelihood)


def register_distribution(
    loss: type[keras.losses.Loss] | Callable[..., Any],
    distribution: Distribution | Maker,
    *,
    unit: float | None = None,
    features: str = "sum",
) -> None:
    """Declares the distribution that a loss is the likelihood of.

    With it, the Fisher matrix can be that of labels drawn from the model's own
    predictions (`KFAC(fisher="monte_carlo")`) or the exact one ("type2").
    Keras' mean squared error, binary, categorical and sparse categorical
    cross-entropy, Kullback-Leibler divergence and Poisson loss are known, and
    so is a loss that is a multiple of one of the first four: a function of
    yours that sums squares, say.

    `tfkfac.fisher` has the distributions `Normal`, `Bernoulli`, `Categorical`
    and `Poisson`, and `Distribution` and `Independent` to write others. For
    example, labels whose logarithm has a standard deviation of 0.1 around the
    outputs:

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
        loss: A class of losses, without its subclasses, or the function that
            is passed to `compile`. Its outputs are the last axis of one
            tensor of predictions.
        distribution: The distribution; or a function that takes the loss, a
            `keras.losses.Loss`, and returns its distribution, or None if it
            has none.
        unit: Ratio of the loss of a term to the negative log-likelihood of its
            labels. None is 1 for a loss that is not a known one or a multiple
            of it.
        features: With a `unit`, "sum" if the loss of a term is the sum over
            its outputs, or "mean", as Keras' `mse` with the unit 2.

    Raises:
        TypeError: If `loss` or `distribution` is of the wrong type.
        ValueError: If `unit` or `features` is not allowed.
    """
    is_class = inspect.isclass(loss) and issubclass(loss, keras.losses.Loss)
    if not is_class and not inspect.isroutine(loss):
        raise TypeError(
            "Argument `loss` must be a subclass of `keras.losses.Loss` or a "
            f"function. Received: loss={loss!r}"
        )
    made = isinstance(distribution, Distribution)
    if not made and not inspect.isroutine(distribution):
        raise TypeError(
            "Argument `distribution` must be a `tfkfac.fisher.Distribution` "
            "or a function of the loss that returns one. Received: "
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
    loss_terms.declare(loss, unit, features == "mean")
    if isinstance(distribution, Distribution):
        known = distribution
        _registered[loss] = lambda _: known
    else:
        _registered[loss] = distribution


# Makes a tensor of the shape of some outputs, of these and their distribution.
OutputGradient = Callable[[Distribution, tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Output:
    """The predictions that one loss was computed from, and their labels'.

    They are `(examples, positions..., outputs of a term)`. Weights, of terms,
    can be multiplied with them; None if all are 1.
    """

    predictions: tf.Tensor
    distribution: Distribution
    weights: tf.Tensor | None

    def gradient(
        self, make: OutputGradient, weight: tf.Tensor | None
    ) -> tf.Tensor:
        """A gradient at the predictions, or a column of the root there.

        The Fisher matrix of a term counts by its weight, and by that of the
        whole loss (None is 1), so its root is multiplied by the root of these.
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
        """Column of a root of the Fisher matrix of whole examples."""
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

        They may be of classes alone only if that is asked for.
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
    """The outputs of the losses of a step, or why there are none."""
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
