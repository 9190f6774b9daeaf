"""What an optimizer around another one leaves to it."""

from collections.abc import Sequence
from typing import Any, Self

import keras

from tfkfac.wrapper.arguments import check_inner, serialize_value
from tfkfac.wrapper.hyperparameters import Hyperparameter


class DelegatingOptimizer(keras.optimizers.Optimizer):
    """Shows an inner optimizer's state as its own.

    Args:
        inner_optimizer: A Keras optimizer, its identifier or its config.
        name: Name of the optimizer.
    """

    def __init__(self, inner_optimizer: Any, name: str) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = check_inner(inner_optimizer)
        self._wrapped = False
        self._hyperparameters: dict[str, Hyperparameter] = {}

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
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras' LossScaleOptimizer resets this attribute on what it wraps,
        # the only sign of it there is.
        if name == "loss_scale_factor" and "inner_optimizer" in vars(self):
            if value is not None:
                raise ValueError(
                    "Argument `loss_scale_factor` must be None; wrap the "
                    "optimizer in a `keras.optimizers.LossScaleOptimizer` "
                    f"instead. Received: loss_scale_factor={value}"
                )
            self._wrapped = True
        super().__setattr__(name, value)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the inner optimizer's variables, those of `variables`."""
        self.inner_optimizer.set_weights(weights)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Lets the inner optimizer write its averages at the end."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        values = {
            name: serialize_value(parameter.get())
            for name, parameter in self._hyperparameters.items()
        }
        return {"name": self.name, "inner_optimizer": inner, **values}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self:
        """Creates an optimizer from its config."""
        arguments = {
            name: keras.saving.deserialize_keras_object(value, custom_objects)
            if isinstance(value, dict)
            else value
            for name, value in config.items()
        }
        return cls(**arguments)
