"""Steps that are skipped one after the other."""

from collections.abc import Sequence

import tensorflow as tf

from tfkfac.compat.graphs import state_variable


class Streak:
    """Steps that one replica has skipped up to now, without one between.

    Attributes:
        length: Number of them.
        left_out: 1 if the last batch is left out of all that follows it, as
            one of a step that is skipped is, else 0.
        names: The gradients that are looked at, in the last trace.
    """

    def __init__(self) -> None:
        self.length = state_variable(0, "int64", "skipped_in_a_row")
        self.left_out = state_variable(0, "int64", "left_out")
        self._bad = state_variable(0, "int64", "gradients_not_finite")
        self._first = state_variable(0, "int64", "first_not_finite")
        self.names: tuple[str, ...] = ()

    def end(self) -> None:
        """Notes a step that is not skipped."""
        self.length.assign(tf.zeros_like(self.length))
        self.left_out.assign(tf.zeros_like(self.left_out))

    def extend(self, finite: tf.Tensor) -> None:
        """Notes a step that is skipped.

        Args:
            finite: Whether each of the gradients is finite.
        """
        # Of integers a GPU knows neither the sum nor the largest.
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        self._lengthen()
        self._bad.assign(tf.cast(tf.reduce_sum(bad), tf.int64))
        self._first.assign(tf.argmax(bad))

    def _lengthen(self) -> None:
        self.length.assign_add(1)
        self.left_out.assign(tf.ones_like(self.left_out))

    def overflow(self) -> None:
        """Notes a step that somebody else skips, whose gradients overflow."""
        self._lengthen()
        self._bad.assign(tf.zeros_like(self._bad))

    def told(self) -> tf.Tensor:
        """What others have to know of it, float64 numbers."""
        known = [self.length, self.left_out, self._bad, self._first]
        return tf.stack([tf.cast(number, tf.float64) for number in known])

    def take(self, told: tf.Tensor, names: Sequence[str]) -> None:
        """Makes it that of another replica.

        Args:
            told: What that one has told.
            names: The gradients that are looked at.
        """
        self.names = tuple(names)
        known = [self.length, self.left_out, self._bad, self._first]
        for number, value in zip(known, tf.unstack(told), strict=True):
            number.assign(tf.cast(value, number.dtype))

    def check(self, most: int | None, name: str) -> None:
        """Raises if it has become too long. Not in graphs.

        Args:
            most: The length that ends the training; None is none.
            name: Name of the optimizer.

        Raises:
            FloatingPointError: If it has.
        """
        length = 0 if most is None else int(self.length.numpy())
        if most is None or length < most:
            return
        raise FloatingPointError(
            f"Optimizer '{name}' has skipped {length} steps in a row "
            f"(max_skipped_steps={most}): {self._reason()} The weights are "
            "those of the last good step. Look at the batches and the loss; a "
            "smaller learning rate or a larger damping may help."
        )

    def _reason(self) -> str:
        """What was not finite in the last of them."""
        bad = int(self._bad.numpy())
        if bad == 0:
            return "gradients overflow at every loss scale."
        first = self.names[int(self._first.numpy())]
        return (
            f"{bad} of {len(self.names)} gradients are not finite, the first "
            f"of them that of '{first}'."
        )
