"""The tool that runs Keras' own tests, with tests of ours, offline."""

import pathlib
import tarfile
from typing import Any

import keras

import keras_tests
import tfkfac

TEST = """
import keras
import tfkfac

def test_replaced():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    assert type(model.optimizer) is tfkfac.KFAC
    model.compile("adam", "mse")
    assert type(model.optimizer) is tfkfac.KFAC

def test_fails():
    assert False
"""


def test_outcomes(tmp_path: pathlib.Path, capfd: Any) -> None:
    """Of a source distribution, the tests of callbacks are run."""
    folder = tmp_path / "keras-0" / "keras" / "src" / "callbacks"
    folder.mkdir(parents=True)
    (folder / "csv_logger_test.py").write_text(TEST)
    (folder / "other_test.py").write_text(TEST)
    archive = tmp_path / "keras-0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "keras-0", "keras-0")
    compile_before = keras.Model.compile
    assert keras_tests.main(["--source", str(archive), "-q"]) == 1
    output = capfd.readouterr().out
    assert "1 failed, 1 passed" in output and "other_test" not in output
    assert keras.Model.compile is compile_before


def test_optimizers_that_stay_inside() -> None:
    """Averages and schedules, which the tests of Keras are about."""
    plain = keras_tests.in_place_of(keras.optimizers.Adam(0.1))
    assert not isinstance(plain.inner_optimizer, keras.optimizers.Adam)
    rate = keras.optimizers.schedules.PolynomialDecay(0.1, 10)
    for given in (
        keras.optimizers.Adam(rate),
        keras.optimizers.Adam(use_ema=True),
    ):
        assert keras_tests.in_place_of(given).inner_optimizer is given
        scaler = keras.optimizers.LossScaleOptimizer(given)
        inside = keras_tests.in_place_of(scaler).inner_optimizer
        assert inside.inner_optimizer is given
    kfac = tfkfac.KFAC(step="natural")
    assert keras_tests.in_place_of(kfac) is kfac
