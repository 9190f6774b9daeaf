"""What `fit` tells an optimizer of ours: the length of the run."""

from typing import Any

import keras

from tfkfac.shell.optimizer import SecondOrderOptimizer


class RunLength(keras.callbacks.Callback):
    """Tells an optimizer's method how many steps `fit` will make.

    Args:
        optimizer: The optimizer of the model that is trained.
    """

    def __init__(self, optimizer: SecondOrderOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer

    def on_train_begin(self, logs: Any = None) -> None:
        """Tells it."""
        steps = self.params.get("steps")
        total = None if steps is None else self.params["epochs"] * steps
        self._optimizer.method.expect(total)
