"""The loss batch of a step, and the loss computed anew at given weights."""

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
    Notes,
    capturing,
    paused,
)
from tfkfac.capture.walk import walk
from tfkfac.compat.graphs import kept_variables
from tfkfac.compat.losses import observed_losses
from tfkfac.compat.models import (
    call_takes_training,
    kept_losses,
    losing_layers,
)
from tfkfac.loss.shares import LossMeasure, weigh
from tfkfac.loss.terms import (
    LossTerms,
    check_labels,
    is_open,
    mean_over,
    read_terms,
)


@dataclasses.dataclass(frozen=True)
class LossBatch:
    """The batch of a loss.

    Attributes:
        terms: The terms of each of its losses; none if they were not seen.
        weightless: For each output with sample weights, bool
            `(examples, positions)`, True where the weight is zero.
        arguments: Arguments of `compute_loss`.
        ordinal: Number of batches that were seen before in the same step.
        measure: Measure of the loss by all replicas, if it has been weighed.
        value: The loss, divided by the number of replicas as Keras does; the
            sum of its values with `reduction="none"`.
    """

    terms: tuple[LossTerms, ...] = ()
    weightless: tuple[tf.Tensor, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ordinal: int = 0
    measure: LossMeasure | None = None
    value: tf.Tensor | None = None


class LossTap(ModelTap[LossBatch]):
    """Notes the batch that a model's `compute_loss` is called with.

    In a custom loop without `compute_loss` nothing is noted: the leading
    dimension of each layer's input is the batch, and no weight is zero.
    """

    method = "compute_loss"

    def __init__(self, model: keras.Model) -> None:
        self._signature = inspect.signature(model.compute_loss)
        self._written: Notes[tf.Tensor] = Notes()  # handles of variables
        super().__init__(model)

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        with observed_losses(is_open, check_labels) as calls:
            loss = below(*args, **kwargs)
        model, before = self._model(), self.take()
        arguments = self._signature.bind(*args, **kwargs).arguments
        terms = read_terms(model, calls) if model is not None else ()
        written = self._written.here()
        for handle in (handle for call in calls for handle in call.written):
            if all(handle is not known for known in written):
                written.append(handle)
        ordinal = before[-1].ordinal + 1 if before else 0
        batch = loss_batch(arguments, terms, ordinal)
        self.note(dataclasses.replace(batch, value=scalar_loss(loss)))
        return loss

    def written(self) -> list[tf.Tensor]:
        """Handles of the variables that the losses of this trace write."""
        found = self._written.everywhere(and_eager=True)
        return [handle for own in found for handle in own]


def loss_batch(
    arguments: dict[str, Any],
    terms: tuple[LossTerms, ...] = (),
    ordinal: int = 0,
) -> LossBatch:
    """Reads the batch off a call of `compute_loss`.

    Without the terms of losses it is taken for a mean over the examples.
    """
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
        tf.reshape(w == 0, [tf.shape(w)[0], tf.reduce_prod(tf.shape(w)[1:])])
        for w in weights
        if w.shape.rank
    )
    return LossBatch(terms, weightless, arguments, ordinal)


# ----------------------------------------------------- the loss once more
def training_call(model: keras.Model, x: Any) -> ForwardCall:
    """The call that Keras' own `train_step` makes."""
    kwargs = {"training": True} if call_takes_training(model) else {}
    return ForwardCall((x,), kwargs, None)


def find_call(
    model: keras.Model, batch: LossBatch, calls: Sequence[ForwardCall]
) -> ForwardCall:
    """Returns the call of the model that the loss was computed from.

    Raises:
        ValueError: If the loss was not computed by `compute_loss`, or of
            something that the model cannot be seen to have returned.
    """
    if "y_pred" in batch.arguments:
        predicted = _identities(batch.arguments["y_pred"])
        for call in reversed(calls):
            if _identities(call.outputs) == predicted:
                return call
        if batch.arguments.get("x") is not None:
            return training_call(model, batch.arguments["x"])
    raise ValueError(
        f"The curvature of model '{model.name}' needs the loss of the current "
        "batch. Compute it with `model.compute_loss(x=x, y=y, y_pred=model(x, "
        "training=True))` under the gradient tape, as Keras' `train_step` does."
    )


@contextlib.contextmanager
def stateless(
    model: keras.Model,
    mapping: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
) -> Iterator[keras.StatelessScope]:
    """A scope in which a model changes no state, at values of some weights."""
    with (
        paused(),
        kept_losses(model),
        keras.StatelessScope(mapping, collect_losses=True) as scope,
    ):
        yield scope


def changed_layers(
    model: keras.Model, call: ForwardCall
) -> tuple[list[str], list[str]]:
    """Layers that a call changes the state of, and those that add a loss."""
    with stateless(model) as scope:
        model(*call.args, **call.kwargs)
        losing = losing_layers(model, scope)
    changed = []
    for node in walk(model):  # what is inside of a layer comes before it
        states = node.layer.non_trainable_variables
        if any(scope.get_current_value(v) is not None for v in states):
            changed.append(node.layer.name)
    return changed, list(losing)


def replay_loss(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    shares: Sequence[tf.Tensor] = (),
    read: Callable[[Any], Any] | None = None,
) -> tf.Tensor:
    """Computes the loss with other weights, and changes no state.

    What the model would update (moving averages, random seeds, metrics) stays
    as it is; each replay sees the same.

    Args:
        model: A compiled model.
        call: The call to repeat.
        arguments: Those of `compute_loss`; `y_pred` is computed anew.
        variables: Weights that have other `values`.
        values: These.
        shares: Weights of the losses, see `weigh`.
        read: Returns what the loss is to read in the place of the outputs.
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
    """Computes the loss of what a model returned; arguments as above.

    Losses that layers have added are those of the surrounding stateless scope.
    What the losses of the training step have been seen to write has afterwards
    the value that it had.
    """
    written = LossTap.open(model).written()
    with kept_variables(written), observed_losses() as losses:
        loss = model.compute_loss(**{**arguments, "y_pred": outputs})
    terms = read_terms(model, losses)
    return scalar_loss(weigh(loss, terms, shares))


def scalar_loss(loss: Any) -> tf.Tensor:
    """Sum of the values of a loss, whose gradient a tape takes."""
    loss = tf.convert_to_tensor(loss)
    return loss if loss.shape.rank == 0 else tf.reduce_sum(loss)


def _identities(outputs: Any) -> list[int]:
    return [id(tensor) for tensor in keras.tree.flatten(outputs)]
