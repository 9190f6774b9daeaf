"""An optimizer around a Keras optimizer, bound to the model it trains."""

import abc
import weakref
from collections.abc import Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from tfkfac.blocks import block_types
from tfkfac.capture import registry
from tfkfac.capture.scaling import LossTap
from tfkfac.capture.taps import Tap, before_first_call
from tfkfac.linalg.symmetric import all_finite
from tfkfac.optimizers.hyperparameters import Hyperparameter
from tfkfac.variables import count_events, state_variable

Gradients = list[tf.Tensor | None]


class WrappingOptimizer(keras.optimizers.Optimizer):
    """Changes the gradients, then lets an inner Keras optimizer apply them.

    The learning rate, the iterations and everything an inner optimizer does
    by itself (momentum, weight decay, clipping, averaging) stay its own. A
    step whose gradients are not finite is skipped as a whole and counted.

    Args:
        inner_optimizer: A Keras optimizer, its identifier or its config.
        name: Name of the optimizer.
    """

    def __init__(self, inner_optimizer: Any, name: str) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = check_inner(inner_optimizer)
        self._wrapped = False
        self._hyperparameters: dict[str, Hyperparameter] = {}
        self._model: weakref.ref[keras.Model] | None = None
        self._scaler: weakref.ref[Any] | None = None
        self.skipped_steps = state_variable(0, "int64", "skipped_steps")

    # ----------------------------------------------------------- the model
    def attach(self, model: keras.Model, *, loss_scaler: Any = None) -> Self:
        """Binds the optimizer to the model that it will train.

        `Model.compile` calls this. Call it yourself, before the first forward
        pass, when you write the training loop.

        Args:
            model: The model.
            loss_scaler: The `LossScaleOptimizer` around this one, if any.

        Returns:
            The optimizer itself.

        Raises:
            TypeError: If `model` is not a Keras model.
            ValueError: If the optimizer belongs to another model, or the
                model is set up in a way that cannot work.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(
                "Argument `model` must be a `keras.Model`. "
                f"Received: model={model} (of type {type(model)})"
            )
        if self._model is not None and self._model() is not model:
            owner = self._model()
            known = f"model '{owner.name}'" if owner else "a deleted model"
            raise ValueError(
                f"Optimizer '{self.name}' already belongs to {known} and "
                "keeps its curvature. Create a new optimizer for model "
                f"'{model.name}'."
            )
        self._check_settings(model)
        self._check_variables(model)
        detach(model, self)
        self._model = weakref.ref(model)
        self._scaler = None if loss_scaler is None else weakref.ref(loss_scaler)
        LossTap.open(model)
        self._tap_layers()
        self._attached()
        return self

    def bound_model(self) -> keras.Model:
        """Returns the model that the optimizer is bound to.

        Raises:
            ValueError: If there is none.
        """
        model = self._model() if self._model is not None else None
        if model is None:
            raise ValueError(
                f"Optimizer '{self.name}' does not know its model. Use "
                "`model.compile(optimizer=...)`, or call "
                "`optimizer.attach(model)` before the first forward pass of "
                "a custom loop."
            )
        return model

    def _tap_layers(self) -> None:
        """Taps the layers there are, and again when more have been built."""
        for layer in self._layers_to_tap():
            Tap.open(layer, self)
        for layer in registry.unbuilt(self.bound_model()):
            if not block_types(layer):
                before_first_call(layer, self._tap_layers)

    @staticmethod
    def _check_settings(model: keras.Model) -> None:
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                "This version trains on one replica. Received: model "
                f"'{model.name}' under a strategy of {replicas} replicas."
            )
        jit = getattr(model, "jit_compile", False)
        if jit is True and not tf.config.list_physical_devices("GPU"):
            raise ValueError(
                "Argument `jit_compile` must not be True without a GPU: XLA's "
                "decompositions are many times slower on a CPU. Received: "
                "jit_compile=True. Compile the model with jit_compile=False."
            )

    def _check_variables(self, model: keras.Model) -> None:
        if not self.built:
            return
        known = self.inner_optimizer._trainable_variables_indices
        new = [
            v.path
            for v in model.trainable_variables
            if self.inner_optimizer._var_key(v) not in known
        ]
        if new:
            raise ValueError(
                f"Optimizer '{self.name}' was built without the variables "
                f"{new}. Compile the model with a new optimizer after making "
                "more of it trainable."
            )

    # ------------------------------------------------------------ the step
    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state, for `variables` of the attached model."""
        if self.built:
            return
        for parameter in self._hyperparameters.values():
            parameter.build()
        self._create_state(self.bound_model())
        self.inner_optimizer.build(list(variables))
        super().build(list(variables))

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates the variables. See `keras.Optimizer.apply`.

        Args:
            grads: Gradients of the mean loss; None where there is none.
            trainable_variables: Their variables; needed in the first call.
        """
        gradients: Gradients = list(grads)
        present = [g for g in gradients if g is not None]
        if not present:
            self.inner_optimizer.apply(gradients, trainable_variables)
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        step = self._prepare(gradients, variables)
        finite = all_finite([values_of(g) for g in present])

        count_events(
            [tf.logical_not(finite)],
            [self.skipped_steps],
            [self.name],
            "a step is skipped, its gradients are not finite.",
        )

        def update() -> tf.Tensor:
            # What is passed on as it is must be of this branch's graph too.
            new = [None if g is None else tf.identity(g) for g in step()]
            self.inner_optimizer.apply(new, variables)
            return tf.constant(0)

        tf.cond(finite, update, lambda: tf.constant(0))

    def _loss_scale(self) -> tf.Tensor | None:
        """What the loss was multiplied by before the gradients were taken."""
        scaler = self._scaler() if self._scaler is not None else None
        if scaler is not None:
            return tf.convert_to_tensor(scaler.dynamic_scale)
        if self._wrapped:
            raise ValueError(
                f"Optimizer '{self.name}' is inside a `LossScaleOptimizer` "
                "that it does not know, so the scale of its statistics is "
                "unknown. Call `optimizer.attach(model, loss_scaler=...)` "
                "with that `LossScaleOptimizer`, or compile the model with it."
            )
        return None

    # ------------------------------------------------------ for subclasses
    @abc.abstractmethod
    def _layers_to_tap(self) -> list[keras.layers.Layer]:
        """Layers whose calls have to be recorded."""

    @abc.abstractmethod
    def _attached(self) -> None:
        """Called after each `attach`; the model may not be built yet."""

    @abc.abstractmethod
    def _create_state(self, model: keras.Model) -> None:
        """Creates the variables for a built model."""

    @abc.abstractmethod
    def _prepare(
        self, gradients: Gradients, variables: list[keras.Variable]
    ) -> Any:
        """Takes this trace's records; returns the function that does the step.

        The function has no arguments and returns the gradients for the inner
        optimizer. It runs only if all gradients are finite.
        """

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


def detach(model: keras.Model, optimizer: WrappingOptimizer | None) -> None:
    """Removes an optimizer's taps from a model; its state is kept.

    Args:
        model: The model.
        optimizer: The optimizer, or None for those that are gone.
    """
    for node in registry.walk(model):
        Tap.close(node.layer, optimizer)
    LossTap.close(model)


def check_inner(identifier: Any) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer that an argument stands for.

    Raises:
        ValueError: If it is not an optimizer or one that cannot be inside.
    """
    message = (
        "Argument `inner_optimizer` must be a Keras optimizer, its name or "
        "config, or a float learning rate. Received: inner_optimizer="
        f"{identifier!r} (of type {type(identifier)})"
    )
    try:
        inner = keras.optimizers.get(identifier)
    except (ValueError, TypeError) as error:
        raise ValueError(message) from error
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(message)
    if isinstance(
        inner, (WrappingOptimizer, keras.optimizers.LossScaleOptimizer)
    ):
        raise ValueError(
            "Argument `inner_optimizer` must be a plain optimizer; put a "
            "`LossScaleOptimizer` around this one, not inside. Received: "
            f"inner_optimizer={inner}"
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            "Argument `inner_optimizer` must not have a `loss_scale_factor`; "
            "put a `LossScaleOptimizer` around this optimizer. Received: "
            f"loss_scale_factor={inner.loss_scale_factor}"
        )
    return inner


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The numbers of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


def serialize_value(value: Any) -> Any:
    """Serialises a schedule or callable; a number is itself."""
    if value is None or isinstance(value, (int, float)):
        return value
    return keras.saving.serialize_keras_object(value)
