"""Quadratic form of the Gauss-Newton matrix of a Keras model's loss.

The form is `d^T J^T H J d`, where J is the Jacobian of the inputs of the loss,
and H is the Hessian of the loss with respect to these inputs. The inputs are
the model outputs, or the logits for Keras' cross-entropies after Keras' softmax
or sigmoid. H is positive semidefinite if the loss is convex in its inputs.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import Sum, exact_second_derivatives
from tfkfac.compat.losses import in_place_of, logits_of
from tfkfac.curvature.hessian import (
    dense,
    naming_layers,
    operations,
    refuse_silent_zeros,
    tape,
)
from tfkfac.loss.batch import replay_loss

# A direction in weight space: a tensor for each variable, None for zero.
Direction = Sequence[tf.Tensor | None]


class GaussNewtonForm(NamedTuple):
    """Quadratic form along directions `d_i`, and its parts, in float64.

    `t_i = J d_i` is the direction at the inputs of the loss. Its tensors are
    numbered by j; `g_j` is the gradient of the loss there.
    """

    matrix: tf.Tensor
    """`d_i^T J^T H J d_k`."""
    squared_slopes: tf.Tensor
    """`sum (g_j t_ij)^2` over the elements, `(directions, inputs)`."""
    curvatures: tf.Tensor
    """`sum |t_ij (H t_i)_j|`: 0 if the loss is linear in input j."""


def gauss_newton_form(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    directions: Sequence[Direction],
    total: Sum = tf.identity,
    shares: Sequence[tf.Tensor] = (),
) -> GaussNewtonForm:
    """Compute the form along directions.

    Costs one forward pass, and about one forward pass per direction. `total` is
    a differentiable sum over the replicas, for synchronised layers. For other
    arguments see `replay_loss`.
    """
    num_before = len(operations())
    with exact_second_derivatives(total):
        with tape() as model_tape, tape(persistent=True) as outer:
            model_tape.watch(values)
            with tape() as inner:
                reading = Reading(inner, outer)
                cut = functools.partial(keras.tree.map_structure, reading.cut)
                loss = replay_loss(
                    model, call, arguments, variables, values, shares, cut
                )
            slopes = inner.gradient(loss, reading.leaves)
        is_used = [slope is not None for slope in slopes]
        if not any(is_used):
            count = len(directions)
            none = tf.zeros([count, 0], tf.float64)
            return GaussNewtonForm(
                tf.zeros([count, count], tf.float64), none, none
            )
        outputs, leaves, slopes = (
            list(itertools.compress(tensors, is_used))
            for tensors in (reading.outputs, reading.leaves, slopes)
        )
        # The backward pass `J^T u` is linear in u; J d is its derivative by u
        # along d. In a graph, TensorFlow prunes the backward pass itself.
        dual = [tf.zeros_like(output) for output in outputs]
        with tape(persistent=True) as backward:
            backward.watch(dual)
            pulled = dense(model_tape.gradient(outputs, values, dual))
        refuse_silent_zeros(model, num_before)
        with naming_layers(model):
            pushed = []
            for direction in directions:
                pairs = [
                    (p, tf.cast(d, p.dtype))
                    for p, d in zip(pulled, direction, strict=True)
                    if p is not None and d is not None
                ]
                targets, seeds = [p for p, _ in pairs], [d for _, d in pairs]
                pushed.append(
                    backward.gradient(
                        targets, dual, seeds, unconnected_gradients="zero"
                    )
                )
            dtypes = [leaf.dtype for leaf in leaves]
            tangents = [list(map(tf.cast, x, dtypes)) for x in pushed]
            images = [
                outer.gradient(slopes, leaves, x, unconnected_gradients="zero")
                for x in tangents
            ]
    matrix = symmetric_products(tangents, images)
    return GaussNewtonForm(
        matrix,
        tf.stack([_sums(tf.square, slopes, t) for t in tangents]),
        tf.stack(
            [_sums(tf.abs, *x) for x in zip(tangents, images, strict=True)]
        ),
    )


def _sums(
    function: Callable[[tf.Tensor], tf.Tensor],
    left: Sequence[tf.Tensor],
    right: Sequence[tf.Tensor],
) -> tf.Tensor:
    """Return the sum of `function(x * y)` for each pair, in float64."""
    # A product in float32 may underflow to 0, as if the loss were linear.
    pairs = [
        (tf.cast(x, tf.float64), tf.cast(y, tf.float64))
        for x, y in zip(left, right, strict=True)
    ]
    return tf.stack([tf.reduce_sum(function(x * y)) for x, y in pairs])


class Reading:
    """Replace the inputs of a loss by leaf tensors that tapes watch."""

    def __init__(self, *tapes: tf.GradientTape) -> None:
        self._tapes = tapes
        # Model outputs, and logits where known; leaf i replaces output i.
        self.outputs: list[tf.Tensor] = []
        self.leaves: list[tf.Tensor] = []

    def cut(self, output: Any) -> Any:
        """Replace the value and the logits of an output by leaf tensors."""
        if not tf.is_tensor(output) or not output.dtype.is_floating:
            return output
        logits = logits_of(output)
        leaf = None if logits is None else self._leaf(logits)
        return in_place_of(output, self._leaf(output), leaf)

    def _leaf(self, tensor: tf.Tensor) -> tf.Tensor:
        # Use float32: in float16, products with a small Hessian can underflow.
        dtype = tf.float32 if tensor.dtype.size < 4 else tensor.dtype
        leaf = tf.identity(tf.cast(tensor, dtype))
        for leaf_tape in self._tapes:
            leaf_tape.watch(leaf)
        self.outputs.append(tensor)
        self.leaves.append(leaf)
        return leaf


def symmetric_products(
    left: Sequence[Direction], right: Sequence[Direction]
) -> tf.Tensor:
    """Compute the inner products `<left_i, right_j>`, a symmetric matrix."""
    indices = range(len(left))
    products: dict[tuple[int, int], tf.Tensor] = {}
    for i, j in itertools.combinations_with_replacement(indices, 2):
        sums = [tf.constant(0, tf.float64)]
        for x, y in zip(left[i], right[j], strict=True):
            if x is not None and y is not None:
                dtype = tf.float32 if x.dtype.size < 4 else x.dtype
                product = tf.cast(x, dtype) * tf.cast(y, dtype)
                sums.append(tf.cast(tf.reduce_sum(product), tf.float64))
        products[i, j] = products[j, i] = tf.add_n(sums)
    return tf.stack(
        [tf.stack([products[i, j] for j in indices]) for i in indices]
    )
