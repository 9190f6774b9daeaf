"""Training steps compiled by XLA, Keras' default on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.marks import with_slow
from tests.support.small import loss

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": lambda: tfkfac.KFAC(0.1),
    "eigen": lambda: tfkfac.KFAC(0.1, solver="eigen"),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    # As many directions as weights: the start vector, which XLA draws in
    # another way, makes no difference then.
    "fosi": lambda: tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=9,
        warmup_steps=1,
        update_interval=3,
        lanczos_steps=9,
    ),
    "few directions": lambda: tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=2,
        warmup_steps=1,
        lanczos_steps=6,
    ),
}
# Of the eigen solver, wanted in one test only.
pytestmark = pytest.mark.filterwarnings("ignore:.*compiled by XLA")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use XLA on the CPU in place of XLA on a GPU."""
    devices = tf.config.list_physical_devices

    def pretend(kind: str | None = None) -> list[Any]:
        return ["a GPU"] if kind == "GPU" else devices(kind)

    monkeypatch.setattr(tf.config, "list_physical_devices", pretend)


def dense(optimizer: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    model.compile(optimizer, loss(), **options)
    return model


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    "name",
    with_slow(["inverse", "eigen", "fosi"], "eigen", "fosi"),
)
def test_trains_as_without_xla(name: str) -> None:
    """XLA and plain steps agree; a batch with a NaN is counted."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 2)).astype("float32")
    y = rng.integers(0, 3, 32)
    x[8] = np.nan
    found = []
    for jit in (False, True):
        model = dense(OPTIMIZERS[name](), jit_compile=jit)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert model.jit_compile is jit
        assert int(model.optimizer.skipped_steps) == 2
        found.append(model.get_weights())
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# ------------------------------------------------------- kinds of layers
def network(shape: tuple[int, ...], *hidden: Any) -> Any:
    """Some layers between an input and two logits."""
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(2)])


def tokens() -> Any:
    x = inputs = keras.Input((3,), dtype="int32")
    x = layers.Embedding(5, 4)(x)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    x = layers.EinsumDense("abc,cd->abd", (3, 2), bias_axes="d")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


NETWORKS: dict[str, Callable[[], Any]] = {
    # Preconditioned by its rows.
    "rows": lambda: network((40,), layers.Dense(32, "tanh")),
    "images": lambda: network(
        (5, 5, 2),
        layers.Conv2D(3, 3, strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.DepthwiseConv2D(2),
        layers.Flatten(),
    ),
    "tokens": tokens,
}


def trained(name: str, optimizer: Any, jit: bool) -> Any:
    keras.utils.set_random_seed(0)
    model = NETWORKS[name]()
    model.compile(optimizer, loss(), jit_compile=jit)
    rng = np.random.default_rng(0)
    (inputs,) = model.inputs
    x = rng.integers(0, 5, (8, *inputs.shape[1:]))
    if inputs.dtype != "int32":
        x = rng.normal(size=x.shape).astype("float32")
    y = rng.integers(0, 2, len(x))
    for _ in range(4):
        model.train_on_batch(x, y)
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "inverse") for name in NETWORKS),
        ("rows", "spectral"),
        ("images", "few directions"),
    ],
)
def test_layers(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps agree up to rounding; measured: 7e-7.

    Spectral steps are in float64: their polynomials amplify rounding errors
    1,000 times along directions that the few gradients do not span.
    """

    def start(shape: Any, seed: Any) -> Any:
        vector = np.random.default_rng(0).normal(size=shape)
        return tf.constant(vector, tf.float32)

    # XLA draws other numbers.
    monkeypatch.setattr(tf.random, "stateless_normal", start)
    with floats("float64" if kind == "spectral" else "float32"):
        plain = trained(name, OPTIMIZERS[kind](), jit=False)
        compiled = trained(name, OPTIMIZERS[kind](), jit=True)
    for got, want in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


@pytest.mark.usefixtures("pretended_gpu")
def test_gauss_newton_does_without() -> None:
    """GaussNewton trains without XLA, because `tf.linalg.lstsq` has none."""
    optimizer = tfkfac.GaussNewton(solve="residuals")
    with pytest.warns(UserWarning, match="trains with jit_compile=False"):
        model = dense(optimizer, jit_compile=True)
    assert model.jit_compile is False


# ------------------------------------- saved with a GPU and loaded without
@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="XLA is allowed"
)
def test_loads_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model saved with XLA loads without a GPU, with a warning."""
    file = tmp_path / "model.keras"
    with monkeypatch.context() as patch:
        pretend_gpu(patch)
        dense(OPTIMIZERS["inverse"](), jit_compile=True).save(file)
    with pytest.warns(UserWarning, match="trains with jit_compile=False"):
        model = keras.models.load_model(file)
    assert model.jit_compile is False
    x, y = np.ones((8, 2), "float32"), np.zeros(8, "int64")
    before = model.get_weights()
    model.fit(x, y, verbose=0)
    assert not np.array_equal(model.get_weights()[0], before[0])
    assert model.get_compile_config()["jit_compile"] is True
    with pytest.warns(UserWarning, match="trains with jit_compile=False"):
        model.compile(OPTIMIZERS["fosi"](), "mse", jit_compile=True)
    assert model.jit_compile is False


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
def test_a_custom_loss() -> None:
    """A custom loss is recognised under XLA, for batches of 5 and 2."""

    def squares(y: Any, p: Any) -> Any:
        return tf.reduce_mean(3 * tf.reduce_sum(tf.square(y - p), -1))

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(7, n)).astype("float32") for n in (4, 3))
    weights = []
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        model.compile(tfkfac.KFAC(fisher="type2"), squares, jit_compile=jit)
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        assert model.optimizer.events() == {}
        weights.append(np.concatenate([v.ravel() for v in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)
