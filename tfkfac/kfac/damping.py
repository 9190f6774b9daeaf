"""Damping that follows how well the quadratic model predicts the loss."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import check_count, check_range
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.saving.entries import Entry
from tfkfac.training.guards import count_events

# The reduction ratios between which the damping stays.
_LOW, _HIGH = 1 / 4, 3 / 4
# A step that is rejected quarters the radius of a trust region, which damping
# is the inverse of.
_REJECTED = 4.0
# How much more than was seen to hold a step may promise unseen.
_UNUSUAL = 4.0
# Rounding errors of a loss, relative to it.
_ROUNDING = 1e-6
ADAPTIVE = "adaptive_damping"  # the part of the state that it is


@keras.saving.register_keras_serializable(package="tfkfac")
class LevenbergMarquardt:
    """Damping that adapts itself to how far the quadratic model holds.

    For `KFAC(step="quadratic", damping=...)` (Martens & Grosse, 2015, section
    6.5). Every few steps the loss of the batch is computed at the new weights
    and the old ones, two forward passes more. With the ratio `rho` of its
    reduction to that which the model predicts, the damping is multiplied by
    `decay ** every` if `rho > 3/4`, and divided by it if `rho < 1/4`. A step
    that promises over four times the reduction of the last accepted one that
    was looked at is looked at too: where the model is of a part of the batch,
    a direction that hardly moves the outputs of these examples looks free, and
    one such step can undo a training.

    A step that raises the loss (`rho < 0`, or a loss that is not finite) is
    rejected: the weights stay as they are, the damping is multiplied by 4, all
    decompositions are renewed with it, and the next step is looked at as well
    (the rule of trust regions: Nocedal & Wright, 2006, algorithm 4.1). It is
    counted, and shown in `summary`. Changes of the loss within rounding count
    as predicted (Conn, Gould & Toint, 2000, section 17.4.2).

    It is refused with `gradient_accumulation_steps`, the inner optimizer's
    too: the losses that it compares are of the whole batch, whose first parts
    are gone when the step is made.

    >>> tfkfac.KFAC(
    ...     step="quadratic", damping=tfkfac.LevenbergMarquardt(initial=1.0))

    Args:
        initial: Damping of the first steps, positive. Defaults to 0.1.
        every: Steps between two looks at the loss, at least 1. Defaults to 5.
        decay: Factor on the damping for each step, in (0, 1). Defaults to
            19/20.
        minimum: Smallest damping, positive. Defaults to 1e-6.
        maximum: Largest damping. Defaults to 1e6.

    Raises:
        ValueError: If an argument is not allowed.
    """

    def __init__(
        self,
        initial: float = 0.1,
        every: int = 5,
        decay: float = 19 / 20,
        minimum: float = 1e-6,
        maximum: float = 1e6,
    ) -> None:
        self.every = check_count("every", every, 1)
        self.decay = check_range("decay", decay, 0, 1)
        self.minimum = check_range("minimum", minimum, 0)
        self.maximum = check_range("maximum", maximum, 0)
        self.initial = check_range("initial", initial, 0)
        for name in ("decay", "minimum"):
            if getattr(self, name) == 0:
                raise ValueError(
                    f"Argument `{name}` must be positive. Received: {name}=0"
                )
        if not minimum <= initial <= maximum:
            raise ValueError(
                "Argument `initial` must be between `minimum` and `maximum`. "
                f"Received: initial={initial}, minimum={minimum}, "
                f"maximum={maximum}"
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        return {
            "initial": self.initial,
            "every": self.every,
            "decay": self.decay,
            "minimum": self.minimum,
            "maximum": self.maximum,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LevenbergMarquardt":
        """Creates one from its config.

        Args:
            config: What `get_config` has returned.
        """
        return cls(**config)

    def __repr__(self) -> str:
        arguments = [f"{k}={v!r}" for k, v in self.get_config().items()]
        return f"LevenbergMarquardt({', '.join(arguments)})"


class AdaptiveDamping(Tracked):
    """The damping of one replica, the same on all.

    Attributes:
        value: The damping, float64.
        rejected: Number of steps rejected.
        again: 1 after a step that was rejected, else 0.
        trusted: The reduction predicted of the last accepted step that was
            looked at, float64; infinite before the first.

    Args:
        rule: How it adapts.
    """

    def __init__(self, rule: LevenbergMarquardt) -> None:
        super().__init__(name="damping")
        self.rule = rule
        initial = np.asarray(rule.initial, "float64")
        self.value = state_variable(initial, "float64", "damping")
        self.rejected = state_variable(0, "int64", "rejected_steps")
        self.again = state_variable(0, "int64", "looks_again")
        self.trusted = state_variable(np.inf, "float64", "trusted_reduction")

    def is_due(self, clock: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        """Whether the next update of the weights is to be looked at.

        Args:
            clock: Number of updates before it.
            predicted: How much smaller it should make the loss, float64.
        """
        last = tf.equal((clock + 1) % self.rule.every, 0)
        unusual = predicted > _UNUSUAL * self.trusted
        return last | unusual | (self.again > 0)

    def judge(
        self,
        before: tf.Tensor,
        after: tf.Tensor,
        predicted: tf.Tensor,
        name: str,
    ) -> tf.Tensor:
        """Adapts the damping to a step.

        Args:
            before: The loss without it, float64.
            after: The loss with it.
            predicted: How much smaller it should be.
            name: Name of the optimizer.

        Returns:
            Scalar bool, whether the step is accepted.
        """
        rounding = _ROUNDING * tf.abs(before)
        # None is predicted of a learning rate of 2 or more.
        expected = tf.maximum(predicted, 0)
        ratio = (before - after + rounding) / (expected + rounding)
        accepted = ratio >= 0  # not if it is NaN
        step = tf.constant(self.rule.decay**self.rule.every, tf.float64)
        one = tf.ones_like(step)
        factor = tf.where(ratio > _HIGH, step, one)
        factor = tf.where(ratio < _LOW, 1 / step, factor)
        factor = tf.where(accepted, factor, _REJECTED)
        self.value.assign(
            tf.clip_by_value(
                self.value * factor, self.rule.minimum, self.rule.maximum
            )
        )
        self.again.assign(tf.cast(~accepted, tf.int64))
        self.trusted.assign(tf.where(accepted, expected, self.trusted))
        count_events(
            [~accepted],
            [self.rejected],
            [name],
            "a step is rejected, it would raise the loss; the damping grows.",
        )
        return accepted

    def text(self) -> str:
        """A line of the summary."""
        return f"Damping now {float(self.value.numpy()):.4g}, {self.rule!r}."

    def reset(self) -> None:
        """Begins anew."""
        self.value.assign(self.rule.initial)
        self.rejected.assign(0)
        self.again.assign(0)
        self.trusted.assign(np.inf)

    def entries(self) -> list[Entry]:
        """All variables to save."""
        variables = {
            "damping": self.value,
            "rejected_steps": self.rejected,
            "looks_again": self.again,
            "trusted_reduction": self.trusted,
        }
        return [
            Entry("", name, variable, part=ADAPTIVE)
            for name, variable in variables.items()
        ]
