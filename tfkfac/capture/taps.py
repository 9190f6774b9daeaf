"""Taps on layers: record inputs and gradients at the pre-activations.

A tap overrides `call` of one layer instance. It inserts an identity before the
activation. The gradient function of this identity records the gradient, when
the tape of `train_step` or of the user runs backward. Calls without an active
tape, saving and cloning are not affected.

A step uses the records of all backward passes of its forward pass. A call of a
layer has one record per backward pass through it.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import (
    TraceLists,
    capturing,
    is_nested,
    is_paused,
    recording,
    replica_id,
)
from tfkfac.compat.graphs import under_tape, with_gradient
from tfkfac.compat.models import mask_of, pass_mask
from tfkfac.compat.overrides import (
    Below,
    drop_from,
    keep_on,
    kept_on,
    overridden,
    override,
    override_moments,
)


@dataclasses.dataclass(frozen=True)
class Record:
    """Input and gradient of one call of a layer in one backward pass.

    Attributes:
        inputs: Input of the layer.
        gradient: Gradient of the (scaled) loss at the pre-activation.
        mask: Keras mask of the input, or None.
        kwargs: Other arguments of the call, by name.
        moments: Mean and variance computed by a batch normalisation, or None.
        order: Increases with time in the backward pass: layers nearer to the
            loss have smaller values.
        output: The pre-activation, a source for other gradients, or None.
    """

    inputs: Any
    gradient: tf.Tensor
    mask: tf.Tensor | None = None
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    moments: tuple[tf.Tensor, tf.Tensor] | None = None
    order: int = 0
    output: tf.Tensor | None = None


# `Tap.reason` of layers with a call whose tensors the step cannot use.
NESTED = "called in a tf.cond, a loop or a tf.function of its own"

_TAP = "_tfkfac_tap"
_HOOK = "_tfkfac_first_call"
_COPIES = ("Identity", "IdentityN")
_clock = itertools.count()  # logical time of calls and gradients

# Function of a gradient and the pre-activation (None if not available yet).
Recorder = Callable[[tf.Tensor, tf.Tensor | None], None]


class TimedRecord(NamedTuple):
    """A record with the logical times of the call and of the gradient.

    `is_inner` is True if a tape recorded the backward pass. The pass
    can then be part of a forward pass, like the derivatives in a Sobolev loss.
    """

    call_time: int
    gradient_time: int
    record: Record
    is_inner: bool


class Tap:
    """Record the calls of a layer, whose first argument is the input."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._records: TraceLists[TimedRecord] = TraceLists()
        self._moments: dict[int, Any] = {}
        self._callers: set[int] = set()  # replicas
        self._is_nested = False
        self._names = list(inspect.signature(layer.call).parameters)
        tapped = functools.partial(self._tapped_call, layer)
        self._overrides = [override(layer, "call", tapped)]
        if isinstance(layer, keras.layers.BatchNormalization):
            # Override the moments permanently, not per call: other replicas run
            # while a synchronised layer is called.
            moments = override_moments(layer, self._record_moments)
            self._overrides.append(moments)

    @classmethod
    def open(cls, layer: keras.layers.Layer, owner: object) -> "Tap":
        """Return the tap of a layer, created if needed, and add an owner."""
        tap = keep_on(layer, _TAP, lambda: cls(layer))
        tap._owners.add(owner)
        return tap

    @classmethod
    def close(cls, layer: keras.layers.Layer, owner: object | None) -> None:
        """Remove an owner of a layer's tap; the last owner removes the tap."""
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
    def reason(layer: keras.layers.Layer) -> str | None:
        """Return why a layer cannot be recorded, from its calls so far."""
        tap = kept_on(layer, _TAP)
        return NESTED if tap is not None and tap._is_nested else None

    @staticmethod
    def pop_called(layer: keras.layers.Layer) -> bool:
        """True if this replica has called the layer since the last query.

        False for a layer that was ever called in a nested graph.
        """
        tap, replica = kept_on(layer, _TAP), replica_id()
        if tap is None or replica not in tap._callers:
            return False
        tap._callers.discard(replica)
        return not tap._is_nested

    @staticmethod
    def calls(layer: keras.layers.Layer) -> list[list[Record]]:
        """Remove and return this replica's records, one list for each call."""
        tap = kept_on(layer, _TAP)
        if tap is None:
            return []
        calls: dict[int, list[Record]] = {}
        for timed in tap._records.pop_items():
            calls.setdefault(timed.call_time, []).append(timed.record)
        return list(calls.values())

    def _tapped_call(
        self,
        layer: keras.layers.Layer,
        below: Below,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._is_nested |= under_tape() and is_nested()
        if not capturing():
            return below(*args, **kwargs)
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        inputs = arguments.pop(self._names[0])
        mask = mask_of(inputs)
        if mask is not None:
            # With `supports_masking`, a layer may change the positions and
            # keep the mask.
            shape = tf.TensorShape(inputs.shape)[: mask.shape.rank]
            mask = mask if shape.is_compatible_with(mask.shape) else None
        call_time, replica = next(_clock), replica_id()
        self._callers.add(replica)
        # Do not capture `self`: a tape would keep the layer alive in a cycle.
        records = self._records
        # Forward mode calls `record` before the layer computes its moments.
        moments: Any = None

        def record(gradient: tf.Tensor, output: tf.Tensor | None) -> None:
            time = next(_clock)
            result = Record(
                inputs, gradient, mask, arguments, moments, time, output
            )
            stored = records.current(replica)
            # Drop records from before this call: records of an earlier
            # micro-batch, or of a backward pass for another purpose (a
            # saliency map, the other network of a GAN).
            stored[:] = [r for r in stored if r.gradient_time > call_time]
            is_inner = under_tape()
            if not is_inner:
                stored[:] = [r for r in stored if not r.is_inner]
            stored.append(TimedRecord(call_time, time, result, is_inner))

        activated: list[bool] = []

        def tapped(activation: Below, z: tf.Tensor, /) -> tf.Tensor:
            activated.append(True)
            return activation(watch(z, record))

        with contextlib.ExitStack() as stack:
            if getattr(layer, "activation", None) is not None:
                stack.enter_context(overridden(layer, "activation", tapped))
            outputs = below(*args, **kwargs)
        moments = self._moments.pop(replica, None)
        return outputs if activated else watch(outputs, record)

    def _record_moments(self, below: Below, /, *args: Any) -> Any:
        """Record the batch moments that a normalisation layer computes."""
        moments = below(*args)
        if capturing():
            self._moments[replica_id()] = moments
        return moments


def before_first_call(
    layer: keras.layers.Layer, action: Callable[[], None]
) -> None:
    """Run `action` once before the next call of a layer, after its build."""

    def call(_: Below, /, *args: Any, **kwargs: Any) -> Any:
        try:
            # Remove the hook last: `action` may have added the hook again.
            action()
        finally:
            forget_first_call(layer)
        # Look `call` up again, as `action` may have tapped the layer.
        return layer.call(*args, **kwargs)

    keep_on(layer, _HOOK, lambda: override(layer, "call", call))


def forget_first_call(layer: keras.layers.Layer) -> None:
    """Remove the hook of `before_first_call` from a layer."""
    hook = drop_from(layer, _HOOK)
    if hook is not None:
        hook.remove()


def watch(tensor: tf.Tensor, record: Recorder) -> tf.Tensor:
    """Identity that calls `record(gradient, result)` in the backward pass.

    In forward mode `record` is called before there is a result, with None.
    """
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.with_flat_values(watch(tensor.flat_values, record))
    result: list[tf.Tensor] = []

    def backward(gradient: tf.Tensor) -> tf.Tensor:
        if not is_paused():
            record(gradient, result[0] if result else None)
        return gradient

    watched = with_gradient(lambda z: z, tensor, backward)
    result.append(watched)
    for tape in getattr(recording, "tapes", ()):  # for pullbacks
        tape.watch(watched)
    pass_mask(tensor, watched)
    return watched


# ------------------------------------- gradients that are products of records
def is_product(
    gradients: Sequence[Any], inputs: Any, gradient: tf.Tensor
) -> bool:
    """True if the gradients of a kernel and a bias are `a^T g` and `1^T g`.

    Users or regularisers may change the gradients after the backward pass. This
    function inspects the graph, and returns True only for exactly these
    products. The first axes of the kernel are contracted with the recorded
    inputs `a`; the features of `a` and `g` are last.
    """
    tensors = [*gradients, inputs, gradient]
    dense = all(isinstance(tensor, tf.Tensor) for tensor in tensors)
    if not dense or not all(map(tf.is_symbolic_tensor, tensors)):
        return False
    kernel, *biases = gradients
    operation = _source(kernel).op
    names = "transpose_a", "transpose_b"
    if operation.type != "MatMul":
        if operation.type == "Sum":
            # Gradient of a kernel broadcast over batches: a sum of products.
            if operation.inputs[1].op.type != "BroadcastGradientArgs":
                return False
            operation = operation.inputs[0].op
        if operation.type != "BatchMatMulV2":
            return False
        names = "adj_x", "adj_y"
    if [operation.get_attr(name) for name in names] != [True, False]:
        return False
    a, g = map(_source, operation.inputs)
    output = _source(gradient)
    for bias in biases:
        # The gradient of a bias is a sum over all axes but the last.
        operation = _source(bias).op
        is_sum = operation.type in ("BiasAddGrad", "Sum")
        if not is_sum or _source(operation.inputs[0]) is not output:
            return False
    return a is _source(inputs) and g is output


def _source(tensor: tf.Tensor) -> tf.Tensor:
    """Follow identities and reshapes back to the source of a tensor.

    Also follow casts to a wider dtype, which keep the values: with a mixed
    precision policy Keras casts the gradient of a kernel.
    """
    while True:
        operation = tensor.op
        if operation.type in _COPIES:
            tensor = operation.inputs[tensor.value_index]
            continue
        is_view = operation.type == "Reshape"
        if operation.type == "Transpose":
            order = tf.get_static_value(operation.inputs[1])
            is_view = order is not None and sorted(order) == list(order)
        elif operation.type == "Cast":
            is_view = operation.inputs[0].dtype.size < tensor.dtype.size
        if not is_view:
            return tensor
        tensor = operation.inputs[0]
