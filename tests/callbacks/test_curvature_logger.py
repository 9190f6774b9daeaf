"""Values of `CurvatureLogger` against NumPy and the optimizer's values."""

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
    """Train with eight steps per epoch."""
    model = mlp()
    eager = not isinstance(optimizer, tfkfac.GaussNewton)
    model.compile(optimizer, loss(), run_eagerly=eager)
    history = model.fit(
        X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks]
    )
    return model, history.history


def written(folder: Path) -> dict[tuple[int, str], float]:
    """Read the scalars of event files, by step and "quantity/layer"."""
    return {
        (event.step, item.tag.partition("/")[2]): float(
            tf.make_ndarray(item.tensor)
        )
        for path in sorted(folder.glob("events.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for item in event.summary.value
    }


def spd(rng: np.random.Generator, *shape: int) -> Array:
    half = rng.normal(size=(*shape, shape[-1] + 2))
    return np.asarray(half @ half.swapaxes(-1, -2))


@pytest.mark.parametrize("factor", ["matrix", "diagonal", "groups"])
def test_trace_and_condition_of_the_dense_block(factor: str) -> None:
    rng = np.random.default_rng(0)
    g = spd(rng, 3)
    if factor == "diagonal":
        a = rng.uniform(size=4)
        matrices = [np.diag(a)]
    else:
        a = spd(rng, 4) if factor == "matrix" else spd(rng, 2, 4)
        matrices = list(np.reshape(a, [-1, 4, 4]))
    blocks = [np.linalg.eigvalsh(np.kron(matrix, g)) for matrix in matrices]
    values = np.concatenate(blocks)
    condition = (values.max() + 0.3) / (values.min() + 0.3)
    result = layer_curvature({"A": a, "G": g}, 0.3)
    assert result == pytest.approx((values.sum(), condition))
    result = layer_curvature({"A": np.full_like(a, np.nan), "G": g}, 0.3)
    assert np.isnan(result).all()


def test_scalars_of_kfac(tmp_path: Path) -> None:
    optimizer = tfkfac.KFAC(
        step="natural", factor_update_interval=2, inverse_update_interval=6
    )
    _, history = fit(optimizer, CurvatureLogger(tmp_path, every=3))
    logged = written(tmp_path)
    assert sorted({step for step, _ in logged}) == [3, 6, 8, 9, 12, 15, 16]
    for layer, factors in optimizer.factors().items():
        trace, condition = layer_curvature(factors, 0.01)
        assert logged[16, f"trace/{layer}"] == pytest.approx(trace, rel=1e-5)
        result = logged[16, f"condition/{layer}"]
        assert result == pytest.approx(condition, rel=1e-3)
    for name, value in optimizer.last_step.items():
        assert logged[16, name] == pytest.approx(value, rel=1e-6)
        assert history[f"curvature/{name}"][-1] == pytest.approx(value)
    assert history["curvature/factor_updates"] == [4, 8]
    assert logged[8, "loss"] == pytest.approx(history["loss"][0], rel=1e-6)


def test_ritz_values_of_fosi(run_eagerly: Any) -> None:
    run_eagerly(True)
    optimizer = tfkfac.FOSI(
        "sgd",
        num_largest=2,
        warmup_steps=1,
        update_interval=6,
        lanczos_steps=4,
    )
    model, history = fit(optimizer, CurvatureLogger(), epochs=1)
    for i, value in enumerate(model.optimizer.spectrum()):
        assert history[f"curvature/ritz_value_{i}"][-1] == pytest.approx(value)


def test_columns_of_the_first_epoch(tmp_path: Path) -> None:
    """Metrics may be arrays; Ritz values are NaN before the estimation."""
    model = mlp()
    model.compile(
        tfkfac.FOSI(num_largest=2, warmup_steps=1000),
        keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.F1Score()],
        run_eagerly=True,
    )
    one_hot = keras.utils.to_categorical(Y)
    logger = CurvatureLogger(tmp_path, every=1)
    history = model.fit(X, one_hot, verbose=0, callbacks=[logger]).history
    assert history["f1_score"][0].shape == one_hot.shape[1:]
    assert np.isnan(history["curvature/ritz_value_1"]).all()
    assert history["curvature/seconds_per_step"][0] > 0
    assert "curvature/ritz_value_2" not in history


@pytest.mark.slow
def test_steps_of_gauss_newton_under_a_strategy() -> None:
    """The strategy mirrors `iterations` of the optimizer."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model, logs = fit(tfkfac.GaussNewton(), CurvatureLogger(), epochs=1)
    for name, value in model.optimizer.last_step.items():
        assert logs[f"curvature/{name}"][-1] == pytest.approx(value)


def test_wrong_arguments_are_refused(monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="`every`"):
        CurvatureLogger(every=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        CurvatureLogger("logs")
    with pytest.raises(ValueError, match="optimizer of tfkfac"):
        fit(keras.optimizers.SGD(), CurvatureLogger(), epochs=1)


def test_the_axis_counts_updates(tmp_path: Path) -> None:
    """Eight batches of each `fit` make two updates."""
    model = mlp()
    model.compile(tfkfac.KFAC(gradient_accumulation_steps=4), loss())
    for _ in range(2):
        logger = CurvatureLogger(tmp_path)
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[logger])
    assert {step for step, _ in written(tmp_path)} == {2, 4}
