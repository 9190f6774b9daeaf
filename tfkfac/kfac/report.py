"""What the last step did, and a hint when the clip rules all of them."""

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.tracking import Tracked
from tfkfac.kfac.clip import Clip
from tfkfac.wrapper.guards import count_events

# Steps that are looked at, and how many of them are nearly all. Of a healthy
# run about 20 % are clipped, of one on inputs times 255 all.
_FIRST, _NEARLY_ALL = 200, 190


class StepReport(Tracked):
    """What the last step did, in variables of one replica.

    Attributes:
        steps: Number of steps so far.
        clipped: Number of the first of them that the clip has shortened.
        hints: 1 once the hint has been given.
    """

    def __init__(self) -> None:
        super().__init__(name="report")
        self.steps = state_variable(0, "int64", "reported_steps")
        self.clipped = state_variable(0, "int64", "clipped_steps")
        self.hints = state_variable(0, "int64", "clip_hints")
        self._values = {
            name: state_variable(0.0, "float64", name)
            for name in ("clip_factor", "length", "damping")
        }

    def note(self, clip: Clip, damping: tf.Tensor, name: str) -> None:
        """Notes a step.

        Args:
            clip: What the clip did.
            damping: The damping.
            name: Name of the optimizer.
        """
        length = tf.square(clip.factor) * clip.length
        for what, value in [
            ("clip_factor", clip.factor),
            ("length", length),
            ("damping", damping),
        ]:
            self._values[what].assign(tf.cast(value, tf.float64))
        self.steps.assign_add(1)
        early = self.steps <= _FIRST
        clipped = tf.logical_and(early, clip.factor < 1)
        self.clipped.assign_add(tf.cast(clipped, tf.int64))
        ruled = tf.equal(self.steps, _FIRST) & (self.clipped >= _NEARLY_ALL)
        count_events(
            [ruled],
            [self.hints],
            [name],
            f"kl_clip has shortened nearly all of the first {_FIRST} steps. "
            "Are the model's inputs normalised? A smaller learning rate or a "
            "larger damping may help too; see `optimizer.last_step`.",
        )

    def values(self) -> dict[str, float]:
        """The last step's numbers, by name; none before the first step."""
        if int(self.steps.numpy()) == 0:
            return {}
        return {name: float(v.numpy()) for name, v in self._values.items()}
