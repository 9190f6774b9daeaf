"""Taps: override methods of a model to record calls and earlier state.

A tap records Python objects with tensors of one trace of one replica. They are
stored on the graph of their tensors, so no other trace uses them.

A pullback backpropagates gradients at the outputs of a recorded call of the
model to the pre-activations of its layers. The tape of the training step is no
longer available when the optimizer runs. Therefore a second, persistent tape
records each call; it only watches the pre-activations of the tapped layers. The
backward pass uses the dropout masks and batch statistics of the step, computes
no gradient of a weight, and changes no state. In a graph it costs nothing
unless it is used, also inside a branch of `tf.cond`.
"""

import abc
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfkfac.compat.graphs import (
    Sum,
    graph_attribute,
    open_graphs,
    trace_place,
    under_tape,
)
from tfkfac.compat.models import all_layers, replica_variable
from tfkfac.compat.overrides import Below, drop_from, keep_on, override
from tfkfac.compat.strategies import summing_replicas

_STORE = "_tfkfac_records"
_state = threading.local()


def capturing() -> bool:
    """Return True if taps record: under a tape, neither paused nor nested."""
    return not is_paused() and under_tape() and not is_nested()


def is_nested() -> bool:
    """Return True in a `tf.cond`, a loop or a `tf.function` in a model call.

    Tensors of such a graph cannot be used in the graph of the step.
    """
    places: Sequence[Any] = getattr(_state, "places", ())
    return bool(places) and places[0] != trace_place()


def is_paused() -> bool:
    """Return True inside of `paused` in this thread."""
    return getattr(_state, "paused", False)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Keep all taps of this thread from recording."""
    previous = is_paused()
    _state.paused = True
    try:
        yield
    finally:
        _state.paused = previous


def replica_id() -> int:
    """Return the static index of the replica being traced; 0 if unknown."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    index = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if index is None else int(index)


N = TypeVar("N")
# Lists of one graph, keyed by (id of the `TraceLists`, replica).
_Store = dict[tuple[int, int], list[Any]]
# (variable, value) pairs of one replica.
Values = list[tuple[tf.Variable, tf.Tensor]]

recording = threading.local()  # `tapes` of all calls in progress


class TraceLists(Generic[N]):
    """Lists of recorded objects, one for each trace and replica."""

    def __init__(self) -> None:
        # Lists of eager calls. A graph has its own lists, so that no other
        # trace uses their tensors.
        self._eager: _Store = {}

    def current(self, replica: int | None = None) -> list[N]:
        """Return the mutable list of a replica in the current graph."""
        store = self._eager
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            store = graph_attribute(graph, _STORE, dict)
        index = replica_id() if replica is None else replica
        return store.setdefault((id(self), index), [])

    def visible(self, and_eager: bool = False) -> list[list[N]]:
        """Return this replica's lists, from the outermost to the current graph.

        With `and_eager`, the eager list comes first.
        """
        graphs = [] if tf.executing_eagerly() else [*open_graphs()][::-1]
        stores: list[_Store] = [getattr(graph, _STORE, {}) for graph in graphs]
        if and_eager or not graphs:
            stores.insert(0, self._eager)
        key = id(self), replica_id()
        return [store[key] for store in stores if key in store]

    def items(self) -> list[N]:
        """Return this replica's objects, oldest first."""
        return [item for items in self.visible() for item in items]

    def pop_items(self) -> list[N]:
        """Remove and return this replica's objects, oldest first."""
        popped = self.items()
        for items in self.visible():
            items.clear()
        return popped


class ModelTap(TraceLists[N], abc.ABC):
    """Override one method of a model to record an object in each call.

    Keep only the last `max_items` objects: calls outside of a training step
    are recorded too, and no step removes their objects.
    """

    method: ClassVar[str]
    max_items: ClassVar[int] = 1

    def __init__(self, model: keras.Model) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self._installed = override(model, self.method, self._call)

    @abc.abstractmethod
    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        """Replacement of the method; `below` is the original method."""

    @classmethod
    def open(cls, model: keras.Model) -> Self:
        """Return the tap of the model; create it at the first call."""
        return keep_on(model, f"_tfkfac_{cls.__name__}", lambda: cls(model))

    @classmethod
    def close(cls, model: keras.Model) -> None:
        """Remove the tap of the model."""
        tap = drop_from(model, f"_tfkfac_{cls.__name__}")
        if tap is not None:
            tap._installed.remove()

    def record(self, item: N) -> None:
        """Record an object of this replica in the current trace."""
        items = self.current()
        items.append(item)
        del items[: -self.max_items]

    def pop_last(self, default: N) -> N:
        """Remove this replica's objects; return the last, else `default`."""
        items = self.pop_items()
        return items[-1] if items else default


# ------------------------------------------------------ calls and pullbacks
@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """Arguments and outputs of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class ForwardTap(ModelTap[ForwardCall]):
    """Record the calls of a model under a gradient tape.

    A custom `train_step` may call its model with other inputs than the `x`
    that it passes to `compute_loss`, or pass no `x`.
    """

    method = "call"
    max_items = 32

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        outputs = below(*args, **kwargs)
        if capturing():
            self.record(ForwardCall(args, kwargs, outputs))
        return outputs


class Pullback:
    """A call of a model recorded on a persistent tape."""

    def __init__(self, outputs: Any, tape: tf.GradientTape) -> None:
        self._outputs = {id(t): t for t in keras.tree.flatten(outputs)}
        self._tape = tape

    def returned(self, tensor: tf.Tensor) -> bool:
        """Return True if the tensor is an output of the call."""
        return id(tensor) in self._outputs

    def pull(
        self,
        outputs: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        sources: Sequence[tf.Tensor | None],
        total: Sum = tf.identity,
    ) -> list[tf.Tensor | None]:
        """Backpropagate gradients at outputs to pre-activations.

        `sources` has `Record.output` of each layer, or None. `total` sums a
        tensor over the replicas, for synchronized layers. The gradient is None
        for a source of None, and where no output depends on the source.
        """
        tapped = [source for source in sources if source is not None]
        with paused(), summing_replicas(total):
            results = self._tape.gradient(
                list(outputs), tapped, output_gradients=list(gradients)
            )
        remaining = iter(results)
        pulled = [None if s is None else next(remaining) for s in sources]
        return [None if g is None else tf.convert_to_tensor(g) for g in pulled]


class PullbackTap(ModelTap[Pullback]):
    """Record each call of a model on a persistent tape, for pullbacks."""

    method = "call"
    max_items = 4

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        previous = getattr(recording, "tapes", ())
        with tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as tape:
            recording.tapes = (*previous, tape)
            try:
                outputs = below(*args, **kwargs)
            finally:
                recording.tapes = previous
        self.record(Pullback(outputs, tape))
        return outputs


# --------------------------------------------------- undo of a skipped step
class BeforeTap(ModelTap[Values]):
    """Record the state of a model before its first call in a training step.

    The call changes moving statistics and random seeds; a skipped step
    restores them. In a graph, TensorFlow prunes unused values.
    """

    method = "call"

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        values, model = self.current(), self._model()
        if model is not None and capturing() and not values:
            frozen = {
                id(variable)
                for layer in all_layers(model)
                if not layer.trainable
                for variable in layer.weights
            }
            # Moving statistics and random seeds.
            changing = model.non_trainable_variables
            changing = [v for v in changing if id(v) not in frozen]
            values.append(read_values(changing))
        previous = getattr(_state, "places", ())
        _state.places = (*previous, trace_place())  # for `is_nested`
        try:
            return below(*args, **kwargs)
        except BaseException:
            values.clear()
            raise
        finally:
            _state.places = previous


class MetricsDecision(NamedTuple):
    """Flags that decide whether the metrics include the batch of a step."""

    flag: tf.Variable  # positive if the batch is excluded from the metrics
    # False if `compute_loss` did not compute the loss. Then the batch is only
    # excluded if a metric is not finite.
    loss_is_known: bool


class MetricsTap(ModelTap[MetricsDecision]):
    """Remove batches whose loss is not finite from the metrics.

    The results of `train_step` include the batch, so its logs show the loss.
    Afterwards the metrics are restored to the values before the batch.
    """

    method = "train_step"

    def _call(self, below: Below, /, *args: Any, **kwargs: Any) -> Any:
        self.pop_items()
        model = self._model()
        variables = [] if model is None else model.metrics_variables
        saved = read_values(variables)
        results = below(*args, **kwargs)
        decisions = self.pop_items()
        if model is None or not decisions:
            return results

        decision = decisions[-1]
        excluded = decision.flag > 0
        if not decision.loss_is_known:
            finite = [
                tf.reduce_all(tf.math.is_finite(value))
                for _, value in read_values(model.metrics_variables)
                if value.dtype.is_floating
            ]
            excluded &= ~tf.reduce_all(finite)
        if tf.executing_eagerly() and excluded:
            # Reset metrics created in this step, which have no saved value.
            saved_ids = {id(variable) for variable in variables}
            for metric in model.metrics:
                if any(id(v) not in saved_ids for v in metric.variables):
                    metric.reset_state()
        # Assign unconditionally: a `tf.cond` takes longer.
        for variable, value in saved:
            variable.assign(
                tf.raw_ops.Select(condition=excluded, x=value, y=variable)
            )
        return results


def metrics_are_reset(model: keras.Model) -> bool:
    """True if all metrics are in their reset state. An eager collective."""
    return all(
        np.array_equal(
            # `np.asarray(variable)` would cause a warning of NumPy 2.
            tf.convert_to_tensor(variable.value).numpy(),
            keras.ops.convert_to_numpy(value),
        )
        for metric in model.metrics
        for variable, value in zip(
            metric.variables, metric.stateless_reset_state(), strict=True
        )
    )


def read_values(variables: Sequence[keras.Variable]) -> Values:
    """Return this replica's copies of variables with their current values."""
    copies = [replica_variable(variable) for variable in variables]
    return [(variable, tf.convert_to_tensor(variable)) for variable in copies]


def restore(values: Values) -> None:
    """Assign recorded values to their variables."""
    for variable, value in values:
        variable.assign(value)
