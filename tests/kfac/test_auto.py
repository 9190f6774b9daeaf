"""`distribution="auto"`: chosen once, by all workers alike, and said."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.support import small, workers_modes
from tests.support.cluster import Pool
from tests.support.jobs import Jobs, replicas_of
from tfkfac.cost import Machine, auto
from tfkfac.distributed.topology import Topology

JOBS = Jobs(workers_modes)
CHOICES = ["two: auto", "mirrored: auto"]
for name_ in CHOICES:
    JOBS.add(name_, "choose", slow=name_.startswith("mirrored"))
JOBS.add("two: disagreement", "disagree")

Results = Callable[[str], list[Any]]


@pytest.fixture
def results(pool: Pool) -> Results:
    return functools.partial(JOBS.results, pool)


# ------------------------------------------------------------ real workers
@pytest.mark.parametrize("name", JOBS.params(CHOICES))
def test_all_workers_choose_the_same(results: Results, name: str) -> None:
    workers = results(name)
    heads = [w["summary"].split("\n\n")[0] for w in workers]
    assert len(set(heads)) == len({w["chosen"] for w in workers}) == 1
    distribution, _ = workers[0]["chosen"]
    assert f"Distribution: {distribution}, chosen by" in heads[0]
    assert "GFLOP/s, measured, and " in heads[0]
    network = "measured" if name.startswith("two") else "assumed"
    assert f"us between workers, {network}." in heads[0]
    assert {w["config"] for w in workers} == {"auto"}
    single = workers_modes.choose(None)
    for worker in workers:
        for replica in worker["weights"]:
            for got, want in zip(replica, single["weights"][0], strict=True):
                np.testing.assert_allclose(got, want, atol=1e-5)
    assert len(workers[0]["weights"]) * len(workers) == replicas_of(name)


@pytest.mark.parametrize("name", JOBS.params(["two: disagreement"]))
def test_disagreement_does_not_hang(results: Results, name: str) -> None:
    """What is measured together comes after all have agreed."""
    for message in results(name):
        assert "argument distribution: 'auto' on worker 0" in message


# ------------------------------------------------------------- the choice
def test_one_worker_has_the_form_of_comm_opt() -> None:
    models = [
        small.compiled_mlp(distribution=mode) for mode in ("auto", "comm_opt")
    ]
    auto_, plain = map(small.kfac_of, models)
    assert auto_.method.placement.plan == plain.method.placement.plan
    assert "comm_opt, as there is one worker" in small.summary_text(auto_)


def chosen(replicas: int, **arguments: Any) -> tuple[tfkfac.KFAC, str]:
    """What is chosen for a wide model before training, and what is said."""
    model = keras.Sequential(
        [keras.Input((300,)), *(keras.layers.Dense(300) for _ in range(8))]
    )
    optimizer = tfkfac.KFAC(distribution="auto", **arguments)
    optimizer.attach(model)
    everyone = tuple(range(replicas))
    optimizer.method.job.topology = Topology(
        replicas, everyone, (None,) * replicas, "auto"
    )
    return optimizer, small.summary_text(optimizer)


def assume(monkeypatch: pytest.MonkeyPatch, **changes: float) -> None:
    machine = Machine.of(1e12, 1e9, 1e-6)
    changed = dataclasses.replace(machine, **changes)
    monkeypatch.setitem(auto._ASSUMED, "auto", changed)


@pytest.mark.parametrize(
    ("intervals", "mode"), [((100, 1000), "comm_opt"), ((1, 1), "mem_opt")]
)
def test_stale_and_fresh_updates(
    monkeypatch: pytest.MonkeyPatch, intervals: tuple[int, int], mode: str
) -> None:
    """Decompositions that last are worth sending (KAISA, section 3.1)."""
    assume(monkeypatch)
    optimizer, text = chosen(
        8,
        factor_update_interval=intervals[0],
        inverse_update_interval=intervals[1],
    )
    assert optimizer.method.placement.distribution.mode == mode
    said = f"Distribution: {mode}, chosen by what K-FAC adds to a step at "
    assert f"{said}intervals {intervals[0]} and {intervals[1]}:" in text
    assert "with 1e+03 GFLOP/s, assumed, and 1 GB/s and 1 us" in text
    for other in ("comm_opt", "mem_opt", "hybrid_opt 0.25", "hybrid_opt 0.5"):
        assert f"\n  {other}: " in text
    assert "dp_kfac" not in text  # it would be another method


def test_a_fraction_is_not_for_auto() -> None:
    with pytest.raises(ValueError, match="gradient_worker_fraction"):
        tfkfac.Distribution("auto", gradient_worker_fraction=0.5)


def test_saved_as_auto() -> None:
    config = tfkfac.KFAC(distribution="auto").get_config()
    assert config["distribution"] == "auto"
    restored = tfkfac.KFAC.from_config(config)
    assert restored.get_config() == config
