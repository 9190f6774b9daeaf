"""The natural unit of a loss: what it is of a negative log-likelihood.

Damping and the clip are in units of a likelihood's Fisher matrix. Keras' mean
squared error over `D` features is `2/D` of the negative log-likelihood of a
normal distribution, its binary cross-entropy `1/D` of that of `D` Bernoulli
variables. With the loss divided by this unit, the step does not depend on
whether a loss is a mean, a sum or any other multiple of one likelihood.

Keras' own losses are known by their functions, and users may declare theirs.
Any other is tried on random numbers: if it is proportional to one of the
likelihoods, the ratio is its unit. A loss that is not has the unit 1.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import (
    are_probabilities,
    loss_arguments,
    loss_function,
)

Array = np.ndarray[Any, Any]
T = TypeVar("T")
Shape = tuple[int | None, ...]
# Labels, predictions, and the negative log-likelihood of each output.
Sample = tuple[Array, Array, Array]


class Known(NamedTuple):
    """What is known of a loss.

    Attributes:
        likelihood: Name of its likelihood, None if nobody but the user knows.
        factor: Its unit if it is the sum over the outputs of a term.
        is_mean: Whether it is the mean over the outputs instead.
    """

    likelihood: str | None
    factor: float = 1.0
    is_mean: bool = False


# Of the predictions: means, probabilities or rates; or logits, if they are.
NORMAL, POISSON = "normal", "poisson"
BERNOULLI, CATEGORICAL = "bernoulli", "categorical"
BERNOULLI_LOGITS = "bernoulli logits"
CATEGORICAL_LOGITS = "categorical logits"
_LOGITS = {BERNOULLI: BERNOULLI_LOGITS, CATEGORICAL: CATEGORICAL_LOGITS}

# By function, or by class.
_known: dict[Any, Known] = {
    keras.losses.mean_squared_error: Known(NORMAL, 2.0, True),
    keras.losses.binary_crossentropy: Known(BERNOULLI, is_mean=True),
    keras.losses.poisson: Known(POISSON, is_mean=True),
    keras.losses.categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.sparse_categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.kl_divergence: Known(CATEGORICAL),
}
# The likelihoods that a loss is tried for, in the order of `_samples`.
_TRIED = (
    NORMAL,
    BERNOULLI_LOGITS,
    BERNOULLI,
    CATEGORICAL_LOGITS,
    CATEGORICAL,
)
_TRIES = (2, 3)  # batch sizes
_LARGEST = 10**6  # elements of a try
_TOLERANCE = 1e-3


class Unit(NamedTuple):
    """What a loss is of a negative log-likelihood.

    Attributes:
        value: Its value of a term over that of the likelihood.
        summed: Of a loss that returns one number, whether that is a sum over
            the terms and not their mean.
        known: Whether the likelihood is known.
        likelihood: Its name, if it has one.
    """

    value: float | tf.Tensor = 1.0
    summed: bool = False
    known: bool = True
    likelihood: str | None = None


_UNKNOWN = Unit(known=False)


def declare_unit(loss: Any, factor: float, is_mean: bool) -> None:
    """Tells the unit of a loss, see `Known`.

    Args:
        loss: A class of losses, or a function.
        factor: Its unit if it is the sum over the outputs of a term.
        is_mean: Whether it is the mean over the outputs instead.
    """
    _known[loss] = Known(None, factor, is_mean)


def declared(table: Mapping[Any, T], loss: keras.losses.Loss) -> T | None:
    """Looks a loss up by its class, or else by the function that it wraps."""
    return table.get(type(loss), table.get(loss_function(loss)))


def natural_unit(
    loss: keras.losses.Loss, y_true: Any, y_pred: Any, values: tf.Tensor
) -> Unit:
    """Returns the unit of a loss.

    Args:
        loss: The loss.
        y_true: Labels.
        y_pred: Predictions.
        values: What the loss returned for them before its reduction: one
            number for each term, or a single one.
    """
    if not tf.is_tensor(y_pred) or not hasattr(y_true, "shape"):
        return _UNKNOWN
    labels = tf.TensorShape(y_true.shape)
    if not y_pred.shape.rank or labels.rank is None:
        return _UNKNOWN
    known = declared(_known, loss)
    if known is not None:
        features = _features(y_pred, values) if known.is_mean else 1.0
        name = _likelihood(known.likelihood, loss, y_pred)
        return Unit(known.factor / features, likelihood=name)
    unit = _recognise(
        loss, tuple(labels), tuple(y_pred.shape), values.shape.rank
    )
    if unit.known or values.shape.rank:
        return unit
    sums = _doubles(loss, tuple(labels), tuple(y_pred.shape))
    return Unit(summed=sums, known=False)


def _likelihood(
    name: str | None, loss: keras.losses.Loss, y_pred: tf.Tensor
) -> str | None:
    """The likelihood of one of Keras' own losses with its arguments."""
    arguments = loss_arguments(loss)
    if arguments.get("axis", -1) not in (-1, y_pred.shape.rank - 1):
        return None  # its outputs are not the last axis
    if arguments.get("from_logits") and not are_probabilities(y_pred):
        return _LOGITS.get(name or "", name)
    return name


def _features(y_pred: tf.Tensor, values: tf.Tensor) -> float | tf.Tensor:
    """Number of features that a value is the mean over.

    A tensor if it is not known before. It does not depend on the number of
    examples, which may be 0.
    """
    rank = values.shape.rank
    if rank == 0:
        return 1.0  # a mean over the examples of single numbers
    ours, theirs = y_pred.shape[1:], values.shape[1:]
    if ours.is_fully_defined() and theirs.is_fully_defined():
        return max(math.prod(ours) / max(math.prod(theirs), 1), 1.0)
    if y_pred.shape[rank:].is_fully_defined():
        return float(max(math.prod(y_pred.shape[rank:]), 1))
    sizes = [
        tf.cast(tf.reduce_prod(tf.shape(t)[1:]), tf.float64)
        for t in (y_pred, values)
    ]
    return tf.maximum(tf.math.divide_no_nan(*sizes), 1.0)


def _recognise(
    loss: keras.losses.Loss, y_true: Shape, y_pred: Shape, rank: int
) -> Unit:
    """Tries a loss on random numbers."""
    sizes = [size or 2 for size in y_pred[1:]]
    if math.prod(sizes) * max(_TRIES) > _LARGEST:
        return _UNKNOWN
    samples = [_samples(batch, sizes, y_true) for batch in _TRIES]
    for name, *tries in zip(_TRIED, *samples, strict=True):
        try:
            with tf.init_scope():
                found = [_ratio(loss, sample, rank) for sample in tries]
        except Exception:
            continue
        unit = _common_unit(found, [_terms(s, rank) for s in tries])
        if unit is not None:
            return Unit(unit.value, unit.summed, likelihood=name)
    return _UNKNOWN


def _doubles(loss: keras.losses.Loss, y_true: Shape, y_pred: Shape) -> bool:
    """Whether a loss of every example twice is twice as large."""
    sizes = [size or 2 for size in y_pred[1:]]
    if math.prod(sizes) * max(_TRIES) > _LARGEST:
        return False
    for *pair, _ in _samples(_TRIES[0], sizes, y_true):
        once = [tf.constant(y, loss.dtype) for y in pair]
        twice = [tf.concat([y, y], 0) for y in once]
        try:
            with tf.init_scope():
                values = [float(loss.call(*both)) for both in (once, twice)]
        except Exception:
            continue
        return math.isclose(values[1], 2 * values[0], rel_tol=_TOLERANCE)
    return False


def _ratio(loss: keras.losses.Loss, sample: Sample, rank: int) -> float | None:
    """The loss over the likelihood if that is the same for all terms."""
    *pair, likelihood = sample
    labels, predictions = (tf.constant(y, loss.dtype) for y in pair)
    values = np.asarray(loss.call(labels, predictions))
    expected = likelihood.sum(tuple(range(rank, likelihood.ndim)))
    if values.shape != expected.shape or not np.all(expected):
        return None
    ratios = values / expected
    ratio = float(np.mean(ratios))
    same = np.all(np.abs(ratios - ratio) <= _TOLERANCE * abs(ratio))
    return ratio if same and ratio > 0 else None


def _terms(sample: Sample, rank: int) -> int:
    """Number of terms that a single number is about; 1 for one of many."""
    shape = sample[1].shape
    return 1 if rank else math.prod(shape[:-1] if len(shape) > 1 else shape)


def _common_unit(ratios: list[float | None], terms: list[int]) -> Unit | None:
    """The unit that tries with different batch sizes agree on."""
    first, second = ratios
    if first is None or second is None:
        return None
    if math.isclose(first, second, rel_tol=_TOLERANCE):
        return Unit(first, summed=terms[0] > 1)
    first, second = first * terms[0], second * terms[1]
    if math.isclose(first, second, rel_tol=_TOLERANCE):
        return Unit(first)
    return None


def _samples(batch: int, sizes: list[int], y_true: Shape) -> Iterator[Sample]:
    """Labels and predictions of every distribution, with their likelihood."""
    draw = np.random.default_rng(batch)
    shape = (batch, *sizes)
    like_labels = (batch, *(size or 2 for size in y_true[1:]))

    def labelled(labels: Array) -> Array:
        """Labels in the user's shape, where it differs by axes of one."""
        same = labels.size == math.prod(like_labels)
        return labels.reshape(like_labels) if same else labels

    z = draw.normal(size=shape)
    y = draw.normal(size=shape)
    yield labelled(y), z, np.square(y - z) / 2
    p = 1 / (1 + np.exp(-z))
    y = draw.integers(0, 2, shape).astype(float)
    bernoulli = -np.log(np.where(y > 0, p, 1 - p))
    yield labelled(y), z, bernoulli
    yield labelled(y), p, bernoulli
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    classes = draw.integers(0, shape[-1], shape[:-1])
    hot = np.eye(shape[-1])[classes]
    categorical = -hot * np.log(p)
    sparse = math.prod(like_labels) != hot.size
    y = labelled(classes if sparse else hot)
    yield y, z, categorical
    yield y, p, categorical
