"""The update before, which the next one is made of."""

import keras
import tensorflow as tf

from tfkfac.compat.graphs import zeros_variable
from tfkfac.compat.variables import Tracked
from tfkfac.saving.entries import Entry
from tfkfac.training.accumulation import names_of

PREVIOUS = "previous"  # the part of the state that it is


class Previous(Tracked):
    """The update before, of one replica.

    Attributes:
        changes: What was added to each trainable weight.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="previous")
        self._names = names_of(model)
        self.changes = [
            zeros_variable(v.shape, v.dtype, "previous_update")
            for v in model.trainable_variables
        ]

    def reset(self) -> None:
        """Forgets it."""
        for change in self.changes:
            change.assign(tf.zeros_like(change))

    def entries(self) -> list[Entry]:
        """All variables to save."""
        return [
            Entry(path, f"previous_update_{name}", change, part=PREVIOUS)
            for (path, name), change in zip(
                self._names, self.changes, strict=True
            )
        ]
