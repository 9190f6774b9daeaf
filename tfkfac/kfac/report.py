"""What the last step did, and hints when steps are shorter than need be."""

import math
from collections.abc import Mapping

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.kfac.clip import Clip
from tfkfac.training.guards import count_events

# What may be said of a step; what is not is NaN.
_NAMES = (
    "clip_factor",
    "length",
    "damping",
    "alpha",
    "alpha_plain",
    "mu",
    "predicted_reduction",
    "actual_reduction",
)
# Steps that are looked at, how many of them are many, and what of a step is
# little. In healthy runs half of the clip factors are above 0.6 (autoencoders;
# of classifiers most are 1), on pixels times 4,080 below 0.07.
_FIRST, _MANY, _LITTLE = 200, 100, 0.25


class StepReport(Tracked):
    """What the last step did, in variables of one replica.

    Attributes:
        steps: Number of steps so far.
        clipped: Number of the first of them that the clip left little of.
        hints: 1 once the hint has been given.
        sums: Number of times that the loss has looked like a sum.
        lost: Number of steps whose quadratic model was not finite.
    """

    def __init__(self) -> None:
        super().__init__(name="report")
        self.steps = state_variable(0, "int64", "reported_steps")
        self.clipped = state_variable(0, "int64", "clipped_steps")
        self.hints = state_variable(0, "int64", "clip_hints")
        self.sums = state_variable(0, "int64", "summed_losses")
        self.lost = state_variable(0, "int64", "lost_models")
        self._values = {
            name: state_variable(math.nan, "float64", name) for name in _NAMES
        }

    def note(self, clip: Clip, damping: tf.Tensor, name: str) -> None:
        """Notes a step.

        Args:
            clip: What the clip did.
            damping: The damping.
            name: Name of the optimizer.
        """
        length = tf.square(clip.factor) * clip.length
        self._assign(clip_factor=clip.factor, length=length, damping=damping)
        early = self.steps <= _FIRST
        clipped = tf.logical_and(early, clip.factor < _LITTLE)
        self.clipped.assign_add(tf.cast(clipped, tf.int64))
        ruled = tf.equal(self.steps, _FIRST) & (self.clipped >= _MANY)
        count_events(
            [ruled],
            [self.hints],
            [name],
            f"kl_clip has left less than {_LITTLE:.0%} of half of the first "
            f"{_FIRST} steps. Are the model's inputs normalised? If they "
            'cannot be, try KFAC(fisher="monte_carlo"). A smaller learning '
            "rate or a larger damping may help too; see `optimizer.last_step`.",
        )

    def note_quadratic(
        self,
        coefficients: Mapping[str, tf.Tensor],
        predicted: tf.Tensor,
        actual: tf.Tensor,
        damping: tf.Tensor,
    ) -> None:
        """Notes a step that minimises the quadratic model.

        Args:
            coefficients: Those of its directions, by name.
            predicted: How much smaller it should make the loss.
            actual: How much smaller it does, NaN if that is not known.
            damping: The damping.
        """
        self._assign(
            **coefficients,
            predicted_reduction=predicted,
            actual_reduction=actual,
            damping=damping,
        )

    def _assign(self, **values: tf.Tensor) -> None:
        """Notes the numbers of a step."""
        for name, value in values.items():
            self._values[name].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)

    def note_sum(self, summed: tf.Tensor | None, name: str) -> None:
        """Notes whether the loss looks like a sum that is taken for a mean."""
        if summed is None:
            return
        count_events(
            [summed],
            [self.sums],
            [name],
            "the loss looks like the sum over the examples, but is taken for "
            "their mean, which makes steps too short. Divide it by their "
            "number, or say `optimizer.attach(model, loss_terms=1)`.",
        )

    def values(self) -> dict[str, float]:
        """The last step's numbers, by name; none before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        every = {name: float(v.numpy()) for name, v in self._values.items()}
        return {name: v for name, v in every.items() if not math.isnan(v)}
