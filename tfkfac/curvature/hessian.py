"""The Hessian of a Keras model's loss, as an operator."""

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
    open_graphs,
    operation_without_gradient,
)
from tfkfac.linalg.lanczos import Product
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import replay_loss


def hessian_operator(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    values: Sequence[tf.Tensor],
    total: Sum = tf.identity,
    shares: Sequence[tf.Tensor] = (),
) -> Product:
    """Product of a flat vector with the Hessian of a compiled model's loss.

    The forward and the first backward pass are done here, once. A product is
    one more pass backward through both (reverse over reverse).

    The values are those of all trainable variables; `total` is a
    differentiable sum over the replicas, for synchronised layers. For the other
    arguments see `replay_loss`.
    """
    variables = model.trainable_variables
    space = flat_space(variables)
    first = len(operations())
    with tape(persistent=True) as outer, exact_second_derivatives(total):
        outer.watch(values)
        with tape() as inner:
            inner.watch(values)
            loss = replay_loss(
                model, call, arguments, variables, values, shares
            )
        slopes = inner.gradient(loss, values)
        # Sparse gradients become dense, so that a product can meet them.
        slopes = dense(slopes)
    refuse_silent_zeros(model, first)

    def product(vector: tf.Tensor) -> tf.Tensor:
        present = [
            (g, v)
            for g, v in zip(slopes, space.split(vector), strict=True)
            if g is not None
        ]
        with naming_layers(model):
            images = outer.gradient(
                [g for g, _ in present],
                list(values),
                output_gradients=[v for _, v in present],
            )
        return space.join(dense(images))

    return product


def tape(persistent: bool = False) -> tf.GradientTape:
    """A tape of what is watched alone."""
    return tf.GradientTape(persistent, watch_accessed_variables=False)


def dense(gradients: Sequence[Any]) -> list[tf.Tensor | None]:
    """Gradients as dense tensors; None where there is none."""
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def flat_space(variables: Sequence[keras.Variable]) -> FlatSpace:
    """The space of flat vectors of some variables."""
    return FlatSpace(
        [tuple(v.shape) for v in variables],
        [tf.as_dtype(v.dtype) for v in variables],
    )


def operations() -> list[tf.Operation]:
    """The operations of the current graph so far; none of eager code."""
    if tf.executing_eagerly():
        return []
    return list(tf.compat.v1.get_default_graph().get_operations())


def refuse_silent_zeros(model: keras.Model, first: int) -> None:
    """Refuses first derivatives that TensorFlow takes for constants.

    The gradient operation of bilinear resizing, for one, is registered as not
    differentiable, which counts as a derivative of zero.
    """
    for operation in operations()[first:]:
        kind = operation.type
        if kind.endswith(("Grad", "Gradient")) and is_constant_to_tapes(kind):
            raise no_second_derivative(model, kind)


@contextlib.contextmanager
def naming_layers(model: keras.Model) -> Iterator[None]:
    """Names the layer of an operation that has no second derivative."""
    try:
        yield
    except LookupError as error:
        kind = operation_without_gradient(error)
        raise no_second_derivative(model, kind) from error


def no_second_derivative(model: keras.Model, kind: str) -> NotImplementedError:
    """The error for an operation, with the layer that it belongs to."""
    names = {node.layer.name for node in walk(model)}
    found: list[str] = []
    for graph in open_graphs():
        for operation in graph.get_operations():
            if operation.type == kind:
                for part in operation.name.split("/"):
                    # Since version 3.16 Keras adds no number to the first.
                    known = {layer_name(part), part} & names
                    found += sorted(known, key=len)[:1]
    where = f"Layer '{found[-1]}'" if found else "An operation"
    return NotImplementedError(
        f"{where} of model '{model.name}' has no second derivative in "
        f"TensorFlow: that of its operation {kind} is missing. Leave it out, "
        "or use an optimizer that needs none."
    )


def layer_name(scope: str) -> str:
    """The layer's name in a name scope, to which Keras adds a number."""
    return re.sub(r"_\d+$", "", scope)
