"""Parts of the studies, worked out by hand.

`test_docs.py` compares all tables and sentences with the committed pages.
"""

import gzip
import json
import math
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import benchmark
import compiled_step
import large_batches
import other_optimizers
import time_to_target
from common import canvases, data
from targets import equal, plan, recording, report, results, study
from targets.methods import keras_decay
from targets.run import Run


# ----------------------------------------------------------------------- data
def write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = header + array.astype(np.uint8).tobytes()
    packed = gzip.compress(content) if path.suffix == ".gz" else content
    path.write_bytes(packed)


def test_idx_files(tmp_path: pathlib.Path) -> None:
    """Plain and compressed files; labels and pixels as written."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 6, 5))
    for prefix, size, suffix in [("train", 30, ".gz"), ("t10k", 12, "")]:
        images = tmp_path / f"{prefix}-images-idx3-ubyte{suffix}"
        labels = tmp_path / f"{prefix}-labels-idx1-ubyte{suffix}"
        write_idx(images, pixels[:size])
        write_idx(labels, np.arange(size) % 3)
    result = data.idx_images(tmp_path)
    np.testing.assert_array_equal(result.train.x[..., 0], pixels)
    np.testing.assert_array_equal(result.train.y, np.arange(30) % 3)
    np.testing.assert_array_equal(result.test.x[..., 0], pixels[:12])


def test_canvases() -> None:
    """Two digits on each canvas; the classes are those of the bright pixels."""
    split = canvases.compose(data.digits().train, 20, seed=5)
    bright = split.x[..., 0] > canvases.INK
    np.testing.assert_array_equal(bright, split.y > 0)
    assert all(len(np.unique(labels)) in (2, 3) for labels in split.y)


# ---------------------------------------------------------- time_to_target.py
def test_known_results_are_not_measured_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second call with more seeds trains these only; all results are kept."""
    file, trained = tmp_path / "study.json", []

    def train(
        runs: Sequence[Run], directory: Any, file: str | None
    ) -> Iterator[dict[str, Any]]:
        for run in runs:
            trained.append(run.seed)
            if run.seed == 13:
                raise study.FailedError("no luck")
            metric = abs(math.log((run.rate or 1.0) / 0.004))  # a loss
            columns = ("step", "seconds", "cpu_seconds", "metric")
            curve = {key: [1.0] for key in columns} | {"metric": [metric]}
            yield {"first_step": 1.0, "curve": curve, "validation": 1.0}

    def call(*seeds: str) -> int:
        words = ["--size", "tiny", "--problem", "cnn"]
        words += ["--method", "adam", "--seeds"]
        return time_to_target.main([*words, *seeds, "--json", str(file)])

    monkeypatch.setattr(study, "train", train)
    assert call("0") == 0
    assert trained == [0] * 4
    assert call("0", "1") == 0
    assert {*trained[4:]} == {1}
    assert call("0", "13") == 1
    assert "no luck" in capsys.readouterr().err
    stored = json.loads(file.read_text())
    assert len(stored["runs"]) == 8
    last = stored["environments"][-1]
    assert last["arguments"][-2:] == ["--json", "study.json"]
    assert str(tmp_path) not in file.read_text()


def test_weight_decay_has_an_effective_size() -> None:
    """A rate from 0.1 to 0 in 50 steps takes away a quarter of a weight."""
    steps, rate = 50, 0.1
    schedule = keras.optimizers.schedules.PolynomialDecay(rate, steps, 0.0)
    decay = keras_decay(0.25, rate, steps)
    assert decay is not None
    left = math.prod(1 - decay * float(schedule(i)) for i in range(steps))
    assert left == pytest.approx(0.75, rel=0.01)
    assert keras_decay(0.0, rate, steps) is None


# --------------------------------------------------------------------- tables
@pytest.mark.parametrize(
    "differences,claim",
    [
        # Mean 3, deviation 1: 3 * sqrt(3) = 5.2 deviations.
        ([2.0, 3.0, 4.0], "more"),
        ([-2.0, -3.0, -4.0], "less"),
        # Mean 2, deviation 2: sqrt(3) = 1.7 deviations.
        ([0.0, 2.0, 4.0], "tie"),
        # Mean 3, deviation sqrt(3): 3 deviations, and a little less.
        ([2.0, 2.001, 4.999], "more"),
        ([2.0, 1.999, 5.001], "tie"),
        ([5.0], "tie"),
        ([0.0, 0.0], "tie"),
    ],
)
def test_a_claim_takes_three_sigmas(
    differences: list[float], claim: str
) -> None:
    assert results.judge(differences) == claim


def test_the_quickest_of_equal_settings_is_chosen() -> None:
    """Errors of 0.1 and 0.1009 are level, 0.1011 and what diverges not."""

    def record(seconds: float, metric: float | None, **run: Any) -> Any:
        usual = {"phase": "search", "problem": "cnn", "size": "small"}
        usual |= {"data": "digits", "method": "muon", "rate": None}
        usual |= {"rest": None, "decay": 0.0, "share": 1.0, "seed": 0}
        curve = {"cpu_seconds": [seconds], "metric": [metric]}
        return {"run": usual | run, "curve": curve}

    records = [
        record(40.0, 0.9, batch=125),
        record(20.0, 0.8991, batch=250),
        record(10.0, 0.8989, batch=500),
        record(5.0, None, batch=250, rate=1.0),
    ]
    best = plan.best_setting(records)
    assert best is not None and best.batch == 250
    # Errors of 0.2 are good enough where the best baseline has these.
    half = record(4.0, 0.85, batch=250, share=0.5)
    best = plan.best_setting([*records, half], 0.2)
    assert best is not None and best.share == 0.5


# -------------------------------------------------------------- equal seconds
def test_equal_seconds() -> None:
    """`KFAC()` takes twice Adam's 10 s, and 95 % of Muon's 21 s.

    So Adam trains for twice the epochs, with the best rate for these, and
    Muon for equal epochs. The better of the two decides.
    """
    common = {"phase": "final", "problem": "vae", "size": "full"}
    common |= {"data": "digits", "rest": None, "decay": 0.0, "batch": 125}
    shared = {"share": 1.0, "seed": -1}
    settings = [
        Run(method=method, rate=rate, **common, **shared)
        for method, rate in (("adam", 0.01), ("muon", 0.1), ("kfac", None))
    ]
    ends = {"kfac": 1.0, "adam": 3.0, "muon": 2.0}
    seconds = {"kfac": 20.0, "adam": 10.0, "muon": 21.0}
    records: list[Any] = []
    requested: list[tuple[str, str, float | None, float]] = []
    for stage in equal.EqualSeconds(settings, (5, 6)).stages(records):
        for run in stage:
            requested.append((run.phase, run.method, run.rate, run.share))
            # The held-out loss is lowest at half of the rate.
            end = run.rate and abs(run.rate - 0.005)
            if run.phase == "final":
                end = ends[run.method] + 0.01 * run.seed - 2.5 * (run.share > 1)
            time = run.share * seconds[run.method]
            curve = {"cpu_seconds": [time], "metric": [end]}
            run_fields = {**run.__dict__}
            records.append(
                {"run": run_fields, "curve": curve, "environment": 0}
            )
    assert requested[:6:2] == [
        ("final", "adam", 0.01, 1.0),
        ("final", "muon", 0.1, 1.0),
        ("final", "kfac", None, 1.0),
    ]
    searched = [rate for phase, _, rate, _ in requested if phase == "search"]
    assert searched == [0.01, 0.005, 0.02, 0.005, 0.0025, 0.01]
    assert requested[-2:] == 2 * [("final", "adam", 0.005, 2.0)]
    assert len(requested) == 6 + 6 + 2
    pairs = list(report.equal_seconds(records))
    assert [(p.baseline.method, p.end) for p in pairs] == [
        ("adam", "less"), ("adam", "more"), ("muon", "less")
    ]  # fmt: skip
    text = report.headline(records)
    assert "tuned Adam and Muon on **0 of 1 problems**, level on 0, w" in text
    assert "At equal epochs it ends better on **1 of 1 problems**" in text
    assert "**2.00 of Adam's processor seconds**" in text
    assert "(not run: autoencoder, " in text and "Adam only" not in text
    others = [r for r in records if r["run"]["method"] != "muon"]
    assert "; vae: Adam only)" in report.headline(others)
    _, [row] = report.summary(records)
    assert row[3:] == [
        "1.055 ± 0.0071", "Adam, 8 epochs: 0.555 ± 0.0071", "worse",
        "Muon: 2.055 ± 0.0071", "**better**", "0.95", "2.00",
    ]  # fmt: skip


# ----------------------------------------------------------- large_batches.py
@pytest.mark.parametrize("first", [8, 64, 2048])
def test_steps_are_interpolated(first: int) -> None:
    """Losses of 100 / steps reach 0.25 after 400 steps."""

    def loss(steps: int, rate: int) -> float:
        return 100 / steps

    counted = large_batches.count(loss, 0.25, first, 0, False)
    assert counted == (pytest.approx(400), 512, 0)
    assert large_batches.count(loss, 1e-9, first, 0, False)[0] is None


def test_the_best_rate_is_searched_for_each_length() -> None:
    """The third rate reaches the target in a sixteenth of the steps."""

    def loss(steps: int, rate: int) -> float:
        return 100 * 4 ** abs(rate - 3) / steps

    counted = large_batches.count(loss, 0.25, 64, 1, True)
    assert counted == (pytest.approx(400), 512, 3)
    assert large_batches.count(loss, 0.25, 64, 1, False)[1] == 8192


# --------------------------------------------------------------- benchmark.py
def test_median_of_each_phase() -> None:
    """Three intervals of four steps, from step 6 on; step 15 is disturbed."""
    by_step = {
        **{6: 1.0, 7: 2.0, 8: 9.0, 9: 4.0},
        **{10: 1.2, 11: 2.2, 12: 9.2, 13: 4.2},
        **{14: 1.1, 15: 70.0, 16: 9.1, 17: 4.1},
    }
    # Steps 8, 12 and 16 have phase 0, then come 9, 10 and 7.
    phases = benchmark.phases(4, 6, list(by_step.values()))
    assert phases == [9.1, 4.1, 1.1, 2.2]


# -------------------------------------------------------------------- demo.py
def test_an_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a quarter of a second, measuring and tracing nothing."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    iterations = model.optimizer.iterations
    monkeypatch.setattr(
        recording, "_now", lambda: (int(iterations), int(iterations) / 4)
    )
    rates: list[float] = []
    allowance = recording.Allowance(lambda: 7.0, 2.0, 4, rate=0.5)
    after = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    x = np.zeros((100, 1), "float32")
    model.fit(x, x, 1, callbacks=[allowance, after], verbose=0)
    assert rates == [0.5 * (1 - step / 8) for step in range(9)]
    assert allowance.first_step == 0.25
    assert allowance.curve == {
        "step": [3, 5, 7, 9],
        "seconds": [2, 4, 6, 8],
        "cpu_seconds": [0.5, 1.0, 1.5, 2.0],
        "metric": [7.0] * 4,
    }


# -------------------------------------------------------- other_optimizers.py
def test_soap() -> None:
    """25 steps of SOAP of the package pytorch_optimizer 4.1.0, in float32.

    The matrix is square: null spaces of Shampoo's matrices have no unique
    bases.
    """
    path = pathlib.Path(__file__).parents[1] / "data" / "soap.npz"
    with np.load(path) as data:
        weights = [keras.Variable(data["w"]), keras.Variable(data["b"])]
        optimizer = other_optimizers.soap(0.01, None)
        for gradients in zip(data["gw"], data["gb"], strict=True):
            optimizer.apply([*map(tf.constant, gradients)], weights)
        for weight, name in zip(weights, "wb", strict=True):
            np.testing.assert_allclose(weight, data[f"{name}_end"], atol=1e-6)


def test_muon_of_a_kernel_is_that_of_its_matrix() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 2, 4, 5)).astype("float32")
    gradient = rng.normal(size=start.shape).astype("float32")
    ends = []
    for shape in (start.shape, (24, 5)):
        weight = keras.Variable(start.reshape(shape))
        optimizer = other_optimizers.reshaped_muon(0.1, None)
        optimizer.apply([tf.constant(gradient.reshape(shape))], [weight])
        ends.append(weight.numpy().reshape(start.shape))
    np.testing.assert_allclose(*ends, atol=1e-6)
    assert np.abs(ends[0] - start).max() > 0.01


# ----------------------------------------------------------- compiled_step.py
def test_equal_layers_share_the_instructions_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four equal layers and an output layer: at most 7 times Muon's addition.

    The inverse updates are not in the compiled step.
    """
    model: Any = (lambda: compiled_step.mlp(8, 4, 8)), 32
    monkeypatch.setitem(compiled_step.MODELS, "dense5", model)
    counts = {}
    for name in ("adam", "muon", "kfac"):
        text, module = compiled_step.compiled_step("dense5", name)
        counts[name] = sum(" = " in line for line in text.splitlines())
        assert "cholesky(" not in text
        assert b"dot" in module
    added = {name: count - counts["adam"] for name, count in counts.items()}
    assert added["muon"] > 0
    assert 0 < added["kfac"] <= 7 * added["muon"], counts
