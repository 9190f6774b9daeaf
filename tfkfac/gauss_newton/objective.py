"""The loss of a step's batch, as a function of the weights."""

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
from tfkfac.gauss_newton.jacobian import Jacobian, Read, Rows
from tfkfac.gauss_newton.support import check_call
from tfkfac.linalg.symmetric import pack, unpack
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import find_call, loss_of_outputs, replay_loss
from tfkfac.loss.terms import LossTerms
from tfkfac.shell.conditions import Conditions
from tfkfac.training.step import Step


class Point(NamedTuple):
    """The loss of this replica's examples where a step begins."""

    loss: tf.Tensor  # a float64 scalar
    jacobian: Jacobian  # of its residuals


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of the batch of a step."""

    step: Step
    call: ForwardCall  # with what the model returned
    arguments: dict[str, Any]  # of `compute_loss`
    space: FlatSpace  # of the flat vectors of all trainable weights
    rows: Sequence[Rows]  # without what the losses read of them

    @classmethod
    def of(cls, step: Step, space: FlatSpace) -> "Objective":
        """Takes the batch of a step.

        Raises:
            ValueError: If the loss was not computed by `compute_loss`, or the
                model or its loss is not one of residuals of single examples.
        """
        model = step.job.model
        call = find_call(model, step.batch, ForwardTap.open(model).take())
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
        """Number of residuals; a tensor if it is not known before."""
        return sum(rows.size * rows.examples for rows in self.rows)

    @property
    def precision(self) -> tf.DType:
        """The least exact dtype of the weights and the losses."""
        calls = [terms.call for terms in self.step.batch.terms]
        dtypes = [tf.as_dtype(c.loss.dtype) for c in calls if c is not None]
        return min([self.space.dtype, *dtypes], key=lambda dtype: dtype.size)

    def point(self, block: int, most: int) -> Point:
        """The loss at the weights as they are, and the Jacobian there.

        Of the outputs that the training step has computed already. A block has
        so many rows, and a backward pass `most` examples.
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
        reads = read_outputs(self.step, self.call, readings, slopes, dtype)
        all_ = [
            rows._replace(reads=[r for r in reads if r.position in rows.places])
            for rows in self.rows
        ]
        jacobian = Jacobian(
            model, all_, self.weights, values, self.space, block, most
        )
        return Point(number(loss), jacobian)

    def loss_after(self, change: tf.Tensor) -> tf.Tensor:
        """The loss of all replicas after a change of the weights."""
        weights, parts = self.weights, self.space.split(change)
        loss = replay_loss(
            self.step.job.model,
            self.call,
            self.arguments,
            weights,
            [v.value + part for v, part in zip(weights, parts, strict=True)],
            self.step.loss.shares,
        )
        return self.sum(number(loss))

    def sum(self, own: tf.Tensor) -> tf.Tensor:
        """The sum over all replicas."""
        (total,) = self.step.group.all_reduce([own])
        return total

    def total(
        self, matrix: tf.Tensor, gradient: tf.Tensor, loss: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The sums over all replicas, of a symmetric matrix by its half."""
        group = self.step.group
        if group.size == 1:
            return matrix, gradient, loss
        half, gradient, loss = group.all_reduce([pack(matrix), gradient, loss])
        return unpack(half, tuple(matrix.shape)), gradient, loss


def rows_of(step: Step, call: ForwardCall) -> list[Rows]:
    """The rows of a call of the model, or of each of its conditions."""
    model = step.job.model
    sizes = [0] * len(keras.tree.flatten(call.outputs))
    for place, output in places_read(step, call):
        sizes[place] += math.prod(output.predictions.shape[1:])
    if isinstance(model, Conditions):
        (points,) = call.args
        names = keras.tree.flatten({name: name for name in points})
        return [
            Rows(one_of(model, name, i), [points[name]], [i], sizes[i])
            for i, name in enumerate(names)
        ]
    leaves = keras.tree.flatten((call.args, call.kwargs))
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in leaves]
    batches = [i for i, shape in enumerate(shapes) if len(shape) > 0]
    own = [i for i in batches if shapes[i][0] == shapes[batches[0]][0]]

    def outputs(points: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        moved = list(leaves)
        for i, point in zip(own, points, strict=True):
            moved[i] = point
        like = call.args, call.kwargs
        args, kwargs = keras.tree.pack_sequence_as(like, moved)
        return dict(enumerate(keras.tree.flatten(model(*args, **kwargs))))

    points = [leaves[i] for i in own]
    return [Rows(outputs, points, range(len(sizes)), sum(sizes))]


def one_of(
    model: keras.Model, name: str, place: int
) -> Callable[[Sequence[tf.Tensor]], dict[int, tf.Tensor]]:
    """One condition of a model, at a position of its outputs."""
    return lambda points: {place: model({name: points[0]})[name]}


def places_read(step: Step, call: ForwardCall) -> list[tuple[int, Output]]:
    """The output that each loss reads, and its position among the model's."""
    flat = keras.tree.flatten(call.outputs)
    position = {id(output): i for i, output in enumerate(flat)}
    found = []
    for one in step.loss.losses:
        output = output_of(one)
        assert isinstance(output, Output)
        found.append((position[id(output.predictions)], output))
    return found


def read_outputs(
    step: Step,
    call: ForwardCall,
    readings: Sequence[Reading],
    slopes: Sequence[Sequence[tf.Tensor | None]],
    dtype: tf.DType,
) -> list[Read]:
    """Finds what each loss of a step reads.

    There are readings of each output of the call, with the slopes of the loss
    at their leaves. The dtype is that of the weights' vectors.
    """
    terms, replicas = step.loss.losses, step.job.topology.replicas
    shares = step.loss.shares or [tf.ones([], tf.float64)] * len(terms)
    reads = []
    places = places_read(step, call)
    for one, share, (place, output) in zip(terms, shares, places, strict=True):
        # The logits, if there are any, come before the output.
        behind, here = readings[place].leaves, slopes[place]
        chosen = next(i for i, slope in enumerate(here) if slope is not None)
        is_logits = chosen < len(behind) - 1
        size = math.prod(behind[chosen].shape[1:])
        slope = tf.reshape(tf.cast(here[chosen], dtype), [-1, size])
        scale = scale_of(one, share, replicas)
        values = tf.cast(behind[chosen], dtype)
        root = root_of(output, values, is_logits, scale)
        reads.append(Read(place, is_logits, behind[chosen], slope, root, size))
    return reads


def scale_of(terms: LossTerms, share: tf.Tensor, replicas: int) -> tf.Tensor:
    """The factor of its terms' sum in a replica's loss, see `weigh_loss`."""
    if terms.summed:
        return terms.unit
    return tf.math.divide_no_nan(terms.unit * share, replicas * terms.count)


def number(loss: tf.Tensor) -> tf.Tensor:
    """A loss in float64. Keras does not reduce that of an empty batch."""
    return tf.cast(tf.reduce_sum(loss), tf.float64)
