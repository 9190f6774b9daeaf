"""Seconds of collectives, from the formulas of their algorithms."""

import math
from typing import Any

import pytest

from tfkfac.cost import Machine

MACHINE = Machine.of(10e12, 1e9, 1e-6)


@pytest.mark.parametrize("workers", [2, 3, 64])
def test_all_reduce(workers: int) -> None:
    """A ring receives 2 (P - 1) / P of the data; few hops go up a tree."""
    size = 4e6
    hops = min(2 * (workers - 1), 2 * math.ceil(math.log2(workers)))
    want = 2 * (workers - 1) / workers * size / 1e9 + 3 * hops * 1e-6
    assert MACHINE.all_reduce(size, workers, 3) == pytest.approx(want)


def test_nothing_takes_no_time() -> None:
    assert MACHINE.all_reduce(1e6, 1) == MACHINE.all_reduce(0, 8) == 0
    assert MACHINE.broadcast(1e6, 1) == MACHINE.broadcast(0, 8) == 0


def test_broadcast() -> None:
    """Two messages, from one to the next of 8 or down three levels."""
    assert MACHINE.broadcast(5e6, 8, 2) == pytest.approx(5e-3 + 2 * 7 * 1e-6)
    tree = Machine.of(10e12, 1e9, 1e-6, tree_broadcast=True)
    assert tree.broadcast(5e6, 8, 2) == pytest.approx(5e-3 + 2 * 3 * 1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("flops", -1.0), ("flops", 0.0), ("latency", math.nan), ("eigen", "fast")],
)
def test_hostile_numbers(name: str, value: Any) -> None:
    numbers = {"flops": 1e12, "bandwidth": 1e9, "latency": 0.0, name: value}
    with pytest.raises(ValueError, match=name):
        Machine.of(**numbers)
