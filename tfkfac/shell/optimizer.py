"""The Keras optimizer around another, bound to the model it trains."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import BeforeTap, LeftOut, MetricsTap
from tfkfac.capture.walk import detach, unbuilt
from tfkfac.checks import check_count
from tfkfac.compat.models import is_saving_legacy_file, legacy_variables
from tfkfac.compat.optimizers import (
    knows_variable,
    variable_key,
)
from tfkfac.compat.optimizers import trainable_variables as known_variables
from tfkfac.distributed.agreement import check_agreement
from tfkfac.loss.batch import LossBatch, LossTap
from tfkfac.loss.shares import LossScaling
from tfkfac.shell.arguments import (
    check_inner,
    restore_value,
    setting,
)
from tfkfac.shell.averages import AveragingOptimizer
from tfkfac.shell.method import Method
from tfkfac.shell.model import (
    check_settings,
    describe_model,
    plain,
    repair_keras,
    uses_xla,
)
from tfkfac.shell.rest import follows
from tfkfac.shell.saving import SavedState
from tfkfac.training.job import Job
from tfkfac.training.step import Step, weigh_loss


class SecondOrderOptimizer(AveragingOptimizer):
    """Changes the gradients, then lets an inner Keras optimizer apply them.

    The learning rate, the iterations and everything an inner optimizer does
    by itself (momentum, weight decay, clipping, averaging) stay its own. A
    step whose gradients are not finite is skipped as a whole and counted.

    The `Method` changes the gradients. The fields of its settings, a frozen
    dataclass that a subclass names, are attributes of the optimizer.
    """

    settings_type: ClassVar[type]

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
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = check_inner(inner_optimizer)
        self.rest_optimizer = rest_optimizer
        self.method = method
        self._scaling = LossScaling(name)
        self.max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0  # upper bound
        self._job: Job | None = None
        # Checkpoints follow the attributes of an optimizer.
        self._saved_state = SavedState(name, method)
        repair_keras(tf.distribute.get_strategy())

    # ---------------------------------------------------------- the config
    @property
    def max_skipped_steps(self) -> int | None:
        """Steps skipped in a row that end the training; None is never."""
        return self._max_skipped_steps

    @max_skipped_steps.setter
    def max_skipped_steps(self, value: int | None) -> None:
        if value is not None:
            value = check_count("max_skipped_steps", value, 1)
        self._max_skipped_steps = value

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments but the optimizers and the name."""
        names = [field.name for field in dataclasses.fields(self.settings_type)]
        values = {name: getattr(self, name) for name in names}
        return {"max_skipped_steps": self.max_skipped_steps, **values}

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        values = {"inner_optimizer": self.inner_optimizer, **self._arguments()}
        serialize = keras.saving.serialize_keras_object
        config = {name: serialize(value) for name, value in values.items()}
        return {"name": self.name, **config}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> Self:
        """Create an optimizer from its config.

        Args:
            config: What `get_config` has returned.
            custom_objects: Classes and functions by the names in the config.

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
            name: restore_value(name, value, custom_objects)
            for name, value in config.items()
        }
        return cls(**arguments)

    # ----------------------------------------------------------- the model
    def attach(
        self,
        model: keras.Model,
        *,
        loss_terms: int | Callable[[], tf.Tensor] | None = None,
        loss_scaler: Any = None,
    ) -> Self:
        """Binds the optimizer to the model that it will train.

        `Model.compile` calls this. Call it yourself, before the first forward
        pass, when you write the training loop.

        Args:
            model: The model.
            loss_terms: For a loop that does not call `model.compute_loss`:
                number of terms that the loss of a batch is the mean of, or a
                function without arguments that returns it. 1 is a sum over
                the terms. None is the leading dimension of a layer's input.
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
        if loss_terms is not None and not callable(loss_terms):
            loss_terms = check_count("loss_terms", loss_terms, 1)
        self._check_owner(model)
        check_settings(model, loss_scaler)
        self._check_variables(model)
        detach(model, self.method)
        self._scaling.know(loss_scaler)
        if self._job is None:
            self._job = Job(
                self.name,
                model,
                self.inner_optimizer,
                self._scaling,
                self.rest_optimizer,
                follows(self.inner_optimizer),
            )
        self._job.loss_terms = loss_terms
        LossTap.open(model)
        BeforeTap.open(model)
        MetricsTap.open(model)
        self.method.attach(self._job)
        if self.built:
            self.method.create()
        return self

    def bound_model(self) -> keras.Model:
        """Returns the model that the optimizer is bound to.

        Raises:
            ValueError: If there is none.
        """
        return self._bound_job().model

    def _bound_job(self) -> Job:
        """The job, of a model that is still there."""
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

    def _check_owner(self, model: keras.Model) -> None:
        owner = None if self._job is None else self._job.find_model()
        if self._job is not None and owner is not model:
            known = f"model '{owner.name}'" if owner else "a deleted model"
            received = f"model '{model.name}'"
            if owner is not None and owner.name == model.name:
                received = "a clone, which is another model of the same name"
            raise ValueError(
                f"Optimizer '{self.name}' already belongs to {known} and "
                "keeps its curvature. Create a new optimizer for each model. "
                f"Received: {received}."
            )

    def _check_variables(self, model: keras.Model) -> None:
        new = [
            v.path
            for v in model.trainable_variables
            if not any(knows_variable(one, v) for one in self._optimizers)
        ]
        if self.built and new:
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
        job = self._bound_job()
        for parameter in self.method.hyperparameters():
            parameter.build()
        job.create()
        if job.topology.replicas > len(job.topology.local):
            with tf.init_scope():  # a config holds values of variables
                processes = job.among_processes("agreement")
                check_agreement(self.description(), processes)
        # Its collectives match only on workers with equal descriptions.
        self.method.create()
        self._build_others(list(variables))
        self._is_building = True
        super().build(list(variables))
        self._is_building = False
        self._saved_state.create(job)

    def _build_others(self, variables: list[keras.Variable]) -> None:
        """Builds inner and rest optimizer, each for its part."""
        if self.rest_optimizer is None:
            self.inner_optimizer.build(variables)
            return
        inner = self.inner_optimizer
        own = {variable_key(inner, v) for v in self.method.covered()}
        parts: tuple[list[keras.Variable], ...] = [], []
        for variable in variables:
            parts[variable_key(inner, variable) in own].append(variable)
        self.rest_optimizer.build(parts[False])
        inner.build(parts[True])

    def build_in_scope(self, variables: Sequence[keras.Variable]) -> None:
        """Builds as Keras' `apply` does, below the optimizer's name."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)

    def description(self) -> dict[str, Any]:
        """Facts that all workers must agree on, by name, for JSON."""
        model = self.bound_model()
        weights = model.trainable_variables
        arguments = {k: plain(v) for k, v in self._arguments().items()}
        others = {}
        for which, one in zip(
            ("inner", "rest"), self._optimizers, strict=False
        ):
            others[f"{which} optimizer"] = type(one).__name__
            settings = plain(one.get_config())
            others |= {
                f"{which} optimizer's {k}": v for k, v in settings.items()
            }
        return {
            "TensorFlow and Keras": [tf.__version__, keras.__version__],
            "optimizer": type(self).__name__,
            **{f"argument {name}": value for name, value in arguments.items()},
            **others,
            "jit_compile": uses_xla(model),
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
        """Updates the variables. See `keras.Optimizer.apply`.

        Args:
            grads: Gradients of the mean loss; None where there is none.
            trainable_variables: Their variables; needed in the first call.
        """
        if all(gradient is None for gradient in grads):
            self.inner_optimizer.apply(grads, trainable_variables)
            return
        variables = trainable_variables
        if variables is None:
            variables = known_variables(self)
        self.build_in_scope(variables)
        job = self._bound_job()
        batch = LossTap.open(job.model).take_last(LossBatch())
        before = BeforeTap.open(job.model).take_last([])
        step = Step(job, list(grads), variables, batch, job.group(), before)
        self.method.run(step)
        flag = job.own(job.streaks).left_out
        verdict = LeftOut(flag, batch.value is not None)
        MetricsTap.open(job.model).note(verdict)
        if tf.executing_eagerly():
            self.count_steps()

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Weighs the loss by this replica's share of the batch.

        With it, the replicas' gradients add up to that of the mean over the
        whole batch, also where they have different numbers of examples. Keras'
        `train_step` calls this. A loop of your own may: under the tape, after
        `model.compute_loss` and only for its gradients.

        Args:
            loss: What `compute_loss` returned.

        Returns:
            The loss to take the gradients of.
        """
        job = self._job
        if job is None or job.topology.replicas == 1:
            return loss
        self.build_in_scope(job.model.trainable_variables)
        return weigh_loss(loss, job, self.method.peers(job.rank))

    # -------------------------------------------------------------- saving
    def gather_state(self) -> None:
        """Brings the state of all workers together, to be saved.

        In a job of several processes each has a share of the curvature. Call
        this on all of them before one saves: the first one then has all of it
        in its main memory (the bytes of the factors and decompositions of all
        layers), until it is gathered again, and what is saved before the next
        step has it. It is a collective operation; saving is none. `fit` calls
        it where a callback with a `save_freq`, as Keras' have, is about to
        save, and saving where all processes save within 30 seconds, each to a
        path of its own. In a job of one process it does nothing.
        """
        self._saved_state.gather()

    def save_own_variables(self, store: Any) -> None:
        """Writes the curvature state, named by layer.

        Keras saves the inner optimizer by itself. In a job of several
        processes `gather_state` has to come before, or all have to save.

        Args:
            store: A mapping of names to arrays.
        """
        self._saved_state.save(store)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, on any number of workers.

        What a file has not and can be made anew, as decompositions by another
        solver, is made anew.

        Args:
            store: A mapping of names to arrays.

        Raises:
            ValueError: If it does not fit the model, cannot be right, or is in
                a format of another version of tfkfac.
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
        """Raises if `max_skipped_steps` steps in a row have been skipped.

        `fit`, `train_on_batch` and eager loops do this after each step. Call
        it yourself where a loop of your own is a `tf.function`: on all
        workers, which then all raise.

        Raises:
            FloatingPointError: If they have been.
        """
        most = self.max_skipped_steps
        if most is not None and self._job is not None and self._job.streaks:
            streak = self._job.streaks[0]
            self._skipped_in_a_row = streak.check(most, self.name)

    def count_steps(self, steps: int = 1) -> None:
        """Checks the skipped steps once enough of them may have been done.

        Reading their number waits for the device, so it is read only where
        `max_skipped_steps` steps have been done since it was 0.

        Args:
            steps: Number of steps since the last call. Defaults to 1.

        Raises:
            FloatingPointError: As `check_skipped_steps`.
        """
        self._skipped_in_a_row += steps
        most = self.max_skipped_steps
        if most is not None and self._skipped_in_a_row >= most:
            self.check_skipped_steps()

    def summary(self, print_fn: Callable[[str], None] = print) -> None:
        """Prints what the optimizer does with the model, and its state.

        Args:
            print_fn: Function that takes the text. Defaults to `print`.

        Raises:
            ValueError: If the optimizer has no model, or one that is not
                built.
        """
        self._check_built()
        events = [f"{text}: {count}" for text, count in self.events().items()]
        print_fn("\n".join([*self.method.summary(), *events]))

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this replica's curvature state by kind."""
        self._check_built()
        return self.method.state_bytes()

    def communication_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that this replica receives, by kind of step."""
        self._check_built()
        return self.method.communication_bytes()

    def events(self) -> dict[str, int]:
        """Returns what has gone wrong so far, and how often.

        `summary` prints it, and `fit` at its end what is new.

        Returns:
            The counts that are not 0, with the layer where it is one's own:
            steps skipped, statistics rejected, factors dropped, decompositions
            failed, plain gradients used. Each process counts the faults of its
            own replicas; `fit` prints the largest count of all processes.
        """
        return largest_counts(self.event_counts())

    def event_counts(self) -> collections.Counter[tuple[str, int]]:
        """Returns the counts of `events` by text and replica."""
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
        """The variables of the inner optimizer, then of the rest optimizer.

        In an `.h5` file, that has nothing else of an optimizer, also its state.
        """
        variables = [v for one in self._optimizers for v in one.variables]
        if is_saving_legacy_file():
            state: dict[str, Any] = {}
            self.save_own_variables(state)
            variables = [*variables, *legacy_variables(state)]
        return variables

    def __setattr__(self, name: str, value: Any) -> None:
        """Record that a `LossScaleOptimizer` wraps this optimizer."""
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
        """Sets the inner and rest optimizers, in the order of `variables`."""
        values = iter(weights)
        for one in self._optimizers:
            one.set_weights(list(itertools.islice(values, len(one.variables))))

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Lets the other optimizers write their averages at the end."""
        for one in self._optimizers:
            own = [v for v in var_list if knows_variable(one, v)]
            one.finalize_variable_values(own)


def ours(optimizer: Any) -> SecondOrderOptimizer | None:
    """The optimizer of ours that a model's optimizer is or has inside."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer if isinstance(optimizer, SecondOrderOptimizer) else None


def largest_counts(
    counts: Mapping[tuple[str, int], int],
) -> collections.Counter[str]:
    """Return the largest count of a replica for each text, without zeros."""
    largest: collections.Counter[str] = collections.Counter()
    for (text, _), count in counts.items():
        largest |= collections.Counter({text: count})
    return largest
