"""An optimizer around another as Keras sees it: a config, and the other."""

from collections.abc import Sequence
from typing import Any, Self

import keras

from tfkfac.checks import check_count
from tfkfac.compat.optimizers import KerasOptimizer
from tfkfac.compat.saving import is_saving_legacy_file, legacy_variables
from tfkfac.loss.shares import LossScaling
from tfkfac.shell.arguments import check_inner, serialize_value
from tfkfac.shell.method import Method


class OptimizerAround(KerasOptimizer):
    """A Keras optimizer that leaves to another what is not its method's.

    The config is the method's arguments and the inner optimizer.

    Args:
        inner_optimizer: A Keras optimizer, its identifier or its config.
        method: What is done to the gradients.
        name: Name of the optimizer.
        max_skipped_steps: Steps skipped in a row that end the training; None
            is any number.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        method: Method,
        name: str,
        max_skipped_steps: int | None = None,
    ) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = check_inner(inner_optimizer)
        self._method = method
        self._scaling = LossScaling(name)
        self.max_skipped_steps = max_skipped_steps

    @property
    def max_skipped_steps(self) -> int | None:
        """Steps skipped in a row that end the training; None is none."""
        return self._max_skipped_steps

    @max_skipped_steps.setter
    def max_skipped_steps(self, value: int | None) -> None:
        if value is not None:
            value = check_count("max_skipped_steps", value, 1)
        self._max_skipped_steps = value

    @property
    def method(self) -> Method:
        """The method, which changes the gradients."""
        return self._method

    def _arguments(self) -> dict[str, Any]:
        """The method's arguments, by name."""
        method = self._method
        tunables = method.hyperparameters().items()
        return {
            "max_skipped_steps": self.max_skipped_steps,
            **{name: parameter.get() for name, parameter in tunables},
            **{name: getattr(method, name) for name in method.arguments},
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor.

        Raises:
            ValueError: If one is a function that a file cannot hold.
        """
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        config = self._arguments()
        for name, value in config.items():
            config[name] = serialize_value(name, value)
        return {"name": self.name, "inner_optimizer": inner, **config}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self:
        """Creates an optimizer from its config.

        Raises:
            TypeError: If the config is no dict.
            ValueError: If an entry is not allowed.
        """
        if not isinstance(config, dict):
            raise TypeError(
                "Argument `config` must be a dict. "
                f"Received: config={config!r} (of type {type(config)})"
            )
        arguments = {
            name: restored(name, value, custom_objects)
            for name, value in config.items()
        }
        return cls(**arguments)

    # ---------------------------------------------------------- delegation
    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The inner optimizer's number of updates."""
        return self.inner_optimizer.iterations

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables.

        In an `.h5` file, that has nothing else of an optimizer, also its state.
        """
        variables: list[Any] = self.inner_optimizer.variables
        if is_saving_legacy_file():
            state: dict[str, Any] = {}
            self.save_own_variables(state)
            variables = [*variables, *legacy_variables(state)]
        return variables

    def __setattr__(self, name: str, value: Any) -> None:
        """Notes when a `LossScaleOptimizer` is put around."""
        # Keras' LossScaleOptimizer resets this attribute on what it wraps,
        # the only sign of it there is.
        if name == "loss_scale_factor" and "_scaling" in vars(self):
            if value is not None:
                raise ValueError(
                    "Argument `loss_scale_factor` must be None; wrap the "
                    "optimizer in a `keras.optimizers.LossScaleOptimizer` "
                    f"instead. Received: loss_scale_factor={value}"
                )
            self._scaling.is_wrapped = True
        super().__setattr__(name, value)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the inner optimizer's variables, those of `variables`."""
        self.inner_optimizer.set_weights(weights)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Lets the inner optimizer write its averages at the end."""
        self.inner_optimizer.finalize_variable_values(var_list)


def restored(
    name: str, value: Any, custom_objects: dict[str, Any] | None
) -> Any:
    """The argument that an entry of a config stands for.

    Raises:
        ValueError: If it is the config of nothing.
    """
    if not isinstance(value, dict):
        return value
    try:
        return keras.saving.deserialize_keras_object(value, custom_objects)
    except (TypeError, ValueError):
        raise
    except Exception as error:  # a config may be anything
        raise ValueError(
            f"Argument `{name}` must be restored from the config of an object "
            f"that Keras knows. Received: {name}={value!r}"
        ) from error
