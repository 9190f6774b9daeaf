"""The learning rate of the Newton steps."""

import dataclasses

import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.fosi.state import State
from tfkfac.shell.hyperparameters import Hyperparameter
from tfkfac.training.job import Job


@dataclasses.dataclass(frozen=True)
class NewtonRate:
    """A number alpha follows the inner optimizer's learning rate.

    It is multiplied by that of the step over the largest so far: of a rate
    that decays, the first. Over the first in any case it would leave all
    bounds where a rate is warmed up from nearly nothing.

    Attributes:
        alpha: The number, or a schedule or callable, which is the rate itself.
    """

    alpha: Hyperparameter

    def note(self, job: Job, state: State) -> None:
        """Remembers the largest learning rate, once in every step."""
        if is_number(self.alpha.get()):
            largest = state.largest_rate
            largest.assign(tf.maximum(largest, inner_rate(job)))

    def at(self, job: Job, state: State) -> tf.Tensor:
        """Returns the rate of this step, a scalar in float64."""
        alpha = self.alpha.at(job.clock)
        if not is_number(self.alpha.get()):
            return alpha
        largest = tf.convert_to_tensor(state.largest_rate)
        share = tf.math.divide_no_nan(inner_rate(job), largest)
        return alpha * tf.where(largest > 0, share, tf.ones_like(share))


def inner_rate(job: Job) -> tf.Tensor:
    """The inner optimizer's learning rate in this step, in float64."""
    rate = tf.convert_to_tensor(job.inner_optimizer.learning_rate)
    return tf.cast(rate, tf.float64)
