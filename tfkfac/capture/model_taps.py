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
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.graphs import Sum, open_graphs, under_tape
from tfkfac.compat.models import changing_variables, own_value
from tfkfac.compat.overrides import drop_from, keep_on, override
from tfkfac.compat.strategies import summing_replicas

_STORE = "_tfkfac_records"
_state = threading.local()


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


N = TypeVar("N")
# The method that a tap takes the place of.
Below = Callable[..., Any]
# Notes in one graph, by (whose, replica).
_Store = dict[tuple[int, int], list[Any]]
# Variables of one replica, and their values.
Values = list[tuple[tf.Variable, tf.Tensor]]

_recording = threading.local()


class Notes(Generic[N]):
    """Notes of a tap, for each trace and replica by itself.

    Those of a graph live on it, those of eager execution here.
    """

    def __init__(self) -> None:
        self._eager: _Store = {}

    def here(self, replica: int | None = None) -> list[N]:
        """A replica's notes in the current graph, to be changed in place.

        By default it is the replica that is being traced.
        """
        store = self._eager
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if not hasattr(graph, _STORE):
                setattr(graph, _STORE, {})
            store = getattr(graph, _STORE)
        number = replica_id() if replica is None else replica
        return store.setdefault((id(self), number), [])

    def everywhere(self, and_eager: bool = False) -> list[list[N]]:
        """This replica's notes whose tensors can be used here, by graph.

        Those are the current graph's, the last, and, from within a branch of a
        `tf.cond`, the enclosing graphs'; on demand the eager ones too.
        """
        graphs = [] if tf.executing_eagerly() else [*open_graphs()][::-1]
        stores: list[_Store] = [getattr(graph, _STORE, {}) for graph in graphs]
        if and_eager or not graphs:
            stores.insert(0, self._eager)
        key = id(self), replica_id()
        return [store[key] for store in stores if key in store]

    def noted(self) -> list[N]:
        """Returns these notes, the last one last."""
        return [note for notes in self.everywhere() for note in notes]

    def take(self) -> list[N]:
        """Returns the same, and forgets them."""
        found = self.noted()
        for notes in self.everywhere():
            notes.clear()
        return found


class ModelTap(Notes[N], abc.ABC):
    """Overrides a method of one model to note what it sees.

    The last notes of a step are kept. Others, that no step takes, would pile
    up.
    """

    method: ClassVar[str]
    most: ClassVar[int] = 1

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self._installed = override(model, self.method, self._call)

    @abc.abstractmethod
    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
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
        notes = self.here()
        notes.append(note)
        del notes[: -self.most]

    def take_last(self, default: N) -> N:
        """Takes the last note of this replica; the default if there is none."""
        notes = self.take()
        return notes[-1] if notes else default

    @classmethod
    def _attribute(cls) -> str:
        """Name of the attribute of a model that holds the tap."""
        return f"_tfkfac_{cls.__name__}"


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

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        outputs = below(*args, **kwargs)
        if capturing():
            self.note(ForwardCall(args, kwargs, outputs))
        return outputs


class Pullback:
    """One recorded call of a model, on a persistent tape."""

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

        The sources are the `Record.output`s of its layers, or None. Their
        gradients are None where no output depends on them. `total` adds up
        over the replicas, for synchronised layers.
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

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
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
    """Records the state of a model before its first call in a training step.

    The call changes this state, moving statistics and random seeds, even if
    the step is skipped. Tensors that nobody uses cost nothing.
    """

    method = "call"

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        notes, model = self.here(), self._model()
        if model is not None and capturing() and not notes:
            notes.append(read(changing_variables(model)))
        try:
            return below(*args, **kwargs)
        except BaseException:
            notes.clear()
            raise


class LeftOut(NamedTuple):
    """Decision about the batch of a step: does it count in the metrics?

    Attributes:
        flag: Positive if the batch is left out of the metrics.
        loss_is_known: False if the loss of the batch was not computed by
            `compute_loss`; then only metrics that are not finite count as
            evidence of a loss that is not.
    """

    flag: tf.Variable
    loss_is_known: bool


class MetricsTap(ModelTap[LeftOut]):
    """Keeps batches whose loss is not finite out of the metrics after them.

    The results that `train_step` returns include the batch, so that its logs
    show the loss. Then the metrics get the values that they had before it.
    """

    method = "train_step"

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        self.take()
        model = self._model()
        known = [] if model is None else model.metrics_variables
        before = read(known)
        results = below(*args, **kwargs)
        noted = self.take()
        if model is None or not noted:
            return results

        verdict = noted[-1]
        left_out = verdict.flag > 0
        if not verdict.loss_is_known:
            left_out &= ~_all_finite(read(model.metrics_variables))
        if tf.executing_eagerly() and left_out:
            # Variables created in this step belong to no other.
            old = {id(variable) for variable in known}
            for metric in model.metrics:
                if any(id(v) not in old for v in metric.variables):
                    metric.reset_state()
        # No `tf.cond`, which takes longer than the assignments.
        for variable, value in before:
            variable.assign(
                tf.raw_ops.Select(condition=left_out, x=value, y=variable)
            )
        return results


def _all_finite(values: Values) -> tf.Tensor:
    """True if all floating-point values are finite."""
    finite = [
        tf.reduce_all(tf.math.is_finite(value))
        for _, value in values
        if value.dtype.is_floating
    ]
    return tf.reduce_all(finite)


def no_batch_counted(model: keras.Model) -> bool:
    """True if the metrics are as after a reset. Not in graphs.

    Under a strategy this is a collective operation, as `Metric.result` is.
    """
    return all(
        np.array_equal(
            # NumPy 2 warns of the `__array__` of a Keras variable.
            tf.convert_to_tensor(variable.value).numpy(),
            keras.ops.convert_to_numpy(value),
        )
        for metric in model.metrics
        for variable, value in zip(
            metric.variables, metric.stateless_reset_state(), strict=True
        )
    )


def read(variables: Sequence[keras.Variable]) -> Values:
    """This replica's copies of variables, and their values now."""
    own = [own_value(variable) for variable in variables]
    return [(variable, tf.convert_to_tensor(variable)) for variable in own]


def put_back(values: Values) -> None:
    """Gives variables their values again."""
    for variable, value in values:
        variable.assign(value)
