"""The directions of extreme curvature, and what else a replica keeps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfkfac.distributed.collectives import Communicator, all_reduce_bytes
from tfkfac.fosi.layouts import Layout, Moves, Split
from tfkfac.linalg.tensors import all_finite
from tfkfac.saving.entries import Contents, Spread
from tfkfac.saving.slots import Slots

# Directions of curvature below this share of the largest are left to the inner
# optimizer: the inverse of their curvature is mostly noise.
_WEAK = 1e-3
# A Newton step may be so many times as long as the root mean square of those
# before. With the default rate, 0.1, it then is a whole one of that length.
_OUTLIER = 10.0
_MEMORY = 0.99


class Inner(NamedTuple):
    """The kind of the inner optimizer."""

    accumulates: bool = False
    has_momentum: bool = False  # and is plain SGD


class Subspace(Slots):
    """The directions of extreme curvature that one worker keeps.

    Attributes:
        directions: The own part of V^T.
        ritz_values: All their curvatures, ascending.
        square: Mean square of the Newton steps' lengths.
        momentum: The own coefficients of the Newton steps' momentum.
        accumulated: Those of gradients, where they are accumulated.
        inner_momentum: Those `V^T b` of plain SGD's momentum b.
    """

    def __init__(self, layout: Layout, inner: Inner, rank: int) -> None:
        # Accelerators have none.
        super().__init__("subspace", spread=Spread.OWNED)
        self.layout = layout
        geometry, (place, own) = layout.geometry, layout.regions(rank)
        dtype, count = geometry.dtype, layout.shape[:1]

        def coefficients(name: str) -> tf.Variable:
            return self.slot(name, count, dtype, region=own)

        self.directions = self.slot(
            "directions", layout.shape, dtype, region=place
        )
        self.ritz_values = self.slot(
            "ritz_values", [geometry.directions], dtype
        )
        self.square = self.slot(
            "square", dtype=dtype, least=0, derive=lambda read: 0.0
        )
        self.momentum = coefficients("momentum")
        self.accumulated = self.inner_momentum = None
        if inner.accumulates:
            self.accumulated = coefficients("accumulated")
        if inner.has_momentum:
            self.inner_momentum = coefficients("inner_momentum")

    @staticmethod
    def carrying_bytes(layout: Layout, inner: Inner) -> int:
        """Bytes that a worker receives in `replace`."""
        carried = (1 + inner.accumulates) * layout.combine_bytes
        return carried + (1 + sum(inner)) * layout.coefficients_bytes

    def replace(
        self,
        values: tf.Tensor,
        part: tf.Tensor,
        group: Communicator,
        inner_momentum: tf.Tensor | None = None,
    ) -> None:
        """Replaces the directions; the momentum is carried over."""
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
        both = self.momentum, self.accumulated
        return [variable for variable in both if variable is not None]

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
        numbers = [self.ritz_values, self.square, *self._carried()]
        if self.inner_momentum is not None:
            numbers.append(self.inner_momentum)
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
    """True for directions with curvature enough to be inverted."""
    sizes = tf.abs(values)
    return sizes > _WEAK * tf.reduce_max(sizes)


class State(Slots):
    """The curvature state of one replica.

    Attributes:
        subspace: The directions; None on an accelerator.
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
        super().__init__("replica")
        self.layout = layout
        self.subspace = subspace
        own: dict[str, Any] = {
            "spread": Spread.OWNED,
            "saved": subspace is not None,
        }
        self.estimations = self.slot("estimations", **own)
        self.last = self.slot("last_estimation", value=-1, least=-1)
        self.failures = self.slot("failures", **own)
        self.forgotten = self.slot("forgotten", saved=False)
        self.warmup = self.slot("warmup", value=-1, least=-1)
        self.largest_rate = self.slot("largest_rate", (), "float64", least=0)

    @property
    def existing_subspace(self) -> Subspace:
        """The directions, on a replica that trains."""
        assert self.subspace is not None
        return self.subspace

    def forget(self) -> None:
        """Drops the directions; the next step estimates them anew."""
        self.existing_subspace.reset()
        self.estimations.assign(0)
        self.last.assign(-1)

    def contents(self) -> Contents:
        """The state to save."""
        own = [] if self.subspace is None else self.subspace.entries()
        return Contents(self.entries() + own)
