"""The state of an accelerator, whose estimation spans many steps."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import copied_rows, state_variable
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.fosi.estimation import Estimation, Spectrum
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import Candidate, Krylov, Tridiagonal
from tfkfac.loss.batch import LossBatch
from tfkfac.saving.entries import Entry, Region, Spread
from tfkfac.saving.slots import Slots


class HeldBatch:
    """A batch in variables, so that later steps can use it.

    Args:
        structure: Any nest of tensors and constants. Only its form is kept.
    """

    def __init__(self, structure: Any) -> None:
        leaves = tf.nest.flatten(structure, expand_composites=True)
        self._variables = [
            held_variable(leaf) if tf.is_tensor(leaf) else None
            for leaf in leaves
        ]

    @property
    def bytes(self) -> int:
        """Bytes of the batch that is held, none before the first."""
        return sum(
            size_in_bytes(variable.read_value())
            for variable in self._variables
            if variable is not None
        )

    def serialized(self) -> list[Any]:
        """The tensors of the batch, each in TensorFlow's own form."""
        return [
            tf.io.serialize_tensor(variable.read_value()).numpy()
            for variable in self._variables
            if variable is not None
        ]

    def restore(self, serialized: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Takes its tensors from the first of some; returns the others."""
        rest = list(serialized)
        with tf.init_scope():
            for variable in self._variables:
                if variable is not None and rest:
                    variable.assign(
                        tf.io.parse_tensor(rest.pop(0), variable.dtype)
                    )
        return rest

    def hold(self, structure: Any) -> None:
        """Copies the current batch."""
        leaves = tf.nest.flatten(structure, expand_composites=True)
        for variable, leaf in zip(self._variables, leaves, strict=True):
            if variable is not None:
                variable.assign(leaf)

    def get(self, structure: Any) -> Any:
        """Returns the batch that is held, in the form of the current one."""
        leaves = tf.nest.flatten(structure, expand_composites=True)
        values = [
            leaf if variable is None else tf.convert_to_tensor(variable)
            for variable, leaf in zip(self._variables, leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(
            structure, values, expand_composites=True
        )


class HeldBatches:
    """A held batch of each form that there has been.

    They are saved as one vector of numbers; what is restored becomes those of
    the first forms there are.
    """

    # Of what is saved, as of a variable.
    shape, dtype = tf.TensorShape([None]), tf.int32

    def __init__(self) -> None:
        self._held: list[tuple[Any, HeldBatch]] = []
        self._restored: list[tf.Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of the batches."""
        return sum(held.bytes for _, held in self._held)

    def of(self, current: Any) -> HeldBatch:
        """The variables for batches of a form, made when it is new."""
        leaves = tf.nest.flatten(current, expand_composites=True)
        form = [describe(leaf) for leaf in leaves]
        for known, held in self._held:
            if known == form:
                return held
        held = HeldBatch(current)
        self._held.append((form, held))
        self._restored = held.restore(self._restored)
        return held

    def entry(self, name: str, part: str) -> Entry:
        """The entry to save, of a part of the state."""
        return Entry("", name, self, Spread.OWNED, part, least=-math.inf)

    def numpy(self) -> np.ndarray:
        """The batches as a vector of numbers."""
        leaves = [v for _, held in self._held for v in held.serialized()]
        packed = tf.io.serialize_tensor(tf.constant(leaves, tf.string)).numpy()
        # Not all that carries numbers between workers carries bytes.
        missing = -len(packed) % 4
        return np.frombuffer(
            bytes([missing, 0, 0, 0]) + packed + bytes(missing), np.int32
        )

    def assign(self, value: tf.Tensor) -> None:
        """Inverse of `numpy`.

        Raises:
            ValueError: If `value` is not what that has returned.
        """
        data = value.numpy().tobytes()
        try:
            end = len(data) - data[0]
            packed = tf.io.parse_tensor(data[4:end], tf.string)
            leaves = tf.unstack(packed)
        except (
            IndexError,
            ValueError,
            tf.errors.InvalidArgumentError,
        ) as error:
            raise ValueError(
                f"A saved batch cannot be read: {error}"
            ) from error
        for _, held in self._held:
            leaves = held.restore(leaves)
        self._restored = leaves


def size_in_bytes(tensor: tf.Tensor) -> int:
    """Bytes of the elements of an eager tensor."""
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)


def held_variable(tensor: tf.Tensor) -> tf.Variable:
    """A variable for tensors like this one, of any number of rows."""
    rest = tensor.shape.as_list()[1:]
    any_rows = [None, *rest] if tensor.shape.rank else []
    shape = [0, *(size or 0 for size in rest)] if tensor.shape.rank else []
    empty = "" if tensor.dtype == tf.string else 0
    with tf.init_scope():
        nothing = tf.fill(shape, empty)
    return state_variable(nothing, tensor.dtype, "held", any_rows)


def point(
    batch: LossBatch, call: ForwardCall, shares: Sequence[tf.Tensor]
) -> tuple[Any, ...]:
    """The arguments of the loss of a batch, and this replica's shares."""
    arguments = {k: v for k, v in batch.arguments.items() if k != "y_pred"}
    return call.args, call.kwargs, arguments, tuple(shares)


def describe(leaf: Any) -> Any:
    """The kind of a leaf: dtype and shape but for the rows, or the value."""
    if not tf.is_tensor(leaf):
        return repr(leaf)
    return leaf.dtype.name, leaf.shape.as_list()[1:] if leaf.shape.rank else []


class Accelerator(Slots):
    """A Lanczos iteration that is done a few steps at a time.

    Args:
        geometry: Sizes.
        count: Number of accelerators.
        index: The place of this one among them.
        part: The part of the state that it is.
    """

    def __init__(
        self, geometry: Geometry, count: int, index: int, part: str
    ) -> None:
        # By the accelerators; the workers have none of it.
        super().__init__(
            "accelerator", spread=Spread.OWNED, part=part, is_finite=False
        )
        self.geometry = geometry
        dtype, steps, size = geometry.dtype, geometry.steps, geometry.size
        shards = geometry.slices(count)
        length, start = shards.length, shards.range(index).start
        own = Region((size,), (start,))
        rows = Region((steps, size), (0, start))
        self.weights = self.slot("weights", [size], dtype)
        self.basis = self.slot("basis", [steps, length], dtype, region=rows)
        self.tridiagonal = Tridiagonal(
            self.slot("diagonal", [steps], dtype),
            self.slot("coupling", [steps], dtype),
            self.slot("kept", [steps], "bool", False),
        )
        self.candidate = Candidate(
            self.slot("candidate", [length], dtype, region=own),
            self.slot("candidate_length", (), dtype),
            self.slot("candidate_fresh", (), "bool", False),
            self.slot("candidate_scale", (), dtype),
            self.slot("candidate_rows", (), "int32"),
        )
        self._held = HeldBatches()
        self._batch = self._held.entry(f"batch_{index}", part)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batches that it holds."""
        return self._held.bytes

    @override
    def entries(self) -> list[Entry]:
        return [*super().entries(), self._batch]

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
        """Does the iterations from `progress` up to `target`."""
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
