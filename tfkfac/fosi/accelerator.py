"""What an accelerator keeps of an estimation that spans many steps."""

import functools
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.forward import ForwardCall
from tfkfac.capture.loss_batch import LossBatch
from tfkfac.compat.graphs import called_often, state_variable
from tfkfac.compat.tracking import Tracked
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.fosi.estimation import Estimation, Spectrum
from tfkfac.fosi.held_batch import HeldBatch, describe, point
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import (
    BLOCK_ROWS,
    Candidate,
    Lanczos,
)


class Accelerator(Tracked):
    """A Lanczos iteration that is done a few steps at a time.

    Args:
        geometry: Sizes.
        length: Length of this accelerator's slices.
    """

    def __init__(self, geometry: Geometry, length: int) -> None:
        super().__init__(name="accelerator")
        dtype, steps = geometry.dtype, geometry.steps

        def vector(size: int, name: str, dtype: Any = dtype) -> tf.Variable:
            return state_variable(tf.zeros([size]), dtype, name)

        self.geometry = geometry
        self.weights = vector(geometry.size, "weights")
        self.share = state_variable(1, "float64", "share")
        self.blocks = [
            state_variable(
                tf.zeros([min(BLOCK_ROWS, steps - start), length]),
                dtype,
                "basis",
            )
            for start in range(0, steps, BLOCK_ROWS)
        ]
        self.diagonal = vector(steps, "diagonal")
        self.coupling = vector(steps, "coupling")
        self.kept = vector(steps, "kept", "bool")
        self.candidate = Candidate(
            vector(length, "candidate"),
            state_variable(0, dtype, "length"),
            state_variable(False, "bool", "fresh"),
            state_variable(0, dtype, "scale"),
            state_variable(0, "int32", "rows"),
        )
        self._held: list[tuple[Any, HeldBatch]] = []

    def begin(
        self,
        batch: LossBatch,
        call: ForwardCall,
        weights: tf.Tensor,
        share: tf.Tensor | None,
        estimation: Estimation,
    ) -> None:
        """Holds weights and batch, and starts at them."""
        self.weights.assign(weights)
        self._held_batch(batch, call).hold(point(batch, call))
        for block in self.blocks:
            block.assign(tf.zeros_like(block))
        if share is not None:
            self.share.assign(share)
        self._continue(
            estimation.iteration(tf.identity, None).start(estimation.start())
        )

    def advance(
        self,
        model: keras.Model,
        batch: LossBatch,
        call: ForwardCall,
        estimation: Estimation,
        progress: tf.Tensor,
        target: tf.Tensor,
        most: int,
    ) -> None:
        """Does the iterations from `progress` up to `target`, at most `most`.

        Args:
            model: The model.
            batch: The current batch, whose form the held one has.
            call: The current call of the model.
            estimation: The accelerators' part in the estimation.
            progress: Number of iterations done.
            target: Number of iterations to have done, the same on all
                accelerators.
            most: Greatest difference of the two.
        """
        weights = model.trainable_variables
        held = self._held_batch(batch, call)
        args, kwargs, arguments = held.get(point(batch, call))
        local = hessian_operator(
            model,
            ForwardCall(args, kwargs, None),
            arguments,
            weights,
            flat_space(weights).split(tf.convert_to_tensor(self.weights)),
            estimation.differentiable_sum,
        )
        lanczos = estimation.iteration(local, tf.identity(self.share))

        def iterate(index: tf.Tensor) -> tf.Tensor:
            branches = [
                functools.partial(self._iterate, lanczos, estimation, i, index)
                for i in range(len(self.blocks))
            ]
            return tf.switch_case(index // BLOCK_ROWS, branches)

        step = called_often(iterate)
        for done in range(most):
            index = tf.cast(progress, tf.int32) + done
            tf.cond(
                index < tf.cast(target, tf.int32),
                functools.partial(step, index),
                lambda: tf.constant(0),
            )

    def _iterate(
        self,
        lanczos: Lanczos,
        estimation: Estimation,
        block: int,
        index: tf.Tensor,
    ) -> tf.Tensor:
        """Iteration `index`, whose row belongs in a given block."""

        def add(row: tf.Tensor) -> list[tf.Tensor]:
            self.blocks[block][index % BLOCK_ROWS].assign(row)
            return [tf.identity(b) for b in self.blocks[: block + 1]]

        candidate = Candidate(*map(tf.convert_to_tensor, self.candidate))
        step, following = lanczos.iterate(add, candidate, index)
        self.diagonal[index].assign(step.diagonal)
        self.coupling[index].assign(step.coupling)
        self.kept[index].assign(step.kept)
        self._continue(following)
        return tf.constant(0)

    def _continue(self, candidate: Candidate) -> None:
        for variable, value in zip(self.candidate, candidate, strict=True):
            variable.assign(value)

    def spectrum(self, estimation: Estimation) -> Spectrum:
        """Returns the Ritz pairs when all iterations are done."""
        numbers = [
            tf.convert_to_tensor(v)
            for v in (self.diagonal, self.coupling, self.kept)
        ]
        return estimation.spectrum(
            (numbers[0], numbers[1], numbers[2]),
            [tf.convert_to_tensor(block) for block in self.blocks],
        )

    def _held_batch(self, batch: LossBatch, call: ForwardCall) -> HeldBatch:
        """The variables for batches of this form, made when it is new."""
        current = point(batch, call)
        leaves = tf.nest.flatten(current, expand_composites=True)
        form = [describe(leaf) for leaf in leaves]
        for known, held in self._held:
            if known == form:
                return held
        held = HeldBatch(current)
        self._held.append((form, held))
        return held
