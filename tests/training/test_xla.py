"""Training steps compiled by XLA, Keras' default on a GPU; kernels of a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import training
from tests.support.definition import by_definition
from tests.support.dtypes import floats
from tests.support.gpu_kernels import REPORTS, without_gpu_kernel
from tests.support.small import loss
from tfkfac.callbacks import model as supervised
from tfkfac.kfac import method as kfac

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": lambda: tfkfac.KFAC(0.1),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    "sketch": lambda: tfkfac.KFAC(0.1, solver="eigen", max_factor_dim=10),
    "fosi": lambda: tfkfac.FOSI(
        keras.optimizers.SGD(0.1),
        num_largest=2,
        num_smallest=1,
        warmup_steps=1,
        lanczos_steps=6,
    ),
}


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use XLA on the CPU in place of XLA on a GPU."""
    devices = tf.config.list_physical_devices

    def pretend(device: str | None = None) -> list[Any]:
        return ["a GPU"] if device == "GPU" else devices(device)

    monkeypatch.setattr(tf.config, "list_physical_devices", pretend)


pretended_gpu = pytest.fixture(pretend_gpu)


def defer_inverses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Update the inverses after the step, also without XLA."""
    monkeypatch.setattr(supervised, "uses_xla", lambda model: True)
    monkeypatch.setattr(kfac, "in_xla", lambda: True)


def dense(optimizer: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3)])
    model.compile(optimizer, loss(), **options)
    return model


# ----------------------------------------------------------- types of layers
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
    # Without XLA, preconditioned as rows (a, g).
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
    """The weights after four batches and, but for tokens, one of NaN."""
    keras.utils.set_random_seed(0)
    model = NETWORKS[name]()
    model.compile(optimizer, loss(), jit_compile=jit)
    rng = np.random.default_rng(0)
    (inputs,) = model.inputs
    x = rng.integers(0, 5, (8, *inputs.shape[1:]))
    floating = inputs.dtype != "int32"
    if floating:
        x = rng.normal(size=x.shape).astype("float32")
    y = rng.integers(0, 2, len(x))
    weight = rng.integers(0, 3, len(x)).astype("float32")
    for step in range(4):
        model.train_on_batch(x, y, weight)
        if floating and step == 1:
            model.train_on_batch(x * np.nan, y, weight)
    assert model.jit_compile is jit
    assert int(optimizer.skipped_steps) == floating
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("images", "sketch"),
        ("tokens", "inverse"),
        ("rows", "spectral"),
        ("images", "fosi"),
    ],
)
def test_steps_equal_those_without_xla(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps agree up to rounding; measured: 7e-7.

    Spectral steps are in float64: their polynomials amplify rounding errors
    1,000 times along directions that the few gradients do not span.
    """

    def start(shape: Any, seed: Any) -> Any:
        vector = np.random.default_rng(0).normal(size=shape)
        return tf.constant(vector, tf.float32)

    # XLA generates other random numbers.
    monkeypatch.setattr(tf.random, "stateless_normal", start)
    with floats("float64" if method == "spectral" else "float32"):
        compiled = trained(name, OPTIMIZERS[method](), jit=True)
        defer_inverses(monkeypatch)
        plain = trained(name, OPTIMIZERS[method](), jit=False)
    for got, want in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6)


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("jit", "steps_per_execution", "inner", "options"),
    [
        (True, 2, "sgd", {}),
        # XLA's singular values, of which the reference consists, are inexact.
        (False, 1, "multiplier", training.SPECTRAL),
    ],
)
def test_inverses_are_those_of_the_step_before(
    jit: bool,
    steps_per_execution: int,
    inner: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten batches by the definition; one with a NaN has no effect.

    The first step uses the identity.
    """
    if not jit:
        defer_inverses(monkeypatch)
    case = training.Training(
        "KFAC", "cnn", inner, "even", options=options, faults=((1, 0, np.nan),)
    )
    model = training.build(
        case, jit_compile=jit, steps_per_execution=steps_per_execution
    )
    start = model.get_weights()
    training.fit(model, case)
    assert int(model.optimizer.skipped_steps) == 1
    steps = training.shares(case.without_step(1).rows, 1)
    want = by_definition(start, steps, inner=inner, is_late=True, **options)
    got = {"start": start, "weights": model.get_weights()}
    training.assert_close(got, want)


class Halves(keras.Model):
    """Trains one of two layers, by `compile`'s or an own optimizer."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(2), layers.Dense(2, name="last")
        self.own = own

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(self(x, training=True) - y))
        weights = self.last.trainable_variables
        optimizer = self.own or self.optimizer
        optimizer.apply(tape.gradient(value, weights), weights)
        return {"error": value}


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize("is_used", [True, False])
def test_steps_without_a_gradient_of_a_block(is_used: bool) -> None:
    model = Halves(None if is_used else keras.optimizers.SGD(0.1))
    x = np.ones((8, 2), "float32")
    if is_used:
        model(x)
    optimizer = tfkfac.KFAC(0.1, skip_layers="last")
    model.compile(optimizer, "mse", jit_compile=True)
    history = model.fit(x, 3 * x, epochs=3, verbose=0).history["error"]
    assert history[-1] < history[0]


@pytest.mark.usefixtures("pretended_gpu")
def test_gauss_newton_trains_without_xla() -> None:
    """`tf.linalg.lstsq` has no XLA kernel."""
    optimizer = tfkfac.GaussNewton(solve="residuals")
    with pytest.warns(UserWarning, match="trains with jit_compile=False"):
        model = dense(optimizer, jit_compile=True)
    assert model.jit_compile is False


# -------------------------------------- saved with a GPU, loaded without one
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
    # The setting is changed for optimizers of this package only.
    model.compile("sgd", "mse", jit_compile=True)
    assert model.jit_compile is True


# ------------------------------------------------------------- kernels of a GPU
@pytest.mark.parametrize(
    ("network", "optimizer", "jit", "want"),
    [
        ("images", "sketch", True, set()),
        # Only the event reports, which are strings, run on the host.
        ("rows", "inverse", False, REPORTS),
    ],
)
def test_operations_without_a_gpu_kernel(
    network: str, optimizer: str, jit: bool, want: set[str]
) -> None:
    model = NETWORKS[network]()
    model.compile(OPTIMIZERS[optimizer](), loss())
    step = tf.function(model.train_step, autograph=False, jit_compile=jit)
    (inputs,) = model.inputs
    x = np.ones((4, *inputs.shape[1:]), inputs.dtype)
    batch = x, np.zeros(4, "int32"), np.ones(4, "float32")
    graph = step.get_concrete_function(batch).graph
    assert without_gpu_kernel(graph) == want


def test_the_registry_knows_what_a_gpu_cannot_do() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return tf.unique_with_counts(tf.strings.length(tf.as_string(x)))[2]

    graph = function.get_concrete_function(tf.ones(3)).graph
    assert "AsString" in without_gpu_kernel(graph)
