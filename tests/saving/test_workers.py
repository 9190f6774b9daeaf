"""State of several workers: saved by one, loaded by any number of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import workers_saving
from tests.support.cluster import Case, Pool
from tests.support.jobs import TIME_LIMIT, kind_of, shape_of
from tests.support.weights import distance
from tests.support.workers_saving import STOP

slow = pytest.mark.slow
Run = Callable[..., list[Any]]
# Estimations begin before updates 3, 6 and 9: none is in flight at `STOP`.
BESIDE = {"accelerator_fraction": 0.5, "update_interval": 3, "lanczos_steps": 3}
HALF = {"distribution": "hybrid_opt", "gradient_worker_fraction": 0.5}


@pytest.fixture
def run(pool: Pool) -> Run:
    """Calls a function of `workers_saving` on all workers, None is alone."""

    def run(where: str | None, name: str, *args: Any, **kwargs: Any) -> Any:
        if where is None:
            return [getattr(workers_saving, name)(None, *args, **kwargs)]
        target = f"{workers_saving.__name__}:{name}"
        case = Case(target, (kind_of(where), *args), kwargs)
        return pool.run(name, case, shape_of(where), TIME_LIMIT).get()

    return run


def test_backup(run: Run, tmp_path: Path) -> None:
    """Stopped and begun again: the run that nobody stopped, to the bit."""
    results = run("two", "backup", "kfac", str(tmp_path), model="small")
    for result in results:
        assert result["kept"] == [
            "epoch-000004.weights.h5",
            f"epoch-{STOP:06}.weights.h5",
        ]
        assert (result["left"], result["end"]) == ([], [])
        # Worker 1 alone has a damaged copy of the newest.
        assert result["end from the one before"] == []
        epochs, callbacks, weights = result["said"]
        assert "epoch: 9 on worker 0, 10 on worker 1" in epochs
        assert "'ChiefBackup'" in callbacks
        assert "digest of the weights:" in weights
        assert "epoch:" not in weights


@pytest.mark.parametrize(
    ("optimizer", "worker", "options"),
    [("kfac", 1, {"model": "small"}), ("fosi", 0, {})],
)
@slow
def test_one_worker_is_asked_to_end(
    run: Run, tmp_path: Path, optimizer: str, worker: int, options: Any
) -> None:
    """All stop after one batch, and go on there, to the bit."""
    first, second = run(
        "two", "terminated", optimizer, str(tmp_path), worker, **options
    )
    assert first == second
    assert first["code"] == 128 + 15
    epoch, _, batch = first["newest"].removesuffix(".weights.h5").partition("_")
    done = 3 * int(epoch[-6:]) + int(batch.removeprefix("batch-"))
    assert done in (5, 6)
    assert first["updates"] == done
    assert first["end"] == []


@pytest.mark.parametrize(
    ("where", "optimizer", "options"),
    [
        ("two", "kfac", {"distribution": "dp_kfac", "inner": "adam"}),
        ("two", "kfac", {"model": "small", "gradient_accumulation_steps": 2}),
        ("two", "fosi", BESIDE | {"layout": "columns"}),
        ("four", "kfac", HALF | {"solver": "eigen"}),
        ("four", "fosi", {"layout": "rows", "inner": "adam"}),
        ("mirrored", "kfac", {"distribution": "mem_opt"}),
    ],
)
@slow
def test_resume(
    run: Run,
    tmp_path: Path,
    where: str,
    optimizer: str,
    options: dict[str, Any],
) -> None:
    """From a file of the first worker, between all intervals, to the bit."""
    path = str(tmp_path / "state.weights.h5")
    for result in run(where, "resume", optimizer, path, **options):
        assert result["end"] == []
        assert len(result["changed"]) >= 5


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("two", {"layout": "columns", "final_update": "paper"}),
        ("four", {"layout": "rows"}),
    ],
)
@slow
def test_estimation_in_flight_starts_again(
    run: Run, tmp_path: Path, where: str, options: dict[str, Any]
) -> None:
    """Bit for bit a run without the estimation, on all workers.

    One begins before update 5 of an interval of 2 and is in flight at `STOP`.
    """
    path = str(tmp_path / "state.weights.h5")
    options = options | BESIDE | {"update_interval": 2, "lanczos_steps": 4}
    for result in run(where, "restart", path, **options):
        assert result["end"] == []
        assert result["estimations"] in (1, None)
        assert set(result["saved"]) == {
            "directions", "estimations", "failures", "inner_momentum",
            "largest_rate", "last_estimation", "momentum", "ritz_values",
            "skipped_steps", "square", "version", "warmup",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("four", HALF), ("two", {"distribution": "comm_opt"})),
        (("two", {"distribution": "mem_opt"}), (None, {})),
        ((None, {}), ("four", HALF)),
    ],
)
@slow
def test_other_workers_and_modes(
    run: Run, tmp_path: Path, saved: Any, loaded: Any
) -> None:
    """Up to rounding, the run of one process: all modes are one algorithm."""
    path = str(tmp_path / "state.weights.h5")
    (first, options), (then, others) = saved, loaded
    (whole,) = run(None, "part", "kfac", 0, None, None)
    run(first, "part", "kfac", 0, None, path, **options)
    travelled = distance(whole, weights_at_start())
    for weights in run(then, "part", "kfac", STOP, path, None, **others):
        assert distance(weights, whole) <= 2e-7 * travelled


def weights_at_start() -> list[Any]:
    with workers_saving.floats("float64"):
        return workers_saving.build(None, "kfac", {}).get_weights()


@pytest.mark.parametrize(("saved", "loaded"), [("two", "four"), ("four", None)])
@slow
def test_owners_factors_stay_their_own(
    run: Run, tmp_path: Path, saved: str, loaded: str | None
) -> None:
    """dp_kfac: of each layer those of its owner, whoever that is then."""
    path = str(tmp_path / "state.weights.h5")
    options = {} if loaded is None else {"distribution": "dp_kfac"}
    before = run(saved, "factors", path, None, distribution="dp_kfac")
    after = run(loaded, "factors", None, path, **options)
    kept, found = (
        {layer: own for one in workers for layer, own in one.items()}
        for workers in (before, after)
    )
    assert kept.keys() == found.keys()
    for layer, factors in kept.items():
        for name, factor in factors.items():
            np.testing.assert_array_equal(found[layer][name], factor)


@slow
def test_directions_in_another_layout(run: Run, tmp_path: Path) -> None:
    """DHO2 of four workers in rows goes on in columns on two, and alone."""
    path = str(tmp_path / "state.weights.h5")
    whole, *_ = run("four", "part", "fosi", 0, None, path, layout="rows")
    after = run("two", "part", "fosi", STOP, path, None, layout="columns")
    after += run(None, "part", "fosi", STOP, path, None)
    size = distance(whole, [0 * w for w in whole])
    assert all(distance(weights, whole) <= 1e-5 * size for weights in after)


@slow
def test_saved_without_gathering(run: Run, tmp_path: Path) -> None:
    """Complete if all save; said by one alone, and when it is loaded."""
    first, second = run("two", "ungathered", str(tmp_path))
    assert first["found"] == second["found"] == []
    assert first["together"] == second["together"] == []
    said, loaded = first["alone"]
    assert "optimizer.gather_state()" in said
    assert "finds no curvature" in loaded


@pytest.mark.parametrize("how", ["backup", "checkpoint"])
@slow
def test_other_ways_of_saving(run: Run, tmp_path: Path, how: str) -> None:
    """A worker's own file has its share, a checkpoint of the first has all."""
    for result in run("two", "each_its_own", how, str(tmp_path)):
        assert result["end"] == []
        assert len(result["changed"]) > 5
