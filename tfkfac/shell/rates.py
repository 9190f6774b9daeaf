"""Keras' settings and methods of an optimizer that wraps two others."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import keras

from tfkfac.checks import check_count, check_range
from tfkfac.compat.optimizers import (
    KerasOptimizer,
    knows_variable,
    rate_of,
    raw_iterations,
)
from tfkfac.shell.arguments import refuse_setting, wrapped_setting
from tfkfac.shell.saving import HOW_TO_COPY
from tfkfac.training.fit_decay import FitDecay, RunPlan

_SUBCLASS = "Add variables in a subclass of the inner optimizer."


def _unavailable(name: str, way: str) -> Callable[..., NoReturn]:
    """Create a method that raises an error; `way` names the alternative."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"`{type(self).__name__}` has no method `{name}`. {way}"
        )

    return method


class ScheduledOptimizer(KerasOptimizer):
    """Optimizer with the settings of an inner and a rest optimizer."""

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
        self.check_rate(value)
        is_decaying = isinstance(rate_of(self.inner_optimizer), FitDecay)
        if is_decaying and not callable(value):
            if hasattr(value, "numpy"):
                value = float(value.numpy())
            self.plan.set_rate.assign(check_range("learning_rate", value, 0))
            return
        self.inner_optimizer.learning_rate = value
        self.plan.set_rate.assign(-1.0)
        self.bind_schedules()

    def check_rate(self, rate: Any) -> None:
        """Warn of a rate of Adam's size. No check by default.

        Args:
            rate: The rate that is set; None at the end of `fit`.
        """

    @property
    def has_decay(self) -> bool:
        """True if a learning rate is a `FitDecay` that no set rate ends."""
        # `set_rate` ends only the decay of the inner optimizer.
        is_set = float(self.plan.set_rate.numpy()) >= 0
        optimizers = self._optimizers[1:] if is_set else self._optimizers
        return any(isinstance(rate_of(x), FitDecay) for x in optimizers)

    def bind_schedules(self) -> None:
        """Replace each `FitDecay` by a copy that follows this optimizer's plan.

        Copy, because several optimizers may share one schedule object.
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
        text = f"Learning rate: {float(self.learning_rate):.4g}"
        if float(self.plan.set_rate.numpy()) >= 0:
            return [f"{text}, set during training."]
        if self.plan.end is None:
            return [
                f"{text}, constant: no length known outside of `fit`. It falls "
                "to 0 over each `fit` of known length."
            ]
        start = int(self.plan.start.numpy())
        return [
            f"{text}, falls linearly to 0 from update {start:,} to "
            f"{self.plan.end:,}."
        ]

    # ----------------------------------------------- other Keras arguments
    weight_decay = wrapped_setting("weight_decay")
    clipnorm = wrapped_setting("clipnorm")
    clipvalue = wrapped_setting("clipvalue")
    global_clipnorm = wrapped_setting("global_clipnorm")
    ema_momentum = wrapped_setting("ema_momentum")
    ema_overwrite_frequency = wrapped_setting("ema_overwrite_frequency")

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """Always None: only the inner optimizer accumulates gradients."""
        return None

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int | None) -> None:
        if value is not None:
            refuse_setting(self, "gradient_accumulation_steps", value)

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the decay of the inner and rest optimizer.

        Call it before `compile`, which builds the optimizer of a built model.

        Args:
            var_list: Variables to exclude. Defaults to None.
            var_names: Regular expressions: a variable is excluded if one of
                them matches a part of its name. Defaults to None.
        """
        for optimizer in self._optimizers:
            optimizer.exclude_from_weight_decay(var_list, var_names)

    # -------------------------------------------------------- other methods
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, keras.Variable]]
    ) -> keras.Variable:
        """Update the variables; return the number of iterations.

        Args:
            grads_and_vars: Pairs of a gradient and its variable.
        """
        self.apply(*zip(*grads_and_vars, strict=True))
        return raw_iterations(self.inner_optimizer)

    @property
    def iterations(self) -> Any:
        """The inner optimizer's number of updates."""
        return self.inner_optimizer.iterations

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Raise an error: `variables` do not contain the curvature."""
        raise ValueError(
            f"`set_weights` cannot set the curvature of '{self.name}', which "
            f"`variables` do not contain. {HOW_TO_COPY}"
        )

    stateless_apply = _unavailable("stateless_apply", "Call `apply`.")
    update_step = _unavailable("update_step", "Call `apply` for all variables.")
    add_variable = _unavailable("add_variable", _SUBCLASS)
    add_variable_from_reference = _unavailable(
        "add_variable_from_reference", _SUBCLASS
    )
    add_optimizer_variables = _unavailable("add_optimizer_variables", _SUBCLASS)

    # --------------------------------------------- averages of the weights
    @property
    def use_ema(self) -> bool:
        """True if the inner or the rest optimizer averages the weights."""
        if self._is_building:  # True would make Keras create averages
            return False
        return bool(self.averaging_optimizers)

    @use_ema.setter
    def use_ema(self, value: bool) -> None:
        if value:
            refuse_setting(self, "use_ema", value)

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        """Empty: Keras' `SwapEMAWeights` only checks that it exists."""
        if not (self.use_ema and self.built):
            raise AttributeError(f"'{self.name}' has no averages of weights.")
        return []

    @property
    def averaging_optimizers(self) -> list[keras.optimizers.Optimizer]:
        """Inner and rest optimizer, each only if it has `use_ema`."""
        return [o for o in self._optimizers if o.use_ema]

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Assign the averages of the inner and the rest optimizer."""
        for optimizer in self._optimizers:
            trained = [v for v in var_list if knows_variable(optimizer, v)]
            optimizer.finalize_variable_values(trained)
