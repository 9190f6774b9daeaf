"""Training steps that XLA compiles, as Keras has it on a GPU by default."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": lambda: tfkfac.KFAC(0.1),
    "eigen": lambda: tfkfac.KFAC(0.1, solver="eigen"),
    # As many directions as weights: the start vector, which XLA draws in
    # another way, makes no difference then.
    "fosi": lambda: tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=9,
        warmup_steps=1,
        update_interval=3,
        lanczos_steps=9,
    ),
}


# Of the eigen solver, wanted in one test only.
pytestmark = pytest.mark.filterwarnings("ignore:.*compiled by XLA")


def train(optimizer: Any, jit: bool, bad_batch: int | None = None) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 2)).astype("float32")
    y = rng.integers(0, 3, 32)
    if bad_batch is not None:
        x[8 * bad_batch] = np.nan
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA on a CPU stands in for that of a GPU, which it is refused without."""
    devices = tf.config.list_physical_devices

    def pretend(kind: str | None = None) -> list[Any]:
        return ["a GPU"] if kind == "GPU" else devices(kind)

    monkeypatch.setattr(tf.config, "list_physical_devices", pretend)


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_without_xla(name: str) -> None:
    plain = train(OPTIMIZERS[name](), jit=False)
    compiled = train(OPTIMIZERS[name](), jit=True)
    assert compiled.jit_compile is True
    for got, want in zip(
        compiled.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("name", ["inverse", "fosi"])
def test_events_are_counted_under_xla(name: str) -> None:
    model = train(OPTIMIZERS[name](), jit=True, bad_batch=1)
    # The bad batch comes once in each of the two epochs.
    assert int(model.optimizer.skipped_steps) == 2
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.usefixtures("pretended_gpu")
def test_eigen_says_that_it_is_slow() -> None:
    def compile(solver: str, jit: bool) -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(tfkfac.KFAC(solver=solver), "mse", jit_compile=jit)

    with pytest.warns(UserWarning, match="XLA, whose eigen-decompositions"):
        compile("eigen", jit=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile("eigen", jit=False)
        compile("inverse", jit=True)


# ------------------------------------- saved with a GPU and loaded without
@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="XLA is allowed"
)
@pytest.mark.parametrize("name", ["inverse", "fosi"])
def test_loads_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning, trains on as without XLA, and keeps it in the file."""
    file = tmp_path / "model.keras"
    with monkeypatch.context() as patch:
        pretend_gpu(patch)
        train(OPTIMIZERS[name](), jit=True).save(file)
    with pytest.warns(UserWarning, match="trains with jit_compile=False"):
        model = keras.models.load_model(file)
    assert model.jit_compile is False
    x, y = np.ones((8, 2), "float32"), np.zeros(8, "int64")
    before = model.get_weights()
    model.fit(x, y, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert model.get_compile_config()["jit_compile"] is True
    # A user's own setting is an error all the same, after a load too.
    with pytest.raises(ValueError, match=r"Received: jit_compile=True.*False"):
        model.compile(OPTIMIZERS[name](), "mse", jit_compile=True)
