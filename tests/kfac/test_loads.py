"""Bytes of factors, decompositions and messages, counted by hand."""

import pytest

from tests.support.placements import place

WORKERS = 4
FLOAT = 4
# Mode: number of gradient workers of a layer.
MODES = {"comm_opt": 4, "mem_opt": 1, "hybrid_opt 1/2": 2, "dp_kfac": 1}


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
