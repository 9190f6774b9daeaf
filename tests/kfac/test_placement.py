"""Who keeps what, and how many bytes that is, counted anew from the shapes."""

import keras
import pytest

import tfkfac
from tests.support import small
from tests.support.placements import MODES, SIZES, place
from tfkfac.cost import Machine, auto
from tfkfac.distributed.topology import Topology

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
    """A factor has one owner; those are all, one, or the fraction of them."""
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
    """Factors are kept once; decompositions by each gradient worker."""
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
    """Counted from the definition (KAISA, section 3.1)."""
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


# ---------------------------------------------------------------------- "auto"
def test_one_worker_has_the_form_of_comm_opt() -> None:
    models = [
        small.compiled_mlp(distribution=mode) for mode in ("auto", "comm_opt")
    ]
    auto_, plain = map(small.kfac_of, models)
    assert auto_.method.placement.plan == plain.method.placement.plan
    assert "comm_opt, as there is one worker" in small.summary_text(auto_)


@pytest.mark.parametrize(
    ("intervals", "mode"), [((100, 1000), "comm_opt"), ((1, 1), "mem_opt")]
)
def test_stale_and_fresh_updates(
    monkeypatch: pytest.MonkeyPatch, intervals: tuple[int, int], mode: str
) -> None:
    """Decompositions that last are worth sending (KAISA, section 3.1)."""
    machine = Machine.of(1e12, 1e9, 1e-6)
    monkeypatch.setitem(auto._ASSUMED, "auto", machine)
    model = keras.Sequential(
        [keras.Input((300,)), *(keras.layers.Dense(300) for _ in range(8))]
    )
    factor, inverse = intervals
    optimizer = tfkfac.KFAC(
        distribution="auto",
        factor_update_interval=factor,
        inverse_update_interval=inverse,
    ).attach(model)
    everyone = tuple(range(8))
    optimizer.method.job.topology = Topology(8, everyone, (None,) * 8, "auto")
    text = small.summary_text(optimizer)
    assert optimizer.method.placement.distribution.mode == mode
    said = f"Distribution: {mode}, chosen by what K-FAC adds to a step at "
    assert f"{said}intervals {factor} and {inverse}:" in text
    assert "with 1e+03 GFLOP/s, assumed, and 1 GB/s and 1 us" in text
    for other in ("comm_opt", "mem_opt", "hybrid_opt 0.25", "hybrid_opt 0.5"):
        assert f"\n  {other}: " in text
    assert "dp_kfac" not in text  # it would be another method
