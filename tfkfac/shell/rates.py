"""Learning rates of the inner and the rest optimizer."""

from typing import Any

from tfkfac.checks import check_count, check_range
from tfkfac.compat.optimizers import rate_of, raw_iterations
from tfkfac.schedules.fit_decay import FitDecay, RunPlan
from tfkfac.shell.averages import AveragingOptimizer


class ScheduledOptimizer(AveragingOptimizer):
    """Optimizer with the learning rate of its inner optimizer.

    Attributes:
        plan: Start and length of the run, for each `FitDecay`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.plan = RunPlan()

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
