"""Lanczos estimation of the extreme curvature, by several replicas together.

An accelerator is a replica that only estimates curvature, over many steps
(DHO2, section IV).
"""

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import copied_rows, state_variable
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.distributed.collectives import Communicator, all_reduce_bytes
from tfkfac.fosi.layouts import Geometry
from tfkfac.linalg.lanczos import (
    Candidate,
    Krylov,
    Lanczos,
    Product,
    Tridiagonal,
    random_vector,
    ritz_pairs,
)
from tfkfac.saving.slots import Slots


class Spectrum(NamedTuple):
    """Ritz pairs of extreme curvature; NaN if the estimation failed."""

    values: tf.Tensor  # `(r,)`, ascending, bitwise equal on all workers
    rows: tf.Tensor  # slices `(r, n / C)` of the vectors, over C workers


class Estimation:
    """The distributed Lanczos iteration on one replica (DHO2, algorithm 2).

    Each replica keeps a slice of every row of the basis. The operator is the
    sum of the weighted Hessians of all replicas: local Hessians would differ
    between the slices, so the operator would not be symmetric.
    """

    def __init__(
        self, geometry: Geometry, group: Communicator, seed: int
    ) -> None:
        self.geometry = geometry
        self.group = group
        self.shards = geometry.slices(group.size)
        self._seed = seed

    def iteration(self, local: Product) -> Lanczos:
        """Return the Lanczos iteration for the sum of all local operators."""

        def product(row: tf.Tensor) -> tf.Tensor:
            image = local(self.shards.gather(row, self.group))
            return self.shards.reduce(image, self.group)

        return Lanczos(product, self.geometry.size, self.draw, self.sum)

    def sum(self, numbers: tf.Tensor) -> tf.Tensor:
        """Sum a vector of at most `steps + 1` elements over the group."""
        if self.group.size == 1:
            return numbers
        # Pad: collectives need a static shape, but `numbers` grows.
        count, limit = tf.size(numbers), self.geometry.steps + 1
        padded = tf.pad(numbers, [[0, limit - count]])
        (total,) = self.group.all_reduce([tf.ensure_shape(padded, [limit])])
        return total[:count]

    def draw(self, index: int | tf.Tensor) -> tf.Tensor:
        """Slice of a random vector of norm near 1; index -1: start vector."""
        vector = random_vector(self.geometry.size, self._seed, index + 1)
        local = self.shards.local_slice(vector, self.group.rank)
        return tf.cast(local, self.geometry.dtype)

    def run(self, local: Product) -> Spectrum:
        """Run the whole estimation; `local` is this replica's operator."""
        state = self.iteration(local).run(self.draw(-1), self.geometry.steps)
        return spectrum(self.geometry, state)


def spectrum(geometry: Geometry, state: Krylov) -> Spectrum:
    """Return the Ritz pairs after the last Lanczos iteration."""
    pairs = ritz_pairs(state.tridiagonal, geometry.largest, geometry.smallest)
    values, weights = (tf.cast(x, geometry.dtype) for x in pairs)
    return Spectrum(values, tf.matmul(weights, state.basis))


def estimation_bytes(geometry: Geometry, replicas: int) -> int:
    """Bytes that each of several replicas receives in an estimation."""
    item, steps = geometry.dtype.size, geometry.steps
    slices = geometry.slices(replicas).length * (replicas - 1)
    # One all-reduce for the start vector, two in each iteration to
    # orthogonalise (three only after a breakdown).
    sums = (1 + 2 * steps) * all_reduce_bytes((steps + 1) * item, replicas)
    # Each iteration gathers a vector and reduce-scatters its product.
    return 2 * steps * slices * item + sums


class HeldBatches:
    """Copies of the last batch of each tensor structure, for later steps."""

    def __init__(self) -> None:
        # Keep the dict in this object: checkpoints track the accelerator's.
        self._variables: dict[str, list[tf.Variable | None]] = {}

    def pairs(self, batch: Any) -> list[tuple[tf.Variable | None, Any]]:
        """Return (variable, leaf) pairs; no variable for a constant leaf."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        structure = repr([describe(leaf) for leaf in leaves])
        if structure not in self._variables:
            self._variables[structure] = [
                held_variable(x) if tf.is_tensor(x) else None for x in leaves
            ]
        return list(zip(self._variables[structure], leaves, strict=True))

    def get(self, batch: Any) -> Any:
        """Return the last held batch with the same structure as this batch."""
        values = [
            leaf if variable is None else tf.convert_to_tensor(variable)
            for variable, leaf in self.pairs(batch)
        ]
        return tf.nest.pack_sequence_as(batch, values, expand_composites=True)


def held_variable(tensor: tf.Tensor) -> tf.Variable:
    """Create a variable for tensors like `tensor`, of any number of rows."""
    row_shape = tensor.shape.as_list()[1:]
    variable_shape = [None, *row_shape] if tensor.shape.rank else []
    shape = [0, *(size or 0 for size in row_shape)] if tensor.shape.rank else []
    with tf.init_scope():
        empty = tf.fill(shape, "" if tensor.dtype == tf.string else 0)
    return state_variable(empty, tensor.dtype, "held", variable_shape)


# Arguments of the loss of a batch: (args, kwargs, arguments of `compute_loss`,
# weights of this replica's losses).
LossPoint = tuple[Any, ...]


def describe(leaf: Any) -> Any:
    """Return dtype and row shape of a tensor; `repr` of other values."""
    if not tf.is_tensor(leaf):
        return repr(leaf)
    return leaf.dtype.name, leaf.shape.as_list()[1:] if leaf.shape.rank else []


class Accelerator(Slots):
    """A Lanczos iteration that advances a few iterations per training step.

    The state is not saved: after loading, an estimation starts again.
    """

    def __init__(self, geometry: Geometry, count: int) -> None:
        super().__init__("accelerator", saved=False)
        self.geometry = geometry
        dtype, steps = geometry.dtype, geometry.steps
        length = geometry.slices(count).length
        self.weights = self.slot("weights", [geometry.size], dtype)
        self.krylov = Krylov(
            self.slot("basis", [steps, length], dtype),
            Tridiagonal(
                self.slot("diagonal", [steps], dtype),
                self.slot("coupling", [steps], dtype),
                self.slot("kept", [steps], "bool", False),
            ),
            Candidate(
                self.slot("candidate", [length], dtype),
                self.slot("candidate_length", (), dtype),
                self.slot("candidate_fresh", (), "bool", False),
                self.slot("candidate_scale", (), dtype),
                self.slot("candidate_rows", (), "int32"),
            ),
        )
        self._held = HeldBatches()

    def begin(
        self, current: LossPoint, weights: tf.Tensor, estimation: Estimation
    ) -> None:
        """Start a Lanczos iteration at copies of the batch and the weights."""
        self.weights.assign(weights)
        for variable, leaf in self._held.pairs(current):
            if variable is not None:
                variable.assign(leaf)
        iteration = estimation.iteration(tf.identity)
        self._assign(iteration.begin(estimation.draw(-1), self.geometry.steps))

    def advance(
        self,
        model: keras.Model,
        current: LossPoint,
        estimation: Estimation,
        progress: tf.Tensor,
        target: tf.Tensor,
    ) -> None:
        """Run the Lanczos iterations from `progress` to `target`."""
        space = flat_space(model.trainable_variables)
        args, kwargs, arguments, shares = self._held.get(current)
        local_hessian = hessian_operator(
            model,
            ForwardCall(args, kwargs, None),
            arguments,
            space.split(tf.convert_to_tensor(self.weights)),
            estimation.group.differentiable_sum,
            shares,
        )
        iteration = estimation.iteration(local_hessian)
        state = self._state()
        state = state._replace(basis=copied_rows(state.basis))
        self._assign(iteration.advance(state, progress, target))

    def _state(self) -> Krylov:
        """Return the values of the variables."""
        state: Krylov = tf.nest.map_structure(tf.convert_to_tensor, self.krylov)
        return state

    def _assign(self, state: Krylov) -> None:
        tf.nest.map_structure(lambda v, x: v.assign(x), self.krylov, state)

    def spectrum(self) -> Spectrum:
        """Return the Ritz pairs after the last Lanczos iteration."""
        return spectrum(self.geometry, self._state())
