"""The loss of a step's batch, as a function of the weights."""

import dataclasses
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall, ForwardTap, paused
from tfkfac.curvature.gauss_newton import Reading
from tfkfac.curvature.hessian import tape
from tfkfac.gauss_newton.jacobian import Jacobian
from tfkfac.gauss_newton.residuals import read_outputs
from tfkfac.gauss_newton.support import check_call
from tfkfac.linalg.symmetric import pack, unpack
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import find_call, loss_of_outputs, replay_loss
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
        return cls(step, call, dict(step.batch.arguments), space)

    @property
    def weights(self) -> list[keras.Variable]:
        """All trainable weights of the model."""
        weights: list[keras.Variable] = self.step.job.model.trainable_variables
        return weights

    @property
    def examples(self) -> int | tf.Tensor:
        """Number of examples; a tensor if it is not known before."""
        output = keras.tree.flatten(self.call.outputs)[0]
        size: int | None = output.shape[0]
        return tf.shape(output)[0] if size is None else size

    @property
    def precision(self) -> tf.DType:
        """The least exact dtype of the weights and the losses."""
        calls = [terms.call for terms in self.step.batch.terms]
        dtypes = [tf.as_dtype(c.loss.dtype) for c in calls if c is not None]
        return min([self.space.dtype, *dtypes], key=lambda dtype: dtype.size)

    def point(self, block: int) -> Point:
        """The loss at the weights as they are, and the Jacobian there.

        Of the outputs that the training step has computed already.
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
        jacobian = Jacobian(
            model, self.call, self.weights, values, self.space, reads, block
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


def number(loss: tf.Tensor) -> tf.Tensor:
    """A loss in float64. Keras does not reduce that of an empty batch."""
    return tf.cast(tf.reduce_sum(loss), tf.float64)
