"""Sums over patches in slices: values in NumPy, and peak memory."""

import subprocess
import sys
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.layer_models import expected_factors
from tests.support.layer_views import view_of
from tfkfac.blocks import Record, patches
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import BatchSettings, batch_statistics

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "3D": (partial(layers.Conv3D, 2, 3, padding="same"), (4, 5, 3, 2)),
    "dilated": (partial(layers.Conv2D, 4, 3, dilation_rate=2), (9, 8, 2)),
}


@pytest.mark.parametrize(
    ("case", "compiled", "sharing"),
    [
        ("3D", True, "reduce"),
        ("dilated", True, "expand"),
        ("dilated", False, "reduce"),
    ],
)
def test_batches_of_any_size(
    case: str, compiled: bool, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trace, also compiled with XLA; the slices divide no batch."""
    monkeypatch.setattr(patches, "_SLICE_ELEMENTS", 700)
    factory, shape = LAYERS[case]
    layer = factory(dtype="float64")
    model = keras.Sequential([keras.Input(shape, dtype="float64"), layer])
    (block,) = build_registry(model, ()).blocks
    settings = BatchSettings(sharing, terms=tf.constant(1.0, tf.float64))

    def statistics(x: tf.Tensor, g: tf.Tensor) -> Any:
        return batch_statistics({0: (block, [Record(x, g)])}, settings)[0]

    sizes = shape, layer.compute_output_shape((None, *shape))[1:]
    traced = tf.function(
        statistics,
        [tf.TensorSpec([None, *size], tf.float64) for size in sizes],
        jit_compile=compiled,
    )
    rng = np.random.default_rng(0)
    for batch in (0, 1, 5):
        x, g = (rng.normal(size=(batch, *size)) for size in sizes)
        sums = traced(tf.constant(x), tf.constant(g))
        if not batch:
            assert not np.any(sums["A"].total)
            continue
        view = view_of(layer)
        rows = view.rows(x), view.split(g)
        A, G = expected_factors(view, *rows, sharing)
        got = sums["A"].total / sums["A"].count
        np.testing.assert_allclose(got, A, rtol=0, atol=1e-12 * np.abs(A).max())
        got = sums["G"].total / batch
        np.testing.assert_allclose(got, G, rtol=0, atol=1e-12 * np.abs(G).max())


MEMORY = """
import os
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1")
import keras, numpy as np, tfkfac
from keras import layers
model = keras.Sequential([
    keras.Input((24, 24, 24, 16)),
    layers.Conv3D(16, 3, padding="same", activation="relu"),
    layers.GlobalAveragePooling3D(),
    layers.Dense(2),
])
model.compile(tfkfac.KFAC(), "mse")
x, y = np.ones((4, 24, 24, 24, 16), "float32"), np.ones((4, 2), "float32")

def peak():  # kB; unlike `ru_maxrss`, not inherited from the parent process
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))

start = peak()
model.fit(x, y, batch_size=4, verbose=0)
print(peak() - start)
"""


def test_peak_memory() -> None:
    """117 MB; with all patches at once it is 316 MB."""
    output = subprocess.check_output([sys.executable, "-c", MEMORY], text=True)
    assert int(output.split()[-1]) < 180_000
