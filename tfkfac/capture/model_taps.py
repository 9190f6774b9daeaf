"""Taps on methods of a model: its calls, and the state before them.

What any tap notes are Python objects that hold the tensors of one trace of one
replica. They live on the graph that they belong to, so that no trace ever sees
another's tensors.

Pullbacks are a second way back through a call of the model, from outputs to
layers. The training step's own tape has forgotten what it recorded when the
optimizer runs. So each call of the model is recorded on a tape of ours too,
which only watches the pre-activations of the tapped layers. What flows back
along it has the same masks of dropout and moments of batch normalisations as
the step, no gradient of a weight is computed, and no state changes. In a graph
it costs nothing until somebody asks for it, which may be inside of a `tf.cond`.
"""

import abc
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import keras
import tensorflow as tf

from tfkfac.compat.graphs import Sum, open_graphs, under_tape
from tfkfac.compat.models import changing_variables, own_value
from tfkfac.compat.overrides import drop_from, keep_on, override
from tfkfac.compat.strategies import summing_replicas

_STORE = "_tfkfac_records"
_state = threading.local()


class TraceStore(dict[tuple[int, int], Any]):
    """Notes of taps in one graph, by (tap, replica)."""


def capturing() -> bool:
    """True if a tape is on and nobody has paused the taps."""
    return not is_paused() and under_tape()


def is_paused() -> bool:
    """True if somebody keeps the taps of this thread from noting."""
    return getattr(_state, "paused", False)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Keeps all taps of this thread from noting anything."""
    before = is_paused()
    _state.paused = True
    try:
        yield
    finally:
        _state.paused = before


def replica_id() -> int:
    """Returns the static index of the replica being traced, 0 if alone."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    index = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if index is None else int(index)


def current_store(eager: TraceStore) -> TraceStore:
    """Returns the store of the current graph, `eager` outside of graphs."""
    if tf.executing_eagerly():
        return eager
    graph = tf.compat.v1.get_default_graph()
    store = getattr(graph, _STORE, None)
    if store is None:
        store = TraceStore()
        setattr(graph, _STORE, store)
    return store


def visible_stores(eager: TraceStore) -> list[TraceStore]:
    """Returns the stores whose tensors can be used here.

    Those are the current graph's and, from within a branch of a `tf.cond`,
    the enclosing graphs'.
    """
    if tf.executing_eagerly():
        return [eager]
    stores = [getattr(graph, _STORE, None) for graph in open_graphs()]
    return [store for store in stores if store is not None]


N = TypeVar("N")
# Variables of one replica, and their values.
Values = list[tuple[tf.Variable, tf.Tensor]]

_recording = threading.local()


class ModelTap(abc.ABC, Generic[N]):
    """Overrides a method of one model to note what it sees.

    Notes are kept by trace and replica, see `TraceStore`.

    Args:
        model: The model.

    Attributes:
        method: Name of the method.
        most: Number of notes that are kept of a step, the last ones. Others,
            that no step takes, would pile up.
    """

    method: ClassVar[str]
    most: ClassVar[int] = 1

    def __init__(self, model: keras.Model) -> None:
        self._model = weakref.ref(model)
        self._eager = TraceStore()
        self._installed = override(model, self.method, self._call)

    @abc.abstractmethod
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Takes the place of the method, which is `below`."""

    @classmethod
    def open(cls, model: keras.Model) -> Self:
        """Returns the model's tap, made if need be."""
        return keep_on(model, cls._attribute(), lambda: cls(model))

    @classmethod
    def close(cls, model: keras.Model) -> None:
        """Removes the tap."""
        tap = drop_from(model, cls._attribute())
        if tap is not None:
            tap._installed.remove()

    @staticmethod
    def close_all(model: keras.Model) -> None:
        """Removes every tap of the model."""
        for kind in ModelTap.__subclasses__():
            kind.close(model)

    def note(self, note: N) -> None:
        """Notes something of this replica in the current trace."""
        store = current_store(self._eager)
        notes = store.setdefault(self._key(), [])
        notes.append(note)
        del notes[: -self.most]

    def noted(self) -> list[N]:
        """Returns this replica's notes of the current trace, the last last."""
        stores = visible_stores(self._eager)[::-1]  # the innermost graph last
        key = self._key()
        return [note for store in stores for note in store.get(key, ())]

    def take(self) -> list[N]:
        """Returns the same, and forgets them."""
        notes = self.noted()
        for store in visible_stores(self._eager):
            store.pop(self._key(), None)
        return notes

    def take_last(self, default: N) -> N:
        """Takes the last note of this replica; the default if there is none."""
        notes = self.take()
        return notes[-1] if notes else default

    @classmethod
    def _attribute(cls) -> str:
        """Name of the attribute of a model that holds the tap."""
        return f"_tfkfac_{cls.__name__}"

    def _key(self) -> tuple[int, int]:
        """This replica's place in a store."""
        return id(self), replica_id()


# --------------------------------------------------- calls, and the way back
@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """Arguments of a call of a model, and its outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class ForwardTap(ModelTap[ForwardCall]):
    """Notes the calls of a model under a tape.

    A `train_step` may call its model on something else than the `x` that it
    passes to `compute_loss`, or pass no `x` at all.
    """

    method = "call"
    most = 32

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        outputs = below(*args, **kwargs)
        if capturing():
            self.note(ForwardCall(args, kwargs, outputs))
        return outputs


class Pullback:
    """One recorded call of a model.

    Args:
        outputs: The outputs of the model.
        tape: The persistent tape that was on.
    """

    def __init__(self, outputs: Any, tape: tf.GradientTape) -> None:
        self._outputs = {id(t): t for t in keras.tree.flatten(outputs)}
        self._tape = tape

    def returned(self, tensor: tf.Tensor) -> bool:
        """True if the model returned this tensor."""
        return id(tensor) in self._outputs

    def pull(
        self,
        outputs: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        sources: Sequence[tf.Tensor | None],
        total: Sum = tf.identity,
    ) -> list[tf.Tensor | None]:
        """Takes gradients at outputs back to pre-activations.

        Args:
            outputs: Tensors that the model returned.
            gradients: The gradient at each of them.
            sources: `Record.output`s of its layers, or None.
            total: Sum over the replicas, for synchronised layers.

        Returns:
            The gradient at each source, None where no output depends on it.
        """
        known = [source for source in sources if source is not None]
        with paused(), summing_replicas(total):
            found = iter(
                self._tape.gradient(
                    list(outputs), known, output_gradients=list(gradients)
                )
            )
        pulled = [None if s is None else next(found) for s in sources]
        return [None if g is None else tf.convert_to_tensor(g) for g in pulled]


class PullbackTap(ModelTap[Pullback]):
    """Records the calls of a model under a tape."""

    method = "call"
    most = 4

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        before = getattr(_recording, "tapes", ())
        with tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as tape:
            _recording.tapes = (*before, tape)
            try:
                outputs = below(*args, **kwargs)
            finally:
                _recording.tapes = before
        self.note(Pullback(outputs, tape))
        return outputs


def watch_for_pullbacks(tensor: tf.Tensor) -> None:
    """Lets the calls that are going on be pulled back to this tensor."""
    for tape in getattr(_recording, "tapes", ()):
        tape.watch(tensor)


# ------------------------------------------------ what a skipped step undoes
class BeforeTap(ModelTap[Values]):
    """Notes what a model keeps, before its first call in a training step.

    That is what the call and Keras' `train_step` change whatever comes of the
    step: moving statistics, random seeds, means of losses. Tensors that
    nobody asks for cost nothing.
    """

    method = "call"

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        store, key = current_store(self._eager), self._key()
        model = self._model()
        if model is not None and capturing() and key not in store:
            self.note(read(changing_variables(model)))
        try:
            return below(*args, **kwargs)
        except BaseException:
            store.pop(key, None)
            raise


class MetricsTap(ModelTap[tf.Variable]):
    """Keeps the batch of a skipped step out of the metrics that follow it.

    Keras' `train_step` ends with `compute_metrics`, which updates those that
    the model was compiled with and returns the results of all. What is noted
    is a variable, positive if this replica's batch is left out.
    """

    method = "compute_metrics"

    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        model, noted = self._model(), self.take()
        # The mean of the loss alone is not updated here.
        if model is None or not noted or len(model.metrics) < 2:
            return below(*args, **kwargs)
        before = read(model.metrics_variables)
        results = below(*args, **kwargs)

        def without() -> Any:
            put_back(before)
            return model.get_metrics_result()

        return tf.cond(noted[-1] > 0, without, lambda: results)


def read(variables: Sequence[keras.Variable]) -> Values:
    """This replica's copies of variables, and their values now."""
    own = [own_value(variable) for variable in variables]
    return [(variable, tf.convert_to_tensor(variable)) for variable in own]


def put_back(values: Values) -> None:
    """Gives variables their values again."""
    for variable, value in values:
        variable.assign(value)
