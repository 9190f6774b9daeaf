"""Averages of the weights, kept by the optimizers inside another."""

from collections.abc import Hashable
from typing import Any

import keras

from tfkfac.compat.optimizers import (
    KerasOptimizer,
    averages_of,
    trainable_variables,
    variable_key,
)


class AveragingOptimizer(KerasOptimizer):
    """Optimizer whose inner and rest optimizer may average the weights."""

    inner_optimizer: keras.optimizers.Optimizer
    rest_optimizer: keras.optimizers.Optimizer | None
    _is_building = False  # whether Keras makes its state

    @property
    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The inner optimizer and, if there is one, the rest optimizer."""
        rest = self.rest_optimizer
        return [self.inner_optimizer] + ([] if rest is None else [rest])

    # Keras' `SwapEMAWeights` asks for these two inside a scaler of the loss.
    @property
    def use_ema(self) -> bool:
        """True if the inner or the rest optimizer averages the weights."""
        if self._is_building:  # Keras would make averages of its own
            return False
        return bool(self.averaging_optimizers)

    @use_ema.setter
    def use_ema(self, value: bool) -> None:
        """Keras' constructor sets it, to False."""
        if value:
            raise AttributeError(
                "Argument `use_ema` must be set on the inner optimizer. "
                f"Received: use_ema={value!r}"
            )

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        """Averages of the trainable variables; None where there is none."""
        if not (self.use_ema and self.built):
            raise AttributeError(f"'{self.name}' has no averages of weights.")
        known: dict[Hashable, Any] = {}
        for optimizer in self.averaging_optimizers:
            known |= averages_of(optimizer)
        return [
            known.get(variable_key(self, v)) for v in trainable_variables(self)
        ]

    @property
    def averaging_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The inner and the rest optimizer, if they average the weights."""
        return [o for o in self._optimizers if o.use_ema]
