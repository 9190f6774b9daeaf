"""The tool that runs Keras' own tests, with tests of ours, offline."""

import pathlib
import tarfile

import keras
import pytest

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


@pytest.fixture
def source(tmp_path: pathlib.Path) -> pathlib.Path:
    """A source distribution with a test of a callback, and another test."""
    folder = tmp_path / "keras-0" / "keras" / "src" / "callbacks"
    folder.mkdir(parents=True)
    (folder / "csv_logger_test.py").write_text(TEST)
    (folder / "other_test.py").write_text(TEST)
    archive = tmp_path / "keras-0.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "keras-0", "keras-0")
    return archive


def test_outcomes(
    source: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test that fails is an error unless its reason is known."""
    arguments = ["--source", str(source), "-q"]
    compile_before = keras.Model.compile
    assert keras_tests.main(arguments) == 1
    name = "csv_logger_test.py::test_fails"
    lines = capsys.readouterr().out.splitlines()
    assert "passed  csv_logger_test.py::test_replaced" in lines
    assert f"failed  {name}" in lines
    assert not any("other_test" in line for line in lines)
    monkeypatch.setitem(keras_tests.CANNOT_PASS, name, "it is false")
    assert keras_tests.main(arguments) == 0
    assert f"{name} cannot pass: it is false" in capsys.readouterr().out
    assert keras.Model.compile is compile_before


def test_what_stays_inside() -> None:
    """Averages and schedules, which tests are about."""
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
    kfac = tfkfac.KFAC()
    assert keras_tests.in_place_of(kfac) is kfac
