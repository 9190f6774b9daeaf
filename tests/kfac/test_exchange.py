"""What K-FAC's workers have after each exchange, and what it cost.

Workers are threads here; `test_modes` has processes.
"""

import math
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.lockstep import run_together
from tests.support.placements import MODES, place
from tests.support.reference import Array
from tfkfac.blocks import Statistic
from tfkfac.distributed import collectives
from tfkfac.kfac.placement import Placement

modes = pytest.mark.parametrize("mode", MODES)
solvers = pytest.mark.parametrize("solver", ["inverse", "eigen", "eigen_outer"])
workers_ = pytest.mark.parametrize("workers", [2, 4])


def plain(shape: tuple[int, ...], *seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def symmetric(shape: tuple[int, ...], *seed: int) -> Array:
    """Numbers of a factor's shape, symmetric where it is a matrix."""
    value = plain(shape, *seed)
    return value if len(shape) == 1 else value + np.swapaxes(value, -1, -2)


def statistic_of(shape: tuple[int, ...], rank: int, layer: int) -> Statistic:
    total = tf.constant(symmetric(shape, rank, layer), tf.float32)
    return Statistic(total, tf.constant(rank + 1.0))


def statistics_of(
    placement: Placement, rank: int
) -> dict[int, dict[str, Statistic]]:
    return {
        i: {
            name: statistic_of(factor.shape, rank, i)
            for name, factor in block.factors.items()
        }
        for i, block in enumerate(placement.blocks)
        if placement.plan.observes(rank, i)
    }


def received_by(placement: Placement, rank: int, kind: str) -> int:
    """Bytes of a kind of message in a step, as the placement counts them."""
    steps = placement.communication_bytes(rank, 0)
    return max(kinds[kind] for kinds in steps.values())


# ------------------------------------------------------------------ factors
@workers_
@pytest.mark.parametrize("mode", ["comm_opt", "mem_opt", "hybrid_opt 1/2"])
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_statistics_are_added_up(
    mode: str, workers: int, packs: bool, dtype: str | None
) -> None:
    placement = place(
        mode, workers, "inverse", symmetric=packs, factor_dtype=dtype
    )

    def work(group: Any) -> Any:
        own = statistics_of(placement, group.rank)
        reduced = placement.exchange.reduce_statistics(group, own)
        return reduced, group.received_bytes

    count = workers * (workers + 1) / 2
    for (reduced, received), _ in run_together(workers, work):
        for i, block in enumerate(placement.blocks):
            for name, factor in block.factors.items():
                want = sum(
                    symmetric(factor.shape, rank, i) for rank in range(workers)
                )
                got = reduced[i][name]
                assert float(got.count) == count
                # A bfloat16 has 8 bits.
                largest = float(np.max(np.abs(want)))
                atol = 1e-5 if dtype is None else 0.02 * largest
                np.testing.assert_allclose(got.total, want, atol=atol)
        assert received == pytest.approx(
            received_by(placement, 0, "factors"), abs=1
        )


def test_the_way_of_statistics_is_short() -> None:
    """A reader of one all-reduce opens these files, and no other."""
    placement = place("comm_opt", 2, "inverse")

    def work(group: Any) -> set[str]:
        own = statistics_of(placement, group.rank)
        files: set[str] = set()

        def note(frame: Any, *_: Any) -> None:
            before, _, file = frame.f_code.co_filename.rpartition("/tfkfac/")
            if before:
                files.add(file)

        sys.setprofile(note)
        try:
            placement.exchange.reduce_statistics(group, own)
        finally:
            sys.setprofile(None)
        return files

    for files, _ in run_together(2, work):
        assert files <= {
            "kfac/exchange.py",
            "distributed/plan.py",
            "distributed/collectives.py",
        }


@workers_
def test_statistics_stay_with_their_owner(workers: int) -> None:
    """DP-KFAC sends no factor, and observes the own layers only."""
    placement = place("dp_kfac", workers, "inverse")

    def work(group: Any) -> Any:
        own = statistics_of(placement, group.rank)
        return own, placement.exchange.reduce_statistics(group, own)

    seen = []
    for (own, reduced), received in run_together(workers, work):
        assert received == 0
        seen += list(own)
        for i, named in own.items():
            for name, one in named.items():
                np.testing.assert_array_equal(reduced[i][name].total, one.total)
    assert sorted(seen) == list(range(len(placement.blocks)))
    assert received_by(placement, 0, "factors") == 0


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_bucket_does_not_wait_for_later_statistics(
    monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    """Each has its own counts and units; that of the last layer goes first."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 1)
    placement = place("comm_opt", 2, "inverse", factor_dtype=dtype)
    sent: list[list[int]] = [[], []]

    def work(group: Any) -> None:
        add_up = group.all_reduce

        def noted(tensors: Any, *dtype: Any) -> Any:
            elements = sum(t.shape.num_elements() for t in tensors)
            sent[group.rank].append(elements)
            return add_up(tensors, *dtype)

        group.all_reduce = noted
        own = statistics_of(placement, group.rank)
        placement.exchange.reduce_statistics(group, own)

    run_together(2, work)
    shapes = [
        kind.shape
        for block in reversed(placement.blocks)
        for kind in block.factors.values()
    ]
    want = [math.prod(shape) + 1 for shape in shapes]
    if dtype is not None:  # a count and a unit for each matrix, then the total
        pairs = ((1 + math.prod(s[:-2]), math.prod(s)) for s in shapes)
        want = [number for pair in pairs for number in pair]
    assert sent == [want, want]


# ----------------------------------------------------------- decompositions
def made_by(placement: Placement, rank: int, solver: str) -> Any:
    """Parts that tell who made them. Inverses are symmetric, to be packed."""
    parts: dict[int, dict[str, tf.Tensor]] = {}
    for i, block in enumerate(placement.blocks):
        for factor in placement.plan.owns(rank, i):
            wanted = placement.solver.parts(block.factors, factor)
            for name, part in wanted.items():
                value = plain(part.shape, rank, i)
                if solver == "inverse" and len(part.shape) > 1:
                    value += np.swapaxes(value, -1, -2)
                value = tf.constant(value, tf.float32)
                parts.setdefault(i, {})[name] = value
    return parts


@modes
@solvers
@workers_
@pytest.mark.parametrize("packs", [False, True])
def test_gradient_workers_get_the_owners_parts(
    mode: str, solver: str, workers: int, packs: bool
) -> None:
    placement = place(mode, workers, solver, symmetric=packs)
    everyone = [made_by(placement, rank, solver) for rank in range(workers)]
    layers = list(range(len(placement.blocks)))

    def work(group: Any) -> Any:
        shared = placement.exchange.share_decompositions(
            group, everyone[group.rank], layers
        )
        return shared, group.received_bytes

    results = run_together(workers, work)
    for rank, ((shared, received), _) in enumerate(results):
        for i, block in enumerate(placement.blocks):
            if not placement.plan.preconditions(rank, i):
                continue
            for factor in block.factors:
                owner = placement.plan.layers[i].owners[factor]
                for name in placement.solver.parts(block.factors, factor):
                    np.testing.assert_array_equal(
                        shared[i][name], everyone[owner][i][name]
                    )
        assert received == received_by(placement, rank, "decompositions")


@modes
def test_layers_without_a_gradient_are_left_out(mode: str) -> None:
    placement = place(mode, 2, "inverse")
    everyone = [made_by(placement, rank, "inverse") for rank in range(2)]

    def work(group: Any) -> Any:
        own = {i: p for i, p in everyone[group.rank].items() if i == 3}
        return placement.exchange.share_decompositions(group, own, [3])

    for shared, _ in run_together(2, work):
        assert set(shared) <= {3}


# ------------------------------------------------- preconditioned gradients
@modes
@workers_
def test_stages(
    monkeypatch: pytest.MonkeyPatch, mode: str, workers: int
) -> None:
    """One of each owner's layers after the other, if nobody waits for it."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 1)
    placement = place(mode, workers, "inverse")
    layers = list(range(len(placement.blocks)))
    owners = [
        layer.gradient_workers
        for layer in placement.plan.layers
        if len(layer.gradient_workers) == 1
    ]
    want = [layers]
    if owners:
        numbers = [owners[:i].count(owner) for i, owner in enumerate(owners)]
        want = [
            [i for i in layers if numbers[i] == number]
            for number in range(max(numbers) + 1)
        ]
    assert placement.exchange.stages(layers) == want
    assert placement.exchange.stages([]) == [[]]


@modes
@workers_
def test_receivers_get_the_result_of_their_row(mode: str, workers: int) -> None:
    """Everybody ends up with every layer's; those who had one, with that."""
    placement = place(mode, workers, "inverse")
    layers = list(range(len(placement.blocks)))

    def matrix(rank: int, i: int) -> tf.Tensor:
        shape = placement.blocks[i].gradient_shape
        return tf.fill(shape, tf.constant(10.0 * rank + i))

    def work(group: Any) -> Any:
        own = {
            i: matrix(group.rank, i)
            for i in layers
            if placement.plan.preconditions(group.rank, i)
        }
        shared = placement.exchange.share_gradients(group, own, layers)
        return own, shared, group.received_bytes

    results = run_together(workers, work)
    for rank, ((own, shared, received), _) in enumerate(results):
        assert set(shared) == set(layers)
        for i in layers:
            senders = [
                sender
                for sender, others in placement.plan.layers[i].receivers.items()
                if rank in others or rank == sender
            ]
            (sender,) = senders
            assert (i in own) == (sender == rank)
            np.testing.assert_array_equal(shared[i], matrix(sender, i))
        assert received == received_by(
            placement, rank, "preconditioned_gradients"
        )
        if mode in ("comm_opt", "hybrid_opt 1"):
            assert received == 0
