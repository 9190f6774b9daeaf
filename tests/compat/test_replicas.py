"""Internals of replicas that share a process."""

import itertools

import pytest

from tests.compat.contracts import contract
from tests.support import workers_replicas
from tests.support.cluster import Pool
from tests.support.jobs import Jobs

JOBS = Jobs(workers_replicas)
JOBS.add("mirrored: in one order", "orders", apart=False)
JOBS.add("mirrored: apart", "orders", apart=True)


@contract(
    "compat.strategies.order_by_replica",
    "Resolvers change the order of operations; the name scope or the device"
    " tells the replica.",
)
@pytest.mark.parametrize("job", ["in one order", "apart"])
def test_stateful_operations_are_ordered_per_replica(
    pool: Pool, job: str
) -> None:
    """Program order per replica; else one common order."""
    (result,) = JOBS.results(pool, f"mirrored: {job}")
    names = list(result)
    assert len(names) == 10, names
    before = {after: [first] for first, after in itertools.pairwise(names)}
    # Lookups of a table are ordered per table, except in replica 1.
    del before[names[4]], before[names[5]]
    if job == "in one order":
        before |= {names[5]: [names[3]], names[9]: [names[4]]}
    assert result == {name: before.get(name, []) for name in names}
