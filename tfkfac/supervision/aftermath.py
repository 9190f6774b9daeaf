"""What becomes of a skipped step outside of the optimizer."""

import sys
from typing import Any

import keras
from typing_extensions import override

from tfkfac.compat.models import after_train_on_batch
from tfkfac.shell.carry import ours
from tfkfac.shell.optimizer import SecondOrderOptimizer


class Aftermath(keras.callbacks.Callback):
    """Ends a `fit` that skips too many steps, and says what went wrong in it.

    In XLA, where nothing can be printed, that is the only word of it.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: SecondOrderOptimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._before: dict[str, int] = {}

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self._optimizer.events()

    @override
    def on_train_end(self, logs: Any = None) -> None:
        new = [
            f"{text}: {count - self._before.get(text, 0)}"
            for text, count in self._optimizer.events().items()
            if count > self._before.get(text, 0)
        ]
        if new:
            text = f"tfkfac: {self._optimizer.name} in this fit: "
            print(text + "; ".join(new), file=sys.stderr)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._optimizer.check_skipped_steps()


def check(model: keras.Model) -> None:
    """The same after a `train_on_batch`."""
    optimizer = ours(getattr(model, "optimizer", None))
    if optimizer is not None:
        optimizer.check_skipped_steps()


def install() -> None:
    """From now on, `train_on_batch` is watched."""
    after_train_on_batch(check)
