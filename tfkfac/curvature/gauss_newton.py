"""The Gauss-Newton matrix of a Keras model's loss, as a quadratic form.

`d^T J^T H J d`, with J the Jacobian of what the loss reads of the model and H
the loss' Hessian with respect to that. Keras' cross-entropies read the logits
behind the model's softmax or sigmoid, if these are Keras' own; all else is
read off the outputs. H is positive semi-definite where the loss is convex in
what it reads, as Keras' squared errors, cross-entropies, Poisson and
Kullback-Leibler losses are.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

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
from tfkfac.loss.terms import LossTerms

# A tensor for each weight; None is zero.
Direction = Sequence[tf.Tensor | None]


def gauss_newton_form(
    model: keras.Model,
    call: ForwardCall,
    arguments: dict[str, Any],
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    directions: Sequence[Direction],
    total: Sum = tf.identity,
    shares: Sequence[tf.Tensor] = (),
    whole: Sequence[LossTerms] = (),
) -> tf.Tensor:
    """The symmetric float64 matrix `d_i^T (J^T H J) d_j` of some directions.

    One forward pass, and for each direction about another one. No state
    changes; see `replay_loss`, also for the other arguments. `total` is a
    differentiable sum over the replicas, for synchronised layers.

    Raises:
        NotImplementedError: If an operation of the model or its loss has no
            second derivative. The message names the layer.
    """
    first = len(operations())
    with exact_second_derivatives(total):
        with tape() as network, tape(persistent=True) as twice:
            network.watch(values)
            with tape() as once:
                reading = Reading(once, twice)
                loss = replay_loss(
                    model,
                    call,
                    arguments,
                    variables,
                    values,
                    shares,
                    whole,
                    reading.cut,
                )
            slopes = once.gradient(loss, reading.leaves)
        read = [slope is not None for slope in slopes]
        if not any(read):
            return tf.zeros([len(directions)] * 2, tf.float64)
        outputs, leaves, slopes = (
            list(itertools.compress(found, read))
            for found in (reading.outputs, reading.leaves, slopes)
        )
        push = jacobian_product(network, outputs, values)
        refuse_silent_zeros(model, first)
        with naming_layers(model):
            tangents = [
                [
                    tf.cast(t, x.dtype)
                    for t, x in zip(push(d), leaves, strict=True)
                ]
                for d in directions
            ]
            images = [
                twice.gradient(
                    slopes,
                    leaves,
                    output_gradients=one,
                    unconnected_gradients="zero",
                )
                for one in tangents
            ]
    return symmetric_products(tangents, images)


class Reading:
    """The outputs that a loss reads of a model, and their logits if any.

    In their place there are leaves, in float32 or wider, which tapes watch.
    """

    def __init__(self, *tapes: tf.GradientTape) -> None:
        self._tapes = tapes
        self.outputs: list[tf.Tensor] = []
        self.leaves: list[tf.Tensor] = []

    def cut(self, outputs: Any) -> Any:
        """Returns what the loss takes for the outputs."""
        return keras.tree.map_structure(self._cut_one, outputs)

    def _cut_one(self, output: Any) -> Any:
        if not tf.is_tensor(output) or not output.dtype.is_floating:
            return output
        logits = logits_of(output)
        own = None if logits is None else self._leaf(logits)
        return in_place_of(output, self._leaf(output), own)

    def _leaf(self, tensor: tf.Tensor) -> tf.Tensor:
        wide = tf.float32 if tensor.dtype.size < 4 else tensor.dtype
        # Losses of half precision would lose products with a small Hessian.
        leaf = tf.identity(tf.cast(tensor, wide))
        for one in self._tapes:
            one.watch(leaf)
        self.outputs.append(tensor)
        self.leaves.append(leaf)
        return leaf


def jacobian_product(
    network: tf.GradientTape,
    outputs: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
) -> Callable[[Direction], list[tf.Tensor]]:
    """Returns the product of a direction with the Jacobian of outputs.

    The backward pass `J^T u` is linear in u, and its derivative is J: what is
    left of it in a graph is the forward pass of a tangent. It takes first
    derivatives of the model alone, with whatever is their gradient.
    """
    dual = [tf.zeros_like(output) for output in outputs]
    with tape(persistent=True) as backward:
        backward.watch(dual)
        pulled = dense(network.gradient(outputs, values, output_gradients=dual))

    def product(direction: Direction) -> list[tf.Tensor]:
        present = [
            (p, tf.cast(d, p.dtype))
            for p, d in zip(pulled, direction, strict=True)
            if p is not None and d is not None
        ]
        found: list[tf.Tensor] = backward.gradient(
            [p for p, _ in present],
            dual,
            output_gradients=[d for _, d in present],
            unconnected_gradients="zero",
        )
        return found

    return product


def symmetric_products(
    left: Sequence[Sequence[tf.Tensor]], right: Sequence[Sequence[tf.Tensor]]
) -> tf.Tensor:
    """The inner products of lists of tensors, of which `(i, j) = (j, i)`."""
    places = range(len(left))
    found: dict[tuple[int, int], tf.Tensor] = {}
    for i, j in itertools.combinations_with_replacement(places, 2):
        found[i, j] = found[j, i] = inner_product(left[i], right[j])
    return tf.stack([tf.stack([found[i, j] for j in places]) for i in places])


def inner_product(left: Direction, right: Direction) -> tf.Tensor:
    """The inner product of two lists of tensors, a float64 scalar."""
    sums = [tf.constant(0, tf.float64)]
    for x, y in zip(left, right, strict=True):
        if x is not None and y is not None:
            wide = tf.float32 if x.dtype.size < 4 else x.dtype
            product = tf.cast(x, wide) * tf.cast(y, wide)
            sums.append(tf.cast(tf.reduce_sum(product), tf.float64))
    return tf.add_n(sums)


def penalty_form(
    variables: Sequence[keras.Variable],
    values: Sequence[tf.Tensor],
    directions: Sequence[Direction],
) -> tf.Tensor:
    """Returns `d_i^T R d_j` with the Hessian R of the weights' regularisers."""
    places = [i for i, v in enumerate(variables) if v.regularizer is not None]
    own = [[direction[i] for i in places] for direction in directions]
    points = [values[i] for i in places]
    with tape(persistent=True) as twice:
        twice.watch(points)
        with tape() as once:
            once.watch(points)
            penalties = [
                variables[i].regularizer(x)
                for i, x in zip(places, points, strict=True)
            ]
        slopes = once.gradient(penalties, points)

    def image(d: Any, slope: Any, x: tf.Tensor) -> tf.Tensor | None:
        if d is None or slope is None:
            return None
        return twice.gradient(slope, x, output_gradients=d)

    images = [list(map(image, direction, slopes, points)) for direction in own]
    return symmetric_products(own, images)
