"""Terms of a loss, their number and its unit.

A compiled loss is `L = u (1/T) sum_t nll_t`, with `T` what its reduction
divides by (examples, tokens, pixels; the valid ones where there is a mask) and
`nll_t` the negative log-likelihood of a term, summed over its outputs. One
whose reduction is "sum" is `T` times that.

Damping and the clip are in units of a likelihood's Fisher matrix. Keras' mean
squared error over `D` features is `2/D` of the negative log-likelihood of a
normal distribution, its binary cross-entropy `1/D` of that of `D` Bernoulli
variables. With the loss divided by this unit, the step does not depend on
whether a loss is a mean, a sum or any other multiple of one likelihood.

Keras' own losses are known by their functions, and users may declare theirs.
Any other is held against the likelihoods in each batch (`recognition.py`).
Where it is a multiple of none, its unit is 1.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import paused
from tfkfac.compat.graphs import has_effects
from tfkfac.compat.losses import (
    LossCall,
    Reduction,
    is_of_keras,
    logits_of,
    loss_arguments,
    loss_function,
    loss_weights,
)
from tfkfac.compat.overrides import keep_on
from tfkfac.loss.recognition import (
    BERNOULLI,
    CATEGORICAL,
    LOGITS,
    NORMAL,
    POISSON,
    Recognition,
    Verdict,
    recognise,
)

T = TypeVar("T")


class Known(NamedTuple):
    """Likelihood of a loss, as far as it is known.

    The factor is its unit if it is the sum over the outputs of a term, or if
    it is their mean. None is the name of one that only the user knows.
    """

    likelihood: str | None
    factor: float = 1.0
    is_mean: bool = False


# By function, or by class.
_known: dict[Any, Known] = {
    keras.losses.mean_squared_error: Known(NORMAL, 2.0, True),
    keras.losses.binary_crossentropy: Known(BERNOULLI, is_mean=True),
    keras.losses.poisson: Known(POISSON, is_mean=True),
    keras.losses.categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.sparse_categorical_crossentropy: Known(CATEGORICAL),
    keras.losses.kl_divergence: Known(CATEGORICAL),
}
# Those whose distribution a user has declared, by the same.
_declared: set[Any] = set()
# Keras' own that compare each output with a label of its own.
_BY_OUTPUT = {
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.poisson,
}
_TOLERANCE = 1e-3


def check_labels(loss: keras.losses.Loss, y_true: Any, y_pred: Any) -> None:
    """Refuses classes where a loss needs a label for each output.

    TensorFlow would say that shapes do not fit, below a page of files.

    Raises:
        ValueError: If an axis is missing.
    """
    ours, theirs = (tuple(getattr(t, "shape", ())) for t in (y_true, y_pred))
    is_short = len(ours) == len(theirs) - 1 and theirs[-1] not in (None, 1)
    is_short = is_short and bool(ours) and ours[-1] != theirs[-1]
    if is_short and loss_function(loss) in _BY_OUTPUT:
        raise ValueError(
            f"Loss '{loss.name}' compares outputs one by one. Received: labels "
            f"of shape {ours} and outputs of shape {theirs}. Classes need "
            '"sparse_categorical_crossentropy" or `keras.utils.to_categorical`.'
        )


class Unit(NamedTuple):
    """Value of a loss of a term over that of its negative log-likelihood.

    That has a name, if it is known before, or a comparison decides.
    """

    value: float | tf.Tensor = 1.0
    likelihood: str | None = None
    recognition: Recognition | None = None


def declare(loss: Any, factor: float | None, is_mean: bool) -> None:
    """Declares a class or function of losses a likelihood, see `Known`.

    A factor of None is that of what it looks like, and 1 else.
    """
    _declared.add(loss)
    if factor is not None:
        _known[loss] = Known(None, factor, is_mean)


def declared(table: Mapping[Any, T], loss: keras.losses.Loss) -> T | None:
    """Looks a loss up by its class, or else by the function that it wraps."""
    return table.get(type(loss), table.get(loss_function(loss)))


def is_open(loss: keras.losses.Loss) -> bool:
    """True if only a batch can tell the unit of a loss."""
    return declared(_known, loss) is None and not is_of_keras(loss)


def natural_unit(call: LossCall) -> Unit:
    """Unit of a loss, by a call of it of which Keras has seen the reduction."""
    y_pred, reduction = call.y_pred, call.reduction
    if not tf.is_tensor(y_pred) or not y_pred.shape.rank or reduction is None:
        return Unit()
    known = declared(_known, call.loss)
    if known is not None:
        features = 1.0
        if known.is_mean:
            features = _features(y_pred, reduction.values)
        name = _likelihood(known.likelihood, call.loss, y_pred)
        return Unit(known.factor / features, name)
    if call.leaves is None:
        return Unit()
    with paused():
        found = recognise(call, call.leaves, reduction)
    if found is not None:
        own = {type(call.loss), loss_function(call.loss)}
        found = found._replace(is_reported=not own & _declared)
    return Unit(recognition=found)


def _likelihood(
    name: str | None, loss: keras.losses.Loss, y_pred: tf.Tensor
) -> str | None:
    """The likelihood of one of Keras' own losses with its arguments."""
    arguments = loss_arguments(loss)
    if arguments.get("axis", -1) not in (-1, y_pred.shape.rank - 1):
        return None  # its outputs are not the last axis
    if arguments.get("from_logits") and logits_of(y_pred) is None:
        return LOGITS.get(name or "", name)
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


# ------------------------------------------- losses that return one number
_SUMS = "_tfkfac_sums"  # by shapes, kept on the loss


def is_sum(call: LossCall) -> bool:
    """True if a loss that returns one number is a sum over the examples.

    A batch alone does not tell a sum from a mean. If the loss has no effects,
    its graph is evaluated on numbers of the right shapes, once and then twice
    over. One with effects (that writes variables, draws random numbers, calls
    Python) is never evaluated, and taken for a mean.
    """
    tensors = call.y_true, call.y_pred
    known = [tf.TensorShape(getattr(t, "shape", None)) for t in tensors]
    if not all(shape.rank for shape in known):
        return False
    shapes = tuple(tuple(shape[1:]) for shape in known)
    found = keep_on(call.loss, _SUMS, dict[Any, bool])
    if shapes not in found:
        found[shapes] = _doubles(call.loss, shapes)
    return found[shapes]


def _doubles(
    loss: keras.losses.Loss, shapes: Sequence[Sequence[int | None]]
) -> bool:
    """True if a loss of every example twice is twice as large."""
    specs = [tf.TensorSpec([None, *shape], loss.dtype) for shape in shapes]
    with paused(), tf.init_scope():
        examples = _examples(specs)
        try:
            function = tf.function(loss.call, autograph=False)
            concrete = function.get_concrete_function(*specs)
            pure = not has_effects(concrete.graph)
            for once in examples if pure else ():
                twice = [tf.concat([x, x], 0) for x in once]
                first, second = (float(concrete(*x)) for x in (once, twice))
                if math.isfinite(first) and first != 0:
                    return math.isclose(second, 2 * first, rel_tol=_TOLERANCE)
        except Exception:  # a loss may not go with any but its own data
            return False
    return False


def _examples(
    specs: Sequence[tf.TensorSpec],
) -> list[list[tf.Tensor]]:
    """Labels and predictions: real numbers, probabilities, classes."""
    shapes = [[2, *(size or 2 for size in spec.shape[1:])] for spec in specs]
    normal = [
        tf.random.stateless_normal(shape, [i, 0], dtype=spec.dtype)
        for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    ]
    labels, predictions = normal
    return [
        normal,
        [tf.cast(labels > 0, labels.dtype), tf.sigmoid(predictions)],
        [tf.zeros_like(labels), predictions],
    ]


@dataclasses.dataclass(frozen=True)
class LossTerms:
    """The terms of one loss, of this replica's batch.

    Attributes:
        count: `T`, a scalar float64: what the mean is over.
        unit: `u`, a scalar float64, the size of the loss' weight included;
            without what a `recognition` will add to it.
        summed: True if the loss is the sum over the terms, not the mean.
        is_fixed: True if the unit is the same on all replicas, a number that
            no shape of theirs has a say in.
        part: Its part of the whole loss; None if there is nothing else.
        call: The call of the loss; None if nobody has seen it.
        likelihood: Name of its likelihood, if that is known before.
        recognition: The batch's word on both, if that decides.
        verdict: That of the batches of all replicas, once they have met.
        predictions: `T` where the loss is a likelihood; None is `count`.
        squares: The sum of the squares of the weights of the terms, where
            `count` is the sum of the weights; None if all weigh the same.
    """

    count: tf.Tensor
    unit: tf.Tensor
    summed: bool = False
    is_fixed: bool = True
    part: tf.Tensor | None = None
    call: LossCall | None = None
    likelihood: str | None = None
    recognition: Recognition | None = None
    verdict: Verdict | None = None
    predictions: tf.Tensor | None = None
    squares: tf.Tensor | None = None


def mean_over(count: Any) -> LossTerms:
    """A loss that is the mean over some terms, of no known likelihood."""
    return LossTerms(_wide(count), _wide(1))


def read_terms(
    model: keras.Model, calls: Sequence[LossCall]
) -> tuple[LossTerms, ...]:
    """Returns the terms of the losses that a `compute_loss` has called."""
    compiled = loss_weights(model)
    ours = [call.loss for call in calls] == [loss for loss, _ in compiled]
    weights = [w for _, w in compiled] if ours else [1.0] * len(calls)
    return tuple(
        _terms_of(call, call.reduction, weight)
        for call, weight in zip(calls, weights, strict=True)
        if call.reduction is not None
    )


def _terms_of(
    call: LossCall, reduction: Reduction, weight: float | tf.Tensor
) -> LossTerms:
    values = reduction.values
    unit, likelihood, recognition = natural_unit(call)
    # A negative weight is the user's own; it does not turn the step around.
    scale = tf.abs(_wide(weight)) * _wide(unit)
    part = tf.cast(call.result, values.dtype) * tf.cast(weight, values.dtype)
    is_fixed = not (tf.is_tensor(unit) or tf.is_tensor(weight))
    count, squares = _count(reduction) if values.shape.rank else (1, None)
    terms = LossTerms(
        _wide(count),
        scale,
        values.shape.rank > 0 and reduction.kind in ("sum", "none", None),
        is_fixed,
        part,
        call,
        likelihood,
        recognition,
        squares=squares,
    )
    return terms if values.shape.rank else _single(terms, call)


def _single(terms: LossTerms, call: LossCall) -> LossTerms:
    """The terms of a loss that returns one number.

    The user's own reduction, which Keras leaves as it is: it does not divide
    by the number of replicas either.
    """
    count = predictions = _predictions(call.y_pred)
    summed, unit, recognition = False, terms.unit, terms.recognition
    if is_open(call.loss):
        count = _wide(tf.shape(keras.tree.flatten(call.y_pred)[0])[0])
        summed = is_sum(call)
    if not summed:
        unit *= tf.distribute.get_strategy().num_replicas_in_sync
        if recognition is not None:
            recognition = recognition.times(predictions)
    return dataclasses.replace(
        terms,
        count=count,
        unit=unit,
        summed=summed,
        recognition=recognition,
        predictions=predictions,
    )


def _count(reduction: Reduction) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Divisor of Keras, if it took a mean.

    And the sum of squares of weights, if it is the sum of these.
    """
    weights, mask = reduction.weights, reduction.mask
    valid = None if mask is None else _wide(mask)
    if reduction.kind == "mean_with_sample_weight" and weights is not None:
        own = _wide(weights)
        if valid is not None:
            own *= tf.reshape(valid, tf.shape(own))
        return tf.reduce_sum(own), tf.reduce_sum(tf.square(own))
    count = _wide(tf.size(reduction.values))
    if valid is None:
        return count, None
    valid_ones = tf.reduce_sum(valid)
    return tf.math.divide_no_nan(count * valid_ones, _wide(tf.size(mask))), None


def _predictions(y_pred: Any) -> tf.Tensor:
    """Number of predictions, each a vector of features."""
    first = keras.tree.flatten(y_pred)[0]
    shape = tf.shape(first)
    if first.shape.rank == 1:
        return _wide(shape[0])
    return _wide(tf.reduce_prod(shape[:-1]))


def _wide(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)
