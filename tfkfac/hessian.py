"""The Hessian of a Keras model's loss, as an operator."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.registry import walk
from tfkfac.capture.replay import ForwardCall, replay_loss
from tfkfac.capture.second_order import Sum, exact_second_derivatives
from tfkfac.linalg.flat import FlatSpace
from tfkfac.linalg.lanczos import Product


def hessian_operator(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    total: Sum = tf.identity,
) -> Product:
    """Differentiates the loss once and returns the product with its Hessian.

    The forward and the first backward pass are done here, once. A product is
    one more pass backward through both (reverse over reverse).

    Args:
        model: A compiled model.
        call: How to call it.
        arguments: Those of its `compute_loss`.
        variables: The weights.
        values: The point, a tensor for each of them.
        total: Differentiable sum over the replicas, for synchronised layers.

    Returns:
        Function of a flat vector.
    """
    space = flat_space(variables)
    names = [node.layer.name for node in walk(model)]
    with (
        tf.GradientTape(
            persistent=True, watch_accessed_variables=False
        ) as outer,
        exact_second_derivatives(total),
    ):
        outer.watch(values)
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(values)
            loss = replay_loss(model, call, arguments, variables, values)
        slopes = inner.gradient(loss, values)
        # Sparse gradients become dense, so that a product can meet them.
        slopes = [
            None if g is None else tf.convert_to_tensor(g) for g in slopes
        ]

    def product(vector: tf.Tensor) -> tf.Tensor:
        present = [
            (g, v)
            for g, v in zip(slopes, space.split(vector), strict=True)
            if g is not None
        ]
        try:
            images = outer.gradient(
                [g for g, _ in present],
                list(values),
                output_gradients=[v for _, v in present],
            )
        except LookupError as error:
            raise NotImplementedError(
                f"{_where(error, names)} of model '{model.name}' has no second "
                f"derivative in TensorFlow: {error}. Leave it out or use "
                "another optimizer."
            ) from error
        dense = [None if h is None else tf.convert_to_tensor(h) for h in images]
        return space.join(dense)

    return product


def flat_space(variables: Sequence[keras.Variable]) -> FlatSpace:
    """The space of flat vectors of some variables."""
    return FlatSpace(
        [tuple(v.shape) for v in variables],
        [tf.as_dtype(v.dtype) for v in variables],
    )


def _where(error: LookupError, names: Sequence[str]) -> str:
    """The layers with operations of the type that an error is about."""
    kind = str(error).rsplit(": ", 1)[-1].strip()
    if "disabled" in str(error):
        kind = "PreventGradient"
    graph = tf.compat.v1.get_default_graph()
    found: list[str] = []
    while graph is not None:
        for operation in graph.get_operations():
            if operation.type == kind:
                parts = operation.name.split("/")
                found += [p for p in parts if p in names and p not in found]
        graph = getattr(graph, "outer_graph", None)
    if not found:
        return "An operation"
    return f"Layer '{found[-1]}'"
