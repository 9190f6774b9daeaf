"""Private modules of Keras at their old and their new places."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.compat.contracts import contract
from tfkfac.compat.gradients import KERAS_NN, module_at

# Keras 3.16 has the module elsewhere.
AS_LATER = """
import sys
import keras
import keras.src.backend.tensorflow as tensorflow

old, new = "keras.src.backend.tensorflow.nn", "keras.src.backend.tensorflow.ops"
if old in sys.modules:
    package = type(sys)(new)
    package.__path__ = []
    package.nn = sys.modules.pop(old)
    sys.modules |= {new: package, new + ".nn": package.nn, old: None}
    del tensorflow.nn

import numpy as np
import tfkfac

for optimizer in (tfkfac.KFAC(), tfkfac.FOSI(warmup_steps=1)):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, "softmax"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(32, 3))
    y = (x[:, 0] > 0).astype(int)
    fit = model.fit(x, y, batch_size=8, epochs=4, verbose=0)
    assert fit.history["loss"][-1] < fit.history["loss"][0]
print("trained")
"""


def test_the_places_of_later_versions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_LATER],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "trained", done.stderr


def test_moments_of_all_replicas() -> None:
    promise = "`_compute_moments_sync` is in a module at one of these places."
    with contract("compat.gradients.KERAS_NN", promise):
        assert hasattr(module_at(*KERAS_NN), "_compute_moments_sync")


def test_the_first_place_that_there_is() -> None:
    assert module_at("json", "os") is json
    assert module_at("nowhere", "json.nowhere.deeper", "os") is os
    with pytest.raises(ImportError, match=r"none of .*'json\.nowhere'"):
        module_at("json.nowhere", "nowhere")


def test_what_a_module_misses_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no other place."""
    (tmp_path / "half_a_module.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        module_at("half_a_module", "json")
