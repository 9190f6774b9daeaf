"""The demonstration: as long for both, and in words of its own."""

import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

from targets import recording

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ROOT / "tools"
LINE = re.compile(
    r"^(KFAC\(\)|Adam) +(\d+) steps +([\d.]+) processor seconds \(([\d.]+) on "
    r"the clock\)  squared error of an image +([\d.]+)$",
    re.MULTILINE,
)


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


@pytest.mark.slow
def test_as_long_for_both() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOLS / "demo.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    shown = done.stdout
    *_, kfac, _, _, _, adam = LINE.findall(shown)
    assert (kfac[0], adam[0]) == ("KFAC()", "Adam")
    assert float(adam[2]) == pytest.approx(float(kfac[2]), rel=0.05)
    assert float(kfac[4]) < float(adam[4])
