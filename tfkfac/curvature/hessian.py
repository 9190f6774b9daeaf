"""Products with the Hessian of a Keras model's loss."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.capture.walk import walk
from tfkfac.compat.graphs import (
    Sum,
    exact_second_derivatives,
    is_constant_to_tapes,
    is_legacy_gradient,
    open_graphs,
    operation_without_gradient,
)
from tfkfac.linalg.lanczos import Product
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import replay_loss

# Last sentence of error messages about missing second derivatives.
ADVICE = (
    " Remove the layer, or use an optimizer that needs no second derivatives."
)


def hessian_operator(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    values: Sequence[tf.Tensor],
    total: Sum = tf.identity,
    shares: Sequence[tf.Tensor] = (),
) -> Product:
    """Return a function that multiplies the Hessian of the loss by a vector.

    Each product is a backward pass through the forward and the backward pass
    (reverse over reverse). `total` is a differentiable sum over the replicas,
    for synchronised layers. For the other arguments see `replay_loss`.
    """
    variables = model.trainable_variables
    space = flat_space(variables)
    num_before = len(operations())
    with tape(persistent=True) as outer, exact_second_derivatives(total):
        outer.watch(values)
        with tape() as inner:
            inner.watch(values)
            loss = replay_loss(
                model, call, arguments, variables, values, shares
            )
        slopes = inner.gradient(loss, values)
        slopes = dense(slopes)  # convert inside of the outer tape, to record it
    refuse_silent_zeros(model, num_before)

    def product(vector: tf.Tensor) -> tf.Tensor:
        pairs = [
            (g, v)
            for g, v in zip(slopes, space.split(vector), strict=True)
            if g is not None
        ]
        targets, seeds = [g for g, _ in pairs], [v for _, v in pairs]
        with naming_layers(model):
            images = outer.gradient(targets, list(values), seeds)
        return space.join(dense(images))

    return product


def tape(persistent: bool = False) -> tf.GradientTape:
    """Create a tape that records watched tensors only."""
    return tf.GradientTape(persistent, watch_accessed_variables=False)


def dense(gradients: Sequence[Any]) -> list[tf.Tensor | None]:
    """Convert gradients to dense tensors; keep None."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def flat_space(variables: Sequence[keras.Variable]) -> FlatSpace:
    """Space of flat vectors with an element for each weight."""
    return FlatSpace(
        [tuple(v.shape) for v in variables],
        [tf.as_dtype(v.dtype) for v in variables],
    )


def operations() -> list[tf.Operation]:
    """Operations of the current graph; empty if running eagerly."""
    if tf.executing_eagerly():
        return []
    return list(tf.compat.v1.get_default_graph().get_operations())


def refuse_silent_zeros(model: keras.Model, start: int) -> None:
    """Raise an error for operations from `start` on with a derivative of 0."""
    # TensorFlow registers some gradient operations as not differentiable, for
    # example of bilinear resizing, and treats them as constants.
    for operation in operations()[start:]:
        op_type = operation.type
        # The derivative of `tf.stop_gradient` is 0 by definition.
        is_gradient = op_type.endswith(("Grad", "Gradient"))
        is_gradient &= op_type != "StopGradient"
        if is_gradient and is_constant_to_tapes(op_type):
            raise no_second_derivative(model, op_type)


@contextlib.contextmanager
def naming_layers(model: keras.Model) -> Iterator[None]:
    """Context manager that adds a layer name to missing-gradient errors.

    Also refuses gradients of loops that would fail when they run.
    """
    start, duplicate = len(operations()), None
    try:
        yield
    except LookupError as error:
        op_type = operation_without_gradient(error)
        raise no_second_derivative(model, op_type) from error
    except tf.errors.InvalidArgumentError as error:
        # The second trace of a loop over functions of TensorFlow 1 fails: it
        # redefines a function of the first. The message has its whole graph.
        if "duplicate function" not in error.message:
            raise
        duplicate = error
    if duplicate or any(map(is_legacy_gradient, operations()[start:])):
        raise NotImplementedError(
            f"A loop of model '{model.name}' or of its loss, for example of "
            "`keras.losses.CTC`, has no second derivative in TensorFlow: the "
            f"gradient of its gradient cannot run.{ADVICE}"
        ) from duplicate


def no_second_derivative(
    model: keras.Model, op_type: str
) -> NotImplementedError:
    """Create the error for an operation type, with the name of its layer."""
    names = {node.layer.name for node in walk(model)}
    layers: list[str] = []
    for graph in open_graphs():
        for operation in graph.get_operations():
            if operation.type == op_type:
                for scope in operation.name.split("/"):
                    # Keras appends no number to the first scope from 3.16 on.
                    matches = {layer_name(scope), scope} & names
                    layers += sorted(matches, key=len)[:1]
    location = f"Layer '{layers[-1]}'" if layers else "An operation"
    return NotImplementedError(
        f"{location} of model '{model.name}' has no second derivative in "
        f"TensorFlow: operation {op_type} has no gradient.{ADVICE}"
    )


def layer_name(scope: str) -> str:
    """Remove the number that Keras appends to a layer's name scope."""
    return re.sub(r"_\d+$", "", scope)
