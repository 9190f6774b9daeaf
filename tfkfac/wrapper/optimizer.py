"""An optimizer around a Keras optimizer, bound to the model it trains."""

import abc
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import keras
import tensorflow as tf

from tfkfac.capture.forward import ForwardTap
from tfkfac.capture.loss_batch import LossBatch, LossTap
from tfkfac.capture.taps import Tap, forget_first_call
from tfkfac.capture.trace import replica_id
from tfkfac.capture.walk import unbuilt, walk
from tfkfac.compat.graphs import count_events, state_variable
from tfkfac.compat.inner_update import updates_in_replica
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.fingerprint import check_agreement
from tfkfac.distributed.topology import find_topology
from tfkfac.fosi.moments import release_moments
from tfkfac.linalg.symmetric import all_finite
from tfkfac.saving.store import Named, is_state, load_state, save_state
from tfkfac.wrapper.checks import check_settings, repair_keras, values_of
from tfkfac.wrapper.delegation import DelegatingOptimizer
from tfkfac.wrapper.shares import batch_share, weighted

_ordinals = itertools.count()

Gradients = list[tf.Tensor | None]


class Update(NamedTuple):
    """What an optimizer lets its inner optimizer do in a step.

    Attributes:
        gradients: The gradients for it.
        after: Called where the inner optimizer has changed the weights, before
            it averages or constrains them.
    """

    gradients: Gradients
    after: Callable[[], None] | None = None


class WrappingOptimizer(DelegatingOptimizer):
    """Changes the gradients, then lets an inner Keras optimizer apply them.

    The learning rate, the iterations and everything an inner optimizer does
    by itself (momentum, weight decay, clipping, averaging) stay its own. A
    step whose gradients are not finite is skipped as a whole and counted.

    Args:
        inner_optimizer: A Keras optimizer, its identifier or its config.
        name: Name of the optimizer.
    """

    def __init__(self, inner_optimizer: Any, name: str) -> None:
        super().__init__(inner_optimizer, name)
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
        self._train(list(grads), variables, batch, self._communicator())

    def _train(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> None:
        """One step of the workers of `communicator`."""
        gradients = self._reduce(gradients, batch, communicator)
        communicator.outputs()  # the gradients are always used
        step = self._prepare(gradients, variables, batch, communicator)
        finite = self._all_finite(gradients, communicator)
        count_events(
            [tf.logical_not(finite)],
            [self._skipped[self._position()]],
            [self.name],
            "a step is skipped, its gradients are not finite.",
        )

        def update() -> tf.Tensor:
            self._apply_inner(step(), variables)
            return tf.constant(0)

        tf.cond(finite, update, lambda: tf.constant(0))

    def _communicator(self, scope: str | None = None) -> Communicator:
        """This worker's collectives for one trace of the step."""
        topology = self._topology
        scope = self._scope if scope is None else scope
        return Communicator(
            self._rank(),
            topology.workers,
            scope,
            topology.hint,
            len(topology.local) > 1,
        )

    def _rank(self) -> int:
        """This worker."""
        local = self._topology.local
        return local[0] if len(local) == 1 else replica_id()

    def _position(self) -> int:
        """Place of this worker among those of this process."""
        return self._topology.position(self._rank())

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
        share = batch_share(batch, communicator, self._topology.workers)
        if communicator.workers == 1 and share is None:
            return gradients
        present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        present = [weighted(g, share) for g in present]
        reduced = iter(communicator.all_reduce(present))
        return [None if g is None else next(reduced) for g in gradients]

    def _all_finite(
        self, gradients: Gradients, communicator: Communicator
    ) -> tf.Tensor:
        """Whether the step can be done; the same on every worker."""
        return all_finite([values_of(g) for g in gradients if g is not None])

    def _apply_inner(
        self, update: Update, variables: list[keras.Variable]
    ) -> None:
        """The inner optimizer's own step, without a second reduction."""
        # What is passed on as it is must be of this branch's graph too.
        gradients = [
            None if g is None else tf.identity(g) for g in update.gradients
        ]
        inner = self.inner_optimizer
        if self._topology.workers == 1 and update.after is None:
            inner.apply(gradients, variables)
            return
        with updates_in_replica(inner, update.after):
            inner.apply(gradients, variables)

    @property
    def skipped_steps(self) -> tf.Variable | int:
        """Number of steps skipped because a gradient was not finite."""
        return self._skipped[0] if self._skipped else 0

    # -------------------------------------------------------------- saving
    def save_own_variables(self, store: Any) -> None:
        """Writes the curvature state, named by layer.

        Keras saves the inner optimizer by itself. With several workers no
        worker has all of the state and none is written: a loaded model then
        gathers its curvature anew from the first step on.

        Args:
            store: A mapping of names to arrays.
        """
        if self.built and self._topology.workers == 1:
            save_state(store, self._named_state())

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote.

        Args:
            store: A mapping of names to arrays.

        Raises:
            ValueError: If it does not fit the model or the solver.
        """
        if not store.keys():
            return  # of an optimizer saved before it had any state
        why = self._cannot_load(store)
        if why is None:
            load_state(store, self._named_state(), self.name)
        else:
            warnings.warn(
                f"Optimizer '{self.name}' does not load its saved curvature: "
                f"{why}. It starts anew.",
                stacklevel=2,
            )

    def _cannot_load(self, store: Any) -> str | None:
        """Why saved state is of no use here, or None."""
        if not is_state(store):
            return "the file is of another optimizer"
        if not self.built:
            model = self._model() if self._model is not None else None
            if model is None or unbuilt(model):
                return "the model is not built"
            self.build(model.trainable_variables)
        if self._topology.workers > 1:
            return "it is of a single worker, and the job has several"
        return None

    # ----------------------------------------------------------- reporting
    def _events(self) -> list[str]:
        """What went wrong so far, for the summary."""
        if not self.built:
            return []
        events = [("steps skipped, gradients not finite", self._skipped[0])]
        events += self._event_counters()
        counts = [(text, int(count.numpy())) for text, count in events]
        return [f"{text}: {count}" for text, count in counts if count]

    def _check_built(self, model: keras.Model) -> None:
        if not self.built and unbuilt(model):
            raise ValueError(
                f"Model '{model.name}' is not built, so the sizes of its "
                "layers are not known. Call `model.build(input_shape)` or "
                "train a step first."
            )

    # ------------------------------------------------------ for subclasses
    @abc.abstractmethod
    def _attached(self) -> None:
        """Called after each `attach`; the model may not be built yet."""

    @abc.abstractmethod
    def _create_state(self) -> None:
        """Creates the variables for the attached model, which is built."""

    @abc.abstractmethod
    def _named_state(self) -> Named:
        """This worker's variables to save, named by layer."""

    @abc.abstractmethod
    def _event_counters(self) -> list[tuple[str, tf.Variable]]:
        """What can go wrong, and how often it has."""

    @abc.abstractmethod
    def _prepare(
        self,
        gradients: Gradients,
        variables: list[keras.Variable],
        batch: LossBatch,
        communicator: Communicator,
    ) -> Callable[[], Update]:
        """Takes this trace's records; returns the function that does the step.

        It runs only if all gradients are finite, which all workers agree on.
        """


def detach(model: keras.Model, optimizer: WrappingOptimizer | None) -> None:
    """Removes an optimizer's taps from a model; its state is kept.

    Args:
        model: The model.
        optimizer: The optimizer, or None for those that are gone.
    """
    for node in walk(model):
        forget_first_call(node.layer)
        release_moments(node.layer)
        Tap.close(node.layer, optimizer)
    ForwardTap.close(model)
    LossTap.close(model)
