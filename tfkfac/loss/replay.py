"""The loss of the current step, computed anew at given weights."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.capture.trace import paused
from tfkfac.compat.losses import observed_losses
from tfkfac.compat.models import call_takes_training, kept_losses
from tfkfac.compat.variables import kept_variables
from tfkfac.loss.batch import LossBatch, LossTap
from tfkfac.loss.shares import shares_of_part, weigh
from tfkfac.loss.terms import LossTerms, read_terms


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


def replay_loss(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    shares: Sequence[tf.Tensor] = (),
    whole: Sequence[LossTerms] = (),
    read: Callable[[Any], Any] | None = None,
) -> tf.Tensor:
    """Computes the loss with other weights, and changes no state.

    What the model would update (moving averages, random seeds, metrics) stays
    as it is; each replay sees the same.

    Args:
        model: A compiled model.
        call: The call to repeat.
        arguments: Those of `compute_loss`; `y_pred` is computed anew.
        variables: Weights.
        values: Values in their place.
        shares: Weights of the losses, see `weigh`.
        whole: The terms of the whole batch, if this is of some examples.
        read: Returns what the loss is to read in the place of the outputs.
    """
    mapping = list(zip(variables, values, strict=True))
    with (
        paused(),
        kept_losses(model),
        keras.StatelessScope(mapping, collect_losses=True),
    ):
        outputs = model(*call.args, **call.kwargs)
        if read is not None:
            outputs = read(outputs)
        return loss_of_outputs(model, arguments, outputs, shares, whole)


def loss_of_outputs(
    model: keras.Model,
    arguments: dict[str, Any],
    outputs: Any,
    shares: Sequence[tf.Tensor] = (),
    whole: Sequence[LossTerms] = (),
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
    return weigh(loss, terms, shares_of_part(terms, whole, shares))


def _identities(outputs: Any) -> list[int]:
    return [id(tensor) for tensor in keras.tree.flatten(outputs)]
