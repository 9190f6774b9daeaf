"""A of a convolution by autocorrelation, against patches in NumPy."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    FACTOR_RTOL,
    assert_close,
)
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
    ((3, 3), (2, 2), "same", (6, 7)),
    ((5, 4), (3, 1), "valid", (9, 6)),  # the last cells are not used
    ((2, 1), (3, 4), "same", (7, 9)),  # strides larger than the kernel
    ((1, 3), (1, 2), "causal", (1, 8)),
]


# Geometries of depthwise convolutions, with equal strides.
DEPTHWISE = [
    ((3, 3), (1, 1), "same", (5, 6)),
    ((4, 5), (1, 1), "valid", (7, 5)),
    ((3, 3), (1, 1), "same", (2, 1)),
    ((3, 2), (2, 2), "same", (6, 7)),
    ((2, 3), (3, 3), "valid", (8, 7)),  # the last cells are not used
    ((1, 3), (2, 2), "same", (1, 8)),
]


def sweep() -> Iterator[Any]:
    """Every fifth combination of kernels, strides, paddings and images."""
    kernels = [(1, 1), (2, 2), (3, 3), (1, 3), (5, 2), (4, 6), (7, 7)]
    strides = [(1, 1), (2, 2), (1, 3), (4, 1), (8, 8)]
    images = [(6, 5), (9, 8), (2, 3), (1, 1)]
    cases = itertools.product(
        kernels, strides, ["same", "valid", "causal"], images
    )
    for kernel, stride, padding, image in itertools.islice(cases, 0, None, 5):
        fits = all(n >= k for n, k in zip(image, kernel, strict=True))
        if padding != "valid" or fits:
            yield kernel, stride, padding, image


def from_patches(x: Array, geometry: Any) -> Array:
    """Sum of the outer products of patches, with a bias column."""
    kernel, strides, padding, _ = geometry
    rows = patches(x, kernel, strides, (1, 1), padding)
    rows = append_one(rows.reshape(*rows.shape[:2], -1))
    return np.einsum("bsi,bsj->ij", rows, rows)


def check(geometry: Any, each_channel: bool = False, **options: Any) -> None:
    """Compares with patches, for images of static and dynamic size."""
    kernel, strides, padding, image = geometry
    x = np.random.default_rng(0).normal(size=(BATCH, *image, CHANNELS)) + 0.3
    images = np.split(x, CHANNELS, -1) if each_channel else [x]
    want = np.squeeze([from_patches(image, geometry) for image in images])

    def gram(x: tf.Tensor) -> Any:
        gram = channel_grams if each_channel else patch_gram
        return gram(x, Geometry(kernel, strides, padding), bias=True)

    unknown = tf.TensorSpec([None, None, None, CHANNELS], tf.float64)
    dynamic = tf.function(gram, input_signature=[unknown], **options)
    static = tf.function(gram, **options)
    for function in (static, dynamic):
        total, count = function(tf.constant(x))
        assert float(count) == want[..., -1, -1].min()
        np.testing.assert_allclose(total, want, atol=1e-12 * want.max(), rtol=0)


@pytest.mark.parametrize(
    "geometry",
    [
        pytest.param(geometry, marks=[pytest.mark.slow] * (i % 2))
        for i, geometry in enumerate(GEOMETRIES)
    ],
    ids=str,
)
def test_sum_over_patches(geometry: Any) -> None:
    check(geometry)


@pytest.mark.parametrize("geometry", DEPTHWISE, ids=str)
def test_sum_over_patches_of_a_channel(geometry: Any) -> None:
    check(geometry, each_channel=True)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", sweep(), ids=str)
def test_every_geometry(geometry: Any) -> None:
    check(geometry)
    kernel, strides, padding, image = geometry
    check((kernel, strides[:1] * 2, padding, image), each_channel=True)


@pytest.mark.slow
def test_compiled_by_xla() -> None:
    for geometry in (GEOMETRIES[1], GEOMETRIES[4]):
        check(geometry, jit_compile=True)
    for geometry in (DEPTHWISE[0], DEPTHWISE[3]):
        check(geometry, each_channel=True, jit_compile=True)


def test_empty_batch() -> None:
    x = tf.zeros([0, 5, 5, CHANNELS])
    geometry = Geometry((3, 3), (1, 1), "same")
    total, count = patch_gram(x, geometry, bias=True)
    assert float(count) == 0
    assert not np.any(total)


# ------------------------------------------------------------------ blocks
def block_of(layer: Any, shape: tuple[int | None, ...]) -> Any:
    model = keras.Sequential([keras.Input(shape), layer])
    (block,) = build_registry(model, ()).blocks
    return block


CORRELATED: dict[str, Case] = {
    "same": (partial(layers.Conv2D, 3, 3, padding="same"), (9, 8, 8)),
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


@pytest.mark.parametrize("case", CORRELATED)
def test_gram_agrees_with_rows(case: str) -> None:
    factory, shape = CORRELATED[case]
    block = block_of(factory(name="block"), shape)
    x = np.random.default_rng(0).normal(size=(32, *shape)).astype("float32")
    g = np.zeros(block.layer.compute_output_shape(x.shape), "float32")
    rows = block.rows(Record(tf.constant(x), tf.constant(g)))
    a = np.asarray(rows.a, np.float64)
    total, count = rows.gram()
    assert float(count) == a.shape[0] * a.shape[1]
    assert_close(total, np.einsum("bs...i,bs...j->...ij", a, a), FACTOR_RTOL)


# Layers for which patches are cheaper, or correlation is not supported.
BY_PATCHES: dict[str, Case] = {
    "dilated": (partial(layers.Conv2D, 3, 3, dilation_rate=2), (9, 8, 8)),
    "1x1": (partial(layers.Conv2D, 3, 1), (9, 8, 8)),
    "one channel": (partial(layers.Conv2D, 3, 3), (9, 8, 1)),
    "three dimensions": (partial(layers.Conv3D, 3, 3), (5, 5, 5, 8)),
    "groups": (partial(layers.Conv2D, 4, 3, groups=2), (9, 8, 8)),
    "dilated depthwise": (
        partial(layers.DepthwiseConv2D, 3, dilation_rate=2),
        (9, 8, 8),
    ),
    "tiny image": (partial(layers.Conv2D, 3, 3, padding="same"), (2, 2, 64)),
}


@pytest.mark.parametrize("case", BY_PATCHES)
def test_layers_without_correlation(case: str) -> None:
    factory, shape = BY_PATCHES[case]
    block = block_of(factory(name="block"), shape)
    x = tf.ones([32, *shape])
    g = tf.ones(block.layer.compute_output_shape(x.shape))
    assert block.rows(Record(x, g)).gram is None
