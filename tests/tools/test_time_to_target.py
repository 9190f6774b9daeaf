"""The command line, which trainings there are, and runs with processes."""

import json
import pathlib
from typing import Any

import pytest

import time_to_target
from targets import study
from targets.problems import BASELINES, KFACS
from targets.run import Run, plan


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--problem", "gan"], "invalid choice: 'gan'"),
        (["--method", "lion"], "'lion' is none of sgd, adam"),
        (["--method", "fosi-muon"], "'fosi-muon' is none of"),
        (["--method", "kfac:damping"], "'damping' is not KEY=VALUE"),
        (["--rates", "0"], "must be a number above 0; received '0'"),
        (["--jobs", "0"], "must be a whole number above 0"),
        (["--data", "mnist"], "must be mnist or fashion_mnist, = and"),
        (["--data", "kmnist=/tmp"], "must be mnist or fashion_mnist, = and"),
        (["--data", "mnist=/no/such"], "= and a directory; received"),
    ],
)
def test_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        time_to_target.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def planned(*arguments: str) -> list[Run]:
    return time_to_target.planned(time_to_target.parse_arguments(arguments))


def test_every_method_has_both_lengths_and_every_seed() -> None:
    runs = planned("--problem", "cnn")
    assert len(set(runs)) == len(runs) == 3 * 2 * (4 * 4 + 2)
    assert {run.method for run in runs} == {*BASELINES, *KFACS}
    assert {run.size for run in runs} == {"full"}
    assert [run.rate for run in runs if run.is_kfac] == [None] * 12


@pytest.mark.parametrize(
    "problem,method,length,steps,batch",
    [
        ("autoencoder", "adam", "full", 1920, 125),
        ("autoencoder", "adam", "half", 960, 125),
        # A quarter of four epochs of 60,000 images.
        ("autoencoder", "kfac", "full", 120, 500),
        # Two thirds of three.
        ("cnn", "kfac", "full", 480, 250),
        ("cnn", "kfac-quadratic", "full", 480, 250),
        ("transformer", "kfac", "half", 250, 32),
        ("mlp", "kfac", "double", 360, 500),
        ("mlp", "fosi-adam", "full", 1440, 125),
    ],
)
def test_schedules(
    problem: str, method: str, length: str, steps: int, batch: int
) -> None:
    run = next(plan(problem, "full", "digits", [method], [length], [0], 1))
    assert (run.count_steps(), run.batch) == (steps, batch)


def test_known_results_are_not_measured_again(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second call with more seeds does these only; --again forgets."""
    done: list[Run] = []

    def train(run: Run, directory: pathlib.Path | None) -> dict[str, Any]:
        done.append(run)
        if run.seed == 13:
            raise study.FailedError("no luck")
        point = {"step": 1, "samples": 1, "seconds": 1.0, "cpu_seconds": 2.0}
        return {
            "run": run.__dict__,
            "first_step": {"seconds": 1.0, "cpu_seconds": 1.0},
            "curve": [{**point, "metric": 0.5}],
        }

    monkeypatch.setattr(study, "train", train)
    file = tmp_path / "study.json"
    csv = "--csv", str(tmp_path / "x.csv")

    def call(*arguments: str) -> int:
        done.clear()
        shared = "--problem", "mlp", "--method", "adam", "kfac", "--rates", "1"
        return time_to_target.main(
            [*shared, *arguments, "--json", str(file), *csv]
        )

    assert call("--seeds", "0") == 0
    assert len(done) == 4
    assert call("--seeds", "0", "1") == 0
    assert {run.seed for run in done} == {1} and len(done) == 4
    assert call("--seeds", "0", "--again", "kfac") == 0
    assert {run.method for run in done} == {"kfac"} and len(done) == 2
    assert call("--seeds", "0", "13") == 1
    assert "no luck" in capsys.readouterr().err
    assert len(json.loads(file.read_text())["runs"]) == 8
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + 8


def test_rates_are_searched_with_one_seed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other seeds train the rate that ended best, one each length."""
    done: list[Run] = []

    def train(run: Run, directory: pathlib.Path | None) -> dict[str, Any]:
        done.append(run)
        # At half length 0.1 diverges.
        best = 0.1 if run.length == "full" else 0.2
        bad = float("nan") if run.length == "half" else 0.6
        point = {"step": 1, "samples": 1, "seconds": 1.0, "cpu_seconds": 2.0}
        return {
            "run": run.__dict__,
            "first_step": {"seconds": 1.0, "cpu_seconds": 1.0},
            "curve": [{**point, "metric": 0.7 if run.rate == best else bad}],
        }

    monkeypatch.setattr(study, "train", train)
    time_to_target.main(
        [
            *("--problem", "mlp", "--method", "adam", "--search-once"),
            *("--rates", "0.1", "0.2", "--seeds", "3", "4", "5"),
        ]
    )
    assert {(run.rate, run.length) for run in done[:4]} == {
        (rate, length) for rate in (0.1, 0.2) for length in ("full", "half")
    }
    assert {run.seed for run in done[:4]} == {3}
    assert {(run.rate, run.length, run.seed) for run in done[4:]} == {
        (0.1, "full", 4),
        (0.1, "full", 5),
        (0.2, "half", 4),
        (0.2, "half", 5),
    }
    assert len(done) == 8


@pytest.mark.slow
def test_a_study(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real trainings: the curves are whole and an epoch of K-FAC learns."""
    file, plot = tmp_path / "study.json", tmp_path / "study.png"
    code = time_to_target.main(
        [
            *("--quick", "--problem", "regression"),
            *("--method", "adam", "kfac", "kfac-quadratic", "--jobs", "2"),
            *("--json", str(file), "--plot", str(plot)),
        ]
    )
    assert code == 0
    records = json.loads(file.read_text())["runs"]
    assert len(records) == 2 * (2 + 2)
    for record in records:
        run, curve = Run(**record["run"]), record["curve"]
        assert len(curve) == 24
        assert curve[-1]["step"] == run.count_steps()
        assert curve[-1]["samples"] == run.count_steps() * run.batch
        assert record["first_step"]["cpu_seconds"] > 0
        for quantity in ("step", "seconds", "cpu_seconds"):
            values = [point[quantity] for point in curve]
            assert values == sorted(values)
        assert curve[-1]["metric"] < 0.1  # of the variance
    assert "| kfac |" in capsys.readouterr().out
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["autoencoder", "resnet20", "transformer"])
def test_models_learn(
    problem: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from targets import training

    monkeypatch.setattr(Run, "count_steps", lambda self: 30)
    run = Run(problem, "small", "digits", "adam", 2e-3, "full", 0, 1)
    curve = training.train(run, None)["curve"]
    assert curve[0]["metric"] != curve[-1]["metric"]
