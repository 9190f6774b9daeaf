"""The directions of extreme curvature, and what else a replica keeps."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.compat.graphs import state_variable
from tfkfac.compat.variables import Tracked
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.wire import all_reduce_bytes
from tfkfac.fosi.layouts import Layout, Moves, Split
from tfkfac.linalg.tensors import all_finite
from tfkfac.saving.entries import Contents, Entry, Read, Spread

# Directions of curvature below this share of the largest are left to the inner
# optimizer: the inverse of their curvature is mostly noise.
_WEAK = 1e-3
# A Newton step may be so many times as long as the root mean square of those
# before. With the default rate, 0.1, it then is a whole one of that length.
_OUTLIER = 10.0
_MEMORY = 0.99
# Accelerators have none.
_OWNED = Spread.OWNED


class Inner(NamedTuple):
    """What the inner optimizer is like.

    Attributes:
        accumulates: Whether it accumulates gradients.
        has_momentum: Whether it is plain SGD with momentum.
    """

    accumulates: bool = False
    has_momentum: bool = False


class Subspace(Tracked):
    """The directions of extreme curvature that one worker keeps.

    Args:
        layout: Which part of them.
        inner: What the inner optimizer is like.

    Attributes:
        directions: The own part of V^T.
        ritz_values: All their curvatures, ascending.
        momentum: The own coefficients of the Newton steps' momentum.
        square: Mean square of the Newton steps' lengths.
        accumulated: Those of gradients, where they are accumulated.
        inner_momentum: Those `V^T b` of plain SGD's momentum b.
    """

    def __init__(self, layout: Layout, inner: Inner) -> None:
        super().__init__(name="subspace")
        geometry = layout.geometry
        self.layout = layout
        own = layout.own(tf.zeros([geometry.directions]), 0).shape
        dtype = geometry.dtype
        self.directions = state_variable(
            tf.zeros(layout.shape, dtype), dtype, "directions"
        )
        self.ritz_values = state_variable(
            tf.zeros([geometry.directions]), dtype, "ritz_values"
        )
        self.momentum = state_variable(tf.zeros(own), dtype, "momentum")
        self.square = state_variable(0, dtype, "square")
        self.accumulated = (
            state_variable(tf.zeros(own), dtype, "accumulated")
            if inner.accumulates
            else None
        )
        self.inner_momentum = (
            state_variable(tf.zeros(own), dtype, "inner_momentum")
            if inner.has_momentum
            else None
        )

    @staticmethod
    def bytes(layout: Layout, inner: Inner) -> int:
        """Bytes of what a worker keeps."""
        directions, item = layout.geometry.directions, layout.geometry.dtype
        rows, length = layout.shape
        own = layout.own(tf.zeros([directions]), 0).shape[0]
        count = rows * length + own * (1 + sum(inner)) + directions + 1
        return int(count * item.size)

    @staticmethod
    def carrying_bytes(layout: Layout, inner: Inner) -> int:
        """Bytes that a worker receives in `replace`."""
        carried = (1 + inner.accumulates) * layout.combine_bytes
        return carried + (1 + sum(inner)) * layout.coefficients_bytes

    def entries(self, rank: int) -> list[Entry]:
        """All variables to save.

        Args:
            rank: The worker, among those that share the directions.
        """
        place, own = self.layout.regions(rank)
        numbers = {"momentum": self.momentum}
        if self.accumulated is not None:
            numbers["accumulated"] = self.accumulated
        if self.inner_momentum is not None:
            numbers["inner_momentum"] = self.inner_momentum
        return [
            Entry("", "directions", self.directions, _OWNED, region=place),
            Entry("", "ritz_values", self.ritz_values, _OWNED),
            Entry("", "square", self.square, _OWNED, least=0, derive=_zero),
            *(
                Entry("", name, variable, _OWNED, region=own)
                for name, variable in numbers.items()
            ),
        ]

    def replace(
        self,
        values: tf.Tensor,
        part: tf.Tensor,
        group: Communicator,
        inner_momentum: tf.Tensor | None = None,
    ) -> None:
        """Replaces the directions; the momentum is carried over.

        Args:
            values: Ritz values `(r,)`, ascending.
            part: This worker's part of V^T, in its layout.
            group: The workers that share the directions.
            inner_momentum: Plain SGD's momentum b, if it has any.
        """
        strong = tf.cast(is_strong(values), part.dtype)
        new = part * self.layout.own(strong, group.rank)[:, None]
        for variable in self._carried():
            vector = self.combine([tf.convert_to_tensor(variable)], group)
            variable.assign(self.layout.coefficients(new, vector, group))
        self.square.assign(tf.zeros_like(self.square))
        self.directions.assign(new)
        self.ritz_values.assign(values)
        if inner_momentum is not None:
            self.note_momentum(inner_momentum, group)

    def note_momentum(
        self, inner_momentum: tf.Tensor, group: Communicator
    ) -> None:
        """Works out `V^T b` of plain SGD's momentum b."""
        assert self.inner_momentum is not None
        found = self.coefficients(inner_momentum, group)
        self.inner_momentum.assign(found)

    def _carried(self) -> list[tf.Variable]:
        """Coefficients that new directions take over."""
        if self.accumulated is None:
            return [self.momentum]
        return [self.momentum, self.accumulated]

    def _coefficients(self) -> list[tf.Variable]:
        """All coefficients."""
        if self.inner_momentum is None:
            return self._carried()
        return [*self._carried(), self.inner_momentum]

    def forget(self) -> None:
        """Makes it that of the start, without directions."""
        numbers = [self.directions, self.ritz_values, self.square]
        for variable in [*numbers, *self._coefficients()]:
            variable.assign(tf.zeros_like(variable))

    def coefficients(self, vector: tf.Tensor, group: Communicator) -> tf.Tensor:
        """`V^T x`."""
        return self.layout.coefficients(self.directions, vector, group)

    def project_out(
        self,
        gradient: tf.Tensor,
        group: Communicator,
        moves: Moves | None = None,
    ) -> Split:
        """Splits the gradient, see `Layout.project_out`."""
        numbers = [self.ritz_values, self.square, *self._coefficients()]
        healthy = all_finite([tf.convert_to_tensor(x) for x in numbers])
        return self.layout.project_out(
            self.directions, gradient, group, moves, healthy
        )

    def combine(
        self, weights: Sequence[tf.Tensor], group: Communicator
    ) -> tf.Tensor:
        """Sum of `V c`."""
        return self.layout.combine(self.directions, weights, group)

    def bounded(self, inside: tf.Tensor, group: Communicator) -> tf.Tensor:
        """The own coefficients `c = V^T g`, or less of an outlier.

        The Newton step `c / |lambda|` is as long as the gradient is large: one
        bad batch could undo a training that Adam, say, survives. It is clipped
        at a multiple of the running root mean square of its length (as SPAM
        does with spikes of the gradient, Huang et al., 2025). The first one is
        taken as it is.

        Args:
            inside: The own coefficients.
            group: The workers that share the directions.
        """
        step = inside * self.inverse_curvature(group.rank)
        square = tf.reduce_sum(tf.square(step))
        if not self.layout.reduces_gradients:  # has a part of them
            (square,) = group.all_reduce([square])
        mean = tf.convert_to_tensor(self.square)
        limit = tf.where(mean > 0, _OUTLIER**2 * mean, square.dtype.max)
        kept = tf.minimum(square, limit)
        new = tf.where(mean > 0, _MEMORY * mean + (1 - _MEMORY) * kept, kept)
        self.square.assign(new)
        share = tf.sqrt(tf.math.divide_no_nan(kept, square))
        return inside * tf.where(square > limit, share, tf.ones_like(share))

    @staticmethod
    def bound_bytes(layout: Layout) -> int:
        """Bytes that a worker receives in `bounded`."""
        number = layout.geometry.dtype.size * (not layout.reduces_gradients)
        return all_reduce_bytes(number, layout.workers)

    def inverse_curvature(self, rank: int) -> tf.Tensor:
        """`1 / |lambda|` of the own directions; zero for weak ones.

        Not `1 / lambda`, which walks uphill where the curvature is negative.
        """
        values = tf.convert_to_tensor(self.ritz_values)
        strong = is_strong(values)
        safe = tf.where(strong, tf.abs(values), tf.ones_like(values))
        inverse = tf.where(strong, 1 / safe, tf.zeros_like(values))
        return self.layout.own(inverse, rank)

    def rate_ratio(self) -> tf.Tensor:
        """`lambda_max / lambda_k`, infinite if the latter is not positive."""
        largest = self.layout.geometry.largest
        values = tf.convert_to_tensor(self.ritz_values)
        top, least = values[-1], values[-max(largest, 1)]
        infinite = tf.constant(float("inf"), values.dtype)
        ratio = tf.where(least > 0, tf.math.divide_no_nan(top, least), infinite)
        return tf.where(top > 0, ratio, tf.ones_like(ratio))


def is_strong(values: tf.Tensor) -> tf.Tensor:
    """Which directions have curvature enough to be inverted."""
    sizes = tf.abs(values)
    return sizes > _WEAK * tf.reduce_max(sizes)


def _zero(read: Read) -> float:
    """What there is where nothing has been averaged yet."""
    del read
    return 0.0


class State(Tracked):
    """The curvature state of one replica.

    Args:
        layout: How the directions are shared.
        subspace: The directions; None on an accelerator.

    Attributes:
        estimations: Number of estimations so far.
        last: The update before which the last one was done or begun; -1 if
            there was none.
        failures: Number of estimations that were not finite.
        forgotten: How often directions were none, so that they were dropped.
        warmup: Updates before the first one, where `fit` has told the length
            of the run; else -1.
        largest_rate: The largest learning rate so far of the inner optimizer.
    """

    def __init__(self, layout: Layout, subspace: Subspace | None) -> None:
        super().__init__(name="replica")
        self.layout = layout
        self.subspace = subspace
        self.estimations = state_variable(0, "int64", "estimations")
        self.last = state_variable(-1, "int64", "last_estimation")
        self.failures = state_variable(0, "int64", "failures")
        self.forgotten = state_variable(0, "int64", "forgotten")
        self.warmup = state_variable(-1, "int64", "warmup")
        self.largest_rate = state_variable(0, "float64", "largest_rate")

    @property
    def existing_subspace(self) -> Subspace:
        """The directions, on a replica that trains."""
        assert self.subspace is not None
        return self.subspace

    @staticmethod
    def bytes() -> int:
        """Bytes of the counters."""
        return 5 * tf.int64.size + tf.float64.size

    def forget(self) -> None:
        """Drops the directions; the next step estimates them anew."""
        self.existing_subspace.forget()
        self.estimations.assign(0)
        self.last.assign(-1)

    def contents(self, rank: int) -> Contents:
        """What is to be saved.

        Args:
            rank: The replica.
        """
        entries = [
            Entry("", "last_estimation", self.last, least=-1),
            Entry("", "warmup", self.warmup, least=-1),
            Entry("", "largest_rate", self.largest_rate, least=0),
        ]
        if self.subspace is not None:
            entries += [
                Entry("", "estimations", self.estimations, Spread.OWNED),
                Entry("", "failures", self.failures, Spread.OWNED),
                *self.subspace.entries(rank),
            ]
        return Contents(entries)
