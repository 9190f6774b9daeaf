"""What an accelerator keeps of an estimation that spans many steps."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked, copied_rows
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.fosi.estimation import Estimation, Spectrum
from tfkfac.fosi.held_batch import HeldBatches, point
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import Candidate, Krylov, Tridiagonal
from tfkfac.loss.batch import LossBatch
from tfkfac.saving.entries import Entry, Region, Spread

# By the accelerators; the workers have none of it.
_OWNED = Spread.OWNED


class Accelerator(Tracked):
    """A Lanczos iteration that is done a few steps at a time.

    Args:
        geometry: Sizes.
        count: Number of accelerators.
        index: The place of this one among them.
    """

    def __init__(self, geometry: Geometry, count: int, index: int) -> None:
        super().__init__(name="accelerator")
        shards = geometry.slices(count)
        dtype, steps, length = geometry.dtype, geometry.steps, shards.length

        def vector(size: int, name: str, dtype: Any = dtype) -> tf.Variable:
            return state_variable(tf.zeros([size]), dtype, name)

        self.geometry = geometry
        self._index, self._start = index, shards.range(index).start
        self.weights = vector(geometry.size, "weights")
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
        self._held = HeldBatches()

    @staticmethod
    def basis_bytes(geometry: Geometry, length: int) -> int:
        """Bytes of the basis, the tridiagonal matrix and the candidate."""
        rows = geometry.steps * (length + 2) + length + 2
        flags = geometry.steps + 1
        return rows * geometry.dtype.size + flags + tf.int32.size

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batches that it holds."""
        return self._held.bytes

    def entries(self, part: str) -> list[Entry]:
        """All variables to save, of a part of the state."""
        size, start = self.geometry.size, self._start
        basis = Region((self.geometry.steps, size), (0, start))
        slices = [
            ("basis", self.basis, basis),
            ("candidate", self.candidate.vector, Region((size,), (start,))),
        ]
        tridiagonal, candidate = self.tridiagonal, self.candidate
        shared = {
            "weights": self.weights,
            "diagonal": tridiagonal.diagonal,
            "coupling": tridiagonal.coupling,
            "kept": tridiagonal.kept,
            "candidate_length": candidate.length,
            "candidate_fresh": candidate.fresh,
            "candidate_scale": candidate.scale,
            "candidate_rows": candidate.rows,
        }
        return [
            *(
                Entry("", n, v, _OWNED, part, region=place, is_finite=False)
                for n, v, place in slices
            ),
            *(
                Entry("", n, v, _OWNED, part, is_finite=False)
                for n, v in shared.items()
            ),
            self._held.entry(f"batch_{self._index}", part),
        ]

    def begin(
        self,
        batch: LossBatch,
        call: ForwardCall,
        weights: tf.Tensor,
        shares: Sequence[tf.Tensor],
        estimation: Estimation,
    ) -> None:
        """Holds weights, batch and shares, and starts at them."""
        self.weights.assign(weights)
        current = point(batch, call, shares)
        self._held.of(current).hold(current)
        iteration = estimation.iteration(tf.identity)
        self._assign(iteration.begin(estimation.start(), self.geometry.steps))

    def advance(
        self,
        model: keras.Model,
        batch: LossBatch,
        call: ForwardCall,
        shares: Sequence[tf.Tensor],
        estimation: Estimation,
        progress: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """Does the iterations from `progress` up to `target`.

        Args:
            model: The model.
            batch: The current batch, whose form the held one has.
            call: The current call of the model.
            shares: The current weights of the losses.
            estimation: The accelerators' part in the estimation.
            progress: Number of iterations done.
            target: Number of iterations to have done, the same on all
                accelerators.
        """
        weights = model.trainable_variables
        current = point(batch, call, shares)
        held = self._held.of(current)
        args, kwargs, arguments, held_shares = held.get(current)
        local = hessian_operator(
            model,
            ForwardCall(args, kwargs, None),
            arguments,
            weights,
            flat_space(weights).split(tf.convert_to_tensor(self.weights)),
            estimation.differentiable_sum,
            held_shares,
        )
        iteration = estimation.iteration(local)
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
