"""MR-DHO2 as one process would do it, one step after the other.

Keras gives loss and gradient at given weights; everything else is NumPy in
float64. Products with the Hessian are differences of gradients, the extreme
pairs those of a projected matrix on a Krylov space.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tests.support.definition import Inner
from tests.support.fosi_objective import Objective, Point, Rows
from tests.support.reference import Array
from tests.support.workers_fosi import Changes
from tfkfac.linalg.lanczos import random_vector

WEAK = 1e-3  # of the largest curvature
DIFFERENCE = 1e-3  # distance of two gradients


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of `FOSI`, and who is what.

    `separate` says that a replica's loss depends on its own rows only, as
    those of others do not change its moments. In the steps `skipped` a worker
    had NaN, in those `blind` an accelerator.
    """

    workers: Sequence[int]
    accelerators: Sequence[int]
    num_largest: int
    num_smallest: int
    alpha: float
    update_interval: int
    warmup_steps: int
    lanczos_steps: int
    learning_rate_clip: float
    final_update: str
    inner: Inner
    separate: bool
    momentum: float = 0.9
    changes: Changes = dataclasses.field(default_factory=dict)
    skipped: Sequence[int] = ()
    blind: Sequence[int] = ()


class Estimate(NamedTuple):
    """Ritz values, ascending, and their vectors as columns."""

    values: Array
    vectors: Array

    def strong(self) -> Array:
        sizes = np.abs(self.values)
        return sizes > WEAK * sizes.max()

    def newton(self, inside: Array) -> Array:
        strong = self.strong()
        inverse = np.zeros_like(self.values)
        inverse[strong] = 1 / np.abs(self.values[strong])
        return self.vectors @ (inverse * inside)


class Simulation:
    """Trains; `weights`, `statistics` and `steps` say what came out."""

    def __init__(self, objective: Objective, settings: Settings) -> None:
        self.objective = objective
        self.settings = settings
        self.weights, self.statistics = objective.start()
        self.steps: list[tuple[float, int, int]] = []
        """Sum of the losses, right answers and rows of all replicas."""
        self.estimate: Estimate | None = None
        self.estimations = 0
        self.failures = 0
        self.clock = 0
        self._interval = settings.update_interval
        self._most = -(-settings.lanczos_steps // self._interval)
        self._last = -1
        self._progress = 0
        self._pending: Estimate | None = None
        self._bad = False
        self._momentum = np.zeros(settings.num_largest + settings.num_smallest)
        self._begin_interval()

    def run(self, feed: Sequence[Sequence[Rows]]) -> "Simulation":
        for number, rows in enumerate(feed):
            change = self.settings.changes.get(number, {})
            self._interval = change.get("update_interval", self._interval)
            target = self._accelerate(number, rows)
            points = self._count(rows)
            if number not in self.settings.skipped:
                self._train(points)
            self._progress = target
            if self._at_boundary() and self._progress == self._full:
                self._take()
        return self

    # ------------------------------------------------------- accelerators
    @property
    def _full(self) -> int:
        return self.settings.lanczos_steps

    def _at_boundary(self) -> bool:
        since = self.clock - self.settings.warmup_steps
        return since % self._interval == 0 and self.clock != self._last

    def _accelerate(self, number: int, rows: Sequence[Rows]) -> int:
        """Begins an estimation if it is due; the iterations then done."""
        ready = self.clock >= self.settings.warmup_steps
        if ready and not self._progress and self._at_boundary():
            self._last = self.clock
            self._begin_interval()
            self._bad = number in self.settings.blind
            self._pending = None if self._bad else self._estimate(rows)
        elif not self._progress:
            return 0
        elapsed = self.clock - self._last + 1
        target = min(-(-self._full * elapsed // self._interval), self._full)
        return min(max(target, self._progress), self._progress + self._most)

    def _estimate(self, rows: Sequence[Rows]) -> Estimate | None:
        """None if the accelerators have no row."""
        settings, size = self.settings, len(self.weights)
        if not any(rows[a] for a in settings.accelerators):
            return None

        def gradient(weights: Array) -> Array:
            return mean(self._points(weights, rows, settings.accelerators))

        def product(vector: Array) -> Array:
            return differences(gradient, self.weights, vector)

        start = np.asarray(random_vector(size, 0, 0), float)
        return ritz_pairs(
            product,
            start,
            settings.lanczos_steps,
            settings.num_largest,
            settings.num_smallest,
        )

    # ------------------------------------------------------------ workers
    def _points(
        self,
        weights: Array,
        rows: Sequence[Rows],
        members: Sequence[int],
        separate: bool = False,
    ) -> list[tuple[int, Point]]:
        """Number of rows and what the model makes of them, by group."""
        groups = [list(rows[m]) for m in members]
        if not (self.settings.separate or separate):
            groups = [[*itertools.chain(*groups)]]
        return [
            (len(g), self.objective.at(weights, g, self.statistics))
            for g in groups
            if g
        ]

    def _count(self, rows: Sequence[Rows]) -> list[tuple[int, Point]]:
        """What the workers get; counts the rows of all for the metrics.

        An accelerator's outputs are those of its own rows' moments.
        """
        settings, weights = self.settings, self.weights
        points = self._points(weights, rows, settings.workers)
        both = points + self._points(weights, rows, settings.accelerators, True)
        self.steps.append(
            (
                sum(n * p.loss for n, p in both),
                sum(p.hits for _, p in both),
                sum(n for n, _ in both),
            )
        )
        return points

    def _train(self, points: list[tuple[int, Point]]) -> None:
        gradient = np.zeros_like(self.weights)
        if points:
            gradient = mean(points)
            self.statistics = points[0][1].statistics
        if self.settings.final_update == "paper":
            self._sum = self._sum + gradient
            self.weights = self.weights + self.settings.inner(0, gradient)
        else:
            self.weights = self.weights + self._step(gradient)
        self.clock += 1

    def _step(self, gradient: Array) -> Array:
        settings, found = self.settings, self.estimate
        if found is None:
            return settings.inner(0, gradient)
        basis = found.vectors
        inside = basis.T @ gradient
        self._momentum = settings.momentum * self._momentum + inside
        change = settings.inner(0, gradient - basis @ inside)
        change = self._scale() * (change - basis @ (basis.T @ change))
        return change - settings.alpha * found.newton(self._momentum)

    def _scale(self) -> float:
        assert self.estimate is not None
        values = self.estimate.values
        top, least = values[-1], values[-self.settings.num_largest]
        if top <= 0:
            return 1.0
        ratio = top / least if least > 0 else np.inf
        return float(np.clip(ratio, 1, self.settings.learning_rate_clip))

    def _take(self) -> None:
        """The end of an interval."""
        self.failures += self._bad
        if self._pending is not None:
            new = self._pending
            new = Estimate(new.values, new.vectors * new.strong())
            if self.estimate is not None:
                old = self.estimate.vectors @ self._momentum
                self._momentum = new.vectors.T @ old
            self.estimate = new
            self.estimations += 1
        if self.settings.final_update == "paper" and self.estimate is not None:
            self.weights = self._equation_17(self.estimate)
        self._progress = 0

    def _begin_interval(self) -> None:
        self._start = self.weights
        self._sum = np.zeros_like(self.weights)

    def _equation_17(self, found: Estimate) -> Array:
        """`w = c - alpha V (p_V / |lambda|) + o - V V^T o` of the paper.

        The projector is a matrix here, made from the directions alone.
        """
        c, o = self._start, self.weights - self._start
        projector = found.vectors @ np.linalg.pinv(found.vectors)
        p_inside = found.vectors.T @ self._sum
        return (
            c
            - self.settings.alpha * found.newton(p_inside)
            + (o - projector @ o)
        )


def mean(points: Sequence[tuple[int, Point]]) -> Array:
    """The gradient of the mean over all rows."""
    total = sum(n for n, _ in points)
    return np.sum([n / total * p.gradient for n, p in points], axis=0)


def differences(
    gradient: Callable[[Array], Array], point: Array, vector: Array
) -> Array:
    """The Hessian times a vector, to fourth order."""

    def central(step: float) -> Array:
        ahead, behind = point + step * vector, point - step * vector
        return (gradient(ahead) - gradient(behind)) / (2 * step)

    return (4 * central(DIFFERENCE) - central(2 * DIFFERENCE)) / 3


def ritz_pairs(
    product: Callable[[Array], Array],
    start: Array,
    steps: int,
    largest: int,
    smallest: int,
) -> Estimate:
    """Extreme pairs of the operator on the Krylov space of a vector."""
    basis, images = [start / np.linalg.norm(start)], []
    for _ in range(steps):
        images.append(product(basis[-1]))
        rest = images[-1]
        for _ in range(2):
            rest = rest - sum(b * (b @ rest) for b in basis)
        basis.append(rest / np.linalg.norm(rest))
    columns = np.stack(basis[:steps], 1)
    matrix = columns.T @ np.stack(images, 1)
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    chosen = [*range(smallest), *range(steps - largest, steps)]
    return Estimate(values[chosen], columns @ vectors[:, chosen])
