"""Steps that are too large are refused before anything large is made."""

import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import workers_gauss
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.reference import Array
from tfkfac.gauss_newton import support

MEGA = 2**20
JOBS = Jobs(workers_gauss)
for shape in ("mirrored", "two"):
    JOBS.add(f"{shape}: large", "refusal", slow=shape == "two")


def batches(network: Any, *sizes: int) -> tf.data.Dataset:
    """Batches of a size that nobody knows before they come."""
    rng = np.random.default_rng(0)

    def generate() -> Any:
        for size in sizes:
            inputs = rng.normal(size=(size, *network.input_shape[1:]))
            outputs = rng.normal(size=(size, *network.output_shape[1:]))
            yield inputs, outputs

    spec = [
        tf.TensorSpec(shape, "float32")
        for shape in (network.input_shape, network.output_shape)
    ]
    return tf.data.Dataset.from_generator(
        generate, output_signature=tuple(spec)
    )


def peak(run: Callable[[], object]) -> float:
    """Most megabytes that this process has while it does something."""
    status, reset = (
        pathlib.Path("/proc/self", n) for n in ("status", "clear_refs")
    )
    try:
        reset.write_text("5")
    except OSError:
        pytest.skip("The system does not say how much memory was in use")

    def most() -> float:
        lines = dict(x.split(":", 1) for x in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 1024

    before = most()
    run()
    return most() - before


def wide() -> Any:
    """64 outputs and 22,144 weights: 64 rows of an example have 5 MB."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((160,)), layers.Dense(98, "tanh"), layers.Dense(64)]
    )
    assert model.count_params() == 22_114
    return model


def images() -> Any:
    """2,938 weights, and 2 x 62 x 62 x 16 numbers and more of an example."""
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


def refused(model: Any, data: tf.data.Dataset) -> str:
    with pytest.raises(ValueError, match="A step of `GaussNewton`") as caught:
        model.fit(data, verbose=0)
    return str(caught.value)


# The first of all: memory that others have freed is there again.
def test_activations_make_blocks_smaller() -> None:
    """A block as long as the weights are many would take 290 MB."""
    model = images()
    optimizer = tfkfac.GaussNewton(solve="parameters")
    model.compile(optimizer, "mse")
    model.fit(batches(model, 2), verbose=0)
    assert peak(lambda: model.fit(batches(model, 60), verbose=0)) < 120


def test_the_error_says_what_a_batch_takes() -> None:
    """As a ValueError of `fit`, by the numbers of the batch that came."""
    model = wide()
    model.compile(tfkfac.GaussNewton(max_bytes=64 * MEGA), "mse")
    model.fit(batches(model, 1), verbose=0)
    before = model.get_weights()
    told = refused(model, batches(model, 32))
    m, n = 32 * 64, model.count_params()
    least, most = (4 * (3 * m * m + 3 * m * (n + x)) / MEGA for x in (0, 999))
    found = re.search(r"takes ([\d.]+) MB for 22,114 weights", told)
    assert found is not None
    assert least <= float(found[1]) <= most
    assert "more than `max_bytes`, 64.00 MB. Use a smaller `batch_size`" in told
    assert 'KFAC(step="quadratic")' in told
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_rows_wait_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would take 550 MB, and half a second before it is done."""

    def late(value: Array) -> Array:
        time.sleep(0.5)
        return value

    refuse = support.refuse

    def refuse_late(condition: tf.Tensor, message: tf.Tensor) -> tf.Operation:
        slow = tf.ensure_shape(tf.numpy_function(late, [condition], bool), [])
        return refuse(slow, message)

    monkeypatch.setattr(support, "refuse", refuse_late)
    model = wide()
    model.compile(tfkfac.GaussNewton(max_bytes=64 * MEGA), "mse")
    model.fit(batches(model, 1), verbose=0)
    more = peak(lambda: refused(model, batches(model, 32)))
    assert more < 64


def test_activations_count_among_residuals() -> None:
    """Of 20 examples the rows take 7 MB; the passes for them 150."""
    model = images()
    optimizer = tfkfac.GaussNewton(max_bytes=100 * MEGA, solve="residuals")
    model.compile(optimizer, "mse")
    model.fit(batches(model, 2), verbose=0)
    assert peak(lambda: model.fit(batches(model, 8), verbose=0)) < 100
    refused(model, batches(model, 20))


def test_the_space_that_is_allowed_is_taken() -> None:
    """300 residuals are fewer than 301 weights, and take more."""
    most = 4 * (3 * 301**2 + 2 * 300 * 301)
    assert most < 4 * (3 * 300**2 + 3 * 300 * 301)
    sizes = support.Limits(301, tf.float32, most)
    assert sizes.space("auto", 300) == "parameters"
    assert sizes.space("auto", 200) == "residuals"


@pytest.mark.parametrize("name", JOBS.params(["mirrored: large", "two: large"]))
def test_all_replicas_refuse(pool: Pool, name: str) -> None:
    """What shows when the model is called, before any of them waits."""
    for told in JOBS.results(pool, name):
        assert "A step of `GaussNewton` in the space of parameters" in told
