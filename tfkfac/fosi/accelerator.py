"""The state of an accelerator, whose estimation spans many steps."""

import itertools
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


class HeldBatches:
    """The last batch of each form that there has been, for later steps.

    A batch is any nest of tensors and constants, of which the tensors are
    held. They are saved as one vector of numbers; what is restored becomes
    those of the first forms there are.
    """

    # Of what is saved, as of a variable.
    shape, dtype = tf.TensorShape([None]), tf.int32

    def __init__(self) -> None:
        self._held: dict[str, list[tf.Variable | None]] = {}
        self._restored: list[tf.Tensor] = []

    def _tensors(self) -> list[tf.Tensor]:
        """All tensors that are held."""
        every = itertools.chain(*self._held.values())
        return [v.read_value() for v in every if v is not None]

    @property
    def bytes(self) -> int:
        """Bytes of the batches, none before the first."""
        return sum(map(size_in_bytes, self._tensors()))

    def _pairs(self, batch: Any) -> list[tuple[tf.Variable | None, Any]]:
        """Leaves of a batch, with variables of its form for the tensors."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        form = repr([describe(leaf) for leaf in leaves])
        if form not in self._held:
            held = [
                held_variable(x) if tf.is_tensor(x) else None for x in leaves
            ]
            self._restore(held)
            self._held[form] = held
        return list(zip(self._held[form], leaves, strict=True))

    def hold(self, batch: Any) -> None:
        """Copies the current batch."""
        for variable, leaf in self._pairs(batch):
            if variable is not None:
                variable.assign(leaf)

    def get(self, batch: Any) -> Any:
        """Returns the batch that is held of the form of the current one."""
        values = [
            leaf if variable is None else tf.convert_to_tensor(variable)
            for variable, leaf in self._pairs(batch)
        ]
        return tf.nest.pack_sequence_as(batch, values, expand_composites=True)

    def entry(self, name: str, part: str) -> Entry:
        """The entry to save, of a part of the state."""
        return Entry("", name, self, Spread.OWNED, part, least=-math.inf)

    def numpy(self) -> np.ndarray:
        """The batches as a vector of numbers."""
        leaves = [tf.io.serialize_tensor(x).numpy() for x in self._tensors()]
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
            self._restored = tf.unstack(packed)
        except (
            IndexError,
            ValueError,
            tf.errors.InvalidArgumentError,
        ) as error:
            raise ValueError(
                f"A saved batch cannot be read: {error}"
            ) from error
        for held in self._held.values():
            self._restore(held)

    def _restore(self, held: list[tf.Variable | None]) -> None:
        """Gives variables the first of the tensors that are restored."""
        with tf.init_scope():
            for variable in held:
                if variable is not None and self._restored:
                    packed = self._restored.pop(0)
                    variable.assign(tf.io.parse_tensor(packed, variable.dtype))


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


# Arguments of a model's call and of its loss, and this replica's shares.
LossPoint = tuple[Any, ...]


def loss_point(
    batch: LossBatch, call: ForwardCall, shares: Sequence[tf.Tensor]
) -> LossPoint:
    """The point of a batch at which a loss is differentiated."""
    arguments = {k: v for k, v in batch.arguments.items() if k != "y_pred"}
    return call.args, call.kwargs, arguments, tuple(shares)


def describe(leaf: Any) -> Any:
    """The kind of a leaf: dtype and shape but for the rows, or the value."""
    if not tf.is_tensor(leaf):
        return repr(leaf)
    return leaf.dtype.name, leaf.shape.as_list()[1:] if leaf.shape.rank else []


class Accelerator(Slots):
    """A Lanczos iteration that is done a few steps at a time.

    It is a part of the state, of the accelerator of some index among all.
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
        self, current: LossPoint, weights: tf.Tensor, estimation: Estimation
    ) -> None:
        """Holds the point and the weights, and starts there."""
        self.weights.assign(weights)
        self._held.hold(current)
        iteration = estimation.iteration(tf.identity)
        self._assign(iteration.begin(estimation.start(), self.geometry.steps))

    def advance(
        self,
        model: keras.Model,
        current: LossPoint,
        estimation: Estimation,
        progress: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """Does the iterations from `progress` up to `target`."""
        space = flat_space(model.trainable_variables)
        args, kwargs, arguments, shares = self._held.get(current)
        local = hessian_operator(
            model,
            ForwardCall(args, kwargs, None),
            arguments,
            space.split(tf.convert_to_tensor(self.weights)),
            estimation.differentiable_sum,
            shares,
        )
        iteration = estimation.iteration(local)
        basis, tridiagonal, candidate = self._state()
        state = Krylov(copied_rows(basis), tridiagonal, candidate)
        self._assign(iteration.advance(state, progress, target))

    def _state(self) -> Any:
        variables = Krylov(self.basis, self.tridiagonal, self.candidate)
        return tf.nest.map_structure(tf.convert_to_tensor, variables)

    def _assign(self, state: Krylov) -> None:
        variables = Krylov(self.basis, self.tridiagonal, self.candidate)
        tf.nest.map_structure(lambda v, x: v.assign(x), variables, state)

    def spectrum(self, estimation: Estimation) -> Spectrum:
        """Returns the Ritz pairs when all iterations are done."""
        state = self._state()
        return estimation.spectrum(state.tridiagonal, [state.basis])
