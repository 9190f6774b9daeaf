"""Convolutions: rows of transposed ones, and A by correlation, in NumPy."""

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
    check_factors,
    train_once,
)
from tests.support.layer_cases import TRANSPOSED, Case, make_input
from tests.support.layer_models import problem, targets
from tests.support.reference import (
    Array,
    append_one,
    dense_solve,
    factors,
    patches,
)
from tfkfac.blocks import Block, Record
from tfkfac.blocks.correlation import channel_grams, patch_gram
from tfkfac.blocks.patches import Geometry
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import BatchSettings, batch_statistics

BATCH, CHANNELS = 4, 2
# Layers that TensorFlow cannot run on a CPU; only their rows are tested.
NOT_ON_CPU: dict[str, Case] = {
    "dilated": (
        partial(layers.Conv2DTranspose, 2, (3, 2), dilation_rate=(2, 3)),
        (3, 4, 2),
    ),
    "dilated same": (
        partial(layers.Conv1DTranspose, 2, 3, dilation_rate=2, padding="same"),
        (5, 2),
    ),
    "channels first": (
        partial(
            layers.Conv2DTranspose,
            2,
            (3, 2),
            strides=2,
            data_format="channels_first",
        ),
        (3, 2, 4),
    ),
}


def expected_rows(layer: Any, x: Array, g: Array) -> tuple[Array, Array]:
    """Inputs, and patches of the output gradient for each input position."""
    if layer.data_format == "channels_first":
        x, g = (np.moveaxis(v, 1, -1) for v in (x, g))
    cells, outputs = x.shape[1:-1], g.shape[1:-1]
    grid = np.indices(cells).reshape(len(cells), -1, 1)
    offsets = np.indices(layer.kernel_size).reshape(len(cells), 1, -1)
    strides, dilation = (
        np.array(v)[:, None, None] for v in (layer.strides, layer.dilation_rate)
    )
    index = grid * strides + offsets * dilation
    extent = index.max((1, 2)) + 1
    # "same" crops the output, by an odd cell more at the end.
    crop = np.maximum(extent - outputs, 0) // 2
    ends = np.maximum(extent - crop - outputs, 0)
    pads = [(0, 0), *zip(crop, ends, strict=True), (0, 0)]
    patches = np.pad(g, pads)[(slice(None), *index)]
    a = x.reshape(BATCH, -1, x.shape[-1])
    return a, patches.reshape(*a.shape[:2], -1)


def block_of(layer: Any, shape: Any) -> Block:
    model = keras.Sequential([keras.Input(shape), layer])
    return build_registry(model, ()).blocks[0]


@pytest.mark.parametrize("case", NOT_ON_CPU)
def test_rows(case: str) -> None:
    factory, shape = NOT_ON_CPU[case]
    layer = factory(name="up", activation=None)
    block = block_of(layer, shape)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, *shape))
    g = rng.normal(size=layer.compute_output_shape(x.shape))
    record = Record(tf.constant(x), tf.constant(g))
    a, patches = expected_rows(layer, x, g)
    want = np.einsum("nsi,nso->io", a, patches)
    assert_close(block.gradient(block.rows(record)), want, 1e-6, "gradient")
    sums = batch_statistics({0: (block, [record])}, BatchSettings("expand"))[0]
    for name, rows in (("A", a), ("G", patches)):
        want = np.einsum("nsi,nsj->ij", rows, rows)
        if name == "G":
            want *= BATCH**2
        assert_close(sums[name].total, want, 1e-6, name)


def test_step_of_several_examples() -> None:
    """The step equals a solve with the dense matrix of A and G."""
    factory, shape = TRANSPOSED["transposed2d_overlap"]
    layer = factory(name="up")
    model, x, y = problem(layer, shape, BATCH)
    g = (model(x) - y).numpy().astype(np.float64)
    a, patches = expected_rows(layer, x.astype(np.float64), g)
    step = train_once(model, x, y, solver="eigen", damping=0.3)
    A, G = factors(a, patches)
    check_factors(step.factors["up"], A, G)
    W = np.einsum("nsp,nsi->ip", patches, a) / BATCH
    P = dense_solve(W, A, G, 0.3)
    assert_close(step.delta[0], P.T.reshape(step.delta[0].shape), 1e-4, "step")
    u = g.sum((1, 2))
    fisher = u.T @ u / BATCH
    assert_close(step.factors["bias/up"]["G"], fisher, 1e-5, "G of the bias")
    want = np.linalg.solve(fisher + 0.3 * np.eye(2), u.mean(0))
    assert_close(step.delta[1], want, 1e-4, "step of the bias")


@pytest.mark.parametrize("case", TRANSPOSED)
def test_gradients(case: str) -> None:
    factory, shape = TRANSPOSED[case]
    layer = factory(name="up", activation=None)
    block = block_of(layer, shape)
    x = tf.constant(make_input("", shape, BATCH))
    with tf.GradientTape() as tape:
        z = layer(x)
        g = tf.constant(targets(layer, x))
        loss = tf.reduce_sum(z * g)
    want = tape.gradient(loss, layer.kernel.value)
    rows = block.rows(Record(x, g))
    assert_close(
        block.gradient(rows), block.to_matrix([want]), 1e-5, "gradient"
    )


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_images_of_dynamic_size(padding: str) -> None:
    """A trace for dynamic sizes returns the factors of static sizes."""
    layer = layers.Conv2DTranspose(2, 3, 2, padding=padding, name="up")
    block = block_of(layer, (None, None, 2))

    def totals(x: tf.Tensor, g: tf.Tensor) -> Any:
        layers = {0: (block, [Record(x, g)])}
        sums = batch_statistics(layers, BatchSettings("expand"))[0]
        return sums["A"].total, sums["G"].total

    unknown = tf.TensorSpec((None, None, None, 2))
    traced = tf.function(totals, input_signature=[unknown, unknown])
    for shape in ((3, 4, 2), (5, 2, 2)):
        x = tf.constant(make_input("", shape, BATCH))
        g = tf.constant(targets(layer, x))
        for got, want in zip(traced(x, g), totals(x, g), strict=True):
            assert_close(got, want, 1e-6, "total")


# ------------------------------------------------------------- A by correlation

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
    total, count = rows.gram()
    want = block.input_statistic(rows.a, None, "expand")
    assert float(count) == float(want.count)
    assert_close(total, want.total, FACTOR_RTOL)
