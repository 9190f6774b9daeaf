"""What a model's outputs say of the labels: the distributions behind losses.

A loss is the negative log-likelihood of the labels under a distribution whose
parameters are the outputs. The Fisher matrix of a term at its outputs, which
for all of these is the Hessian there where the outputs are natural parameters
(logits, means), is the covariance of the gradient of that for labels drawn
from the distribution itself (Martens & Grosse, 2015, section 5).
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

# Keras adds it to rates; and a probability or rate of 0 is never divided by.
_EPSILON = 1e-7


class Distribution(abc.ABC):
    """A predictive distribution of labels, given the outputs of a model.

    Outputs are `(..., n)`, float32 or float64, with the `n` outputs of a term
    last.

    Attributes:
        categorical: Whether a label is one of several classes. For these the
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
        """The Fisher matrices' diagonals, of the shape of the outputs."""

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


class Bernoulli(Independent):
    """Zeros and ones.

    Args:
        from_logits: Whether the outputs are logits, not probabilities of 1.
    """

    def __init__(self, from_logits: bool = False) -> None:
        self.from_logits = from_logits

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


class Categorical(Distribution):
    """One of several classes.

    Args:
        from_logits: Whether the outputs are logits, not probabilities. These
            need not add up to 1.
    """

    categorical = True

    def __init__(self, from_logits: bool = False) -> None:
        self.from_logits = from_logits

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

    What is drawn is not the counts, but the signs of the gradients that they
    make: with the same mean, 0, and variance. XLA draws no counts, and where
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


class Chosen(Distribution):
    """One of several distributions, as a tensor says.

    Args:
        among: The distributions.
        index: Which of them it is, an int32 scalar; their number is none, for
            which the normal distribution stands.
    """

    def __init__(self, among: Sequence[Distribution], index: tf.Tensor) -> None:
        self.among = tuple(among)
        self.index = index
        self.categorical = all(one.categorical for one in among)

    @property
    def is_known(self) -> tf.Tensor:
        """Whether it is any of them, a scalar bool."""
        return self.index < len(self.among)

    @property
    def is_categorical(self) -> tf.Tensor:
        """Whether it is one of classes, a scalar bool."""
        flags = [one.categorical for one in self.among]
        return tf.gather(tf.constant([*flags, False]), self.index)

    def map(
        self, function: Callable[[Distribution], Distribution]
    ) -> "Distribution":
        """The same with other distributions in the place of each."""
        return chosen([function(one) for one in self.among], self.index)

    @override
    def sample(self, outputs: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return self._made(lambda one: one.sample(outputs, seed))

    @override
    def column(self, outputs: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        return self._made(lambda one: one.column(outputs, index))

    def _made(self, make: Callable[[Any], tf.Tensor]) -> tf.Tensor:
        """What the one that it is makes."""
        every = [*self.among, Normal()]
        return tf.switch_case(
            self.index, [functools.partial(make, one) for one in every]
        )


class ChosenIndependent(Chosen, Independent):
    """The same of labels that are independent whichever it is."""

    @override
    def fisher(self, outputs: tf.Tensor) -> tf.Tensor:
        return self._made(lambda one: one.fisher(outputs))


def chosen(among: Sequence[Distribution], index: tf.Tensor) -> Chosen:
    """Returns the distribution that is one of several, see `Chosen`."""
    independent = all(isinstance(one, Independent) for one in among)
    return (ChosenIndependent if independent else Chosen)(among, index)
