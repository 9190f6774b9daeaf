"""Limits: the memory of a step, unsupported models, losses and arguments."""

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.small import summary_text
from tests.support.strategies import strategy
from tests.support.summaries import sequential
from tfkfac.capture.walk import needs_loop
from tfkfac.gauss_newton.support import Limits, choose_solve_spaces

MEGA = 2**20


def batches(network: Any, size: int) -> tf.data.Dataset:
    """A data set with one batch of unknown static size."""
    rng = np.random.default_rng(0)
    shapes = network.input_shape, network.output_shape

    def generate() -> Any:
        yield tuple(rng.normal(size=(size, *shape[1:])) for shape in shapes)

    spec = tuple(tf.TensorSpec(shape, "float32") for shape in shapes)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def peak(run: Callable[[], object]) -> float:
    """Increase of the peak memory of this process in MiB during `run`."""
    status, reset = (
        pathlib.Path("/proc/self", n) for n in ("status", "clear_refs")
    )
    try:
        reset.write_text("5")
    except OSError:
        pytest.skip("/proc/self/clear_refs is not writable")

    def most() -> float:
        lines = dict(x.split(":", 1) for x in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024

    before = most()
    run()
    return most() - before


# First test of the file, as memory freed by other tests would be reused.
def test_activations_reduce_the_block_size() -> None:
    """A block with as many rows as weights would take 215 MB.

    Measured: up to 121 MB, which depends on the processor's convolutions. The
    model has 2,938 weights, and at least 2 x 62 x 62 x 16 activations per
    example.
    """
    model = sequential(
        layers.Conv2D(16, 3, activation="tanh"),
        layers.Conv2D(16, 3, strides=2, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(10),
        shape=(64, 64, 3),
    )
    optimizer = tfkfac.GaussNewton(solve="parameters")
    model.compile(optimizer, "mse")
    model.fit(batches(model, 2), verbose=0)
    assert peak(lambda: model.fit(batches(model, 36), verbose=0)) < 170


def test_error_message_has_the_memory_of_the_batch() -> None:
    """`fit` raises a ValueError with the numbers of the actual batch."""
    # The 64 rows of an example have 5 MB.
    model = sequential(layers.Dense(98, "tanh"), layers.Dense(64), shape=(160,))
    model.compile(tfkfac.GaussNewton(max_bytes=64 * MEGA), "mse")
    model.fit(batches(model, 1), verbose=0)
    before = model.get_weights()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(33, 160)), rng.normal(size=(33, 64))

    def refused() -> None:
        with pytest.raises(ValueError, match="A step of `Gauss") as caught:
            model.fit(x, y, shuffle=False, batch_size=32, verbose=0)
        texts.append(str(caught.value))

    texts: list[str] = []
    assert peak(refused) < 90  # the Jacobian has 181 MB
    (message,) = texts
    m, n = 32 * 64, model.count_params()
    least, most = (4 * (3 * m * m + 3 * m * (n + x)) / MEGA for x in (0, 999))
    result = re.search(r"takes ([\d.]+) MB for 22,114 weights", message)
    assert result is not None
    assert least <= float(result[1]) <= most
    assert (
        "more than `max_bytes`, 64.00 MB. Use a smaller `batch_size`" in message
    )
    assert "or `tfkfac.KFAC`, which needs no matrix" in message
    np.testing.assert_equal(model.get_weights(), before)


# ----------------------------------------------------------- unsupported models
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2] ** 2


def model(*middle: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    last = layers.Dense(1, name="last", **options)
    return keras.Sequential([keras.Input((3,)), *middle, last], name="net")


class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class Overriding(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) + 1.0


# ------------------------------------------------------------------ models
COMPILED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: model(layers.Dense(2, dtype="mixed_bfloat16", name="half")),
        "Layer 'half' computes in bfloat16",
    ),
    (
        lambda: model(kernel_regularizer="l1"),
        "/last/kernel' has the regulariser L1\\.",
    ),
    (
        lambda: model(kernel_regularizer="l2"),
        "with a regulariser, which adds .*/last/kernel",
    ),
    (
        lambda: model(kernel_constraint="non_neg"),
        "/last/kernel' has a constraint",
    ),
    (
        lambda: Overriding([keras.Input((3,)), layers.Dense(1)], name="net"),
        "Model 'net' overrides `compute_loss`",
    ),
]
CHANGES = "Layer 'h' of model 'net' changes its state"
TRAINED: list[tuple[Any, str, str]] = [
    (layers.BatchNormalization, "mse", CHANGES),
    (functools.partial(layers.Dropout, 0.5), "mse", CHANGES),
    (Penalty, "mse", "Layer 'h' of model 'net' adds a loss"),
    (layers.Flatten, "mae", "loss 'mae' is not known"),
    (layers.Softmax, "kl_divergence", "Kullback-Leibler"),
]


@pytest.mark.parametrize(("make", "message"), COMPILED)
def test_errors_in_compile(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().compile(tfkfac.GaussNewton(solve="residuals"), "mse")


@pytest.mark.parametrize(("layer", "loss", "message"), TRAINED)
def test_errors_in_the_first_step(layer: Any, loss: str, message: str) -> None:
    """In eager mode, where nothing is traced before."""
    network = model(layer(name="h"))
    optimizer = tfkfac.GaussNewton(solve="residuals")
    network.compile(optimizer, loss, run_eagerly=True)
    with pytest.raises(ValueError, match=message):
        network.train_on_batch(X, Y)


def test_warning_for_a_loss_of_lower_precision() -> None:
    network = model(dtype="float64")
    network.compile(tfkfac.GaussNewton(), "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="computed in float32"):
        network.train_on_batch(X.astype("float64"), Y)


def test_error_for_the_space_of_residuals_with_replicas() -> None:
    with pytest.raises(ValueError, match='"auto" or "parameters" with'):
        limits = Limits(10, np.float32, 2**31)  # type: ignore[arg-type]
        choose_solve_spaces(limits, "residuals", None, "with several replicas")


# ------------------------------------------ other losses and changed gradients
class Steps(keras.Sequential):
    """Custom training step with the loss, or the gradients, of a case."""

    case = ""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            if self.case == "two losses":
                other = self.compute_loss(x=x, y=2 * y, y_pred=predicted)
                loss = 0.25 * loss + 0.75 * other
            if "term" in self.case:
                loss += tf.reduce_sum(self.trainable_variables[0] ** 2)
            if self.case != "term without `scale_loss`":
                loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.case == "missing gradient":
            gradients[0] = None
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def compiled_steps(case: str, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    network = Steps([keras.Input((3,)), layers.Dense(1)])
    network.case = case
    network.compile(tfkfac.GaussNewton(**options), "mse")
    return network


@pytest.mark.parametrize(
    ("case", "solve"),
    [
        ("two losses", "auto"),
        ("term", "residuals"),
        ("term without `scale_loss`", "parameters"),
        ("missing gradient", "auto"),
    ],
)
def test_error_for_another_gradient(case: str, solve: str) -> None:
    network = compiled_steps(case, solve=solve)
    before = network.get_weights()
    with pytest.raises(ValueError, match="`grads` of `apply` must be the"):
        network.fit(X, Y, verbose=0)
    np.testing.assert_equal(network.get_weights(), before)


def test_own_training_step() -> None:
    """The check passes at the minimum, where gradients are rounding errors."""
    network = compiled_steps("")
    matrix = np.c_[X, np.ones(len(X))].astype(float)
    least = np.linalg.lstsq(matrix, Y.astype(float), rcond=None)[0]
    minimum = [least[:-1], least[-1]]
    network.set_weights(minimum)
    network.fit(X, Y, verbose=0)
    for got, want in zip(network.get_weights(), minimum, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def refuse_on_replicas() -> None:
    with strategy().scope():
        network = sequential(
            layers.Conv2D(4, 3, activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(1),
            shape=(64, 64, 1),
        )
        network.compile(tfkfac.GaussNewton(max_bytes=130_000), "mse")
    message = "A step of `GaussNewton` in the space of parameters"
    with pytest.raises(ValueError, match=message):
        network.fit(np.ones((8, 64, 64, 1)), np.ones((8, 1)), verbose=0)
    for case in "term", "two losses":
        with strategy().scope():
            network = compiled_steps(case)
        message = "`loss` of `scale_loss` must be the loss that"
        with pytest.raises(ValueError, match=message):
            network.fit(X, Y, verbose=0)
    with strategy().scope():
        network = compiled_steps("")
    network.fit(X, Y, verbose=0)
    assert network.optimizer.last_step["accepted"]


@pytest.mark.parametrize("where", ["mirrored"])
def test_all_replicas_raise(on_workers: Any, where: str) -> None:
    """Replicas raise in the trace, for large steps and other losses."""
    on_workers(where, refuse_on_replicas)


def test_no_loss_scale() -> None:
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        model().compile(
            keras.optimizers.LossScaleOptimizer(tfkfac.GaussNewton()), "mse"
        )


def test_attention() -> None:
    """oneDNN would end the process in the vectorised gradient of float32."""
    for dtype in "float64", "float32":
        x = keras.Input((3, 2), dtype=dtype)
        y = layers.MultiHeadAttention(1, 2, dtype=dtype)(x, x)
        y = layers.Dense(1, dtype=dtype)(layers.Flatten(dtype=dtype)(y))
        network = keras.Model(x, y)
        assert needs_loop(network) == (dtype == "float32")
    network.compile(tfkfac.GaussNewton(), "mse", run_eagerly=True)
    network.train_on_batch(np.ones((4, 3, 2)), np.ones((4, 1)))
    assert network.optimizer.last_step["accepted"]


# ------------------------------------------------------------------ limits
def test_memory_of_a_step() -> None:
    """n weights, m residuals: 3 n^2 + 2 m n, or 3 m^2 + 3 m n scalars."""
    network = model(kernel_initializer="zeros")
    network.compile(tfkfac.GaussNewton(), "mse", run_eagerly=True)
    optimizer = network.optimizer
    assert "4 weights n in float32" in summary_text(optimizer)
    assert optimizer.state_bytes()["previous_step"] == 16
    # 300 residuals need more memory than 301 weights.
    most = 4 * (3 * 301**2 + 2 * 300 * 301)
    limits = Limits(301, tf.float32, most)
    assert limits.peak_bytes("parameters", 300) == most
    assert limits.space("auto", 300) == "parameters"
    assert limits.space("auto", 200) == "residuals"
    limits = optimizer.method.limits
    assert limits.peak_bytes("parameters", 100) == 4 * (3 * 16 + 2 * 100 * 4)
    assert limits.peak_bytes("residuals", 3) == 4 * (3 * 9 + 3 * 3 * 4)
    network.train_on_batch(X, Y)
    lines = summary_text(optimizer).splitlines()
    (row,) = [li for li in lines if li.startswith("8 ")]
    assert "parameters" in row


def test_a_loss_without_a_gradient() -> None:
    """Keras would take the `StopIteration` of a generator for missing data."""
    x = keras.Input((3,))
    model = keras.Model(x, [layers.Dense(1)(x), layers.Dense(1)(x)])
    losses = ["mse", lambda y, p: tf.square(y - tf.stop_gradient(p))]
    model.compile(tfkfac.GaussNewton(), losses)
    data = np.ones([4, 3]), [np.ones([4, 1])] * 2
    with pytest.raises(ValueError, match="has no gradient at its output"):
        model.fit(*data, verbose=0)
