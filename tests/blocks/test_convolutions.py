"""A of convolutions: slices of patches and their memory, and correlations."""

import sys
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import FACTOR_RTOL, assert_close
from tests.support.layers import LAYERS, views_of
from tests.support.programs import Program
from tests.support.reference import append_one, patches
from tfkfac.blocks import Record
from tfkfac.blocks import patches as library_patches
from tfkfac.blocks.correlation import channel_grams, patch_gram
from tfkfac.blocks.patches import Geometry
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import BatchSettings, batch_statistics

BATCH, CHANNELS = 4, 2


# ------------------------------------------------------------------ all sizes
@pytest.mark.parametrize(
    ("case", "is_compiled", "sharing"),
    [
        ("conv3d_same", True, "reduce"),
        ("transposed2d_overlap", False, "expand"),
    ],
)
def test_batches_and_images_of_any_size(
    case: str, is_compiled: bool, sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One trace, also compiled with XLA; the slices divide no batch."""
    monkeypatch.setattr(library_patches, "_SLICE_ELEMENTS", 700)
    factory, shape = LAYERS[case]
    layer = factory(name="block", dtype="float64")
    # XLA compiles a function for each size of the images.
    open_shape = shape if is_compiled else (*[None] * 2, shape[-1])
    inputs = keras.Input(open_shape, dtype="float64")
    model = keras.Model(inputs, layer(inputs))
    block = build_registry(model, ()).blocks[0]
    settings = BatchSettings(sharing, terms=tf.constant(1.0, tf.float64))

    def statistics(x: tf.Tensor, g: tf.Tensor) -> Any:
        return batch_statistics({0: (block, [Record(x, g)])}, settings)[0]

    specs = (None, *open_shape), (None, *model.output_shape[1:])
    signature = [tf.TensorSpec(spec, tf.float64) for spec in specs]
    traced = tf.function(statistics, signature, jit_compile=is_compiled)
    rng, view = np.random.default_rng(0), next(views_of(layer))
    sizes = [(0, shape), (5, shape), *[(2, (9, 4, 2))] * (not is_compiled)]
    for batch, images in sizes:
        sizes = (batch, *images), layer.compute_output_shape((batch, *images))
        x, g = (rng.normal(size=size) for size in sizes)
        sums = traced(tf.constant(x), tf.constant(g))
        if not batch:
            assert not np.any(sums["A"].total)
            continue
        want = view.factors(*view.rows(x, g), sharing)
        assert_close(sums["A"].total / sums["A"].count, want["A"], 1e-12)
        assert_close(sums["G"].total / batch, want["G"], 1e-12)


MEMORY = """
import keras, tensorflow as tf
from tfkfac.blocks import Record
from tfkfac.blocks.conv import ConvBlock
from tfkfac.blocks.statistics import BatchSettings, batch_statistics

def peak():  # kB; unlike `ru_maxrss`, not inherited from the parent process
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM"))

images = tf.ones((4, 24, 24, 24, 16))
layer = keras.layers.Conv3D(16, 3, padding="same")
layer.build(images.shape)
layers = {0: (ConvBlock(layer, "block"), [Record(images, images)])}
compute = tf.function(lambda: batch_statistics(layers, BatchSettings("expand")))
start = peak()
compute()
print(peak() - start)
"""


def test_peak_memory() -> None:
    """30 MB; with all patches at once it is 230 MB."""
    with Program([sys.executable, "-c", MEMORY]) as program:
        assert program.end() == 0
    assert int(program.text().split()[-1]) < 90_000


# ------------------------------------------------------------- A by correlation
# Kernel, strides, padding, image, and True for a depthwise convolution.
GEOMETRIES = [
    ((3, 3), (1, 1), "same", (5, 6), False),
    ((2, 4), (1, 1), "same", (6, 5), False),  # more zeros after than before
    ((5, 3), (1, 1), "same", (2, 1), False),  # smaller than the kernel
    ((4, 3), (2, 2), "same", (9, 8), False),
    ((5, 4), (3, 1), "valid", (9, 6), False),  # the last cells are not used
    ((2, 1), (3, 4), "same", (7, 9), False),  # strides larger than the kernel
    ((1, 3), (1, 2), "causal", (1, 8), False),
    ((3, 2), (1, 1), "same", (6, 7), True),
    ((5, 3), (1, 1), "same", (2, 3), True),  # smaller than the kernel
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_sum_over_patches(geometry: Any) -> None:
    """Products of patches with a bias column, for images of any size."""
    kernel, strides, padding, image, each_channel = geometry
    x = np.random.default_rng(0).normal(size=(BATCH, *image, CHANNELS)) + 0.3
    want = []
    for images in np.split(x, CHANNELS, -1) if each_channel else [x]:
        rows = patches(images, kernel, strides, (1, 1), padding)
        rows = append_one(rows.reshape(*rows.shape[:2], -1))
        want.append(np.einsum("bsi,bsj->ij", rows, rows))

    def gram(x: tf.Tensor) -> Any:
        gram = channel_grams if each_channel else patch_gram
        return gram(x, Geometry(kernel, strides, padding), bias=True)

    unknown = tf.TensorSpec([None, None, None, CHANNELS], tf.float64)
    functions = [gram]
    if strides == (3, 1) or (each_channel and image == (2, 3)):
        functions.append(tf.function(gram, input_signature=[unknown]))
    for function in functions:
        total, count = function(tf.constant(x))
        assert_close(total, np.squeeze(want), 1e-12)
        assert float(count) == want[0][-1, -1]
    total, count = gram(tf.constant(x[:0]))
    assert float(count) == 0
    assert not np.any(total)


conv2d = partial(partial, layers.Conv2D)
depthwise = partial(partial, layers.DepthwiseConv2D)
# Layer, shape of an example, and True if correlations are cheaper than patches
# and supported.
COSTS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "strides": (conv2d(3, 7, 2, use_bias=False), (32, 35, 3), True),
    "channels first":
        (conv2d(3, 3, data_format="channels_first"), (8, 9, 8), True),
    "sequence": (partial(layers.Conv1D, 3, 5, padding="causal"), (40, 8), True),
    "depthwise": (depthwise(3), (7, 8, 3), True),
    "depthwise, strides": (depthwise(3, 2), (7, 8, 3), False),
    "at each time step": (
        lambda name: layers.TimeDistributed(layers.Conv2D(3, 3, name=name)),
        (2, 9, 8, 8), True,
    ),
    "dilated": (conv2d(3, 3, dilation_rate=2), (9, 8, 8), False),
    "groups": (conv2d(4, 3, groups=2), (9, 8, 8), False),
    "tiny image": (conv2d(3, 3, padding="same"), (2, 2, 64), False),
}  # fmt: skip


@pytest.mark.parametrize("case", COSTS)
def test_gram_of_a_layer(case: str) -> None:
    """By correlation, if `rows.gram` is given, it agrees with the rows."""
    factory, shape, is_correlated = COSTS[case]
    model = keras.Sequential([keras.Input(shape), factory(name="block")])
    (block,) = build_registry(model, ()).blocks
    x = np.random.default_rng(0).normal(size=(32, *shape)).astype("float32")
    g = np.zeros(block.layer.compute_output_shape(x.shape), "float32")
    rows = block.rows(Record(tf.constant(x), tf.constant(g)))
    assert (rows.gram is not None) == is_correlated
    if rows.gram is not None:
        total, count = rows.gram()
        want = block.input_statistic(rows.a, None, "expand")
        assert float(count) == float(want.count)
        assert_close(total, want.total, FACTOR_RTOL)
