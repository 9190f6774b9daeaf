"""Steps beyond the memory limit raise before large tensors are allocated."""

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
from tests.support.strategies import strategy
from tfkfac.gauss_newton import support

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


def wide() -> Any:
    """64 outputs and 22,114 weights: the 64 rows of an example have 5 MB."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((160,)), layers.Dense(98, "tanh"), layers.Dense(64)]
    )
    assert model.count_params() == 22_114
    return model


def images() -> Any:
    """2,938 weights, and at least 2 x 62 x 62 x 16 activations per example."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64, 64, 3)),
            layers.Conv2D(16, 3, activation="tanh"),
            layers.Conv2D(16, 3, strides=2, activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


# First test of the file, as memory freed by other tests would be reused.
def test_activations_reduce_the_block_size() -> None:
    """A block with as many rows as weights would take 290 MB."""
    model = images()
    optimizer = tfkfac.GaussNewton(solve="parameters")
    model.compile(optimizer, "mse")
    model.fit(batches(model, 2), verbose=0)
    assert peak(lambda: model.fit(batches(model, 60), verbose=0)) < 120


def test_error_message_has_the_memory_of_the_batch() -> None:
    """`fit` raises a ValueError with the numbers of the actual batch."""
    model = wide()
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
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_auto_uses_the_space_within_the_limit() -> None:
    """300 residuals need more memory than 301 weights."""
    most = 4 * (3 * 301**2 + 2 * 300 * 301)
    assert most < 4 * (3 * 300**2 + 3 * 300 * 301)
    sizes = support.Limits(301, tf.float32, most)
    assert sizes.space("auto", 300) == "parameters"
    assert sizes.space("auto", 200) == "residuals"


def refuse_large_images() -> None:
    with strategy().scope():
        model: Any = keras.Sequential(
            [
                keras.Input((64, 64, 1)),
                layers.Conv2D(4, 3, activation="tanh"),
                layers.GlobalAveragePooling2D(),
                layers.Dense(1),
            ]
        )
        model.compile(tfkfac.GaussNewton(max_bytes=130_000), "mse")
    message = "A step of `GaussNewton` in the space of parameters"
    with pytest.raises(ValueError, match=message):
        model.fit(np.ones((8, 64, 64, 1)), np.ones((8, 1)), verbose=0)


@pytest.mark.parametrize("where", ["mirrored"])
def test_all_replicas_raise(on_workers: Any, where: str) -> None:
    """All replicas raise in the trace, so that none waits for another."""
    on_workers(where, refuse_large_images)
