"""Rest optimizer: trains the weights that a method has no part in."""

import math
import warnings
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.optimizers import rate_of
from tfkfac.shell.arguments import check_inner

# Name of the choice that leaves them to the inner optimizer.
INNER = "inner"
_PEAK = 1e-3
# Arguments of a Keras optimizer that averages the weights.
_AVERAGES = "use_ema", "ema_momentum", "ema_overwrite_frequency"
# Steps at which the largest value of a schedule is looked for.
_PROBES = (0, *(2**i for i in range(25)))
# A schedule that grows by this factor over the last doubling of the steps has
# no largest value.
_GROWTH = 1.01


@keras.saving.register_keras_serializable(package="tfkfac")
class ShapedRate(LearningRateSchedule):
    """Learning rate that rises and falls as that of another optimizer.

    `peak * rate / largest`, at most `peak`, with the rate of the optimizer that
    is followed; `peak` while there is none.

    Args:
        peak: Learning rate where the other one's is largest.
        largest: Largest learning rate of the other optimizer, 0 if it is not
            known yet.
    """

    def __init__(self, peak: float, largest: float) -> None:
        super().__init__()
        self.peak = peak
        self._largest = state_variable(largest, "float32", "largest_rate")
        self._followed: keras.optimizers.Optimizer | None = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes the shape of the learning rate of an optimizer."""
        self._followed = optimizer

    def measure(self, end: int | None) -> None:
        """Updates the largest learning rate, see `update_largest`."""
        if self._followed is not None:
            update_largest(self._largest, self._followed, end)

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of a step, float32."""
        if self._followed is None:
            return tf.constant(self.peak)
        rate = tf.cast(self._followed.learning_rate, tf.float32)
        largest = tf.convert_to_tensor(self._largest)
        return self.peak * share_of_largest(rate, largest)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"peak": self.peak, "largest": float(self._largest.numpy())}


def share_of_largest(rate: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
    """A learning rate over the largest one, at most 1.

    If that is 0, as where a callback warms up a number, any rate is as large.
    """
    tiny = tf.constant(1e-30, rate.dtype)
    return tf.minimum(rate / tf.maximum(largest, tiny), 1.0)


def choose_rest(
    rest_optimizer: Any, inner: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer | None:
    """Returns the rest optimizer that a user means, None for "inner".

    What a user calls None is Adam, whose rate has the shape of the inner one's.
    None and a name stand for an optimizer that averages the weights as the
    inner optimizer does. Warn of an instance with other averages.

    Raises:
        ValueError: If it is not an optimizer, or one that cannot be this.
    """
    if rest_optimizer == INNER:
        return None
    is_new = rest_optimizer is None or isinstance(rest_optimizer, str)
    if rest_optimizer is None:
        rate = ShapedRate(_PEAK, known_rate(inner))
        rest_optimizer = keras.optimizers.Adam(rate)
    rest = check_inner(rest_optimizer, "rest_optimizer")
    if rest is inner or rest.gradient_accumulation_steps:
        why = (
            "another one than `inner_optimizer`"
            if rest is inner
            else "an optimizer that accumulates no gradients by itself"
        )
        raise ValueError(
            f"Argument `rest_optimizer` must be {why}. "
            f"Received: rest_optimizer={rest}"
        )
    if is_new:
        for name in _AVERAGES:
            setattr(rest, name, getattr(inner, name))
    elif averages(rest) != averages(inner):
        warnings.warn(
            f"Argument `rest_optimizer` should average the weights as the "
            "inner optimizer does: otherwise the model is a mixture of "
            "averages and weights where they are swapped or written into it. "
            f"Received: rest_optimizer={rest.name!r} with {averages(rest)}, "
            f"and the inner optimizer {inner.name!r} with {averages(inner)}",
            stacklevel=3,
        )
    for one, other in ((rest, inner), (inner, rest)):
        if follows(one):  # of a config, too
            rate_of(one).follow(other)
    return rest


def averages(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the settings of the average of the weights, if there is one."""
    used = _AVERAGES if optimizer.use_ema else _AVERAGES[:1]
    return {name: getattr(optimizer, name) for name in used}


def follow_rest(
    rest_optimizer: Any, peak: float
) -> LearningRateSchedule | None:
    """Returns a rate with the shape of the schedule of a rest optimizer.

    None where there is none.
    """
    rest = rest_optimizer
    if not isinstance(rest, keras.optimizers.Optimizer):
        return None
    if not has_schedule(rest) or follows(rest):
        return None
    return ShapedRate(peak, known_rate(rest))


def follows(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the learning rate has the shape of another one's."""
    return isinstance(rate_of(optimizer), ShapedRate)


def has_schedule(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the learning rate is a schedule, and not a number."""
    return isinstance(rate_of(optimizer), LearningRateSchedule)


def known_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate if it is a number, 0 for a schedule."""
    if has_schedule(optimizer):
        return 0.0
    return float(tf.convert_to_tensor(optimizer.learning_rate))


def update_largest(
    kept: tf.Variable, optimizer: keras.optimizers.Optimizer, end: int | None
) -> None:
    """Updates the largest rate of a schedule for a run that ends at a step.

    Without an end, a known rate stays, such as the rate of a loaded model.
    """
    is_known = 0 < float(kept.numpy()) < math.inf
    if has_schedule(optimizer) and not (end is None and is_known):
        kept.assign(largest_rate(optimizer, end))


def largest_rate(
    optimizer: keras.optimizers.Optimizer, end: int | None
) -> float:
    """Largest learning rate before the step `end`, where a run ends.

    Of a schedule it is that of the steps that are powers of two, the first and
    the last; of a number, which callbacks reduce, the present one. Values that
    are not finite do not count, and steps from the first error on, as of a
    table that ends. If the end is not known, None, a schedule that grows for
    ever has its first value.
    """
    rate = rate_of(optimizer)
    if isinstance(rate, ShapedRate):  # of the present step, which may warm up
        return rate.peak
    if not isinstance(rate, LearningRateSchedule):
        return known_rate(optimizer)
    probes = [*_PROBES]
    if end is not None:
        probes = [step for step in probes if step < end] + [max(end - 1, 0)]
    values: list[float] = []
    is_table = False
    with tf.init_scope():
        for step in probes:
            try:
                values.append(float(rate(step)))
            except Exception:
                is_table = True
                break
        values = [value for value in values if math.isfinite(value)]
        if not values:
            return float(tf.convert_to_tensor(optimizer.learning_rate))
    *before, last = values
    is_open = end is None and not is_table
    if is_open and before and last > _GROWTH * max(before):
        return values[0]
    return max(values)
