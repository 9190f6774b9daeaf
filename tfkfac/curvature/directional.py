"""Curvature of the loss along directions, from examples of a mini-batch."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import Sum
from tfkfac.compat.models import all_layers, has_keras_call
from tfkfac.compat.overrides import keep_on
from tfkfac.curvature.gauss_newton import (
    Direction,
    GaussNewtonForm,
    gauss_newton_form,
    symmetric_products,
)
from tfkfac.curvature.hessian import tape
from tfkfac.linalg.tensors import size_of
from tfkfac.loss.batch import LossBatch, find_call, stateless
from tfkfac.loss.shares import LossMeasure

# Batch size for a test trace; few models contain this number as a constant.
_OTHER_SIZE = 7
# Model attribute that caches results of `takes_any_batch` by input specs.
_KNOWN_CALLS = "_tfkfac_known_calls"


@dataclasses.dataclass(frozen=True)
class LossInputs:
    """Inputs of the loss of a mini-batch on one replica."""

    call: ForwardCall
    arguments: dict[str, Any]  # arguments of `compute_loss` except `y_pred`
    shares: Sequence[tf.Tensor]  # local weight of each loss, see `weigh`
    summed: Sequence[bool]  # for each loss, True for a sum over its terms

    @classmethod
    def of(
        cls,
        model: keras.Model,
        batch: LossBatch,
        loss: LossMeasure,
        calls: Sequence[ForwardCall],
    ) -> Self:
        """Return the inputs of a step's loss; `calls` are recorded calls."""
        call = find_call(model, batch, calls)
        arguments = {k: v for k, v in batch.arguments.items() if k != "y_pred"}
        summed = [terms.summed for terms in batch.terms]
        call = dataclasses.replace(call, outputs=None)
        return cls(call, arguments, loss.shares, summed)

    def select(self, choose: Callable[[Any], Any]) -> Self:
        """Select some examples that represent the whole batch.

        `choose` maps the batch size to `blocks.statistics.Examples`. All
        examples are used if an input is sparse or ragged, or if inputs may
        relate the examples to each other, as the edges of a graph do: if their
        leading dimensions differ, or another dimension is as large.
        """
        batch = (self.call.args, self.call.kwargs, self.arguments)
        leaves = [x for x in keras.tree.flatten(batch) if _has_examples(x)]
        if any(
            isinstance(x, tf.RaggedTensor | tf.SparseTensor) for x in leaves
        ):
            return self
        are_separate = _are_separate(leaves)
        if are_separate is False:
            return self
        selection = choose(size_of(leaves[0], 0))

        def take(leaf: Any) -> Any:
            if not _has_examples(leaf):
                return leaf
            tensor = tf.convert_to_tensor(leaf)
            if are_separate is True:
                return selection.of(tensor)
            return tf.cond(
                are_separate, lambda: selection.of(tensor), lambda: tensor
            )

        args, kwargs, arguments = keras.tree.map_structure(take, batch)
        shares = self.shares
        if any(self.summed):
            shares = shares or [tf.ones([], tf.float64)] * len(self.summed)
            weight = selection.weight
            if are_separate is not True:
                weight = tf.where(are_separate, weight, 1.0)
            shares = [
                share * weight if summed else share
                for share, summed in zip(shares, self.summed, strict=True)
            ]
        call = ForwardCall(args, kwargs, None)
        return dataclasses.replace(
            self, call=call, arguments=arguments, shares=shares
        )


def takes_any_batch(model: keras.Model, call: ForwardCall) -> bool:
    """True if a call of a model can be repeated with other batch sizes."""
    if not getattr(model, "inputs", None):  # not functional
        return False
    ends = keras.tree.flatten([model.inputs, model.outputs])
    if not all(x.shape and x.shape[0] is None for x in ends):
        return False
    if all(map(has_keras_call, all_layers(model))):
        return True
    # A custom layer may contain the batch size as a constant: trace the call
    # with another size.
    inputs = (call.args, call.kwargs)
    leaves = [x for x in keras.tree.flatten(inputs) if _has_examples(x)]
    if not all(isinstance(x, tf.Tensor) for x in leaves):
        return False
    specs = [
        tf.TensorSpec([_OTHER_SIZE, *x.shape[1:]], x.dtype) for x in leaves
    ]
    # Cache the result: otherwise each eager step would trace the call.
    cache = keep_on(model, _KNOWN_CALLS, dict)
    if tuple(specs) not in cache:

        def repeat(*tensors: tf.Tensor) -> Any:
            remaining = iter(tensors)
            args, kwargs = keras.tree.map_structure(
                lambda x: next(remaining) if _has_examples(x) else x, inputs
            )
            with stateless(model):
                return model(*args, **kwargs)

        try:
            traced = tf.function(repeat, autograph=False)
            outputs = traced.get_concrete_function(*specs).structured_outputs
        except Exception:  # the model refuses the size, or a second trace
            cache[tuple(specs)] = False
        else:
            cache[tuple(specs)] = all(
                tf.is_tensor(x) and x.shape[:1] == [_OTHER_SIZE]
                for x in keras.tree.flatten(outputs)
                if x is not None
            )
    return bool(cache[tuple(specs)])


def directional_curvature(
    model: keras.Model,
    inputs: LossInputs,
    variables: Sequence[keras.Variable],
    directions: Sequence[Direction],
    unit: tf.Tensor,
    total: Sum = tf.identity,
    replicas: int = 1,
) -> GaussNewtonForm:
    """Compute the form along directions, with regularizers.

    Returns this replica's terms of sums over the replicas. The matrix is
    `d_i^T (J^T H J + R) d_k / unit`, where J is the Jacobian of the inputs of
    the loss, H the Hessian of the loss with respect to these inputs, R the
    Hessian of the weight regularizers, and `unit` the loss over the mean
    negative log-likelihood. The other fields have neither R nor `unit`.
    `total` is a differentiable sum over the replicas, for synchronised layers.
    """
    call, arguments, shares = inputs.call, inputs.arguments, inputs.shares
    values = [tf.identity(v.value) for v in variables]
    form = gauss_newton_form(
        model, call, arguments, variables, values, directions, total, shares
    )
    # Add the form of R.
    indices = [i for i, v in enumerate(variables) if v.regularizer is not None]
    tangents = [[direction[i] for i in indices] for direction in directions]
    points = [values[i] for i in indices]
    with tape(persistent=True) as outer:
        outer.watch(points)
        with tape() as inner:
            inner.watch(points)
            penalties = [
                variables[i].regularizer(x)
                for i, x in zip(indices, points, strict=True)
            ]
        slopes = inner.gradient(penalties, points)
    images = [
        [
            None
            if d is None or slope is None
            else outer.gradient(slope, x, output_gradients=d)
            for d, slope, x in zip(tangent, slopes, points, strict=True)
        ]
        for tangent in tangents
    ]
    matrix = form.matrix
    matrix += symmetric_products(tangents, images) / replicas
    matrix = tf.math.divide_no_nan(matrix, tf.cast(unit, tf.float64))
    return form._replace(matrix=matrix)


def _are_separate(leaves: Sequence[Any]) -> bool | tf.Tensor:
    """True if all first dimensions equal a size that no other dimension has."""
    shapes = [tf.TensorShape(leaf.shape) for leaf in leaves]
    if len({shape[0] for shape in shapes} - {None}) > 1:
        return False
    # Return a Python bool if the shapes are static: a wrong batch size then
    # fails in the trace, not at run time.
    if all(shape.is_fully_defined() for shape in shapes):
        return all(shapes[0][0] not in shape[1:] for shape in shapes)
    dynamic_shapes = [tf.shape(leaf) for leaf in leaves]
    size = dynamic_shapes[0][0]
    leading_sizes = tf.stack([shape[0] for shape in dynamic_shapes])
    other_sizes = tf.concat([shape[1:] for shape in dynamic_shapes], 0)
    separate = tf.reduce_all(tf.equal(leading_sizes, size))
    return separate & tf.reduce_all(tf.not_equal(other_sizes, size))


def _has_examples(leaf: Any) -> bool:
    """True if the first axis of an input may be the batch."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return tf.is_tensor(leaf) and leaf.shape.rank != 0
