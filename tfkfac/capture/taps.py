"""Taps on layers: inputs and pre-activation gradients of the current trace.

A tap overrides `call` on one layer instance. It puts an identity between the
linear part and the activation whose gradient function notes the gradient that
flows through. The tape of `train_step`, or the user's own, does the rest. Only
a call under a tape is touched; inference, saving and cloning are not.

The records of a step are those of the last backward pass before it, with all
calls of the forward pass that went ahead of it.

Records are Python objects that hold the tensors of one trace. They live on
the graph that they belong to, so that no trace ever sees another's tensors,
and on the tap when running eagerly.
"""

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.eager import record as tape_record

from tfkfac.capture.record import Record

_STORE = "_tfkfac_records"
_TAP = "_tfkfac_tap"
_HOOK = "_tfkfac_first_call"
_moments_in_time = itertools.count()
_state = threading.local()


class Note(NamedTuple):
    """A record, and when its layer was called and its gradient came."""

    called: int
    noted: int
    record: Record


class Tap:
    """Records the calls of one layer.

    Args:
        layer: Any Keras layer whose first argument is its input.
    """

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._eager = TraceStore()
        self._moments: dict[int, Any] = {}
        self._overridden: dict[str, Any] = {}
        self._install(layer)
        if isinstance(layer, keras.layers.BatchNormalization):
            self._listen_to_moments(layer)

    @classmethod
    def open(cls, layer: keras.layers.Layer, owner: object) -> "Tap":
        """Returns the layer's tap, made if need be, for one more owner."""
        tap = vars(layer).get(_TAP)
        if tap is None:
            tap = cls(layer)
            object.__setattr__(layer, _TAP, tap)
        tap._owners.add(owner)
        return tap

    @classmethod
    def close(cls, layer: keras.layers.Layer, owner: object | None) -> None:
        """Takes an owner off the layer's tap and removes it with the last.

        Owners that are gone are off by themselves.
        """
        tap = vars(layer).get(_TAP)
        if tap is None:
            return
        if owner is not None:
            tap._owners.discard(owner)
        if not tap._owners:
            object.__delattr__(layer, _TAP)
            for name, value in tap._overridden.items():
                object.__delattr__(layer, name)
                if value is not None:
                    object.__setattr__(layer, name, value)

    @staticmethod
    def records(layer: keras.layers.Layer) -> list[Record]:
        """Takes this replica's records of a layer from the current trace."""
        tap = vars(layer).get(_TAP)
        if tap is None:
            return []
        key = (id(tap), replica_id())
        records: list[Record] = []
        for store in visible_stores(tap._eager):
            records += [note.record for note in store.pop(key, ())]
        return records

    def _install(self, layer: keras.layers.Layer) -> None:
        original = layer.call
        self._input_name = next(iter(inspect.signature(original).parameters))

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not capturing():
                return original(*args, **kwargs)
            return self._tapped(layer, original, args, kwargs)

        self._substitute(layer, "call", call)

    def _tapped(
        self,
        layer: keras.layers.Layer,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        rest = dict(kwargs)
        inputs = args[0] if args else rest.pop(self._input_name)
        mask = getattr(inputs, "_keras_mask", None)
        called = next(_moments_in_time)
        key = (id(self), replica_id())
        moments: Any = None  # in forward mode `note` runs during the call

        def note(gradient: tf.Tensor) -> None:
            store = current_store(self._eager)
            # What was noted before this call is of an earlier backward pass
            # that was not for this optimizer (a saliency map, the other half
            # of a GAN) or of an earlier micro-batch. A second gradient of the
            # same call takes the place of the first.
            notes = [
                note
                for note in store.get(key, ())
                if note.noted > called and note.called != called
            ]
            record = Record(inputs, gradient, mask, rest, moments)
            noted = next(_moments_in_time)
            store[key] = [*notes, Note(called, noted, record)]

        with listening(layer, note) as passed:
            outputs = original(*args, **kwargs)
        moments = self._moments.pop(key[1], None)
        return outputs if passed else watch(outputs, note)

    def _listen_to_moments(self, layer: keras.layers.Layer) -> None:
        """Notes the batch moments that a normalisation layer computes.

        For good, not for the time of a call: a synchronised layer lets other
        replicas run in the middle of its call.
        """
        compute = layer._moments

        def moments(*args: Any) -> Any:
            result = compute(*args)
            if capturing():
                self._moments[replica_id()] = result
            return result

        self._substitute(layer, "_moments", moments)

    def _substitute(
        self, layer: keras.layers.Layer, name: str, value: Any
    ) -> None:
        """Overrides an attribute of the layer until the tap is closed."""
        self._overridden[name] = vars(layer).get(name)
        object.__setattr__(layer, name, value)


@contextlib.contextmanager
def listening(
    layer: keras.layers.Layer, note: Callable[[tf.Tensor], None]
) -> Iterator[list[bool]]:
    """Taps the activation of a layer, if it has one, for one call.

    Args:
        layer: The layer.
        note: Takes the gradient at the input of the activation.

    Yields:
        A list that is not empty once the activation has been called.
    """
    passed: list[bool] = []
    activation = getattr(layer, "activation", None)
    if activation is None:
        yield passed
        return

    def tapped_activation(z: tf.Tensor) -> tf.Tensor:
        passed.append(True)
        return activation(watch(z, note))

    object.__setattr__(layer, "activation", tapped_activation)
    try:
        yield passed
    finally:
        object.__setattr__(layer, "activation", activation)


def before_first_call(
    layer: keras.layers.Layer, action: Callable[[], None]
) -> None:
    """Runs `action` once when `layer` is called next, after it was built."""
    if _HOOK in vars(layer):
        return
    overridden = vars(layer).get("call")

    def remove() -> None:
        object.__delattr__(layer, "call")
        if overridden is not None:
            object.__setattr__(layer, "call", overridden)

    @functools.wraps(layer.call)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Keras may hold on to the hook and call it more than once.
        if vars(layer).get("call") is call:
            remove()
            # The mark stays on meanwhile: `layer` may still not be built.
            action()
            object.__delattr__(layer, _HOOK)
        return layer.call(*args, **kwargs)

    object.__setattr__(layer, _HOOK, remove)
    object.__setattr__(layer, "call", call)


def forget_first_call(layer: keras.layers.Layer) -> None:
    """Removes what `before_first_call` put on a layer."""
    remove = vars(layer).get(_HOOK)
    if remove is not None:
        object.__delattr__(layer, _HOOK)
        remove()


class TraceStore(dict[tuple[int, int], Any]):
    """What taps noted in one graph, by (tap, replica)."""


def watch(tensor: tf.Tensor, note: Callable[[tf.Tensor], None]) -> tf.Tensor:
    """Identity that calls `note` with the gradient when one flows back."""

    @tf.custom_gradient
    def identity(z: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            note(gradient)
            return gradient

        return tf.identity(z), backward

    watched = identity(tensor)
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        watched._keras_mask = mask
    return watched


def capturing() -> bool:
    """Whether a tape is on and nobody has paused the taps."""
    if getattr(_state, "paused", False):
        return False
    return bool(tape_record.could_possibly_record())


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Keeps all taps of this thread from noting anything."""
    before = getattr(_state, "paused", False)
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
    stores = []
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        store = getattr(graph, _STORE, None)
        if store is not None:
            stores.append(store)
        graph = getattr(graph, "outer_graph", None)
    return stores
