"""Averages of the weights by the inner and the rest optimizer."""

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
    _is_building = False  # True while Keras creates the optimizer's variables

    @property
    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The inner optimizer and the rest optimizer, if any."""
        rest = self.rest_optimizer
        return [self.inner_optimizer] + ([] if rest is None else [rest])

    # Keras' `SwapEMAWeights` reads the properties `use_ema` and
    # `_model_variables_moving_average`, also inside a loss scaler.
    @property
    def use_ema(self) -> bool:
        """True if the inner or the rest optimizer averages the weights."""
        if self._is_building:  # else Keras would create averages here
            return False
        return bool(self.averaging_optimizers)

    @use_ema.setter
    def use_ema(self, value: bool) -> None:
        """Accept the False that Keras' constructor assigns."""
        if value:
            raise AttributeError(
                "Argument `use_ema` must be set on the inner optimizer. "
                f"Received: use_ema={value!r}"
            )

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        """Average of each trainable variable; None where none exists."""
        if not (self.use_ema and self.built):
            raise AttributeError(f"'{self.name}' has no averages of weights.")
        averages: dict[Hashable, Any] = {}
        for optimizer in self.averaging_optimizers:
            averages |= averages_of(optimizer)
        variables = trainable_variables(self)
        return [averages.get(variable_key(self, v)) for v in variables]

    @property
    def averaging_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Inner and rest optimizer, each only if it has `use_ema`."""
        return [o for o in self._optimizers if o.use_ema]
