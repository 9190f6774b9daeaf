"""Replicas of one process do not deadlock on assertions and prints.

`MirroredStrategy` has one graph for all replicas, and TensorFlow runs stateful
operations in program order. An assertion in the second replica's loss waited
for a print in the first replica's step, which waits for a sum over both.
"""

import numpy as np
import pytest

from tests.support import workers_replicas
from tests.support.cluster import Pool
from tests.support.jobs import Jobs

JOBS = Jobs(workers_replicas)
# In float64 but for Lanczos vectors. Labels are drawn by each replica, and an
# accelerator does not train: these have no path of one process.
TOLERANCES = {
    ("tokens", "eigen"): 1e-9,
    ("assertion", "inverse"): 1e-9,
    ("watched", "fosi"): 1e-5,
}
WIDER = {
    ("tokens", "drawn labels"): None,
    ("tokens", "mem_opt"): 1e-9,
    ("watched", "schedule"): 1e-9,
    ("watched", "accelerator"): None,
    ("watched", "gauss-newton"): 1e-6,
    ("table", "fosi"): 1e-5,
}
RUNS = {
    f"mirrored: {', '.join(run)}": (run, tolerance)
    for run, tolerance in (TOLERANCES | WIDER).items()
}
for name, (run, _) in RUNS.items():
    JOBS.add(name, "train", *run, slow=run in WIDER)
JOBS.add("mirrored: eager", "train_eagerly")
JOBS.add("mirrored: standstill", "stand_still")


def test_several_eager_replicas_are_refused(pool: Pool) -> None:
    """By `compile`, and by the first step where they become eager later."""
    (errors,) = JOBS.results(pool, "mirrored: eager")
    assert errors.keys() == {"compile", "fit", "loop"}
    for error in errors.values():
        assert "Argument `run_eagerly` of `compile` must be False" in error
        assert "one replica in each process" in error


@pytest.mark.parametrize("name", JOBS.params(RUNS))
def test_training_ends_and_is_that_of_one_replica(
    pool: Pool, name: str
) -> None:
    """Replicas have equal bits and match a single replica."""
    ((first, second),) = JOBS.results(pool, name)
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.isfinite(ours).all()
    run, tolerance = RUNS[name]
    if tolerance is not None:
        (expected,) = workers_replicas.train(None, *run)
        for ours, theirs in zip(first, expected, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=tolerance, atol=tolerance
            )


def test_a_standstill_is_told_of(pool: Pool) -> None:
    (said,) = JOBS.results(pool, "mirrored: standstill")
    lines = [one for one in said.splitlines() if one.startswith("tfkfac")]
    assert lines[0] == "tfkfac: no step has ended for 1 s."
    assert lines[1].startswith("tfkfac: this process is in ")
    # The first step may be told of as well.
    assert any("slow_rows (workers_replicas.py:" in one for one in lines[1::2])
