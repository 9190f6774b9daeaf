"""What compat relies on where replicas share a process."""

import itertools

import pytest

from tests.compat.contracts import contract
from tests.support import workers_replicas
from tests.support.cluster import Pool
from tests.support.jobs import Jobs

JOBS = Jobs(workers_replicas)
JOBS.add("mirrored: in one order", "orders", apart=False)
JOBS.add("mirrored: apart", "orders", apart=True)
JOBS.add("mirrored: meet", "meet")


@contract(
    "compat.strategies.keep_apart",
    "Resolvers say what is in order, and a replica's scope or device whose.",
)
@pytest.mark.parametrize("job", ["in one order", "apart"])
def test_each_replica_is_in_its_own_order(pool: Pool, job: str) -> None:
    """In that of the program; it is one for all of them without."""
    (found,) = JOBS.results(pool, f"mirrored: {job}")
    names = list(found)
    assert len(names) == 10, names
    before = {after: [first] for first, after in itertools.pairwise(names)}
    # A table is an order by itself, which the second replica leaves.
    del before[names[4]], before[names[5]]
    if job == "in one order":
        before |= {names[5]: [names[3]], names[9]: [names[4]]}
    assert found == {name: before.get(name, []) for name in names}


@contract(
    "compat.strategies.side_by_side",
    "`merge_call` passes on a function, a `ReplicaContext` makes a replica.",
)
def test_replicas_that_run_eagerly_meet(pool: Pool) -> None:
    (found,) = JOBS.results(pool, "mirrored: meet")
    assert [number for number, _ in found] == [0, 1]
    assert [device[-5:] for _, device in found] == ["CPU:0", "CPU:1"]
