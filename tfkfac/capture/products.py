"""Gradients of kernels that are the product of what was recorded.

The gradient that is applied may not be the one that flowed back: it may have
the term of a regulariser, have been clipped, unscaled or added up by the user.
So the graph is looked at. What is not the plain product of a layer's recorded
inputs and gradient, and nothing more, is not recognised.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_COPIES = ("Identity", "IdentityN")


def is_product(
    gradients: Sequence[Any], inputs: Any, gradient: tf.Tensor
) -> bool:
    """True if the gradients of a kernel and a bias are `a^T g` and `1^T g`.

    Args:
        gradients: The gradient of the kernel, whose first axes are those that
            are contracted with the inputs; and that of the bias, if any.
        inputs: The inputs `a`, features last.
        gradient: The gradient `g` at the pre-activation, features last.
    """
    tensors = [*gradients, inputs, gradient]
    if tf.executing_eagerly() or not all(_is_symbolic(t) for t in tensors):
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


def _is_symbolic(tensor: Any) -> bool:
    """True if it is a dense tensor of a graph."""
    return isinstance(tensor, tf.Tensor) and tf.is_symbolic_tensor(tensor)


def _factors(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor] | None:
    """The `a` and `g` of which a tensor is `a^T g`, summed over batches."""
    operation = tensor.op
    if operation.type == "MatMul":
        names = "transpose_a", "transpose_b"
    else:
        if operation.type == "Sum" and _is_of_broadcast(operation):
            operation = operation.inputs[0].op
        names = "adj_x", "adj_y"
        if operation.type != "BatchMatMulV2":
            return None
    if [operation.get_attr(name) for name in names] != [True, False]:
        return None
    a, g = operation.inputs
    return a, g


def _is_of_broadcast(total: tf.Operation) -> bool:
    """True if a sum is over the batches that shared the kernel."""
    return bool(total.inputs[1].op.type == "BroadcastGradientArgs")


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
