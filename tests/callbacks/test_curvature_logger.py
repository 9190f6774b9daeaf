"""What `CurvatureLogger` says, against numbers worked out beside it."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.reference import Array
from tests.support.small import data, loss, mlp
from tfkfac.callbacks import CurvatureLogger
from tfkfac.callbacks.curvature_logger import layer_curvature

X, Y = data(32)


def fit(optimizer: Any, *callbacks: Any, epochs: int = 2) -> Any:
    """Eight steps an epoch."""
    model = mlp()
    eager = not isinstance(optimizer, tfkfac.GaussNewton)
    model.compile(optimizer, loss(), run_eagerly=eager)
    history = model.fit(
        X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks]
    )
    return model, history.history


def written(folder: Path, quantity: str) -> dict[tuple[int, str], float]:
    """Scalars of a quantity in the event files, by step and layer."""
    values = {}
    for path in sorted(folder.glob("events.*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for item in event.summary.value:
                _, name, *layer = item.tag.split("/")
                if name == quantity:
                    key = event.step, "/".join(layer)
                    values[key] = float(tf.make_ndarray(item.tensor))
    return values


def spd(rng: np.random.Generator, *shape: int) -> Array:
    half = rng.normal(size=(*shape, shape[-1] + 2))
    return np.asarray(half @ half.swapaxes(-1, -2))


@pytest.mark.parametrize("kind", ["matrices", "diagonal", "groups"])
def test_trace_and_condition_are_those_of_the_whole_block(kind: str) -> None:
    rng = np.random.default_rng(0)
    g = spd(rng, 3)
    if kind == "diagonal":
        a = rng.uniform(size=4)
        each = [np.diag(a)]
    else:
        a = spd(rng, 4) if kind == "matrices" else spd(rng, 2, 4)
        each = list(np.reshape(a, [-1, 4, 4]))
    blocks = [np.linalg.eigvalsh(np.kron(one, g)) for one in each]
    values = np.concatenate(blocks)
    condition = (values.max() + 0.3) / (values.min() + 0.3)
    found = layer_curvature({"A": a, "G": g}, 0.3)
    assert found == pytest.approx((values.sum(), condition))
    found = layer_curvature({"A": np.full_like(a, np.nan), "G": g}, 0.3)
    assert np.isnan(found).all()


def test_it_logs_what_the_optimizer_did(tmp_path: Path) -> None:
    optimizer = tfkfac.KFAC(factor_update_interval=2, inverse_update_interval=6)
    _, history = fit(optimizer, CurvatureLogger(tmp_path, every=3))
    said = written(tmp_path, "trace")
    assert sorted({step for step, _ in said}) == [3, 6, 8, 9, 12, 15, 16]
    for layer, factors in optimizer.factors().items():
        trace, condition = layer_curvature(factors, 0.01)
        assert said[16, layer] == pytest.approx(trace, rel=1e-5)
        conditions = written(tmp_path, "condition")
        assert conditions[16, layer] == pytest.approx(condition, rel=1e-3)
    for name, value in optimizer.last_step.items():
        own = written(tmp_path, name)[16, ""]
        assert own == pytest.approx(value, rel=1e-6)
        assert history[f"curvature/{name}"][-1] == pytest.approx(value)
    assert history["curvature/factor_updates"] == [4, 8]
    losses = written(tmp_path, "loss")
    assert losses[8, ""] == pytest.approx(history["loss"][0], rel=1e-6)


def test_ritz_values_of_fosi() -> None:
    optimizer = tfkfac.FOSI("sgd", num_largest=2, warmup_steps=1)
    model, history = fit(optimizer, CurvatureLogger())
    for i, value in enumerate(model.optimizer.spectrum()):
        assert history[f"curvature/ritz_value_{i}"][-1] == pytest.approx(value)


@pytest.mark.slow
def test_steps_of_gauss_newton_under_a_strategy(tmp_path: Path) -> None:
    """Whose iterations are mirrored."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model, logs = fit(
            tfkfac.GaussNewton(), CurvatureLogger(tmp_path), epochs=1
        )
    for name, value in model.optimizer.last_step.items():
        assert logs[f"curvature/{name}"][-1] == pytest.approx(value)
    (tries,) = written(tmp_path, "tries").values()
    assert tries >= 1


def test_wrong_arguments_are_refused(monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="`every`"):
        CurvatureLogger(every=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        CurvatureLogger("logs")
    with pytest.raises(ValueError, match="optimizer of tfkfac"):
        fit(keras.optimizers.SGD(), CurvatureLogger(), epochs=1)
