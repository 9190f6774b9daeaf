"""What is reported to move, against what does.

Workers are threads that count what they receive.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.lockstep import run_together
from tests.support.reference import Array
from tfkfac.fosi.estimation import Estimation, estimation_bytes
from tfkfac.fosi.handover import FinalUpdate
from tfkfac.fosi.layouts import LAYOUTS, Geometry
from tfkfac.fosi.subspace import Inner, Subspace

SIZE, ITEM = 23, 8
GEOMETRY = Geometry(SIZE, 3, 0, 5, tf.float64)

layouts = pytest.mark.parametrize("name", LAYOUTS)
groups = pytest.mark.parametrize("workers", [1, 2, 3, 4])


def close(received: float, reported: int) -> bool:
    """But for the rounding of a few sums."""
    return abs(received * ITEM - reported) <= 3


@layouts
@groups
@pytest.mark.parametrize(
    "inner", [Inner(), Inner(accumulates=True), Inner(has_momentum=True)]
)
def test_new_directions(name: str, workers: int, inner: Inner) -> None:
    """The momenta's way to them, and their values there."""
    layout = LAYOUTS[name](GEOMETRY, workers)
    old, new = np.linalg.qr(np.random.default_rng(0).normal(size=(2, SIZE, 3)))[
        0
    ]
    momentum = np.array([1.0, -2.0, 0.5])
    of_sgd = np.random.default_rng(1).normal(size=SIZE)
    given = tf.constant(of_sgd) if inner.has_momentum else None

    def part(whole: Array, rank: int) -> Any:
        own = np.zeros(layout.shape)
        piece = whole.T[layout.part(rank)]
        own[: piece.shape[0], : piece.shape[1]] = piece
        return tf.constant(own)

    def work(group: Any) -> list[Array]:
        rank = group.rank
        subspace = Subspace(layout, inner, rank)
        subspace.directions.assign(part(old, rank))
        subspace.momentum.assign(layout.own(tf.constant(momentum), rank))
        values = tf.constant([1.0, 2.0, 3.0], tf.float64)
        subspace.replace(values, part(new, rank), group, given)
        found = [subspace.momentum, subspace.inner_momentum]
        return [x.numpy() for x in found if x is not None]

    wanted = [new.T @ (old @ momentum)]
    if inner.has_momentum:
        wanted.append(new.T @ of_sgd)
    reported = Subspace.carrying_bytes(layout, inner)
    assert (reported > 0) == (workers > 1)
    for rank, (got, received) in enumerate(run_together(workers, work)):
        for one, want in zip(got, wanted, strict=True):
            own = layout.own(tf.constant(want), rank)
            np.testing.assert_allclose(one, own, atol=1e-13)
        assert close(received, reported)


@layouts
@groups
def test_final_update(name: str, workers: int) -> None:
    layout = LAYOUTS[name](GEOMETRY, workers)

    def work(group: Any) -> None:
        vector = tf.ones([SIZE], tf.float64)
        final = FinalUpdate(GEOMETRY, "")
        subspace = Subspace(layout, Inner(), group.rank)
        final.move(vector, subspace, tf.ones([], tf.float64), group)

    for _, received in run_together(workers, work):
        assert close(received, FinalUpdate.moving_bytes(layout))


@groups
def test_estimation(workers: int) -> None:
    """All sums and slices of a Lanczos iteration."""

    def work(group: Any) -> None:
        estimation = Estimation(GEOMETRY, group, 0)
        scale = tf.range(1.0, SIZE + 1, dtype=tf.float64)
        estimation.run(lambda v: scale * v)

    for _, received in run_together(workers, work):
        off = abs(received * ITEM - estimation_bytes(GEOMETRY, workers))
        assert off <= 11
