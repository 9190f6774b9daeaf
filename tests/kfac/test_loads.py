"""Bytes and operations of blocks against hand-counted numbers."""

import keras
import pytest
from keras import layers

import tfkfac
from tests.support.placements import SIZES, place
from tfkfac.factors.base import Wire
from tfkfac.kfac.placement import BlockCost
from tfkfac.solvers.registry import make_solver

WORKERS = 4
FLOAT = 4
# Mode: number of gradient workers of a layer.
MODES = {"comm_opt": 4, "mem_opt": 1, "hybrid_opt 1/2": 2, "dp_kfac": 1}


# -------------------------------------------------------- bytes and memory
# Of all layers together: elements of the weights, of the factors, and of what
# comes of them. `SIZES` tells the sizes; the embedding's A is diagonal.
WEIGHTS = 7 * 4 + 2 * 5 * 3 + 6 * 2 + 7 * 3
FACTORS = 7 + 4**2 + 2 * (5**2 + 3**2) + 6 * 2**2 + 7**2 + 3**2
EIGENVALUES = 4 + 2 * (5 + 3) + 6 * 2 + 7 + 3
SENT = {"inverse": FACTORS, "eigen": FACTORS + EIGENVALUES}
# Of eigenvalues the products are kept (KAISA, section 4.4): one a weight.
KEPT = {"inverse": FACTORS, "eigen": FACTORS - 7 + WEIGHTS}


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize(("mode", "gradient_workers"), MODES.items())
def test_bytes_by_hand(mode: str, gradient_workers: int, solver: str) -> None:
    """KAISA, section 3.1: sums over four workers, g of them gradient workers.

    Each factor has one owner, which sends its decomposition to g - 1 workers.
    A preconditioned gradient goes to the workers outside of the g.
    """
    placement = place(mode, WORKERS, solver)
    g, ranks = gradient_workers, range(WORKERS)
    states = [placement.state_bytes(rank) for rank in ranks]
    received = [placement.communication_bytes(rank, 400) for rank in ranks]

    def total(step: str, kind: str) -> float:
        return sum(one[step][kind] for one in received) / FLOAT

    assert sum(one["factors"] for one in states) == FLOAT * FACTORS
    kept = sum(one["decompositions"] for one in states)
    assert kept == FLOAT * g * KEPT[solver]
    sent = total("inverse", "decompositions")
    assert sent == (g - 1) * SENT[solver]
    away = total("plain", "preconditioned_gradients")
    assert away == (WORKERS - g) * WEIGHTS
    # An all-reduce: 2 (P - 1) / P of the data at each of P workers. With the
    # seven factors go the numbers of their rows.
    assert total("plain", "gradients") == 2 * (WORKERS - 1) * 100
    reduced = 0 if mode == "dp_kfac" else FACTORS + 7
    assert total("factor", "factors") == 2 * (WORKERS - 1) * reduced


def test_a_model_without_layers_has_no_bytes() -> None:
    """A model without supported layers has no bytes."""
    built = keras.Sequential([keras.Input((2,)), layers.Activation("tanh")])
    placement = tfkfac.KFAC().attach(built).method.placement
    assert set(placement.state_bytes(0).values()) == {0}
    assert placement.communication_bytes(0, 0)["plain"]["gradients"] == 0


# -------------------------------------------------------------- operations
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_work_by_hand(solver: str) -> None:
    """One product with inverses, two with eigenbases."""
    times = {"inverse": 1, "eigen": 2}[solver]
    for block in place("comm_opt", 1, "inverse").blocks:
        work = BlockCost.of(block, make_solver(solver), Wire(), 1)
        inputs, outputs, count = SIZES[block.path]
        of_a = {"embedding": inputs * outputs, "norm": 0}.get(
            block.path, inputs**2 * outputs
        )
        products = count * (of_a + inputs * outputs**2)
        assert work.precondition == times * products
        a = count * inputs**3, count * inputs**2
        wanted = {"G": (count * outputs**3, count * outputs**2)}
        if block.path != "norm":
            wanted["A"] = (7, 7) if block.path == "embedding" else a
        assert work.decompositions == wanted


def test_cost_of_row_gradients() -> None:
    """Rows cost `N (n^2 + m^2) + N^2 (n + m)`, if less than the matrix."""
    built = keras.Sequential([keras.Input((99,)), layers.Dense(100)])
    (block,) = tfkfac.KFAC().attach(built).method.placement.blocks
    work = BlockCost.of(block, make_solver("inverse"), Wire(), 1)
    assert work.apply(3) == 3 * 2 * 100**2 + 3**2 * 200
    assert work.apply(10**6) == 2 * 100**3
    work = BlockCost.of(block, make_solver("eigen"), Wire(), 1)
    assert work.apply(3) == 4 * 100**3
