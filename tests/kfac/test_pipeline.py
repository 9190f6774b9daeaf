"""Communication overlaps with computation.

Tests inspect dependencies in the graph and measure no times.
"""

from tests.support import workers_collectives
from tests.support.cluster import Pool
from tests.support.jobs import Jobs

HIDDEN = [5, 6, 7, 8, 9]
LAYERS = len(HIDDEN) + 1
OWNED = LAYERS // 2  # by each of two replicas, in turn

JOBS = Jobs(workers_collectives)
STATISTICS = "mirrored: statistics of comm_opt"
STAGES = "mirrored: stages of dp_kfac"
JOBS.add(STATISTICS, "waits", "comm_opt", HIDDEN, "MatMul")
JOBS.add(STAGES, "waits", "dp_kfac", HIDDEN, "Cholesky")


def test_statistics_overlap_with_computation(pool: Pool) -> None:
    """The last layer's statistics are sent first, without waiting."""
    (found,) = JOBS.results(pool, STATISTICS)
    branches = [b for b in found["branches"] if len(b.before) == 2 * LAYERS]
    assert len(branches) == 2  # replicas
    for work, before in branches:
        a_layer = len(work) / LAYERS
        counts = sorted(len(own) for own in before)
        assert 0 < counts[0] <= a_layer
        # NCCL's order: those after it wait for it, and for no more.
        for place, count in enumerate(counts):
            assert count <= a_layer * (place // 2 + 1)
        assert set.union(*before) == work
    assert not found["unordered"]


def test_gradients_overlap_with_decompositions(pool: Pool) -> None:
    """A stage's gradients are sent while the next stage is decomposed."""
    (found,) = JOBS.results(pool, STAGES)
    branches = [b for b in found["branches"] if len(b.before) == LAYERS]
    assert len(branches) == 2  # replicas
    for work, before in branches:
        assert len(work) == OWNED - 1
        # Each round has a message of each replica.
        counts = sorted(len(own) for own in before)
        assert counts[:2] == [0, 0]
        for place, count in enumerate(counts):
            assert count <= place // 2
    assert not found["unordered"]
