"""The command line, the runs and the records of the examples."""

import argparse
import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import pytest

import classification
from common import data, networks, session
from common.data import Data, Split

DEFAULTS = session.Defaults(epochs=7, batch_size=32, rates={"sgd": 0.2})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--optimizer lbfgs", "'lbfgs' is none of kfac, sgd"),
        ("--optimizer kfac:damping", "'damping' is not KEY=VALUE"),
        ("--batch-size 0", "above 0; received '0'"),
    ],
)
def test_wrong_argument(text: str, message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        session.make_parser(None, DEFAULTS).parse_args(text.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", session.NAMES)
def test_optimizers_decay_to_0(name: str) -> None:
    variant = session.parse_optimizer(f"{name}:learning_rate=0.25")
    optimizer = session.make_optimizer(variant, 8, {})
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [float(inner._learning_rate(step)) for step in (0, 4, 8)]
    np.testing.assert_allclose(rates, [0.25, 0.125, 0])


def tiny(options: argparse.Namespace) -> Data:
    """Return 40 training images and 20 test images of 2x2 pixels."""
    rng = np.random.default_rng(0)
    splits = [
        Split(
            rng.integers(0, 256, (size, 2, 2, 1)).astype(np.uint8),
            rng.integers(0, 3, size),
        )
        for size in (40, 20)
    ]
    return Data(*splits)


def network(shape: tuple[int, ...], classes: int) -> keras.Model:
    """Return a model of 19 weights."""
    hidden = [keras.layers.Flatten(), keras.layers.Dense(2, "tanh")]
    last = keras.layers.Dense(classes)
    return keras.Sequential([keras.Input(shape), *hidden, last])


@pytest.mark.slow
def test_comparison(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: Any
) -> None:
    """Losses are those of the batches; the summary, a plot and files."""
    monkeypatch.setattr(data, "load", tiny)
    monkeypatch.setitem(networks.CLASSIFIERS, "mlp", network)
    words = "classification.py --model mlp --optimizer kfac sgd --epochs 2 "
    words += f"--batch-size 10 --plot {tmp_path}/plots/plot.png "
    words += f"--json {tmp_path}/runs.json --log-dir {tmp_path}/logs"
    monkeypatch.setattr(sys, "argv", words.split())
    seen: list[float] = []
    on_end = session.Run.on_train_batch_end

    def end(self: session.Run, batch: int, logs: Any = None) -> None:
        on_end(self, batch, logs)
        # Keras' mean loss of the epoch so far.
        epoch = self.losses[len(self.losses) - batch - 1 :]
        seen.append(np.mean(epoch) - logs["loss"])

    monkeypatch.setattr(session.Run, "on_train_batch_end", end)
    classification.main()
    assert len(seen) == 16 and np.abs(seen).max() < 1e-5
    assert "Preconditioned weights" in capsys.readouterr().out
    png = (tmp_path / "plots" / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    records = json.loads((tmp_path / "runs.json").read_text())
    assert list(records) == ["kfac", "sgd"]
    for name, record in records.items():
        assert len(record["losses"]) == len(record["cpu_seconds"]) == 8
        assert [test["step"] for test in record["evaluations"]] == [4, 8]
        seconds = np.diff(record["seconds"], prepend=0)
        assert (seconds > 0).all()
        # The first step traced the graph, which does not count.
        assert seconds[0] == pytest.approx(seconds[1:].max())
        csv = (tmp_path / "logs" / f"{name}.csv").read_text()
        assert csv.count("\n") == 1 + 2
    assert records["kfac"]["state_bytes"]["total"] > 0


def test_batches_of_more_examples_than_there_are() -> None:
    parser = session.make_parser(None, DEFAULTS)
    runs = session.Session(parser.parse_args([]), "title").runs(31)
    with pytest.raises(SystemExit, match="at most 31"):
        next(runs)
