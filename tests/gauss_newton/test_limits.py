"""Steps that are too large are refused before anything large is made."""

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
from tests.support import workers_gauss
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tfkfac.gauss_newton import support

MEGA = 2**20
JOBS = Jobs(workers_gauss)
JOBS.add("mirrored: large", "refusal")


def batches(network: Any, size: int) -> tf.data.Dataset:
    """A batch of a size that nobody knows before it comes."""
    rng = np.random.default_rng(0)
    shapes = network.input_shape, network.output_shape

    def generate() -> Any:
        yield tuple(rng.normal(size=(size, *shape[1:])) for shape in shapes)

    spec = tuple(tf.TensorSpec(shape, "float32") for shape in shapes)
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


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
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(33, 160)), rng.normal(size=(33, 64))

    def refused() -> None:
        with pytest.raises(ValueError, match="A step of `Gauss") as caught:
            model.fit(x, y, shuffle=False, batch_size=32, verbose=0)
        texts.append(str(caught.value))

    texts: list[str] = []
    assert peak(refused) < 90  # the Jacobian has 181 MB
    (told,) = texts
    m, n = 32 * 64, model.count_params()
    least, most = (4 * (3 * m * m + 3 * m * (n + x)) / MEGA for x in (0, 999))
    found = re.search(r"takes ([\d.]+) MB for 22,114 weights", told)
    assert found is not None
    assert least <= float(found[1]) <= most
    assert "more than `max_bytes`, 64.00 MB. Use a smaller `batch_size`" in told
    assert 'KFAC(step="quadratic")' in told
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_space_that_is_allowed_is_taken() -> None:
    """300 residuals are fewer than 301 weights, and take more."""
    most = 4 * (3 * 301**2 + 2 * 300 * 301)
    assert most < 4 * (3 * 300**2 + 3 * 300 * 301)
    sizes = support.Limits(301, tf.float32, most)
    assert sizes.space("auto", 300) == "parameters"
    assert sizes.space("auto", 200) == "residuals"


def test_all_replicas_refuse(pool: Pool) -> None:
    """What shows when the model is called, before any of them waits."""
    for told in JOBS.results(pool, "mirrored: large"):
        assert "A step of `GaussNewton` in the space of parameters" in told
