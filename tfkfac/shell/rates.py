"""Learning rates and averages of the inner and the rest optimizer."""

from collections.abc import Hashable
from typing import Any

import keras

from tfkfac.checks import check_count, check_range
from tfkfac.compat.optimizers import (
    KerasOptimizer,
    averages_of,
    rate_of,
    raw_iterations,
    trainable_variables,
    variable_key,
)
from tfkfac.schedules.fit_decay import FitDecay, RunPlan


class ScheduledOptimizer(KerasOptimizer):
    """Optimizer with the rate and averages of an inner and a rest optimizer."""

    inner_optimizer: keras.optimizers.Optimizer
    rest_optimizer: keras.optimizers.Optimizer | None
    _is_building = False  # True while Keras creates the optimizer's variables

    def __init__(self, name: str) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.plan = RunPlan()

    @property
    def _optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The inner optimizer and the rest optimizer, if any."""
        rest = self.rest_optimizer
        return [self.inner_optimizer] + ([] if rest is None else [rest])

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        """Set the rate; a number ends the decay of a `FitDecay` for good."""
        is_decaying = isinstance(rate_of(self.inner_optimizer), FitDecay)
        if is_decaying and not callable(value):
            if hasattr(value, "numpy"):
                value = float(value.numpy())
            self.plan.set_rate.assign(check_range("learning_rate", value, 0))
            return
        self.inner_optimizer.learning_rate = value
        self.plan.set_rate.assign(-1.0)
        self.bind_schedules()

    def bind_schedules(self) -> None:
        """Replace each `FitDecay` by a copy that follows this optimizer's plan.

        A copy, because several optimizers may have been given one schedule.
        """
        for optimizer in self._optimizers:
            rate = rate_of(optimizer)
            if isinstance(rate, FitDecay):
                rate = type(rate).from_config(rate.get_config())
                rate.follow(self.plan, optimizer is self.inner_optimizer)
                optimizer.learning_rate = rate

    @property
    def num_updates(self) -> int:
        """Number of updates of the weights so far."""
        return int(raw_iterations(self.inner_optimizer).numpy())

    def begin_run(self, steps: int) -> None:
        """Begin a run of known length, for `tfkfac.schedules.FitDecay`.

        For a training loop of your own: the learning rate falls linearly to 0
        over the next `steps` updates. `fit` does this itself.

        Args:
            steps: Number of updates of the weights, at least 1. With gradient
                accumulation, an update is several batches.

        Raises:
            TypeError: If `steps` is not an integer.
            ValueError: If `steps` is less than 1.
        """
        steps = check_count("steps", steps, 1)
        self.plan.begin(self.num_updates, steps)

    def rate_lines(self) -> list[str]:
        """Return the line on a `FitDecay` for `summary`; [] without one."""
        if not isinstance(rate_of(self.inner_optimizer), FitDecay):
            return []
        last_update, rate = self.plan.end, f"{float(self.learning_rate):.4g}"
        if float(self.plan.set_rate.numpy()) >= 0:
            return [f"Learning rate: {rate}, set during training."]
        if last_update is None:
            return [
                f"Learning rate: {rate}, constant: no length known "
                "outside of `fit`. It falls to 0 over each `fit` of known "
                "length."
            ]
        start = int(self.plan.start.numpy())
        return [
            f"Learning rate: {rate}, falls linearly to 0 from update "
            f"{start:,} to {last_update:,}."
        ]

    # --------------------------------------------- averages of the weights
    # Keras' `SwapEMAWeights` reads the properties `use_ema` and
    # `_model_variables_moving_average`, also inside a loss scaler.
    @property
    def use_ema(self) -> bool:
        """True if the inner or the rest optimizer averages the weights."""
        if self._is_building:  # True would make Keras create averages
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
