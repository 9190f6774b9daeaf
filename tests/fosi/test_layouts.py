"""Which part of the directions a worker keeps, and how it gets it.

Workers are threads here; `test_dho2` and `test_multirole` have processes.
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
from tfkfac.fosi.estimation import Spectrum
from tfkfac.fosi.handover import hand_over, piece_bytes
from tfkfac.fosi.layouts import LAYOUTS, Geometry, Layout, Shards

few = settings(max_examples=25, deadline=None)
ITEM = 8  # bytes
SIZES = st.integers(1, 40)
DIRECTIONS = st.integers(1, 6)
GROUPS = st.integers(1, 5)
names = pytest.mark.parametrize("name", LAYOUTS)


def layout_of(name: str, size: int, directions: int, workers: int) -> Layout:
    geometry = Geometry(size, directions, 0, directions, tf.float64)
    return LAYOUTS[name](geometry, workers)


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def basis(directions: int, size: int) -> Array:
    """Orthonormal rows, as far as there is room."""
    vectors = np.linalg.qr(numbers(size, min(directions, size)))[0].T
    missing = directions - len(vectors)
    return np.concatenate([vectors, np.zeros([missing, size])])


def padded(part: Array, shape: tuple[int, int]) -> Array:
    whole = np.zeros(shape)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole


def own_part(layout: Layout, whole: Array, rank: int) -> Array:
    return padded(whole[layout.part(rank)], layout.shape)


# ----------------------------------------------------------------- layouts
@names
@given(SIZES, DIRECTIONS, GROUPS)
def test_parts_cover_the_directions(
    name: str, size: int, directions: int, workers: int
) -> None:
    layout = layout_of(name, size, directions, workers)
    owners = np.zeros([directions, size], int)
    for rank in range(workers):
        owners[layout.part(rank)] += 1
    np.testing.assert_array_equal(owners, 1)
    slices = directions, -(-size // workers)
    columns = -(-directions // workers), size
    assert layout.shape == (slices if name == "rows" else columns)


@names
@few
@given(SIZES, DIRECTIONS, GROUPS)
def test_arrange(name: str, size: int, directions: int, workers: int) -> None:
    """From slices of all directions to what a worker keeps."""
    layout = layout_of(name, size, directions, workers)
    whole, shards = basis(directions, size), Shards(size, workers)

    def work(group: Any) -> Array:
        slices = shards.own(tf.constant(whole), group.rank)
        return layout.arrange(slices, group).numpy()

    for rank, (got, received) in enumerate(run_together(workers, work)):
        np.testing.assert_array_equal(got, own_part(layout, whole, rank))
        assert received * ITEM == layout.arrangement_bytes()


@names
@few
@given(SIZES, DIRECTIONS, GROUPS)
def test_products(name: str, size: int, directions: int, workers: int) -> None:
    """With V and its transpose, the same on every worker."""
    layout = layout_of(name, size, directions, workers)
    whole, vector = basis(directions, size), numbers(size, seed=1)
    weights = numbers(2, directions, seed=2)

    def work(group: Any) -> tuple[Array, Array]:
        rank = group.rank
        part = tf.constant(own_part(layout, whole, rank))
        inside = layout.coefficients(part, tf.constant(vector), group)
        own = [layout.own(tf.constant(w), rank) for w in weights]
        return inside.numpy(), layout.combine(part, own, group).numpy()

    want = weights.sum(0) @ whole
    for rank, ((inside, outside), _) in enumerate(run_together(workers, work)):
        mine = layout.own(tf.constant(whole @ vector), rank)
        np.testing.assert_allclose(inside, mine, atol=1e-13)
        np.testing.assert_allclose(outside, want, atol=1e-13)


@names
@few
@given(SIZES, DIRECTIONS, GROUPS)
def test_project_out(
    name: str, size: int, directions: int, workers: int
) -> None:
    """Splits the sum of the gradients, which some layouts make themselves."""
    layout = layout_of(name, size, directions, workers)
    whole, gradients = basis(directions, size), numbers(workers, size)
    total = gradients.sum(0)

    def work(group: Any) -> tuple[Array, Array]:
        part = tf.constant(own_part(layout, whole, group.rank))
        late = layout.reduces_gradients
        mine = tf.constant(gradients[group.rank] if late else total)
        inside, rest, sound, _ = layout.project_out(part, mine, group)
        assert bool(sound)
        return inside.numpy(), rest.numpy()

    want = total - (whole @ total) @ whole
    for rank, ((inside, rest), _) in enumerate(run_together(workers, work)):
        mine = layout.own(tf.constant(whole @ total), rank)
        np.testing.assert_allclose(inside, mine, atol=1e-13)
        np.testing.assert_allclose(rest, want, atol=1e-13)


@names
@few
@given(SIZES, DIRECTIONS, GROUPS, st.booleans())
def test_moves(
    name: str, size: int, directions: int, workers: int, longer: bool
) -> None:
    """Beside the split, in one go.

    In vectors as long as the layout likes them best, or as they are.
    """
    layout = layout_of(name, size, directions, workers)
    whole, gradients = basis(directions, size), numbers(workers, size)
    total = gradients.sum(0)
    others = tf.constant(numbers(directions, seed=3))
    length = layout.length if longer else size

    def lengthen(vector: Array) -> Any:
        return tf.constant(np.pad(vector, [0, length - size]))

    def work(group: Any) -> list[Array]:
        part = tf.constant(own_part(layout, whole, group.rank))
        late = layout.reduces_gradients
        mine = lengthen(gradients[group.rank] if late else total)
        found = layout.project_out(
            part, mine, group, lambda c: 2 * c - layout.own(others, group.rank)
        )
        assert bool(found.sound)
        return [x.numpy() for x in (found.inside, found.rest, found.moved)]

    want = total - (whole @ total) @ whole
    moved = (2 * whole @ total - others.numpy()) @ whole
    # As many elements as are not padding, and the rounding of each sum.
    gradient = layout.reduces_gradients * all_reduce_bytes(size * ITEM, workers)
    reported = gradient + layout.projection_bytes(True)
    for rank, (found, received) in enumerate(run_together(workers, work)):
        inside, rest, move = found
        assert rest.shape == move.shape == (length,)
        mine = layout.own(tf.constant(whole @ total), rank)
        np.testing.assert_allclose(inside, mine, atol=1e-13)
        np.testing.assert_allclose(rest[:size], want, atol=1e-13)
        np.testing.assert_allclose(move[:size], moved, atol=1e-13)
        assert abs(received * ITEM - reported) <= 4 * ITEM * workers


@names
@pytest.mark.parametrize("workers", [1, 2])
def test_long_vectors(name: str, workers: int) -> None:
    """In float32, a gradient along the directions, of like numbers."""
    size = 1_000_003
    layout = LAYOUTS[name](Geometry(size, 2, 0, 2, tf.float32), workers)
    whole = np.zeros([2, size], "float32")
    whole[:, ::2] = whole[0, 1::2] = size**-0.5
    gradient = whole[0] / layout.workers**layout.reduces_gradients

    def work(group: Any) -> tuple[Array, Array]:
        part = tf.constant(own_part(layout, whole, group.rank), tf.float32)
        inside = layout.project_out(part, tf.constant(gradient), group).inside
        again = layout.coefficients(part, tf.constant(whole[0]), group)
        return inside.numpy(), again.numpy()

    exact = whole.astype("float64") @ whole[0]
    for rank, ((inside, again), _) in enumerate(run_together(workers, work)):
        want = layout.own(tf.constant(exact), rank)
        np.testing.assert_allclose(inside, want, rtol=3e-6)
        np.testing.assert_allclose(again, want, rtol=3e-6)


@names
@few
@given(SIZES, DIRECTIONS, GROUPS)
def test_projection_bytes(
    name: str, size: int, directions: int, workers: int
) -> None:
    """All that a step moves, but for what the gradients' all-reduce would."""
    layout = layout_of(name, size, directions, workers)
    whole = basis(directions, size)

    def work(group: Any) -> None:
        part = tf.constant(own_part(layout, whole, group.rank))
        vector = tf.constant(numbers(size))
        layout.project_out(part, vector, group)
        inside = layout.coefficients(part, vector, group)
        layout.combine(part, [inside, inside], group)

    # As many elements as are not padding, and the rounding of each sum.
    gradients = layout.reduces_gradients * all_reduce_bytes(
        size * ITEM, workers
    )
    reported = gradients + layout.projection_bytes(False)
    for _, received in run_together(workers, work):
        assert abs(received * ITEM - reported) <= 4 * ITEM * workers


# --------------------------------------------------------------- hand-over
def roles_of(workers: int, accelerators: int) -> Roles:
    everyone = tuple(range(workers + accelerators))
    return Roles(everyone[:workers], everyone[workers:])


@names
@few
@given(SIZES, DIRECTIONS, st.integers(1, 4), st.integers(1, 4))
def test_hand_over(
    name: str, size: int, directions: int, workers: int, accelerators: int
) -> None:
    """Every worker gets its part; nobody gets more than is reported."""
    layout = layout_of(name, size, directions, workers)
    roles, shards = roles_of(workers, accelerators), Shards(size, accelerators)
    whole, values = basis(directions, size), numbers(directions)

    def work(group: Any) -> Any:
        spectrum = None
        if not roles.trains(group.rank):
            slices = shards.own(tf.constant(whole), group.rank - workers)
            spectrum = Spectrum(tf.constant(values), slices)
        return hand_over(spectrum, layout, roles, group)

    results = run_together(workers + accelerators, work)
    for rank, (found, received) in enumerate(results):
        assert received * ITEM == piece_bytes(layout, roles, rank)
        if not roles.trains(rank):
            assert found is None
            assert received == 0
            continue
        np.testing.assert_array_equal(found[0], values)
        want = own_part(layout, whole, rank)
        np.testing.assert_array_equal(found[1], want)
        part = whole[layout.part(rank)]
        assert received == directions + part.size
