"""Recorded batch of a loss, and evaluation of the loss at other weights."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import (
    ForwardCall,
    ModelTap,
    TraceLists,
    capturing,
    paused,
)
from tfkfac.capture.walk import unbuilt, walk
from tfkfac.compat.graphs import kept_variables
from tfkfac.compat.losses import observed_losses
from tfkfac.compat.models import (
    all_layers,
    call_takes_training,
    children,
    has_keras_call,
    input_specs,
    kept_losses,
    loss_layers,
)
from tfkfac.loss.shares import LossMeasure, weigh
from tfkfac.loss.terms import LossTerms, check_labels, mean_over, read_terms

# Arguments of Keras' `compute_loss`, in order.
_ARGUMENTS = ("x", "y", "y_pred", "sample_weight", "training")


@dataclasses.dataclass(frozen=True)
class LossBatch:
    """Batch for which `compute_loss` was called."""

    # Terms of each loss; empty if no loss was observed.
    terms: tuple[LossTerms, ...] = ()
    # For each output with sample weights, bool `(examples, positions)`, True
    # where the weight is zero.
    weightless: tuple[tf.Tensor, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ordinal: int = 0  # number of earlier batches in the same step
    measure: LossMeasure | None = None  # None before the loss is weighted
    # The loss, divided by the number of replicas as in Keras; the sum of its
    # values with `reduction="none"`.
    value: tf.Tensor | None = None
    # Loss minus its minimum for the targets, summed over micro-batches; None to
    # compute the difference from the terms.
    excess: tf.Tensor | None = None


class LossTap(ModelTap[LossBatch]):
    """Record the batch of each call of a model's `compute_loss`."""

    method = "compute_loss"

    def __init__(self, model: keras.Model) -> None:
        self.signature = inspect.signature(model.compute_loss)
        # Handles of the variables that losses write, by trace.
        self._written: TraceLists[tf.Tensor] = TraceLists()
        super().__init__(model)

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        with observed_losses(check_labels) as calls:
            loss = below(*args, **kwargs)
        model, earlier_batches = self._model(), self.pop_items()
        arguments = self.signature.bind(*args, **kwargs).arguments
        if "y_pred" not in arguments:  # an override with `*args`
            arguments = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        terms = read_terms(model, calls) if model is not None else ()
        written = self._written.current()
        for handle in (handle for call in calls for handle in call.written):
            if all(handle is not other for other in written):
                written.append(handle)
        ordinal = earlier_batches[-1].ordinal + 1 if earlier_batches else 0
        # If no loss was observed, assume a mean over the examples.
        sources = [arguments.get(name) for name in ("x", "y_pred", "y")]
        tensors = [
            t
            for t in keras.tree.flatten(sources)
            if tf.is_tensor(t) and t.shape.rank
        ]
        if tensors and not terms:
            terms = (mean_over(tf.shape(tensors[0])[0]),)
        weights = [
            tf.convert_to_tensor(w)
            for w in keras.tree.flatten(arguments.get("sample_weight"))
            if w is not None
        ]
        weightless = tuple(
            tf.reshape(
                w == 0, [tf.shape(w)[0], tf.reduce_prod(tf.shape(w)[1:])]
            )
            for w in weights
            if w.shape.rank
        )
        value = scalar_loss(loss)
        batch = LossBatch(terms, weightless, arguments, ordinal, value=value)
        self.record(batch)
        return loss

    def written(self) -> list[tf.Tensor]:
        """Return handles of the variables that losses write in this trace."""
        lists = self._written.visible(and_eager=True)
        return [handle for handles in lists for handle in handles]


# -------------------------------------------------- recomputation of the loss
def training_call(model: keras.Model, x: Any) -> ForwardCall:
    """Return the model call that Keras' `train_step` makes for inputs `x`."""
    kwargs = {"training": True} if call_takes_training(model) else {}
    return ForwardCall((x,), kwargs, None)


def find_call(
    model: keras.Model, batch: LossBatch, calls: Sequence[ForwardCall]
) -> ForwardCall:
    """Return the model call whose outputs were passed to the loss.

    Without a recorded call (in a nested graph), it is the call with the `x` of
    the loss.
    """
    if "y_pred" in batch.arguments:
        predicted = _identities(batch.arguments["y_pred"])
        for call in reversed(calls):
            if _identities(call.outputs) == predicted:
                return call
        if batch.arguments.get("x") is not None and not calls:
            return training_call(model, batch.arguments["x"])
    raise ValueError(
        f"The curvature of model '{model.name}' needs the loss of the current "
        "batch. Compute it with `model.compute_loss(x=x, y=y, y_pred=model(x, "
        "training=True))` under the gradient tape, as Keras' `train_step` "
        "does: with the result of the model, not of operations on it."
    )


def trace_nested_calls(model: keras.Model) -> None:
    """Trace one training call, so that taps find the layers in nested graphs.

    Only a user-defined `call` can run sublayers in a `tf.cond` or a loop. If
    the call cannot be traced from the shapes of its inputs, the first step
    raises an error for such a sublayer.
    """
    is_custom = any(
        children(layer) and not has_keras_call(layer)
        for layer in all_layers(model)
    )
    specs = input_specs(model) if is_custom and not unbuilt(model) else None
    if specs is None:
        return

    def call(*args: Any) -> None:
        with stateless(model), tf.GradientTape():
            model(*args, **training_call(model, None).kwargs)

    with contextlib.suppress(Exception):
        tf.function(call, autograph=False).get_concrete_function(*specs)


@contextlib.contextmanager
def stateless(
    model: keras.Model, mapping: Sequence[tuple[keras.Variable, tf.Tensor]] = ()
) -> Iterator[keras.StatelessScope]:
    """Context in which model calls use `mapping` and change no variable.

    Recurrent layers run without cuDNN, which has no second derivatives.
    """
    with (
        paused(),
        kept_losses(model),
        contextlib.ExitStack() as stack,
        keras.StatelessScope(mapping, collect_losses=True) as scope,
    ):
        for layer in all_layers(model):
            if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
                # Each call of the layer reads this attribute.
                stack.callback(setattr, layer, "use_cudnn", layer.use_cudnn)
                layer.use_cudnn = False
        yield scope


def changed_layers(
    model: keras.Model, call: ForwardCall
) -> tuple[list[str], list[str]]:
    """Return names of layers that a call updates, and of layers with losses."""
    with stateless(model) as scope:
        model(*call.args, **call.kwargs)
        layers_with_losses = loss_layers(model, scope)
    updated_layers = []
    for node in walk(model):  # inner layers come before outer layers
        states = node.layer.non_trainable_variables
        if any(scope.get_current_value(v) is not None for v in states):
            updated_layers.append(node.layer.name)
    return updated_layers, list(layers_with_losses)


def replay_loss(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    shares: Sequence[tf.Tensor] = (),
    read: Callable[[Any], Any] | None = None,
) -> tf.Tensor:
    """Recompute the loss at other weights without changing any state.

    Moving averages, random seeds and metrics are not updated, so each replay
    uses the same values, for example the same dropout mask.

    Args:
        model: A compiled model.
        call: The call to repeat.
        arguments: Arguments of `compute_loss`; `y_pred` is recomputed.
        variables: Weights to replace.
        values: The new values of `variables`.
        shares: Share of each loss, see `weigh`.
        read: Maps the outputs to the inputs of the loss.
    """
    with stateless(model, list(zip(variables, values, strict=True))):
        outputs = model(*call.args, **call.kwargs)
        if read is not None:
            outputs = read(outputs)
        return loss_of_outputs(model, arguments, outputs, shares)


def loss_of_outputs(
    model: keras.Model,
    arguments: dict[str, Any],
    outputs: Any,
    shares: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Compute the loss of given outputs; arguments as in `replay_loss`.

    Losses added by layers come from the current stateless scope. Variables that
    a loss writes are restored.
    """
    tap = LossTap.open(model)
    # Bind declared arguments of `compute_loss`; pass others as keywords.
    call = tap.signature.bind_partial()
    names = tap.signature.parameters.keys()
    arguments = {**arguments, "y_pred": outputs}
    call.arguments.update({n: x for n, x in arguments.items() if n in names})
    extra_arguments = {n: x for n, x in arguments.items() if n not in names}
    with kept_variables(tap.written()), observed_losses() as losses:
        loss = model.compute_loss(*call.args, **call.kwargs, **extra_arguments)
    return scalar_loss(weigh(loss, read_terms(model, losses), shares))


def scalar_loss(loss: Any) -> tf.Tensor:
    """Sum the values of a loss, as a gradient tape does."""
    loss = tf.convert_to_tensor(loss)
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)


def _identities(outputs: Any) -> list[int]:
    return [id(tensor) for tensor in keras.tree.flatten(outputs)]
