"""The scale of the loss whose gradients an optimizer gets."""

import weakref
from typing import Any

import tensorflow as tf


class LossScaling:
    """What is known of a `LossScaleOptimizer` around an optimizer.

    Args:
        name: The optimizer's name, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._scaler: weakref.ref[Any] | None = None
        self.is_wrapped = False

    def know(self, scaler: Any) -> None:
        """Notes the `LossScaleOptimizer`, None if there is none."""
        self._scaler = None if scaler is None else weakref.ref(scaler)

    def factor(self) -> tf.Tensor | None:
        """What the loss was multiplied by before the gradients were taken.

        Raises:
            ValueError: If the optimizer is inside a scaler it does not know.
        """
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is not None:
            return tf.convert_to_tensor(scaler.dynamic_scale)
        if self.is_wrapped:
            raise ValueError(
                f"Optimizer '{self._name}' is inside a `LossScaleOptimizer` "
                "that it does not know, so the scale of its statistics is "
                "unknown. Call `optimizer.attach(model, loss_scaler=...)` "
                "with that `LossScaleOptimizer`, or compile the model with it."
            )
        return None
