"""Placement of factors and decompositions, and bytes from their shapes."""

import pytest

from tests.support.placements import MODES, SIZES, place

WORKERS = 4
FLOAT, HALF = 4, 2
modes = pytest.mark.parametrize("mode", MODES)

# Elements of the two factors of each layer, of its inverses and of its
# eigen-decomposition, whose eigenvalues are kept as their outer product.
A = {"embedding": 7, "grouped": 2 * 25, "norm": 0, "dense": 49}
G = {"embedding": 16, "grouped": 2 * 9, "norm": 6 * 4, "dense": 9}
OUTER = {n: count * i * o for n, (i, o, count) in SIZES.items()}
EIGEN = {n: (A[n] if n != "embedding" else 0) + G[n] + OUTER[n] for n in SIZES}
INVERSE = {n: A[n] + G[n] for n in SIZES}
# Numbers that travel with the statistics: rows of a factor.
COUNTS = 7


@modes
def test_owners_and_gradient_workers(mode: str) -> None:
    """Gradient workers are all, one, or a fraction of the workers."""
    count = {"comm_opt": 4, "hybrid_opt 1": 4, "hybrid_opt 1/2": 2}.get(mode, 1)
    placement = place(mode, WORKERS, "inverse")
    plan = placement.plan
    for i, block in enumerate(placement.blocks):
        owned = [name for rank in range(WORKERS) for name in plan.owns(rank, i)]
        assert sorted(owned) == sorted(block.factors)
        ranks = [r for r in range(WORKERS) if plan.preconditions(r, i)]
        assert len(ranks) == count
        assert set(plan.layers[i].owners.values()) <= set(ranks)


@modes
@pytest.mark.parametrize(
    ("solver", "sizes", "dtype"),
    [("inverse", INVERSE, "bfloat16"), ("eigen", EIGEN, None)],
)
def test_state_of_all_workers(
    mode: str, solver: str, sizes: dict[str, int], dtype: str | None
) -> None:
    """Factors are stored once, decompositions on each gradient worker."""
    placement = place(
        mode, WORKERS, solver, factor_dtype=dtype, inverse_dtype=dtype
    )
    item = FLOAT if dtype is None else HALF
    total = sum(A.values()) + sum(G.values())
    copies = sum(len(p.gradient_workers) for p in placement.plan.layers)
    copies //= len(SIZES)
    states = [placement.state_bytes(rank) for rank in range(WORKERS)]
    # Averages are never in half precision.
    assert sum(s["factors"] for s in states) == FLOAT * total
    kept = sum(s["decompositions"] for s in states)
    assert kept == item * copies * sum(sizes.values())


def test_traffic_of_comm_opt() -> None:
    """Bytes follow the definition (KAISA, section 3.1)."""
    placement = place("comm_opt", WORKERS, "inverse")
    gradients = 1000
    found = [
        placement.communication_bytes(rank, gradients)
        for rank in range(WORKERS)
    ]
    factors = FLOAT * (sum(A.values()) + sum(G.values()) + COUNTS)
    for rank, kinds in enumerate(found):
        owned = sum(
            {"A": A, "G": G}[name][block.path]
            for i, block in enumerate(placement.blocks)
            for name in placement.plan.owns(rank, i)
        )
        everything = sum(A.values()) + sum(G.values())
        plain = {
            "gradients": 1500,
            "factors": 0,
            "decompositions": 0,
            "preconditioned_gradients": 0,
        }
        received = FLOAT * (everything - owned)
        assert kinds["plain"] == plain
        assert kinds["factor"] == plain | {"factors": round(1.5 * factors)}
        assert kinds["inverse"] == plain | {"decompositions": received}
