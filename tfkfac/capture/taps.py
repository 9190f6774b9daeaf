"""Taps on layers: inputs and pre-activation gradients of the current trace.

A tap overrides `call` on one layer instance. It puts an identity between the
linear part and the activation whose gradient function notes the gradient that
flows through. The tape of `train_step`, or the user's own, does the rest. Only
a call under a tape is touched; inference, saving and cloning are not.

The records of a step are those of the backward passes before it, with all
calls of the forward pass that went ahead of them. A call has one for each of
them that came through it.

Records are Python objects that hold the tensors of one trace. They live on
the graph that they belong to, so that no trace ever sees another's tensors,
and on the tap when running eagerly.
"""

import contextlib
import dataclasses
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import (
    Notes,
    capturing,
    is_paused,
    replica_id,
    watch_for_pullbacks,
)
from tfkfac.compat.graphs import with_gradient
from tfkfac.compat.models import mask_of, pass_mask
from tfkfac.compat.overrides import (
    Wrapper,
    drop_from,
    keep_on,
    kept_on,
    overridden,
    override,
    override_moments,
)


@dataclasses.dataclass(frozen=True)
class Record:
    """Input of one call of a layer, and a gradient that came back.

    Attributes:
        inputs: The layer's input.
        gradient: Gradient of the (scaled) loss at the pre-activation.
        mask: Keras mask of the input, or None.
        kwargs: The other arguments of the call, by name.
        moments: Mean and variance that a batch normalisation computed.
        order: Grows in the order in which gradients came: a smaller one is of
            a layer nearer to the loss.
        output: The pre-activation, for gradients of something else.
    """

    inputs: Any
    gradient: tf.Tensor
    mask: tf.Tensor | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[tf.Tensor, tf.Tensor] | None = None
    order: int = 0
    output: tf.Tensor | None = None


_TAP = "_tfkfac_tap"
_HOOK = "_tfkfac_first_call"
_COPIES = ("Identity", "IdentityN")
_moments_in_time = itertools.count()

Noter = Callable[[tf.Tensor, tf.Tensor | None], None]


class Note(NamedTuple):
    """A record, and when its layer was called and its gradient came."""

    called: int
    noted: int
    record: Record


class Tap:
    """Records the calls of one layer, whose first argument is its input."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._notes: Notes[Note] = Notes()
        self._moments: dict[int, Any] = {}
        self._names = list(inspect.signature(layer.call).parameters)
        self._overrides = [override(layer, "call", self._call_of(layer))]
        if isinstance(layer, keras.layers.BatchNormalization):
            # For good, not for the time of a call: a synchronised layer lets
            # other replicas run in the middle of its call.
            moments = override_moments(layer, self._note_moments)
            self._overrides.append(moments)

    @classmethod
    def open(cls, layer: keras.layers.Layer, owner: object) -> "Tap":
        """Returns the layer's tap, made if need be, for one more owner."""
        tap = keep_on(layer, _TAP, lambda: cls(layer))
        tap._owners.add(owner)
        return tap

    @classmethod
    def close(cls, layer: keras.layers.Layer, owner: object | None) -> None:
        """Takes an owner off the layer's tap and removes it with the last.

        Owners that are gone are off by themselves.
        """
        tap = kept_on(layer, _TAP)
        if tap is None:
            return
        if owner is not None:
            tap._owners.discard(owner)
        if not tap._owners:
            drop_from(layer, _TAP)
            for installed in tap._overrides:
                installed.remove()

    @staticmethod
    def calls(layer: keras.layers.Layer) -> list[list[Record]]:
        """Takes this replica's records of a layer from the current trace.

        There are some for each call, in the order in which they came.
        """
        tap = kept_on(layer, _TAP)
        if tap is None:
            return []
        calls: dict[int, list[Record]] = {}
        for note in tap._notes.take():
            calls.setdefault(note.called, []).append(note.record)
        return list(calls.values())

    def _call_of(self, layer: keras.layers.Layer) -> Wrapper:
        def call(
            below: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            if not capturing():
                return below(*args, **kwargs)
            return self._tapped(layer, below, args, kwargs)

        return call

    def _tapped(
        self,
        layer: keras.layers.Layer,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        rest = dict(zip(self._names, args, strict=False)) | kwargs
        inputs = rest.pop(self._names[0])
        mask = mask_of(inputs)
        called, replica = next(_moments_in_time), replica_id()
        # Tapes that are kept must not keep the layer: nobody would free both.
        own_notes = self._notes
        moments: Any = None  # in forward mode `note` runs during the call

        def note(gradient: tf.Tensor, output: tf.Tensor | None) -> None:
            noted = next(_moments_in_time)
            record = Record(
                inputs, gradient, mask, rest, moments, noted, output
            )
            notes = own_notes.here(replica)
            # What was noted before this call is of an earlier backward pass
            # that was not for this optimizer (a saliency map, the other half
            # of a GAN) or of an earlier micro-batch.
            notes[:] = [note for note in notes if note.noted > called]
            notes.append(Note(called, noted, record))

        with listening(layer, note) as passed:
            outputs = original(*args, **kwargs)
        moments = self._moments.pop(replica, None)
        return outputs if passed else watch(outputs, note)

    def _note_moments(self, below: Callable[..., Any], /, *args: Any) -> Any:
        """Notes the batch moments that a normalisation layer computes."""
        moments = below(*args)
        if capturing():
            self._moments[replica_id()] = moments
        return moments


@contextlib.contextmanager
def listening(layer: keras.layers.Layer, note: Noter) -> Iterator[list[bool]]:
    """Taps the input of a layer's activation, if it has one, for one call.

    The list that it yields is not empty once that has been called.
    """
    passed: list[bool] = []
    if getattr(layer, "activation", None) is None:
        yield passed
        return

    def tapped(activation: Callable[..., Any], z: tf.Tensor, /) -> tf.Tensor:
        passed.append(True)
        return activation(watch(z, note))

    with overridden(layer, "activation", tapped):
        yield passed


def before_first_call(
    layer: keras.layers.Layer, action: Callable[[], None]
) -> None:
    """Runs `action` once when `layer` is called next, after it was built."""

    def call(_: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            # The mark stays on meanwhile: `layer` may still not be built.
            action()
        finally:
            forget_first_call(layer)
        # From the top, as `action` may have tapped the layer.
        return layer.call(*args, **kwargs)

    keep_on(layer, _HOOK, lambda: override(layer, "call", call))


def forget_first_call(layer: keras.layers.Layer) -> None:
    """Removes what `before_first_call` put on a layer."""
    hook = drop_from(layer, _HOOK)
    if hook is not None:
        hook.remove()


def watch(tensor: tf.Tensor, note: Noter) -> tf.Tensor:
    """Identity that calls `note` when a gradient flows back.

    That takes the gradient and what this function returned, or None while it
    has not yet (in forward mode).
    """
    made: list[tf.Tensor] = []

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        if not is_paused():
            note(gradient, made[0] if made else None)
        return gradient

    watched = with_gradient(lambda z: z, tensor, backward)
    made.append(watched)
    watch_for_pullbacks(watched)
    pass_mask(tensor, watched)
    return watched


# ------------------------------------- gradients that are products of records
def is_product(
    gradients: Sequence[Any], inputs: Any, gradient: tf.Tensor
) -> bool:
    """True if the gradients of a kernel and a bias are `a^T g` and `1^T g`.

    The gradient that is applied may not be the one that flowed back: it may
    have the term of a regulariser, have been clipped, unscaled or added up by
    the user. So the graph is looked at. What is not the plain product of a
    layer's recorded inputs and gradient, and nothing more, is not recognised.

    The first axes of the kernel are those that are contracted with the inputs
    `a`. There may be no bias. Features are last of `a` and `g`.
    """
    tensors = [*gradients, inputs, gradient]
    dense = all(isinstance(tensor, tf.Tensor) for tensor in tensors)
    if not dense or not all(map(tf.is_symbolic_tensor, tensors)):
        return False
    kernel, *biases = gradients
    pair = _factors(_source(kernel))
    if pair is None:
        return False
    a, g = (_source(t) for t in pair)
    output = _source(gradient)
    return (
        a is _source(inputs)
        and g is output
        and all(_summed(_source(bias)) is output for bias in biases)
    )


def _factors(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """The `a` and `g` of which a tensor is `a^T g`, summed over batches."""
    operation = tensor.op
    if operation.type == "MatMul":
        names = "transpose_a", "transpose_b"
    else:
        if operation.type == "Sum":
            # Over the batches that shared the kernel.
            if operation.inputs[1].op.type != "BroadcastGradientArgs":
                return None
            operation = operation.inputs[0].op
        names = "adj_x", "adj_y"
        if operation.type != "BatchMatMulV2":
            return None
    if [operation.get_attr(name) for name in names] != [True, False]:
        return None
    a, g = operation.inputs
    return a, g


def _summed(tensor: tf.Tensor) -> tf.Tensor | None:
    """The tensor whose sum over all but the features this is, or None."""
    if tensor.op.type in ("BiasAddGrad", "Sum"):
        return _source(tensor.op.inputs[0])
    return None


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """The origin of a tensor's numbers, with all in the same order."""
    while True:
        operation = tensor.op
        if operation.type in _COPIES:
            tensor = operation.inputs[tensor.value_index]
        elif operation.type == "Reshape" or (
            operation.type == "Transpose" and _keeps_order(operation)
        ):
            tensor = operation.inputs[0]
        else:
            return tensor


def _keeps_order(transpose: tf.Operation) -> bool:
    order = tf.get_static_value(transpose.inputs[1])
    return order is not None and list(order) == list(range(len(order)))
