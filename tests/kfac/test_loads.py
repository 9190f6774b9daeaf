"""Bytes of factors, decompositions and messages, counted by hand."""

import pytest

from tests.support.placements import place

WORKERS = 4
FLOAT = 4
# Mode: number of gradient workers of a layer.
MODES = {"comm_opt": 4, "mem_opt": 1, "hybrid_opt 1/2": 2, "dp_kfac": 1}


# Elements of all layers of `SIZES`; the embedding's A is diagonal.
WEIGHTS = 7 * 4 + 2 * 5 * 3 + 6 * 2 + 7 * 3
FACTORS = 7 + 4**2 + 2 * (5**2 + 3**2) + 6 * 2**2 + 7**2 + 3**2
EIGENVALUES = 4 + 2 * (5 + 3) + 6 * 2 + 7 + 3
SENT = {"inverse": FACTORS, "eigen": FACTORS + EIGENVALUES}
# Products of eigenvalues are stored, one per weight (KAISA, section 4.4).
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

    def total(step: str, message: str) -> float:
        return sum(row[step][message] for row in received) / FLOAT

    assert sum(row["factors"] for row in states) == FLOAT * FACTORS
    kept = sum(row["decompositions"] for row in states)
    assert kept == FLOAT * g * KEPT[solver]
    sent = total("inverse", "decompositions")
    assert sent == (g - 1) * SENT[solver]
    away = total("plain", "preconditioned_gradients")
    assert away == (WORKERS - g) * WEIGHTS
    # All-reduce: 2 (P - 1) / P of the data per worker. The message has the
    # seven factors and their numbers of rows.
    assert total("plain", "gradients") == 2 * (WORKERS - 1) * 100
    reduced = 0 if mode == "dp_kfac" else FACTORS + 7
    assert total("factor", "factors") == 2 * (WORKERS - 1) * reduced
