"""A loss held against the likelihoods that it may be a multiple of.

Nobody runs it for that: the batch of each step is the trial. Of every
likelihood that labels and predictions could be of, the gradient at the
outputs is compared with that of the loss. The loss is the likelihood times
`u = sum(values) / sum(nll)` if both, values and gradients of all terms, are
(to 0.1 %). `u` is found anew in each step: a weight of the loss may be in a
variable. And a loss that is a likelihood for some residuals alone, as
Huber's, is one in the steps that have no others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfkfac.compat.losses import Leaves, LossCall, Reduction

# Of the predictions: means, probabilities or rates; or logits, if they are.
NORMAL, POISSON = "normal", "poisson"
BERNOULLI, CATEGORICAL = "bernoulli", "categorical"
BERNOULLI_LOGITS = "bernoulli logits"
CATEGORICAL_LOGITS = "categorical logits"
LOGITS = {BERNOULLI: BERNOULLI_LOGITS, CATEGORICAL: CATEGORICAL_LOGITS}

_TOLERANCE = 1e-3
# Errors of probabilities in float32, and what Keras clips them at.
_ROUNDING, _EPSILON = 1e-6, 1e-7


class Verdict(NamedTuple):
    """What all replicas say of a loss.

    Attributes:
        names: The likelihoods that it could be of.
        index: Which of them it is, an int32 scalar; their number if none.
        unit: What it is of that; 1 if it is none.
        is_counted: Scalar bool, whether users want to know; False for a loss
            that is not finite.
    """

    names: tuple[str, ...]
    index: tf.Tensor
    unit: tf.Tensor
    is_counted: tf.Tensor

    @property
    def is_known(self) -> tf.Tensor:
        """Whether it is any of them, a scalar bool."""
        return self.index < len(self.names)


class Recognition(NamedTuple):
    """What one replica's batch says of a loss.

    Attributes:
        names: The likelihoods that it could be of.
        sums: Of each of them what replicas add up, float64 `(names, 7)`.
        is_reported: Whether users want to know that it is none of them.
    """

    names: tuple[str, ...]
    sums: tf.Tensor
    is_reported: bool = True

    def times(self, factor: tf.Tensor) -> "Recognition":
        """That of the loss times a number."""
        powers = tf.constant([0, 1, 0, 2, 1, 0, 0], tf.float64)
        return self._replace(sums=self.sums * tf.pow(factor, powers))

    def verdict(self, sums: tf.Tensor) -> Verdict:
        """Decides.

        Args:
            sums: Those of all replicas, added up.
        """
        wrong, product, square, spread, values, nll, floor = tf.unstack(
            sums, axis=1
        )
        unit = tf.math.divide_no_nan(product, square)
        expected = unit * nll
        room = _TOLERANCE * tf.abs(expected) + unit * floor
        # Replicas have found the same, each by itself.
        varied = spread - tf.math.divide_no_nan(product**2, square)
        alike = varied <= _TOLERANCE**2 * spread
        fits = (wrong == 0) & alike & (tf.abs(values - expected) <= room)
        nothing = (values == 0) & (nll == 0) & (product == 0)
        fits = nothing | (fits & (unit > 0) & tf.math.is_finite(unit))
        number = len(self.names)
        places = tf.where(fits, tf.range(number), number)
        index = tf.reduce_min(places)
        unit = tf.where(nothing, tf.ones_like(unit), unit)
        found = tf.concat([unit, tf.ones([1], unit.dtype)], 0)
        return Verdict(
            self.names,
            index,
            tf.gather(found, index),
            tf.math.is_finite(values[0]) & self.is_reported,
        )


class _Comparison(NamedTuple):
    """A likelihood beside the loss; all but `nll` `(terms..., outputs)`.

    Attributes:
        nll: The negative log-likelihoods of the terms, `(terms...)`.
        residuals: Mean less label: the gradient of a likelihood at its
            natural parameters.
        slopes: The gradient of the loss there.
        is_discrete: Whether residuals are of probabilities.
    """

    nll: tf.Tensor
    residuals: tf.Tensor
    slopes: tf.Tensor
    is_discrete: bool = True


def _normal(y: tf.Tensor, z: tf.Tensor, g: tf.Tensor) -> _Comparison:
    r = z - y
    return _Comparison(tf.reduce_sum(tf.square(r), -1) / 2, r, g, False)


def _bernoulli_logits(y: tf.Tensor, z: tf.Tensor, g: tf.Tensor) -> _Comparison:
    nll = tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=z)
    return _Comparison(tf.reduce_sum(nll, -1), tf.sigmoid(z) - y, g)


def _bernoulli(y: tf.Tensor, z: tf.Tensor, g: tf.Tensor) -> _Comparison:
    p = tf.clip_by_value(z, _EPSILON, 1 - _EPSILON)
    nll = -y * tf.math.log(p) - (1 - y) * tf.math.log(1 - p)
    return _Comparison(tf.reduce_sum(nll, -1), z - y, g * z * (1 - z))


def _categorical_logits(
    y: tf.Tensor, z: tf.Tensor, g: tf.Tensor
) -> _Comparison:
    mass = tf.reduce_sum(y, -1, keepdims=True)
    nll = -tf.reduce_sum(y * tf.nn.log_softmax(z), -1)
    return _Comparison(nll, tf.nn.softmax(z) * mass - y, g)


def _categorical(y: tf.Tensor, z: tf.Tensor, g: tf.Tensor) -> _Comparison:
    """Of probabilities, which the loss may or may not divide by their sum."""
    mass = tf.reduce_sum(y, -1, keepdims=True)
    p = tf.math.divide_no_nan(z, tf.reduce_sum(z, -1, keepdims=True))
    clipped = tf.clip_by_value(p, _EPSILON, 1 - _EPSILON)
    nll = -tf.reduce_sum(y * tf.math.log(clipped), -1)
    slopes = z * g - p * tf.reduce_sum(z * g, -1, keepdims=True)
    return _Comparison(nll, p * mass - y, slopes)


# Of labels, outputs and the gradient of the loss at these.
_COMPARISONS: dict[
    str, Callable[[tf.Tensor, tf.Tensor, tf.Tensor], _Comparison]
] = {
    NORMAL: _normal,
    BERNOULLI_LOGITS: _bernoulli_logits,
    BERNOULLI: _bernoulli,
    CATEGORICAL_LOGITS: _categorical_logits,
    CATEGORICAL: _categorical,
}
_OF_CLASSES = (CATEGORICAL_LOGITS, CATEGORICAL)


class _Labels(NamedTuple):
    """Labels of some outputs.

    Attributes:
        values: The labels, of the shape of the outputs or of their terms.
        are_classes: Whether they are numbers of classes.
        fit: Scalar bool, whether their shape is what it must be; they are 0
            where it is not.
    """

    values: tf.Tensor
    are_classes: bool
    fit: tf.Tensor


def recognise(
    call: LossCall, leaves: Leaves, reduction: Reduction
) -> Recognition | None:
    """Compares a loss with the likelihoods of labels of its shapes.

    Args:
        call: A call of the loss.
        leaves: What it has read.
        reduction: How its values became a number.

    Returns:
        What this batch says; None if no likelihood can be meant.
    """
    try:
        at_output, at_logits = leaves.slopes(reduction.values)
    except LookupError:  # TensorFlow has no gradient of an operation of it
        return None
    if (at_output is None) == (at_logits is None):
        return None
    if at_logits is None:
        read, slopes = leaves.output, at_output
    else:
        read, slopes = leaves.logits, at_logits
    by_logits = at_logits is not None
    labels = _labels_of(call.y_true, read)
    if labels is None:
        return None
    names = _possible(labels.are_classes, by_logits, leaves.logits is not None)
    wide = tf.float64 if read.dtype == tf.float64 else tf.float32
    z, g = (
        tf.cast(tf.stop_gradient(t), wide)
        for t in (read, tf.convert_to_tensor(slopes))
    )
    y = labels.values
    if labels.are_classes:
        y = tf.one_hot(tf.cast(y, tf.int32), tf.shape(z)[-1], dtype=wide)
    y = tf.cast(tf.stop_gradient(y), wide)
    if z.shape.rank == 1:
        y, z, g = y[:, None], z[:, None], g[:, None]
    mask = _mask_of(reduction)
    values = tf.stop_gradient(_masked(reduction.values, mask))
    sums = [
        _sums(_COMPARISONS[name](y, z, g), values, mask, labels.fit)
        for name in names
    ]
    if by_logits:  # those of the probabilities that the model returns
        plain = {logits: name for name, logits in LOGITS.items()}
        names = [plain[name] for name in names]
    return Recognition(tuple(names), tf.stack(sums))


def _possible(
    are_classes: bool, by_logits: bool, have_logits: bool
) -> list[str]:
    """The likelihoods that a loss may be of, by what it has read."""
    names: list[str] = list(_OF_CLASSES if are_classes else _COMPARISONS)
    if by_logits:
        return [name for name in names if name in LOGITS.values()]
    if have_logits:
        return [name for name in names if name not in LOGITS.values()]
    return names


def _labels_of(y_true: Any, outputs: tf.Tensor) -> _Labels | None:
    """Labels in the shape of outputs, or of their terms if they are classes."""
    if not isinstance(y_true, (tf.Tensor, tf.Variable, np.ndarray)):
        return None
    y = tf.convert_to_tensor(y_true)
    known = y.dtype.is_floating or y.dtype.is_integer or y.dtype.is_bool
    if not known or y.shape.rank is None:
        return None
    rank, shape = outputs.shape.rank, outputs.shape
    more = y.shape.rank - rank
    are_classes = False
    if more == 1 and y.shape[-1] == 1:
        y = y[..., 0]
    elif more == -1 and shape[-1] == 1:
        y = y[..., None]
    elif more == -1:
        are_classes = True
    elif more == 0 and y.shape[-1] == 1 and shape[-1] not in (1, None):
        y, are_classes = y[..., 0], True
    elif more != 0:
        return None
    wanted = shape[:-1] if are_classes else shape
    if not y.shape.is_compatible_with(wanted):
        return None
    if y.shape.is_fully_defined() and wanted.is_fully_defined():
        return _Labels(y, are_classes, tf.constant(True))
    # Where they differ the loss knows what it does, but nothing here may fail.
    there = tf.shape(outputs)[: wanted.rank]
    fit = tf.reduce_all(tf.equal(tf.shape(y), there))
    values = tf.cond(fit, lambda: y, lambda: tf.zeros(there, y.dtype))
    values.set_shape(wanted)
    return _Labels(values, are_classes, fit)


def _mask_of(reduction: Reduction) -> tf.Tensor | None:
    """The mask of the terms, of the shape of their values."""
    values, mask = reduction.values, reduction.mask
    if mask is None or not values.shape.rank or mask.shape.rank is None:
        return None
    if mask.shape.rank == values.shape.rank + 1:
        mask = tf.squeeze(mask, -1)
    return tf.cast(mask, tf.bool)


def _masked(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Values with 0 where a mask, which may have fewer axes, is False."""
    if mask is None:
        return values
    for _ in range(values.shape.rank - mask.shape.rank):
        mask = mask[..., None]
    return tf.where(mask, values, tf.zeros_like(values))


def _sums(
    found: _Comparison,
    values: tf.Tensor,
    mask: tf.Tensor | None,
    fit: tf.Tensor,
) -> tf.Tensor:
    """What replicas add up of one likelihood, see `Recognition`."""
    residuals, slopes = (
        _masked(t, mask) for t in (found.residuals, found.slopes)
    )
    square = _total(tf.square(residuals))
    product = _total(residuals * slopes)
    unit = tf.math.divide_no_nan(product, square)
    u = tf.cast(unit, slopes.dtype)
    count = tf.cast(tf.size(residuals), tf.float64)
    # Of one output, where a term has next to nothing to compare.
    least = tf.ones_like(u)
    if not found.is_discrete:
        least = tf.sqrt(tf.math.divide_no_nan(square, count))
    least = tf.square(10 * _ROUNDING * u * tf.cast(least, u.dtype))
    room = tf.square(_TOLERANCE * u) * tf.reduce_sum(tf.square(residuals), -1)
    off = tf.reduce_sum(tf.square(slopes - u * residuals), -1)
    right = fit & tf.reduce_all(off <= room + least)
    floor = _ROUNDING * count if found.is_discrete else tf.zeros_like(count)
    # The mean over no example is not a number.
    total = tf.where(count > 0, _total(values), tf.zeros_like(count))
    return tf.stack(
        [
            tf.cast(tf.logical_not(right), tf.float64),
            product,
            square,
            unit * product,
            total,
            _total(_masked(found.nll, mask)),
            floor,
        ]
    )


def _total(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of a tensor, float64."""
    rows = tf.reduce_sum(tensor, -1) if tensor.shape.rank else tensor
    return tf.reduce_sum(tf.cast(rows, tf.float64))
