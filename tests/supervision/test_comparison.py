"""Workers with different weights or a different order of data."""

import itertools
import pathlib
from typing import Any

import pytest

from tests.support import workers_data, workers_unsound
from tests.support.cluster import Pool, run
from tests.support.jobs import Jobs

JOBS = Jobs(workers_unsound)
JOBS.add("two: K-FAC", "flip", "kfac", 3)
JOBS.add("two: FOSI, epoch", "flip", "fosi", 100, slow=True)
# Updates until the detection of a bit that changes before update 6.
UPDATES = {"two: K-FAC": 6, "two: FOSI, epoch": 8}


@pytest.mark.parametrize("name", JOBS.params(UPDATES))
def test_one_changed_bit_of_a_weight(pool: Pool, name: str) -> None:
    """All workers raise the same error, which names weight and workers."""
    (path, first), (_, second) = JOBS.results(pool, name)
    assert first == second
    assert "no longer have the same weights" in first
    checksums = f"After {UPDATES[name]} updates these checksums differ: {path}"
    assert checksums in first
    assert "on worker 0" in first
    assert "on worker 1" in first


def test_no_worker_waits_for_another_at_the_end_of_fit(
    tmp_path: pathlib.Path,
) -> None:
    """A worker may stop, or fail, in a callback after its last step."""
    target = f"{workers_unsound.__name__}:end_before_others"
    assert run(target, "multi", str(tmp_path), workers=2) == [True, True]


# ------------------------------------------------------- the order of the data
def check_rows(results: list[dict[str, Any]]) -> None:
    """Assert that each epoch has every row once, in a new order."""
    for name in results[0]["rows"]:
        by_worker = [result["rows"][name] for result in results]
        epochs = list(zip(*by_worker, strict=True))
        assert len(epochs) == workers_data.EPOCHS
        for epoch in epochs:
            rows = sorted(itertools.chain(*epoch))
            assert rows == list(range(workers_data.ROWS)), name
        assert epochs[0] != epochs[1], name


def test_every_row_once_under_the_stock_strategy() -> None:
    """The first `fit` sets a common seed, and rejects earlier datasets."""
    results = run(
        f"{workers_data.__name__}:see_rows_under_stock",
        time_limit=120,
        workers=2,
    )
    check_rows(results)
    for result in results:
        assert "must shuffle their data in the same order" in result["error"]


@pytest.mark.parametrize(
    ("workers", "is_wide"),
    [
        (2, False),
        pytest.param(2, True, marks=pytest.mark.slow),
        pytest.param(4, False, marks=pytest.mark.slow),
    ],
)
def test_every_row_once_in_each_epoch(
    tmp_path: pathlib.Path, workers: int, is_wide: bool
) -> None:
    """Without a seed of the user; needs a new cluster, which has no seed."""
    num_rows = workers_data.ROWS
    for i in range(workers):
        lines = map(str, range(num_rows)[i::workers])
        (tmp_path / f"{i}.txt").write_text("\n".join(lines))
    target = f"{workers_data.__name__}:see_rows"
    results = run(
        target, str(tmp_path), is_wide, time_limit=600, workers=workers
    )
    check_rows(results)
    rows = results[0]["rows"]
    assert rows["arrays, KFAC"][0] != rows["arrays, steps, Adam"][0]
    # Keras draws different seeds for the layers of each worker.
    for seeds in zip(*(result["seeds"] for result in results), strict=True):
        assert len(set(seeds)) == workers
    for name in results[0]["errors"]:
        texts = {result["errors"][name] for result in results}
        assert len(texts) == 1, name  # the same on all workers
        (text,) = texts
        assert "must shuffle their data in the same order" in text, name
        assert "keras.utils.set_random_seed" in text
        assert f"on worker {workers - 1}" in text
    for name in "files", "no shuffle":
        by_worker = [result["own rows"][name] for result in results]
        for epoch in zip(*by_worker, strict=True):
            assert sorted(itertools.chain(*epoch)) == list(range(num_rows)), (
                name
            )
    for index, result in enumerate(results):
        for epoch in result["own rows"]["sharding off"]:
            assert set(epoch) <= set(range(index, num_rows, workers))
        assert len(result["warnings"]["shuffled"]) == 1
        assert not result["warnings"]["in order"]
        assert not result["overwritten"]
