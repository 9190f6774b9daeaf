"""Rest optimizer: trains the weights that the method does not cover."""

import math
import warnings
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.optimizers import rate_of
from tfkfac.shell.arguments import check_inner

# Value of `rest_optimizer` that leaves all weights to the inner optimizer.
INNER = "inner"
_PEAK = 1e-3  # largest learning rate of the default rest optimizer
# Arguments of Keras optimizers for averages of the weights.
_AVERAGES = "use_ema", "ema_momentum", "ema_overwrite_frequency"
# Steps at which a schedule is evaluated to find its largest value.
_PROBES = (0, *(2**i for i in range(25)))
# A schedule that grows by this factor over the last doubling of the steps is
# treated as unbounded.
_GROWTH = 1.01


@keras.saving.register_keras_serializable(package="tfkfac")
class ShapedRate(LearningRateSchedule):
    """Learning rate proportional to the rate of another optimizer.

    `peak * min(rate / largest, 1)` for the `rate` of the followed optimizer;
    `peak` before `follow` is called.

    Args:
        peak: Upper bound of the learning rate.
        largest: Largest learning rate of the followed optimizer; 0 if unknown.
    """

    def __init__(self, peak: float, largest: float) -> None:
        super().__init__()
        self.peak = peak
        self._largest = state_variable(largest, "float32", "largest_rate")
        self._followed: keras.optimizers.Optimizer | None = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Follow the learning rate of an optimizer."""
        self._followed = optimizer

    def measure(self, end: int | None) -> None:
        """Update the largest learning rate, see `update_largest`."""
        if self._followed is not None:
            update_largest(self._largest, self._followed, end)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of the current step, float32."""
        if self._followed is None:
            return tf.constant(self.peak)
        rate = tf.cast(self._followed.learning_rate, tf.float32)
        largest = tf.convert_to_tensor(self._largest)
        return self.peak * share_of_largest(rate, largest)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"peak": self.peak, "largest": float(self._largest.numpy())}


def share_of_largest(rate: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    """`min(rate / largest, 1)`; 1 for a positive rate if `largest` is 0.

    The largest rate is 0 if a callback warms up a rate that starts at 0.
    """
    tiny = tf.constant(1e-30, rate.dtype)
    return tf.minimum(rate / tf.maximum(largest, tiny), 1.0)


def choose_rest(
    rest_optimizer: Any, inner: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer | None:
    """Create the rest optimizer from the argument; None for "inner".

    The argument None gives Adam, its rate proportional to the inner one. For
    None or a name, the averages of weights are set as in the inner optimizer;
    an instance with other averages causes a warning.

    Raises:
        ValueError: If it is not an optimizer, is the inner optimizer, or
            accumulates gradients.
    """
    if rest_optimizer == INNER:
        return None
    is_new = rest_optimizer is None or isinstance(rest_optimizer, str)
    if rest_optimizer is None:
        rate = ShapedRate(_PEAK, constant_rate(inner))
        rest_optimizer = keras.optimizers.Adam(rate)
    rest = check_inner(rest_optimizer, "rest_optimizer")
    if rest is inner or rest.gradient_accumulation_steps:
        requirement = (
            "different from `inner_optimizer`"
            if rest is inner
            else "an optimizer without `gradient_accumulation_steps`"
        )
        raise ValueError(
            f"Argument `rest_optimizer` must be {requirement}. "
            f"Received: rest_optimizer={rest}"
        )
    if is_new:
        for name in _AVERAGES:
            setattr(rest, name, getattr(inner, name))
    elif averages(rest) != averages(inner):
        warnings.warn(
            f"Argument `rest_optimizer` should average the weights as the "
            "inner optimizer does: otherwise swapping or overwriting the "
            "weights by averages mixes averages and current weights. "
            f"Received: rest_optimizer={rest.name!r} with {averages(rest)}, "
            f"and the inner optimizer {inner.name!r} with {averages(inner)}",
            stacklevel=3,
        )
    for optimizer, other in ((rest, inner), (inner, rest)):
        if follows(optimizer):  # also if restored from a config
            rate_of(optimizer).follow(other)
    return rest


def averages(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """The settings of the averages of weights of an optimizer."""
    used = _AVERAGES if optimizer.use_ema else _AVERAGES[:1]
    return {name: getattr(optimizer, name) for name in used}


def follow_rest(
    rest_optimizer: Any, peak: float
) -> LearningRateSchedule | None:
    """A rate proportional to a rest optimizer's schedule; None without one."""
    rest = rest_optimizer
    if not isinstance(rest, keras.optimizers.Optimizer):
        return None
    if not has_schedule(rest) or follows(rest):
        return None
    return ShapedRate(peak, constant_rate(rest))


def follows(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the learning rate is a `ShapedRate`."""
    return isinstance(rate_of(optimizer), ShapedRate)


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the learning rate is a schedule, not a number."""
    return isinstance(rate_of(optimizer), LearningRateSchedule)


def constant_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Return a constant learning rate; 0 for a schedule."""
    if has_schedule(optimizer):
        return 0.0
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def update_largest(
    largest: tf.Variable, optimizer: keras.optimizers.Optimizer, end: int | None
) -> None:
    """Update the largest rate of a schedule for a run up to the step `end`.

    Without an end, keep a known value, for example of a loaded model.
    """
    is_known = 0 < float(largest.numpy()) < math.inf
    if has_schedule(optimizer) and not (end is None and is_known):
        largest.assign(largest_rate(optimizer, end))


def largest_rate(
    optimizer: keras.optimizers.Optimizer, end: int | None
) -> float:
    """Largest learning rate in the steps before `end` (None: unknown).

    A schedule is evaluated at step 0, at powers of 2 and at the last step. Not
    counted are values that are not finite, and steps from the first error on
    (a table that ends). If `end` is None, a schedule that keeps growing has
    its first value. A number, which callbacks may reduce, has its current
    value.
    """
    rate = rate_of(optimizer)
    if isinstance(rate, ShapedRate):  # cannot be evaluated at other steps
        return rate.peak
    if not isinstance(rate, LearningRateSchedule):
        return constant_rate(optimizer)
    probes = [*_PROBES]
    if end is not None:
        probes = [step for step in probes if step < end] + [max(end - 1, 0)]
    values: list[float] = []
    has_ended = False
    with tf.init_scope():
        for step in probes:
            try:
                values.append(float(rate(step)))
            except Exception:
                has_ended = True
                break
        values = [value for value in values if math.isfinite(value)]
        if not values:
            return float(tf.convert_to_tensor(optimizer.learning_rate))
    *before, last = values
    is_open = end is None and not has_ended
    if is_open and before and last > _GROWTH * max(before):
        return values[0]
    return max(values)
