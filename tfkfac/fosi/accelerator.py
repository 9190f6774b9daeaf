"""What an accelerator keeps of an estimation that spans many steps."""

from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.forward import ForwardCall
from tfkfac.capture.loss_batch import LossBatch
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.rows import copied_rows
from tfkfac.compat.tracking import Tracked
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.fosi.estimation import Estimation, Spectrum
from tfkfac.fosi.held_batch import HeldBatch, describe, point
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import Candidate, Krylov, Tridiagonal


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
        basis = tf.zeros([steps, length])
        self.basis = state_variable(basis, dtype, "basis")
        self.tridiagonal = Tridiagonal(
            vector(steps, "diagonal"),
            vector(steps, "coupling"),
            vector(steps, "kept", "bool"),
        )
        self.candidate = Candidate(
            vector(length, "candidate"),
            state_variable(0, dtype, "length"),
            state_variable(False, "bool", "fresh"),
            state_variable(0, dtype, "scale"),
            state_variable(0, "int32", "rows"),
        )
        self._held: list[tuple[Any, HeldBatch]] = []

    @staticmethod
    def basis_bytes(geometry: Geometry, length: int) -> int:
        """Bytes of the basis, the tridiagonal matrix and the candidate."""
        rows = geometry.steps * (length + 2) + length + 2
        flags = geometry.steps + 1
        return rows * geometry.dtype.size + flags + tf.int32.size

    @staticmethod
    def point_bytes(geometry: Geometry) -> int:
        """Bytes of the weights that it holds and of its batch's share."""
        return geometry.size * geometry.dtype.size + tf.float64.size

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batches that it holds."""
        return sum(held.bytes for _, held in self._held)

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
        if share is not None:
            self.share.assign(share)
        iteration = estimation.iteration(tf.identity, None)
        self._assign(iteration.begin(estimation.start(), self.geometry.steps))

    def advance(
        self,
        model: keras.Model,
        batch: LossBatch,
        call: ForwardCall,
        estimation: Estimation,
        progress: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """Does the iterations from `progress` up to `target`.

        Args:
            model: The model.
            batch: The current batch, whose form the held one has.
            call: The current call of the model.
            estimation: The accelerators' part in the estimation.
            progress: Number of iterations done.
            target: Number of iterations to have done, the same on all
                accelerators.
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
        iteration = estimation.iteration(local, tf.identity(self.share))
        basis, tridiagonal, candidate = self._state()
        state = Krylov(copied_rows(basis), tridiagonal, candidate)
        self._assign(iteration.advance(state, progress, target))

    def _state(self) -> Krylov:
        variables = self.basis, self.tridiagonal, self.candidate
        state: Krylov = tf.nest.map_structure(
            tf.convert_to_tensor, Krylov(*variables)
        )
        return state

    def _assign(self, state: Krylov) -> None:
        variables = self.basis, self.tridiagonal, self.candidate
        tf.nest.map_structure(
            lambda variable, value: variable.assign(value),
            Krylov(*variables),
            state,
        )

    def spectrum(self, estimation: Estimation) -> Spectrum:
        """Returns the Ritz pairs when all iterations are done."""
        state = self._state()
        return estimation.spectrum(state.tridiagonal, [state.basis])

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
