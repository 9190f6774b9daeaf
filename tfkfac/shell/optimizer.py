"""Keras optimizer that wraps an inner optimizer and is bound to a model."""

import collections
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import BeforeTap, MetricsDecision, MetricsTap
from tfkfac.capture.walk import detach, unbuilt
from tfkfac.checks import check_count
from tfkfac.compat.models import is_saving_legacy_file
from tfkfac.compat.optimizers import knows_variable, variable_key
from tfkfac.compat.optimizers import trainable_variables as known_variables
from tfkfac.compat.strategies import repair
from tfkfac.distributed.agreement import check_agreement
from tfkfac.distributed.topology import find_topology
from tfkfac.loss.batch import LossBatch, LossTap, scalar_loss
from tfkfac.loss.shares import LossScaling
from tfkfac.shell.arguments import (
    Hyperparameter,
    check_inner,
    refuse_unknown,
    restore_value,
    setting,
)
from tfkfac.shell.method import Method
from tfkfac.shell.model import (
    check_float8,
    check_settings,
    describe_model,
    plain,
    uses_xla,
)
from tfkfac.shell.rates import ScheduledOptimizer
from tfkfac.shell.saving import SavedState
from tfkfac.training.guards import largest_counts
from tfkfac.training.job import Job
from tfkfac.training.step import Step, weigh_loss


class SecondOrderOptimizer(ScheduledOptimizer):
    """Precondition the gradients; an inner Keras optimizer applies them.

    The inner optimizer has the learning rate and the iterations, and does
    momentum, weight decay, clipping and averaging. A step whose gradients are
    not finite is skipped and counted.

    The `Method` preconditions the gradients. The fields of `settings_type`, a
    frozen dataclass, are attributes of the optimizer.
    """

    settings_type: ClassVar[type]
    # For errors: default class of the inner optimizer, name of the argument of
    # the learning rate, and how to pass the inner optimizer an argument `{}`.
    inner_class: ClassVar[type[keras.optimizers.Optimizer] | None] = None
    rate_argument: ClassVar[str] = "learning_rate"
    wrapped_hint: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse unknown arguments, with the place where they belong."""
        refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for field in dataclasses.fields(cls.settings_type):
            if not hasattr(cls, field.name):
                setattr(cls, field.name, setting(field.name))

    def __init__(
        self,
        inner_optimizer: Any,
        method: Method,
        name: str,
        max_skipped_steps: int | None = 100,
        rest_optimizer: keras.optimizers.Optimizer | None = None,
    ) -> None:
        super().__init__(name)
        self.inner_optimizer = check_inner(inner_optimizer)
        self.rest_optimizer = rest_optimizer
        self.method = method
        self._scaling = LossScaling(name)
        self.max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0  # upper bound, see `count_steps`
        self._job: Job | None = None
        self.bind_schedules()
        # As an attribute, the saved state is part of checkpoints.
        self._saved_state = SavedState(name, method, self.plan)
        repair(tf.distribute.get_strategy())

    # ---------------------------------------------------------- the config
    @property
    def max_skipped_steps(self) -> int | None:
        """Number of consecutive skipped steps that ends training, or None."""
        return self._max_skipped_steps

    @max_skipped_steps.setter
    def max_skipped_steps(self, value: int | None) -> None:
        if value is not None:
            value = check_count("max_skipped_steps", value, 1)
        self._max_skipped_steps = value

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments except the optimizers and the name."""
        names = [field.name for field in dataclasses.fields(self.settings_type)]
        values = {name: getattr(self, name) for name in names}
        return {"max_skipped_steps": self.max_skipped_steps, **values}

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor.

        A learning rate that was set during training, which ends the decay of
        `FitDecay`, is an additional entry "set_learning_rate".
        """
        values = {"inner_optimizer": self.inner_optimizer, **self._arguments()}
        serialize = keras.saving.serialize_keras_object
        config = {name: serialize(value) for name, value in values.items()}
        if (rate := float(self.plan.set_rate.numpy())) >= 0:
            config["set_learning_rate"] = rate
        return {"name": self.name, **config}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self:
        """Create an optimizer from its config.

        Args:
            config: The result of `get_config`.
            custom_objects: Classes and functions by their names in the config.

        Raises:
            TypeError: If the config is not a dict.
            ValueError: If an entry is not allowed.
        """
        if not isinstance(config, dict):
            raise TypeError(
                "Argument `config` must be a dict. "
                f"Received: config={config!r} (of type {type(config)})"
            )
        arguments = {
            # Copy the value: Keras changes the config of an inner optimizer.
            name: restore_value(name, copy.deepcopy(value), custom_objects)
            for name, value in config.items()
        }
        rate = arguments.pop("set_learning_rate", None)
        optimizer = cls(**arguments)
        if rate is not None:
            optimizer.learning_rate = rate
        return optimizer

    # ----------------------------------------------------------- the model
    def attach(
        self,
        model: keras.Model,
        *,
        loss_terms: int | Callable[[], tf.Tensor] | None = None,
        loss_scaler: Any = None,
    ) -> Self:
        """Bind the optimizer to the model that it will train.

        `Model.compile` calls this method. In a custom training loop, call it
        before the first forward pass.

        Args:
            model: The model.
            loss_terms: For a loop that does not call `model.compute_loss`:
                number of terms over which the loss of a batch is averaged, or
                a function without arguments that returns it; 1 for a sum.
                Defaults to None: the leading dimension of a layer's input.
            loss_scaler: The `LossScaleOptimizer` that wraps this optimizer.
                Defaults to None.

        Returns:
            The optimizer itself.

        Raises:
            TypeError: If `model` is not a Keras model.
            ValueError: If the optimizer is bound to another model, or a
                setting of the model is not supported.
        """
        if not isinstance(model, keras.Model):
            raise TypeError(
                "Argument `model` must be a `keras.Model`. "
                f"Received: model={model} (of type {type(model)})"
            )
        if loss_terms is not None and not callable(loss_terms):
            loss_terms = check_count("loss_terms", loss_terms, 1)
        owner = None if self._job is None else self._job.find_model()
        if self._job is not None and owner is not model:
            bound = f"model '{owner.name}'" if owner else "a deleted model"
            received = f"model '{model.name}'"
            if owner is not None and owner.name == model.name:
                received = "a clone, which is another model of the same name"
            raise ValueError(
                f"Optimizer '{self.name}' already belongs to {bound} and "
                "keeps its curvature. Create a new optimizer for each model. "
                f"Received: {received}."
            )
        check_settings(
            model, loss_scaler, self._optimizers, self.method.takes_float8
        )
        added = [
            v.path
            for v in model.trainable_variables
            if not any(knows_variable(x, v) for x in self._optimizers)
        ]
        if self.built and added:
            raise ValueError(
                f"Optimizer '{self.name}' was built without the variables "
                f"{added}. Compile the model with a new optimizer after making "
                "more of it trainable."
            )
        detach(model, self.method)
        self._scaling.scaler = loss_scaler and weakref.ref(loss_scaler)
        if self._job is None:
            self._job = Job(
                self.name,
                model,
                self.inner_optimizer,
                self._scaling,
                self.rest_optimizer,
                self.plan,
            )
        self._job.loss_terms = loss_terms
        LossTap.open(model)
        BeforeTap.open(model)
        MetricsTap.open(model)
        self.method.attach(self._job)
        if self.built:
            self.method.create()
            _, others = self._divide(model.trainable_variables)
            rest = self.rest_optimizer or self.inner_optimizer
            lost = [v.path for v in others if not knows_variable(rest, v)]
            if lost:
                raise ValueError(
                    f"Optimizer '{self.name}' was built with a curvature block "
                    f"for {lost}, whose layers have frozen variables now. "
                    "Compile the model with a new optimizer."
                )
        return self

    def bound_model(self) -> keras.Model:
        """Return the model that the optimizer is bound to.

        Raises:
            ValueError: If the optimizer is not bound to a model.
        """
        return self._bound_job().model

    def _bound_job(self) -> Job:
        """Return the job; raise without a model or if the model was deleted."""
        if self._job is None or self._job.find_model() is None:
            raise ValueError(
                f"Optimizer '{self.name}' does not know its model. "
                "`Model.compile(optimizer=...)` binds it if tfkfac is imported "
                "before. Call `optimizer.attach(model)` before the first "
                "forward pass in a custom training loop, and for an optimizer "
                "that the model keeps under another attribute, as a GAN does: "
                "`self.d_optimizer.attach(self.discriminator)`. The optimizer "
                "cannot be inside a `MultiOptimizer`."
            )
        return self._job

    # ------------------------------------------------------------ the step
    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Create the state of the method and of the wrapped optimizers."""
        if self.built:
            return
        job = self._bound_job()
        is_single = job.topology.replicas == 1 and self._scaling.scaler is None
        check_float8(variables, self.method.takes_float8 and is_single)
        for value in vars(self.method.settings).values():
            if isinstance(value, Hyperparameter):
                value.build()
        job.create()
        if job.topology.replicas > len(job.topology.local):
            with tf.init_scope():  # `description` reads variables
                processes = job.among_processes("agreement")
                check_agreement(self.description(), processes)
        # Compare first: collectives of `create` need equal descriptions.
        self.method.create()
        self._build_wrapped(list(variables))
        self._is_building = True
        super().build(list(variables))
        self._is_building = False
        self._saved_state.create(job)

    def _build_wrapped(self, variables: list[keras.Variable]) -> None:
        """Build the inner and the rest optimizer for their variables."""
        covered, others = self._divide(variables)
        if self.rest_optimizer is not None:
            self.rest_optimizer.build(others)
        self.inner_optimizer.build(covered)

    def _divide(
        self, variables: Sequence[keras.Variable]
    ) -> tuple[list[keras.Variable], list[keras.Variable]]:
        """Return the variables of the inner and of the rest optimizer."""
        if self.rest_optimizer is None:
            return list(variables), []
        inner = self.inner_optimizer
        keys = {variable_key(inner, v) for v in self.method.covered()}
        covered = [v for v in variables if variable_key(inner, v) in keys]
        others = [v for v in variables if variable_key(inner, v) not in keys]
        return covered, others

    def build_in_scope(self, variables: Sequence[keras.Variable]) -> None:
        """Build the optimizer in its name scope, as Keras' `apply` does."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)

    def description(self) -> dict[str, Any]:
        """Return settings that must be equal on all workers, as JSON types."""
        model = self.bound_model()
        weights = model.trainable_variables
        arguments = {k: plain(v) for k, v in self._arguments().items()}
        optimizers = {}
        roles = "inner optimizer", "rest optimizer"
        for role, optimizer in zip(roles, self._optimizers, strict=False):
            optimizers[role] = type(optimizer).__name__
            config = plain(optimizer.get_config())
            optimizers |= {f"{role}'s {k}": v for k, v in config.items()}
        return {
            "TensorFlow and Keras": [tf.__version__, keras.__version__],
            "optimizer": type(self).__name__,
            **{f"argument {name}": value for name, value in arguments.items()},
            **optimizers,
            "learning rate set in training": float(self.plan.set_rate.numpy()),
            "jit_compile": uses_xla(model),
            "collectives": find_topology(model.distribute_strategy).hint,
            "shapes of the weights": [list(v.shape) for v in weights],
            **self.method.agreement(),
            **describe_model(model),
        }

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Update the variables. See `keras.Optimizer.apply`.

        Args:
            grads: Gradients of the mean loss; None for missing gradients.
            trainable_variables: The variables. Defaults to the variables that
                the optimizer was built with, else the model's.
        """
        if all(gradient is None for gradient in grads):
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        job = self._bound_job()
        variables = known_variables(self) or job.model.trainable_variables
        variables = list(trainable_variables or variables)
        if len(variables) != len(grads):
            raise ValueError(
                f"Argument `grads` must have {len(variables)} elements, as the "
                f"variables. Received: {len(grads)} elements"
            )
        self.build_in_scope(variables)
        self._check_variables_are_known(variables)
        batch = LossTap.open(job.model).pop_last(LossBatch())
        before = BeforeTap.open(job.model).pop_last([])
        if tf.executing_eagerly():
            self.check_iterations()
        step = Step(job, list(grads), variables, batch, job.group(), before)
        self.method.run(step)
        flag = job.local_state(job.streaks).excluded
        decision = MetricsDecision(flag, batch.value is not None)
        MetricsTap.open(job.model).record(decision)
        if tf.executing_eagerly():
            self.count_steps()

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weight the loss by this replica's share of the batch.

        The sum of the replicas' gradients is then the gradient of the mean
        over the global batch, even if the replicas have different numbers of
        examples. Keras' `train_step` calls this method. A custom training loop
        may call it under the tape, after `model.compute_loss`.

        In a loop without `compute_loss` it passes the loss to the optimizer;
        the length of spectral steps depends on it. Pass the mean negative
        log-likelihood of the examples, divided by the number of replicas.

        Args:
            loss: The result of `compute_loss`, or the loss of the loop.

        Returns:
            The loss to differentiate.
        """
        job = self._job
        if job is None:
            return loss
        batches = LossTap.open(job.model).current()
        batch = batches.pop() if batches else LossBatch()
        if not batch.arguments:  # `compute_loss` was not called
            batch = dataclasses.replace(batch, value=scalar_loss(loss))
        batches.append(batch)
        if job.topology.replicas == 1:
            return loss
        self.build_in_scope(job.model.trainable_variables)
        return weigh_loss(loss, job, self.method.peers(job.rank))

    # -------------------------------------------------------------- saving
    def gather_state(self) -> None:
        """Gather the state of all workers on worker 0, to be saved.

        In a job of several processes, each process has a part of the
        curvature. Call this method on all workers before one of them saves.
        The gathered state (factors and decompositions of all layers) stays in
        the main memory of worker 0; files saved before the next step contain
        it. `fit` calls this method before a callback with a `save_freq`, like
        Keras' callbacks, saves. Saving also gathers if all workers save within
        30 seconds, to different paths. No-op in a job of one process.
        """
        self._saved_state.gather()

    def save_own_variables(self, store: Any) -> None:
        """Write the whole state: curvature, inner and rest optimizer.

        In a model file, Keras itself saves the inner and the rest optimizer.
        On several workers, call `gather_state` before, or save on all workers.

        >>> store = {}
        >>> optimizer.save_own_variables(store)
        >>> copy.load_own_variables(store)  # the copy continues bit for bit

        Args:
            store: Dict or `h5py.Group`, which gets an array for each name.
        """
        self._saved_state.save(store)
        # The stores of Keras' files are no mappings.
        if isinstance(store, MutableMapping):
            self._saved_state.save_wrapped(store)

    def load_own_variables(self, store: Any) -> None:
        """Load state that `save_own_variables` wrote on any number of workers.

        The model must be built. Missing state that can be recomputed, such as
        the decompositions of another solver, is recomputed in the next step.

        Args:
            store: Mapping from names to arrays.

        Raises:
            ValueError: If the state does not fit the model, is invalid, or has
                the format of another version of tfkfac.
        """
        if not self.built:
            model = self._job.find_model() if self._job is not None else None
            if model is not None and not unbuilt(model):
                self.build(model.trainable_variables)
        self._saved_state.load(store)

    # ----------------------------------------------------------- reporting
    @property
    def skipped_steps(self) -> tf.Variable | int:
        """Number of steps skipped because a gradient was not finite."""
        skipped = () if self._job is None else self._job.skipped
        return skipped[0] if skipped else 0

    def check_skipped_steps(self) -> None:
        """Raise an error after `max_skipped_steps` consecutive skipped steps.

        `fit`, `train_on_batch` and eager loops call this method. If your
        training step is a `tf.function`, call it on all workers: either all of
        them raise or none.

        Raises:
            FloatingPointError: If so many steps have been skipped.
        """
        limit = self.max_skipped_steps
        if limit is not None and self._job is not None and self._job.streaks:
            streak = self._job.streaks[0]
            self._skipped_in_a_row = streak.check(limit, self.name)

    def count_steps(self, steps: int = 1) -> None:
        """Count steps; call `check_skipped_steps` if the limit may be reached.

        Reading the number of skipped steps waits for the device, so the number
        is read only if `max_skipped_steps` steps have run since it was 0.

        Args:
            steps: Number of steps since the last call. Defaults to 1.

        Raises:
            FloatingPointError: See `check_skipped_steps`.
        """
        self._skipped_in_a_row += steps
        limit = self.max_skipped_steps
        if limit is not None and self._skipped_in_a_row >= limit:
            self.check_skipped_steps()

    def summary(self, print_fn: Callable[[str], None] = print) -> None:
        """Print how the optimizer treats the model, and its state.

        Args:
            print_fn: Function that prints the text. Defaults to `print`.

        Raises:
            ValueError: If the optimizer is not bound to a built model.
        """
        self._check_built()
        events = [f"{text}: {count}" for text, count in self.events().items()]
        rate = self.rate_lines()
        print_fn("\n".join([*self.method.summary(), *rate, *events]))

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of this replica's curvature state by name."""
        self._check_built()
        return self.method.state_bytes()

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes that this replica receives, by type of step."""
        self._check_built()
        return self.method.communication_bytes()

    def events(self) -> dict[str, int]:
        """Return the counts of unexpected events so far.

        `summary` prints them, and `fit` prints the new events at its end.

        Returns:
            Counts above 0 by text, with the name of the layer: skipped steps,
            rejected statistics, dropped factors, failed decompositions, plain
            gradients used. Each process counts the events of its replicas;
            `fit` prints the largest count of all processes.
        """
        return largest_counts(self.event_counts())

    def event_counts(self) -> collections.Counter[tuple[str, int]]:
        """Return the counts of `events` by text and replica."""
        counts: collections.Counter[tuple[str, int]] = collections.Counter()
        if not self.built:
            return counts
        skipped = self._bound_job().skipped[0]
        events = [("steps skipped, gradients not finite", skipped)]
        replicas: collections.Counter[str] = collections.Counter()
        for text, count in events + self.method.events():
            counts[text, replicas[text]] = int(count.numpy())
            replicas[text] += 1
        return counts

    def _check_built(self) -> None:
        model = self.bound_model()
        if not self.built and unbuilt(model):
            raise ValueError(
                f"Model '{model.name}' is not built, so the sizes of its "
                "layers are not known. Call `model.build(input_shape)` or "
                "train a step first."
            )

    # ------------------------------------------------- the other optimizers
    @property
    def variables(self) -> list[Any]:
        """The variables of the inner optimizer, then of the rest optimizer.

        Empty while Keras writes an `.h5` file. See `save_own_variables`.
        """
        if is_saving_legacy_file():
            text = f"The `.h5` file does not contain the state of '{self.name}'"
            warnings.warn(f"{text}, which a `.keras` file does.", stacklevel=2)
            return []
        return [v for x in self._optimizers for v in x.variables]

    def __setattr__(self, name: str, value: Any) -> None:
        """Record that a `LossScaleOptimizer` wraps this optimizer."""
        # Keras' `LossScaleOptimizer` sets this attribute of the optimizer that
        # it wraps to None, which is the only sign of a wrapper.
        if name == "loss_scale_factor" and "_scaling" in vars(self):
            if value is not None:
                raise ValueError(
                    "Argument `loss_scale_factor` must be None; wrap the "
                    "optimizer in a `keras.optimizers.LossScaleOptimizer` "
                    f"instead. Received: loss_scale_factor={value}"
                )
            self._scaling.is_wrapped = True
        super().__setattr__(name, value)

    def check_iterations(self) -> None:
        """Raise an error if `variables` were assigned outside of a step.

        `fit`, `train_on_batch` and eager steps call this method.

        Raises:
            ValueError: If the count of iterations was assigned.
        """
        self._saved_state.check_iterations()
