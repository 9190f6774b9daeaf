"""Loss of a batch as a function of the weights, and its Jacobian."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall, ForwardTap, paused
from tfkfac.curvature.gauss_newton import Reading
from tfkfac.curvature.hessian import tape
from tfkfac.fisher.distributions import Output, output_of
from tfkfac.fisher.roots import root_of
from tfkfac.gauss_newton.jacobian import Jacobian, LossInput, Rows
from tfkfac.gauss_newton.support import check_call
from tfkfac.linalg.symmetric import pack, unpack
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import find_call, loss_of_outputs, replay_loss
from tfkfac.loss.terms import LossTerms
from tfkfac.shell.conditions import Conditions
from tfkfac.training.step import Step


class Point(NamedTuple):
    """The loss of this replica's examples at the current weights."""

    loss: tf.Tensor  # float64 scalar
    jacobian: Jacobian  # of the residuals


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a batch as a function of the weights."""

    step: Step
    call: ForwardCall  # call of the model, with its outputs
    arguments: dict[str, Any]  # arguments of `compute_loss`
    space: FlatSpace  # conversion of all trainable weights to flat vectors
    rows: Sequence[Rows]  # without `Rows.loss_inputs`

    @classmethod
    def of(cls, step: Step, space: FlatSpace) -> "Objective":
        """Create the objective from the batch of a step.

        Raises:
            ValueError: If the loss was not computed by `compute_loss`, or has
                no residuals of single examples, see `check_call`.
        """
        model = step.job.model
        call = find_call(model, step.batch, ForwardTap.open(model).pop_items())
        check_call(model, call, step.loss.losses)
        arguments = dict(step.batch.arguments)
        return cls(step, call, arguments, space, rows_of(step, call))

    @property
    def weights(self) -> list[keras.Variable]:
        """All trainable weights of the model."""
        weights: list[keras.Variable] = self.step.job.model.trainable_variables
        return weights

    @property
    def residuals(self) -> int | tf.Tensor:
        """Number of residuals; a tensor if not static."""
        return sum(rows.size * rows.examples for rows in self.rows)

    @property
    def precision(self) -> tf.DType:
        """The dtype of lowest precision among the weights and the losses."""
        calls = [terms.call for terms in self.step.batch.terms]
        dtypes = [tf.as_dtype(c.loss.dtype) for c in calls if c is not None]
        return min([self.space.dtype, *dtypes], key=lambda dtype: dtype.size)

    def point(self, block: int, max_examples: int) -> Point:
        """Compute the loss and the Jacobian at the current weights.

        Uses the outputs of the forward pass of the training step. `block` is
        the number of rows per block of the Jacobian.
        """
        model, dtype = self.step.job.model, self.space.dtype
        values = [tf.identity(v.value) for v in self.weights]
        mapping = list(zip(self.weights, values, strict=True))
        with tape(persistent=True) as back:
            flat = keras.tree.flatten(self.call.outputs)
            readings = [Reading(back) for _ in flat]
            outputs = keras.tree.pack_sequence_as(
                self.call.outputs,
                [
                    r.cut(output)
                    for r, output in zip(readings, flat, strict=True)
                ],
            )
            with paused(), keras.StatelessScope(mapping, collect_losses=True):
                loss = loss_of_outputs(
                    model, self.arguments, outputs, self.step.loss.shares
                )
        slopes = back.gradient(loss, [r.leaves for r in readings])
        inputs = find_loss_inputs(self.step, self.call, readings, slopes, dtype)
        rows = [
            r._replace(
                loss_inputs=[x for x in inputs if x.position in r.indices]
            )
            for r in self.rows
        ]
        jacobian = Jacobian(
            model, rows, self.weights, values, self.space, block, max_examples
        )
        return Point(as_float64(loss), jacobian)

    def loss_after(self, change: tf.Tensor) -> tf.Tensor:
        """Sum of the losses of all replicas after a change of the weights."""
        weights, changes = self.weights, self.space.split(change)
        loss = replay_loss(
            self.step.job.model,
            self.call,
            self.arguments,
            weights,
            [v.value + c for v, c in zip(weights, changes, strict=True)],
            self.step.loss.shares,
        )
        return self.sum(as_float64(loss))

    def sum(self, replica_value: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over all replicas."""
        (total,) = self.step.group.all_reduce([replica_value])
        return total

    def total(
        self, matrix: tf.Tensor, gradient: tf.Tensor, loss: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Sum over all replicas; the symmetric matrix is sent packed."""
        group = self.step.group
        if group.size == 1:
            return matrix, gradient, loss
        tensors = [pack(matrix), gradient, loss]
        packed, gradient, loss = group.all_reduce(tensors)
        return unpack(packed, tuple(matrix.shape)), gradient, loss


def rows_of(step: Step, call: ForwardCall) -> list[Rows]:
    """One `Rows` for the call of a model, or for each of its `Conditions`."""
    model = step.job.model
    sizes = [0] * len(keras.tree.flatten(call.outputs))
    for index, output in outputs_of_losses(step, call):
        sizes[index] += math.prod(output.predictions.shape[1:])
    if isinstance(model, Conditions):
        (points,) = call.args
        names = keras.tree.flatten({name: name for name in points})
        return [
            Rows(condition_of(model, name, i), [points[name]], [i], sizes[i])
            for i, name in enumerate(names)
        ]
    leaves = keras.tree.flatten((call.args, call.kwargs))
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in leaves]
    tensors = [i for i, shape in enumerate(shapes) if len(shape) > 0]
    # Arguments with the batch axis of the first tensor.
    batched = [i for i in tensors if shapes[i][0] == shapes[tensors[0]][0]]

    def outputs(points: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        replaced = list(leaves)
        for i, point in zip(batched, points, strict=True):
            replaced[i] = point
        structure = call.args, call.kwargs
        args, kwargs = keras.tree.pack_sequence_as(structure, replaced)
        return dict(enumerate(keras.tree.flatten(model(*args, **kwargs))))

    points = [leaves[i] for i in batched]
    return [Rows(outputs, points, range(len(sizes)), sum(sizes))]


def condition_of(
    model: keras.Model, name: str, index: int
) -> Callable[[Sequence[tf.Tensor]], dict[int, tf.Tensor]]:
    """Return a function from points to the output of one condition."""
    return lambda points: {index: model({name: points[0]})[name]}


def outputs_of_losses(
    step: Step, call: ForwardCall
) -> list[tuple[int, Output]]:
    """For each loss, the model's output that it uses, with its index."""
    flat = keras.tree.flatten(call.outputs)
    indices = {id(output): i for i, output in enumerate(flat)}
    result = []
    for terms in step.loss.losses:
        output = output_of(terms)
        assert isinstance(output, Output)
        result.append((indices[id(output.predictions)], output))
    return result


def find_loss_inputs(
    step: Step,
    call: ForwardCall,
    readings: Sequence[Reading],
    slopes: Sequence[Sequence[tf.Tensor | None]],
    dtype: tf.DType,
) -> list[LossInput]:
    """Find the outputs or logits that the losses of a step use.

    `slopes` are the gradients of the loss at the leaves of the readings, and
    `dtype` is the dtype of the results.
    """
    losses, replicas = step.loss.losses, step.job.topology.replicas
    shares = step.loss.shares or [tf.ones([], tf.float64)] * len(losses)
    result = []
    outputs = outputs_of_losses(step, call)
    for terms, share, (i, output) in zip(losses, shares, outputs, strict=True):
        # The leaves are the logits, if any, and then the output.
        leaves = readings[i].leaves
        used = next(k for k, slope in enumerate(slopes[i]) if slope is not None)
        is_logits = used < len(leaves) - 1
        size = math.prod(leaves[used].shape[1:])
        slope = tf.reshape(tf.cast(slopes[i][used], dtype), [-1, size])
        scale = scale_of(terms, share, replicas)
        values = tf.cast(leaves[used], dtype)
        root = root_of(output, values, is_logits, scale)
        result.append(LossInput(i, is_logits, leaves[used], slope, root, size))
    return result


def scale_of(terms: LossTerms, share: tf.Tensor, replicas: int) -> tf.Tensor:
    """Factor of `sum nll_t`: `u`, for a mean `u share / (replicas count)`."""
    if terms.summed:
        return terms.unit
    return tf.math.divide_no_nan(terms.unit * share, replicas * terms.count)


def as_float64(loss: tf.Tensor) -> tf.Tensor:
    """Sum to float64; Keras does not reduce the loss of an empty batch."""
    return tf.cast(tf.reduce_sum(loss), tf.float64)
