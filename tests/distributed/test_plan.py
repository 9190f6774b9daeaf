"""Plans: assignment by cost, gradient workers, receivers."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfkfac.distributed.plan import (
    MODES,
    LayerPlan,
    Shapes,
    assign,
    gradient_workers,
    plan_layers,
)

# Factors of a convolutional network: all factor types, with equal costs.
SHAPES: list[Shapes] = [
    {"A": (28, 28), "G": (32, 32)},
    {"G": (32, 2, 2)},
    {"A": (289, 289), "G": (64, 64)},
    {"A": (4, 9, 9), "G": (4, 8, 8)},
    {"A": (1000,), "G": (64, 64)},
    {"A": (289, 289), "G": (64, 64)},
    {"A": (65, 65), "G": (10, 10)},
]


def plan(mode: str, workers: int, **kwargs: Any) -> tuple[LayerPlan, ...]:
    if mode == "hybrid_opt":
        kwargs.setdefault("fraction", 1 / workers)
    return plan_layers(SHAPES, workers, mode, **kwargs)


@pytest.mark.parametrize("workers", [1, 3, 16])
@pytest.mark.parametrize("mode", MODES)
def test_every_worker_gets_the_gradient_once(mode: str, workers: int) -> None:
    """Owners are gradient workers; each other worker has one sender."""
    for layer, shapes in zip(plan(mode, workers), SHAPES, strict=True):
        groups = [(s, *r) for s, r in layer.receivers.items()]
        everyone = sorted(itertools.chain(*groups))
        assert everyone == list(range(workers))
        assert tuple(layer.receivers) == layer.gradient_workers
        assert set(layer.owners) == set(shapes)
        owners = set(layer.owners.values())
        assert owners <= set(layer.gradient_workers)
        if mode in ("mem_opt", "dp_kfac"):
            assert owners == set(layer.gradient_workers)
            assert len(owners) == 1


def test_comm_opt_splits_by_factor() -> None:
    layers = plan("comm_opt", 4)
    assert {p.gradient_workers for p in layers} == {(0, 1, 2, 3)}
    assert not any(any(p.receivers.values()) for p in layers)
    # The two largest factors first, then 65, then 64 three times.
    assert layers[2].owners == {"A": 0, "G": 3}
    assert layers[5].owners == {"A": 1, "G": 2}
    assert layers[6].owners["A"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_whole_layers(mode: str) -> None:
    """Both factors have one owner; the mode sets the gradient workers."""
    fraction = 1 if mode == "hybrid_opt" else None
    whole = plan(mode, 4, fraction=fraction, whole_layers=True)
    split = plan(mode, 4, fraction=fraction)
    for layer, other in zip(whole, split, strict=True):
        assert len(set(layer.owners.values())) == 1
        assert set(layer.owners) == set(other.owners)
        if mode in ("comm_opt", "hybrid_opt"):
            assert layer.gradient_workers == other.gradient_workers
    owners = {owner for layer in whole for owner in layer.owners.values()}
    assert owners == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("fraction", "columns", "sends"),
    [
        (
            1 / 4,
            {(0, 4), (1, 5), (2, 6), (3, 7)},
            {0: {1, 2, 3}, 4: {5, 6, 7}},
        ),
        (1 / 2, {(0, 2, 4, 6), (1, 3, 5, 7)}, {0: {1}, 2: {3}, 4: {5}}),
    ],
)
def test_hybrid_on_eight(
    fraction: float, columns: set[Any], sends: dict[int, set[int]]
) -> None:
    """The groups of the code of KAISA's authors."""
    shapes: list[Shapes] = [{"A": (2, 2)}] * 8
    layers = plan_layers(shapes, 8, "hybrid_opt", fraction)
    assert {p.gradient_workers for p in layers} == columns
    first = next(p for p in layers if 0 in p.gradient_workers)
    for sender, receivers in sends.items():
        assert set(first.receivers[sender]) == receivers


def test_hybrid_extremes() -> None:
    assert plan("hybrid_opt", 4, fraction=1 / 4) == plan("mem_opt", 4)
    assert plan("hybrid_opt", 4, fraction=1) == plan("comm_opt", 4)
    assert plan("hybrid_opt", 1, fraction=1) == plan("comm_opt", 1)


def test_default_policies() -> None:
    rotated = plan("dp_kfac", 2)
    assert rotated == plan("dp_kfac", 2, policy="round_robin")
    pairs = [p.owners["G"] for p in rotated if "A" in p.owners]
    singles = [p.owners["G"] for p in rotated if "A" not in p.owners]
    for owners in (pairs, singles):
        assert owners == [i % 2 for i in range(len(owners))]
    for mode in ("comm_opt", "mem_opt", "hybrid_opt"):
        assert plan(mode, 2) == plan(mode, 2, policy="compute")
    assert plan("dp_kfac", 2, policy="compute") == plan("mem_opt", 2)


def test_memory_differs_from_compute() -> None:
    # 3^3 > 3 * 2^3, but 3^2 < 3 * 2^2.
    shapes: list[Shapes] = [{"A": (3, 3)}, {"A": (3, 2, 2)}]
    for policy, owners in (("compute", [0, 1]), ("memory", [1, 0])):
        layers = plan_layers(shapes, 2, "mem_opt", policy=policy)
        assert [p.owners["A"] for p in layers] == owners


def makespan(costs: list[int], chosen: Sequence[int], workers: int) -> int:
    loads = [0] * workers
    for piece, worker in zip(costs, chosen, strict=True):
        loads[worker] += piece
    return max(loads)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_lpt_bound(costs: list[int], workers: int) -> None:
    chosen = assign(costs, workers, "compute")
    best = min(
        makespan(costs, owners, workers)
        for owners in itertools.product(range(workers), repeat=len(costs))
    )
    # 4/3 - 1/(3m), without fractions.
    bound = (4 * workers - 1) * best
    assert 3 * workers * makespan(costs, chosen, workers) <= bound


def test_assignments_by_hand() -> None:
    """The most expensive task first; ties by order."""
    assert assign([5, 5, 9, 5], 2, "compute") == (1, 1, 0, 0)
    assert assign([1, 1, 1], 3, "memory") == (0, 1, 2)
    assert assign([9, 1, 1, 1, 1], 3, "round_robin") == (0, 1, 2, 0, 1)
    assert sorted(assign([3, 2], 8, "compute")) == [0, 1]
    assert assign([], 2, "compute") == ()


def test_number_of_gradient_workers() -> None:
    """Rounding is tolerated; the minimum is one."""
    assert gradient_workers(4, 0.5) == 2
    assert gradient_workers(4, 1) == 4
    assert gradient_workers(49, 1 / 49) == 1  # times 49 is less than 1
    assert gradient_workers(3, 1 - 1 / 3 - 1 / 3) == 1  # 1.0000000000000002
    assert gradient_workers(4, 0.1) == 1


def test_default_fraction() -> None:
    """By hand: the divisor that is nearest to half."""
    counts = {n: gradient_workers(n, None) for n in range(1, 10)}
    assert counts == dict(enumerate([1, 1, 1, 2, 1, 3, 1, 4, 3], 1))
    assert gradient_workers(15, None) == 5


def test_wrong_fractions() -> None:
    for workers, fraction in ((4, 0.75), (100, 0.29)):
        message = f"one of 1/{workers}, 2/{workers}, .*1 with {workers}"
        with pytest.raises(ValueError, match=message):
            gradient_workers(workers, fraction)
