"""An optimizer around a Keras optimizer, bound to the model it trains."""

import abc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import tensorflow as tf

from tfkfac.blocks import block_types
from tfkfac.capture import registry
from tfkfac.capture.scaling import LossBatch, LossTap
from tfkfac.capture.taps import (
    Tap,
    before_first_call,
    forget_first_call,
    replica_id,
)
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.fingerprint import check_agreement
from tfkfac.distributed.topology import find_topology
from tfkfac.linalg.symmetric import all_finite
from tfkfac.optimizers.checks import (
    check_inner,
    check_settings,
    repair_keras,
    serialize_value,
    values_of,
)
from tfkfac.optimizers.hyperparameters import Hyperparameter
from tfkfac.optimizers.replicas import updates_in_replica
from tfkfac.variables import count_events, state_variable

_ordinals = itertools.count()

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
        self._scope = ""
        self._skipped: tuple[tf.Variable, ...] = ()
        repair_keras(tf.distribute.get_strategy())

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
        check_settings(model, loss_scaler)
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
        strategy = self.bound_model().distribute_strategy
        self._topology = find_topology(strategy)
        for parameter in self._hyperparameters.values():
            parameter.build()
        self._skipped = tuple(
            state_variable(0, "int64", "skipped_steps")
            for _ in self._topology.local
        )
        self._create_state()
        if self._topology.workers > 1:
            # Tells the collectives of one optimizer from another's. All
            # workers build the optimizers of a job, in the same order.
            self._scope = f"{self.name}:{next(_ordinals)}"
        if self._topology.workers > len(self._topology.local):
            with tf.init_scope():  # a config holds values of variables
                communicator = self._communicator("agreement")
                check_agreement(self._description(), communicator)
        self.inner_optimizer.build(list(variables))
        super().build(list(variables))

    def _description(self) -> dict[str, Any]:
        """What all workers must agree on."""
        config = self.get_config()
        inner = config.pop("inner_optimizer")
        settings = {k: v for k, v in inner["config"].items() if k != "name"}
        weights = self.bound_model().trainable_variables
        return {
            "TensorFlow and Keras": [tf.__version__, keras.__version__],
            "optimizer": type(self).__name__,
            **{f"argument {name}": value for name, value in config.items()},
            "inner optimizer": inner["class_name"],
            **{f"inner optimizer's {k}": v for k, v in settings.items()},
            "shapes of the weights": [list(v.shape) for v in weights],
        }

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
        if all(gradient is None for gradient in grads):
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        variables = list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        batch = LossTap.open(self.bound_model()).take()
        communicator = self._communicator()
        gradients = self._reduce(list(grads), batch, communicator)
        communicator.outputs()  # the gradients are always used
        step = self._prepare(gradients, variables, batch, communicator)
        present = [values_of(g) for g in gradients if g is not None]
        finite = all_finite(present)
        skipped = self._skipped[self._position(communicator.rank)]
        count_events(
            [tf.logical_not(finite)],
            [skipped],
            [self.name],
            "a step is skipped, its gradients are not finite.",
        )

        def update() -> tf.Tensor:
            # What is passed on as it is must be of this branch's graph too.
            new = [None if g is None else tf.identity(g) for g in step()]
            self._apply_inner(new, variables, communicator)
            return tf.constant(0)

        tf.cond(finite, update, lambda: tf.constant(0))

    def _communicator(self, scope: str | None = None) -> Communicator:
        """This worker's collectives for one trace of the step."""
        topology = self._topology
        alone = len(topology.local) == 1
        rank = topology.local[0] if alone else replica_id()
        scope = self._scope if scope is None else scope
        return Communicator(rank, topology.workers, scope, topology.hint)

    def _position(self, rank: int) -> int:
        """Place of a worker among those of this process."""
        return self._topology.position(rank)

    def _reduce(
        self,
        gradients: Gradients,
        batch: LossBatch,
        communicator: Communicator,
    ) -> Gradients:
        """The only reduction of the gradients over the workers.

        Keras divides each worker's mean loss by the number of workers. With
        batches of different sizes, the last of an epoch, the sum is not the
        gradient of the global mean: each is weighted by its examples.
        """
        workers = communicator.workers
        if workers == 1:
            return gradients
        present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        if batch.examples is not None:
            own = tf.cast(batch.examples, tf.float32)
            (total,) = communicator.all_reduce([own])
            share = tf.math.divide_no_nan(own * workers, total)
            present = [
                # A mean over no example may be NaN.
                tf.math.multiply_no_nan(g, tf.cast(share, g.dtype))
                for g in present
            ]
        reduced = iter(communicator.all_reduce(present))
        return [None if g is None else next(reduced) for g in gradients]

    def _apply_inner(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        communicator: Communicator,
    ) -> None:
        """The inner optimizer's own step, without a second reduction."""
        if communicator.workers == 1:
            self.inner_optimizer.apply(gradients, variables)
            return
        with updates_in_replica(self.inner_optimizer):
            self.inner_optimizer.apply(gradients, variables)

    @property
    def skipped_steps(self) -> tf.Variable | int:
        """Number of steps skipped because a gradient was not finite."""
        return self._skipped[0] if self._skipped else 0

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
    def _create_state(self) -> None:
        """Creates the variables for the attached model, which is built."""

    @abc.abstractmethod
    def _prepare(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> Callable[[], Gradients]:
        """Takes this trace's records; returns the function that does the step.

        The function returns the gradients for the inner optimizer. It runs
        only if all gradients are finite, which all workers agree on.
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


def detach(model: keras.Model, optimizer: WrappingOptimizer | None) -> None:
    """Removes an optimizer's taps from a model; its state is kept.

    Args:
        model: The model.
        optimizer: The optimizer, or None for those that are gone.
    """
    for node in registry.walk(model):
        forget_first_call(node.layer)
        Tap.close(node.layer, optimizer)
    LossTap.close(model)
