"""Results travel while the next ones are made.

Nothing here is timed: a message that waits for work of other layers would be
seen in the graph.
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


def test_statistics_are_sent_while_others_are_made(pool: Pool) -> None:
    """Those of the last layer go first, with nothing of the others."""
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


def test_results_are_sent_while_others_are_decomposed(pool: Pool) -> None:
    """The first stage is decomposed before, each other one between two."""
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
