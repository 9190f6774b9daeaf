"""Rest optimizer: trains the weights that a method has no part in."""

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfkfac.compat.optimizers import rate_of
from tfkfac.shell.arguments import check_inner

# Name of the choice that leaves them to the inner optimizer.
INNER = "inner"
_PEAK = 1e-3
# Steps at which the largest value of a schedule is looked for.
_PROBES = (0, *(2**i for i in range(25)))


@keras.saving.register_keras_serializable(package="tfkfac")
class ShapedRate(LearningRateSchedule):
    """Learning rate that rises and falls as that of another optimizer.

    `peak * rate / largest`, at most `peak`, with the rate of the optimizer that
    is followed; `peak` while there is none.

    Args:
        peak: Learning rate where the other one's is largest.
        largest: Largest learning rate of the other optimizer.
    """

    def __init__(self, peak: float, largest: float) -> None:
        super().__init__()
        self.peak = peak
        self.largest = largest
        self._followed: keras.optimizers.Optimizer | None = None

    def follow(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes the shape of the learning rate of an optimizer."""
        self._followed = optimizer

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of a step, float32."""
        if self._followed is None:
            return tf.constant(self.peak)
        rate = tf.cast(self._followed.learning_rate, tf.float32)
        return self.peak * share_of_largest(rate, tf.constant(self.largest))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {"peak": self.peak, "largest": self.largest}


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

    Raises:
        ValueError: If it is not an optimizer, or one that cannot be this.
    """
    if rest_optimizer == INNER:
        return None
    if rest_optimizer is None:
        rate = ShapedRate(_PEAK, largest_rate(inner))
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
    for one, other in ((rest, inner), (inner, rest)):
        if follows(one):  # of a config, too
            rate_of(one).follow(other)
    return rest


def follow_rest(
    rest_optimizer: Any, peak: float
) -> LearningRateSchedule | None:
    """Returns a rate with the shape of the schedule of a rest optimizer.

    None where there is none.
    """
    rest = rest_optimizer
    if not isinstance(rest, keras.optimizers.Optimizer):
        return None
    if not isinstance(rate_of(rest), LearningRateSchedule) or follows(rest):
        return None
    return ShapedRate(peak, largest_rate(rest))


def follows(optimizer: keras.optimizers.Optimizer) -> bool:
    """True if the learning rate has the shape of another one's."""
    return isinstance(rate_of(optimizer), ShapedRate)


def largest_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Largest learning rate: a schedule's at powers of two, else the first.

    (A warm-up begins at 0. A number is what callbacks reduce.)
    """
    rate = rate_of(optimizer)
    if isinstance(rate, ShapedRate):  # of the present step, which may warm up
        return rate.peak
    if isinstance(rate, LearningRateSchedule):
        with tf.init_scope():
            return max(float(rate(step)) for step in _PROBES)
    return float(tf.convert_to_tensor(optimizer.learning_rate))
