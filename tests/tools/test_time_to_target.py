"""The command line, which trainings there are, and runs with processes."""

import json
import pathlib
from typing import Any

import pytest

import time_to_target
from targets import study
from targets.run import Run


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--problem", "gan"], "invalid choice: 'gan'"),
        (["--method", "lion"], "'lion' is none of sgd, adam"),
        (["--method", "fosi-muon"], "'fosi-muon' is none of"),
        (["--method", "kfac:damping"], "'damping' is not KEY=VALUE"),
        (["--rates", "0"], "must be a number above 0; received '0'"),
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
