"""Results and bytes of each exchange between K-FAC's workers.

Workers are threads here; `test_modes` uses processes.
"""

import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tests.support.printed  # noqa: F401
from tests.support.lockstep import run_together
from tests.support.placements import MODES, place
from tests.support.reference import Array
from tfkfac.blocks import Statistic
from tfkfac.kfac.placement import Placement

modes = pytest.mark.parametrize("mode", MODES)


def plain(shape: tuple[int, ...], *seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def symmetric(shape: tuple[int, ...], *seed: int) -> Array:
    """Random values of a factor's shape; matrices are symmetric."""
    value = plain(shape, *seed)
    return value if len(shape) == 1 else value + np.swapaxes(value, -1, -2)


def statistics_of(
    placement: Placement, rank: int
) -> dict[int, dict[str, Statistic]]:
    return {
        i: {
            name: Statistic(
                tf.constant(symmetric(factor.shape, rank, i), tf.float32),
                tf.constant(rank + 1.0),
            )
            for name, factor in block.factors.items()
        }
        for i, block in enumerate(placement.blocks)
        if placement.plan.observes(rank, i)
    }


def received_by(placement: Placement, rank: int, kind: str) -> int:
    """Bytes of a message in a step, as reported by the placement."""
    steps = placement.communication_bytes(rank, 0)
    return max(kinds[kind] for kinds in steps.values())


# ------------------------------------------------------------------ factors
@pytest.mark.parametrize(
    ("mode", "workers", "packs", "dtype"),
    [
        ("comm_opt", 2, False, None),
        ("mem_opt", 4, True, None),
        ("hybrid_opt 1/2", 4, True, "bfloat16"),
        ("comm_opt", 2, False, "bfloat16"),
    ],
)
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


def test_files_of_an_all_reduce() -> None:
    """An all-reduce of statistics runs code of these files only."""
    placement, files = place("comm_opt", 2, "inverse"), set()

    def note(frame: Any, *_: Any) -> None:
        before, _, file = frame.f_code.co_filename.rpartition("/tfkfac/")
        files.update([file] if before else [])

    def work(group: Any) -> None:
        own = statistics_of(placement, group.rank)
        sys.setprofile(note)
        try:
            placement.exchange.reduce_statistics(group, own)
        finally:
            sys.setprofile(None)

    run_together(2, work)
    assert files <= {
        "kfac/exchange.py",
        "distributed/plan.py",
        "distributed/collectives.py",
        "factors/base.py",
    }


def test_statistics_stay_with_their_owner() -> None:
    """DP-KFAC sends no factors and observes only owned layers."""
    placement = place("dp_kfac", 4, "inverse")

    def work(group: Any) -> Any:
        own = statistics_of(placement, group.rank)
        return own, placement.exchange.reduce_statistics(group, own)

    seen = []
    for (own, reduced), received in run_together(4, work):
        assert received == 0
        seen += list(own)
        for i, named in own.items():
            for name, one in named.items():
                np.testing.assert_array_equal(reduced[i][name].total, one.total)
    assert sorted(seen) == list(range(len(placement.blocks)))
    assert received_by(placement, 0, "factors") == 0


# ----------------------------------------------------------- decompositions
def made_by(placement: Placement, rank: int, solver: str) -> Any:
    """Values that identify their owner; inverses are symmetric."""
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
@pytest.mark.parametrize(
    ("solver", "workers", "packs"),
    [("inverse", 4, True), ("eigen", 2, False), ("eigen_outer", 4, False)],
)
def test_gradient_workers_get_the_owners_parts(
    mode: str, solver: str, workers: int, packs: bool
) -> None:
    placement = place(mode, workers, solver, symmetric=packs)
    everyone = [made_by(placement, rank, solver) for rank in range(workers)]
    layers = list(range(len(placement.blocks)))

    def work(group: Any) -> Any:
        mine, share = everyone[group.rank], placement.exchange
        shared = share.share_decompositions(group, mine, layers)
        received = group.received_bytes
        own = {i: parts for i, parts in mine.items() if i == 3}
        return shared, received, share.share_decompositions(group, own, [3])

    results = run_together(workers, work)
    for rank, ((shared, received, one), _) in enumerate(results):
        assert set(one) <= {3}  # others have no gradient
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


# ------------------------------------------------- preconditioned gradients
@modes
@pytest.mark.parametrize("workers", [2, 4])
def test_receivers_get_the_result_of_their_row(mode: str, workers: int) -> None:
    """Every worker gets every layer's gradient; senders keep theirs."""
    placement = place(mode, workers, "inverse")
    layers = list(range(len(placement.blocks)))

    def matrix(rank: int, i: int) -> tf.Tensor:
        shape = placement.blocks[i].gradient_shape
        return tf.fill(shape, tf.constant(10.0 * rank + i))

    def work(group: Any) -> Any:
        own = {
            i: [matrix(group.rank, i)]
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
            np.testing.assert_array_equal(shared[i][0], matrix(sender, i))
        assert received == received_by(
            placement, rank, "preconditioned_gradients"
        )
        if mode in ("comm_opt", "hybrid_opt 1"):
            assert received == 0
