"""A of a convolution by autocorrelation, against patches in NumPy."""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import FACTOR_RTOL, assert_close
from tests.support.layer_cases import Case
from tests.support.reference import Array, append_one, patches
from tfkfac.blocks.patches import Geometry, channel_grams, patch_gram
from tfkfac.blocks.registry import build_registry
from tfkfac.capture.taps import Record

BATCH, CHANNELS = 4, 2

# Kernel, strides, padding, image.
GEOMETRIES = [
    ((3, 3), (1, 1), "same", (5, 6)),
    ((2, 4), (1, 1), "same", (6, 5)),  # more zeros after than before
    ((3, 2), (1, 1), "valid", (3, 7)),  # one output in a dimension
    ((5, 3), (1, 1), "same", (2, 1)),  # an image smaller than the kernel
    ((4, 6), (2, 2), "same", (9, 8)),
    ((5, 4), (3, 1), "valid", (9, 6)),  # the last cells are not used
    ((2, 1), (3, 4), "same", (7, 9)),  # strides larger than the kernel
    ((1, 3), (1, 2), "causal", (1, 8)),
]
# Geometries of depthwise convolutions, with equal strides.
DEPTHWISE = [
    ((3, 3), (1, 1), "same", (2, 1)),
    ((3, 2), (2, 2), "same", (6, 7)),
    ((2, 3), (3, 3), "valid", (8, 7)),  # the last cells are not used
]
CASES = [(g, False) for g in GEOMETRIES] + [(g, True) for g in DEPTHWISE]


def from_patches(x: Array, geometry: Any) -> Array:
    """Sum of the outer products of patches, with a bias column."""
    kernel, strides, padding, _ = geometry
    rows = patches(x, kernel, strides, (1, 1), padding)
    rows = append_one(rows.reshape(*rows.shape[:2], -1))
    return np.einsum("bsi,bsj->ij", rows, rows)


@pytest.mark.parametrize(("geometry", "each_channel"), CASES, ids=str)
def test_sum_over_patches(geometry: Any, each_channel: bool) -> None:
    """For images of static and dynamic size."""
    kernel, strides, padding, image = geometry
    x = np.random.default_rng(0).normal(size=(BATCH, *image, CHANNELS)) + 0.3
    images = np.split(x, CHANNELS, -1) if each_channel else [x]
    want = np.squeeze([from_patches(image, geometry) for image in images])

    def gram(x: tf.Tensor) -> Any:
        gram = channel_grams if each_channel else patch_gram
        return gram(x, Geometry(kernel, strides, padding), bias=True)

    unknown = tf.TensorSpec([None, None, None, CHANNELS], tf.float64)
    dynamic = tf.function(gram, input_signature=[unknown])
    for function in (gram, dynamic):
        total, count = function(tf.constant(x))
        assert float(count) == want[..., -1, -1].min()
        np.testing.assert_allclose(total, want, atol=1e-12 * want.max(), rtol=0)


def test_empty_batch() -> None:
    x = tf.zeros([0, 5, 5, CHANNELS])
    geometry = Geometry((3, 3), (1, 1), "same")
    total, count = patch_gram(x, geometry, bias=True)
    assert float(count) == 0
    assert not np.any(total)


CORRELATED: dict[str, Case] = {
    "strides": (partial(layers.Conv2D, 3, 7, 2, use_bias=False), (32, 35, 3)),
    "channels first": (
        partial(layers.Conv2D, 3, 3, data_format="channels_first"),
        (8, 9, 8),
    ),
    "sequence": (
        partial(layers.Conv1D, 3, 5, padding="causal"),
        (40, 8),
    ),
    "depthwise": (partial(layers.DepthwiseConv2D, 3, 2), (7, 8, 3)),
    "depthwise sequence": (
        partial(layers.DepthwiseConv1D, 3, strides=2, padding="same"),
        (9, 3),
    ),
    "at each time step": (
        lambda name: layers.TimeDistributed(layers.Conv2D(3, 3, name=name)),
        (2, 9, 8, 8),
    ),
}


# Layers for which patches are cheaper, or correlation is not supported.
BY_PATCHES: dict[str, Case] = {
    "dilated": (partial(layers.Conv2D, 3, 3, dilation_rate=2), (9, 8, 8)),
    "three dimensions": (partial(layers.Conv3D, 3, 3), (5, 5, 5, 8)),
    "groups": (partial(layers.Conv2D, 4, 3, groups=2), (9, 8, 8)),
    "dilated depthwise": (
        partial(layers.DepthwiseConv2D, 3, dilation_rate=2),
        (9, 8, 8),
    ),
    "tiny image": (partial(layers.Conv2D, 3, 3, padding="same"), (2, 2, 64)),
}


@pytest.mark.parametrize("case", {**CORRELATED, **BY_PATCHES})
def test_gram_of_a_layer(case: str) -> None:
    """By correlation, if `rows.gram` is given, it agrees with the rows."""
    factory, shape = {**CORRELATED, **BY_PATCHES}[case]
    model = keras.Sequential([keras.Input(shape), factory(name="block")])
    (block,) = build_registry(model, ()).blocks
    x = np.random.default_rng(0).normal(size=(32, *shape)).astype("float32")
    g = np.zeros(block.layer.compute_output_shape(x.shape), "float32")
    rows = block.rows(Record(tf.constant(x), tf.constant(g)))
    assert (rows.gram is not None) == (case in CORRELATED)
    if rows.gram is None:
        return
    a = np.asarray(rows.a, np.float64)
    total, count = rows.gram()
    assert float(count) == a.shape[0] * a.shape[1]
    assert_close(total, np.einsum("bs...i,bs...j->...ij", a, a), FACTOR_RTOL)
