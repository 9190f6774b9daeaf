"""Workers whose weights are no longer the same."""

import pytest

from tests.support import workers_unsound
from tests.support.cluster import Pool
from tests.support.jobs import Jobs

JOBS = Jobs(workers_unsound)
JOBS.add("two: K-FAC", "flip", "kfac", 3)
JOBS.add("two: FOSI, epoch", "flip", "fosi", 100, slow=True)
# Updates until it is found: one bit changes before the sixth.
WHEN = {"two: K-FAC": 6, "two: FOSI, epoch": 8}


@pytest.mark.parametrize("name", JOBS.params(WHEN))
def test_one_bit_of_a_weight(pool: Pool, name: str) -> None:
    """All stop with one message, that names the weight and the workers."""
    (path, first), (_, second) = JOBS.results(pool, name)
    assert first == second
    assert "no longer have the same weights" in first
    assert f"After {WHEN[name]} updates these checksums differ: {path}" in first
    assert "on worker 0" in first
    assert "on worker 1" in first
