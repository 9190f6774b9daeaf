"""Layouts of the directions: blocks of workers, products, communication.

Workers are threads here; `test_workers` uses processes.
"""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lockstep import run_together
from tests.support.reference import Array
from tfkfac.distributed.collectives import all_reduce_bytes
from tfkfac.distributed.topology import Roles
from tfkfac.fosi.estimation import Estimation, Spectrum, estimation_bytes
from tfkfac.fosi.layouts import LAYOUTS, Geometry, Layout, Shards
from tfkfac.fosi.multirole import FinalUpdate, hand_over, piece_bytes
from tfkfac.fosi.subspace import InnerTraits, Subspace

few = settings(max_examples=20, deadline=None)
ITEM = 8  # bytes
SIZES = st.integers(1, 40)
DIRECTIONS = st.integers(1, 6)
GROUPS = st.integers(1, 5)
names = pytest.mark.parametrize("name", LAYOUTS)


def layout_of(name: str, size: int, directions: int, workers: int) -> Layout:
    geometry = Geometry(size, directions, 0, directions, tf.float64)
    return Layout(name, geometry, workers)


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def basis(directions: int, size: int, seed: int = 0) -> Array:
    """At most `size` orthonormal rows, then zeros."""
    noise = numbers(size, min(directions, size), seed=seed)
    vectors = np.linalg.qr(noise)[0].T
    missing = directions - len(vectors)
    return np.concatenate([vectors, np.zeros([missing, size])])


def block_of(layout: Layout, whole: Array, rank: int) -> Array:
    part, block = whole[layout.ranges(rank)], np.zeros(layout.shape)
    block[: part.shape[0], : part.shape[1]] = part
    return block


# ----------------------------------------------------------------- layouts
@names
@few
@given(SIZES, DIRECTIONS, GROUPS)
def test_arrange(name: str, size: int, directions: int, workers: int) -> None:
    """`arrange` turns Lanczos slices into blocks; each element is kept once."""
    layout = layout_of(name, size, directions, workers)
    whole, shards = basis(directions, size), Shards(size, workers)
    owners = np.zeros([directions, size], int)

    def work(group: Any) -> Array:
        slices = shards.local_slice(tf.constant(whole), group.rank)
        return layout.arrange(slices, group).numpy()

    for rank, (got, received) in enumerate(run_together(workers, work)):
        np.testing.assert_array_equal(got, block_of(layout, whole, rank))
        assert received * ITEM == layout.arrangement_bytes
        owners[layout.ranges(rank)] += 1
    np.testing.assert_array_equal(owners, 1)
    slices = directions, -(-size // workers)
    columns = -(-directions // workers), size
    assert layout.shape == (slices if name == "rows" else columns)


@names
@few
@given(SIZES, DIRECTIONS, GROUPS, st.booleans(), st.booleans())
def test_projections(
    name: str,
    size: int,
    directions: int,
    workers: int,
    moves: bool,
    longer: bool,
) -> None:
    """The split of the summed gradients and a step along V equal NumPy's.

    With vectors of length n, or padded to `Layout.length`.
    """
    layout = layout_of(name, size, directions, workers)
    whole, gradients = basis(directions, size), numbers(workers, size)
    total, late = gradients.sum(0), layout.reduces_gradients
    others = tf.constant(numbers(directions, seed=3))
    length = layout.length if longer else size

    def work(group: Any) -> list[Array]:
        part = tf.constant(block_of(layout, whole, group.rank))
        local = gradients[group.rank] if late else total
        local = tf.constant(np.pad(local, [0, length - size]))
        local_values = layout.columns.local_slice(others, group.rank)
        move = (lambda c: 2 * c - local_values) if moves else None
        result = layout.project_out(part, local, group, move)
        assert bool(result.valid)
        moved = result.step
        if not moves:
            full = tf.constant(np.pad(total, [0, length - size]))
            again = layout.coefficients(part, full, group)
            moved = layout.combine(part, [2 * again, -local_values], group)
        return [
            x.numpy() for x in (result.coefficients, result.remainder, moved)
        ]

    want = total - (whole @ total) @ whole
    moved = (2 * whole @ total - others.numpy()) @ whole
    # As many elements as are not padding, and the rounding of each sum.
    gradient = late * all_reduce_bytes(size * ITEM, workers)
    reported = gradient + layout.projection_bytes(moves)
    for rank, (result, received) in enumerate(run_together(workers, work)):
        inside, rest, move = result
        assert rest.shape == (length,)
        local = layout.columns.local_slice(tf.constant(whole @ total), rank)
        np.testing.assert_allclose(inside, local, atol=1e-13)
        np.testing.assert_allclose(rest[:size], want, atol=1e-13)
        np.testing.assert_allclose(move[:size], moved, atol=1e-13)
        assert abs(received * ITEM - reported) <= 4 * ITEM * workers


# ------------------------------------------------------------ new directions


@names
@pytest.mark.parametrize("workers", [1, 3])
def test_traffic(name: str, workers: int) -> None:
    """Reported bytes of an estimation, its directions and the final update."""
    layout = Layout(name, Geometry(23, 3, 0, 5, tf.float64), workers)

    def estimate(group: Any) -> None:
        estimation = Estimation(layout.geometry, group, 0)
        scale = tf.range(1.0, 24, dtype=tf.float64)
        estimation.run(lambda v: scale * v)

    vector = tf.ones([23], tf.float64)
    traits = InnerTraits(has_momentum=True)

    def replace(group: Any) -> None:
        subspace = Subspace(layout, traits, group.rank)
        values = tf.ones([3], tf.float64)
        subspace.replace(values, subspace.directions, group, vector)

    def finish(group: Any) -> None:
        final = FinalUpdate(layout.geometry)
        subspace = Subspace(layout, InnerTraits(), group.rank)
        final.change(vector, subspace, tf.ones([], tf.float64), group)

    for work, reported in [
        (estimate, estimation_bytes(layout.geometry, workers)),
        (replace, Subspace.replace_bytes(layout, traits)),
        (finish, FinalUpdate.change_bytes(layout)),
    ]:
        for _, received in run_together(workers, work):
            assert abs(received * ITEM - reported) <= 11


# --------------------------------------------------------------- hand-over
@names
@few
@given(SIZES, DIRECTIONS, st.integers(1, 4), st.integers(1, 4))
def test_hand_over(
    name: str, size: int, directions: int, workers: int, accelerators: int
) -> None:
    """Every worker receives its block; bytes equal the reported ones."""
    layout = layout_of(name, size, directions, workers)
    everyone = tuple(range(workers + accelerators))
    roles = Roles(everyone[:workers], everyone[workers:])
    shards = Shards(size, accelerators)
    whole, values = basis(directions, size), numbers(directions)

    def work(group: Any) -> Any:
        spectrum = None
        if not roles.trains(group.rank):
            slices = shards.local_slice(
                tf.constant(whole), group.rank - workers
            )
            spectrum = Spectrum(tf.constant(values), slices)
        return hand_over(spectrum, layout, roles, group)

    results = run_together(workers + accelerators, work)
    for rank, (result, received) in enumerate(results):
        assert received * ITEM == piece_bytes(layout, roles, rank)
        if not roles.trains(rank):
            assert result is None
            assert received == 0
            continue
        np.testing.assert_array_equal(result[0], values)
        want = block_of(layout, whole, rank)
        np.testing.assert_array_equal(result[1], want)
        assert received == directions + whole[layout.ranges(rank)].size
