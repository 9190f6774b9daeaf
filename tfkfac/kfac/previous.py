"""The update before, which the next one is made of."""

import keras

from tfkfac.compat.graphs import zeros_variable
from tfkfac.compat.tracking import Tracked
from tfkfac.saving.store import Entry
from tfkfac.wrapper.accumulation import names_of


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

    def entries(self) -> list[Entry]:
        """All variables to save."""
        return [
            Entry(path, f"previous_update_{name}", change)
            for (path, name), change in zip(
                self._names, self.changes, strict=True
            )
        ]
