"""MR-DHO2: accelerators work out the curvature while workers train.

Every job is compared with a simulation that does the same schedule one step
after the other, `fosi_simulation`. All is in float64; what differs is the
rounding of differences.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tfkfac
from tests.support import workers_fosi
from tests.support.cluster import Pool
from tests.support.jobs import replicas_of
from tests.support.multirole_cases import (
    CASES,
    EVALUATED,
    JOBS,
    REFUSED,
    count_workers,
    names,
    options_of,
    simulated,
    steps_of,
)
from tests.support.weights import distance
from tests.support.workers_fosi import DEFAULTS

CLOSE = 1e-6  # of the distance that all weights travelled
VALUES = 1e-5  # of the largest Ritz value

Results = Callable[[str], list[Any]]


@pytest.fixture
def results(pool: Pool) -> Results:
    """Gives the results of a job by process."""
    return functools.partial(JOBS.results, pool)


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_weights(results: Results, name: str) -> None:
    want = simulated(name)
    weights = want.objective.split(want.weights)
    for process in results(name):
        travelled = distance(weights, process["start"])
        assert travelled > 0.1
        assert distance(process["weights"], weights) <= CLOSE * travelled


@pytest.mark.parametrize("name", JOBS.params(names(poison=False)))
def test_moving_statistics(results: Results, name: str) -> None:
    """The first worker's, also on the accelerators."""
    workers = count_workers(name)
    for process in results(name):
        if process["ranks"][0] in (0, *range(workers, replicas_of(name))):
            for got, want in zip(
                process["statistics"], simulated(name).statistics, strict=True
            ):
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_same_bits_at_the_end_of_epochs(results: Results, name: str) -> None:
    """All that a model has, of the first worker and of accelerators.

    Other workers may have their own moving statistics.
    """
    by_rank = {
        rank: [epoch[place] for epoch in process["epochs"]]
        for process in results(name)
        for place, rank in enumerate(process["ranks"])
    }
    assert len(by_rank) == replicas_of(name)
    own = options_of(name)["model"] == "plain_norm"
    for rank, epochs in by_rank.items():
        assert len(epochs) == 3
        for got, want in zip(epochs, by_rank[0], strict=True):
            for one, other in zip(got, want, strict=True):
                own_statistics = own and 0 < rank < count_workers(name)
                if not (own_statistics and one.shape == (2,)):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_ritz_values(results: Results, name: str) -> None:
    """The same bits on all workers; accelerators keep none."""
    want = simulated(name).estimate
    assert want is not None
    by_rank: dict[int, Any] = {}
    for process in results(name):
        by_rank |= zip(process["ranks"], process["ritz_values"], strict=True)
        first = process["ritz_values"][0]
        shown = np.zeros([0]) if first is None else first
        np.testing.assert_array_equal(process["spectrum"], shown)
    for rank, values in by_rank.items():
        if rank >= count_workers(name):
            assert values is None
            continue
        np.testing.assert_array_equal(values, by_rank[0])
        off = np.abs(values - want.values).max()
        assert off <= VALUES * np.abs(want.values).max()


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_counts(results: Results, name: str) -> None:
    want = simulated(name)
    assert want.estimations > 0
    bad = int("poison" in options_of(name))
    for process in results(name):
        assert process["iterations"] == want.clock
        for place, rank in enumerate(process["ranks"]):
            works = rank < count_workers(name)
            seen = [
                process[k][place]
                for k in ("estimations", "failures", "skipped")
            ]
            blind = "blind" in name
            assert seen == (
                [want.estimations, want.failures, bad - blind]
                if works
                else [0, 0, 0]
            )
            assert want.failures == blind


# ----------------------------------------------------------------- metrics
@pytest.mark.parametrize("name", JOBS.params(names(poison=False)))
def test_metrics(results: Results, name: str) -> None:
    """Means over the rows of all replicas, at the weights of their step."""
    first, *others = results(name)
    for other in others:
        assert other["history"] == first["history"]
    losses, hits, rows = np.transpose(simulated(name).steps)
    begin = 0
    for logs, length in zip(first["history"], (3, 3, 4), strict=True):
        epoch = slice(begin, begin + length)
        total = rows[epoch].sum()
        assert logs["loss"] == pytest.approx(losses[epoch].sum() / total, 1e-6)
        assert logs["accuracy"] == pytest.approx(hits[epoch].sum() / total)
        begin += length


@pytest.mark.parametrize("name", JOBS.params(names("evaluated")))
def test_evaluate(results: Results, name: str) -> None:
    """The same everywhere right after `fit`, and right."""
    first, *others = results(name)
    for other in others:
        assert other["evaluation"] == first["evaluation"]
    if options_of(name)["model"] != "mlp":
        return
    want, rows = simulated(name), []
    for step in steps_of(name)[:EVALUATED]:
        rows += [row for own in step for row in own]
    point = want.objective.at(want.weights, rows, want.statistics)
    assert first["evaluation"]["loss"] == pytest.approx(point.loss, 1e-6)
    assert first["evaluation"]["accuracy"] == pytest.approx(
        point.hits / len(rows)
    )


# ----------------------------------------------------------------- reports
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_reports(results: Results, name: str) -> None:
    """Shares of waiting; when the first estimation has come, it is not said."""
    for process in results(name):
        idle = process["idle_share"]
        assert idle.shape == (replicas_of(name),)
        assert np.all((idle >= 0) & (idle <= 1))
        assert np.any(idle > 0)
        assert "the first" not in process["summary"]


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_state(results: Results, name: str) -> None:
    """Workers keep directions, accelerators the basis."""
    options = DEFAULTS | options_of(name)
    workers = count_workers(name)
    accelerators = replicas_of(name) - workers
    for process in results(name):
        size = sum(w.size for w in process["weights"])
        shape: Any = (3, -(-size // workers))
        if options["layout"] == "columns":
            shape = (-(-3 // workers), size)
        shapes = [
            shape if rank < workers else None for rank in process["ranks"]
        ]
        assert process["shapes"] == shapes
        # Of the first replica of the process, which has trained.
        kept, slices = process["state_bytes"], -(-size // accelerators)
        assert kept["total"] == process["kept_bytes"]
        assert kept["counters"] == 8 * (6 + 1 + 2 * replicas_of(name) + 2)
        vector, paper = 8 * size, options["final_update"] == "paper"
        if process["ranks"][0] < workers:
            assert kept["basis"] == 0
            assert kept["directions"] >= 8 * np.prod(shape)
            assert kept["copies"] == 2 * vector * paper
        else:
            assert kept["basis"] >= 8 * options["lanczos_steps"] * slices
            assert kept["directions"] == 0
            # The weights, and a batch of some rows.
            assert kept["copies"] > vector


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_traffic(results: Results, name: str) -> None:
    """Accelerators get weights and no gradients."""
    for process in results(name):
        moved = process["communication_bytes"]["estimation"]
        works = process["ranks"][0] < count_workers(name)
        variables = [*process["weights"], *process["statistics"]]
        if works:
            assert moved["lanczos"] == moved["weights"] == 0
            assert moved["directions"] > 0
            if options_of(name)["final_update"] == "paper":
                assert process["communication_bytes"]["plain"] == {
                    **dict.fromkeys(moved, 0),
                    "gradients": moved["gradients"],
                }
        else:
            assert moved["gradients"] == moved["projections"] == 0
            assert moved["weights"] == sum(v.nbytes for v in variables)
            assert moved["directions"] == 0


def test_when_the_first_estimation_comes() -> None:
    """At the end of the first interval, which follows the warmup."""
    options: Any = {"accelerator_fraction": 0.5, "warmup_steps": 1200}
    known = tfkfac.FOSI(**options, update_interval=30).method.estimator
    assert known.first(0) == known.first(1229) == "the first after update 1,230"
    assert known.first(1230) == ""
    changing = tfkfac.FOSI(**options, update_interval=lambda t: 30)
    first = changing.method.estimator.first
    assert first(0) == first(1200) == "the first begins before update 1,201"
    assert first(1201) == ""


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", JOBS.params(REFUSED))
def test_fractions_that_leave_out_a_role(results: Results, name: str) -> None:
    """Already `compile` says so, on every process."""
    for messages in results(name):
        for message, fraction, missing in zip(
            messages, REFUSED[name], ("accelerator", "worker"), strict=True
        ):
            assert f"accelerator_fraction={fraction}" in message
            assert f"no {missing}" in message


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 1.0])
def test_one_device_is_not_enough(fraction: float) -> None:
    (message,) = workers_fosi.fractions_refused(None, [fraction])
    assert f"accelerator_fraction={fraction}" in message
