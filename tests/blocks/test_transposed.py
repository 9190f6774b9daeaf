"""Transposed convolutions against Jacobians of Keras' own layer."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    CURVES,
    SLOPES,
    assert_close,
    check_factors,
    keras_gradients,
    train_once,
    weights_of,
)
from tests.support.layer_cases import TRANSPOSED, Case, make_input
from tests.support.layer_models import activation_name, one_layer, targets
from tests.support.reference import Array, dense_solve, factors
from tfkfac.blocks import Record
from tfkfac.blocks.registry import build_registry

BATCH = 4


def reach(layer: Any, shape: tuple[int, ...]) -> Array:
    """1 where an input position adds to an output by a kernel offset.

    Shape `(inputs, offsets, outputs)`: the output of a Keras layer with one
    filter for each offset, for an image of zeros with a single one.
    """
    offsets = math.prod(layer.kernel_size)
    config = layer.get_config() | {
        "filters": offsets,
        "use_bias": False,
        "activation": None,
    }
    probe = type(layer).from_config(config)
    spatial = shape[:-1]
    inputs = math.prod(spatial)
    probe.build((None, *spatial, 1))
    kernel = np.eye(offsets).reshape(*layer.kernel_size, offsets, 1)
    probe.set_weights([kernel])
    images = np.eye(inputs).reshape(inputs, *spatial, 1)
    out = np.asarray(probe(images)).reshape(inputs, -1, offsets)
    return np.moveaxis(out, -1, 1)


@dataclasses.dataclass
class Expected:
    """Inputs, gradients by output position, and their patches."""

    a: Array
    g: Array
    patches: Array


def expected(layer: Any, weights: list[Array], x: Array, y: Array) -> Expected:
    """When the loss is half the squared error."""
    at = reach(layer, x.shape[1:])
    a = x.astype(np.float64).reshape(len(x), -1, x.shape[-1])
    kernel = weights[0].reshape(at.shape[1], *weights[0].shape[-2:])
    z = np.einsum("skp,koi,nsi->npo", at, kernel, a)
    if len(weights) > 1:
        z = z + weights[1]
    curve = activation_name(layer)
    out = CURVES[curve](z)
    g = (out - y.reshape(out.shape)) * SLOPES[curve](out)
    patches = np.einsum("skp,npo->nsko", at, g)
    return Expected(a, g, patches.reshape(*a.shape[:2], -1))


REDUCED = ("transposed1d_same_strided", "transposed2d_overlap")


@pytest.mark.parametrize(
    ("case", "sharing"),
    [(case, "expand") for case in TRANSPOSED]
    + [(case, "reduce") for case in REDUCED],
)
def test_transposed_convolution(case: str, sharing: str) -> None:
    factory, shape = TRANSPOSED[case]
    layer = factory(name="up")
    model = one_layer(layer, shape)
    x = make_input(case, shape, BATCH)
    y = targets(model, x)
    want = expected(layer, weights_of(model), x, y)

    kernel, *bias = keras_gradients(model, x, y)
    mean = np.einsum("nsp,nsi->pi", want.patches, want.a) / BATCH
    assert_close(mean.reshape(kernel.shape), kernel, 1e-5, "gradient")

    step = train_once(model, x, y, weight_sharing=sharing)
    assert list(step.factors) == ["up", "bias/up"][: 1 + len(bias)]
    check_factors(step.factors["up"], *factors(want.a, want.patches, sharing))
    if bias:
        u = want.g.sum(1)
        assert_close(u.mean(0), bias[0], 1e-5, "bias gradient")
        assert set(step.factors["bias/up"]) == {"G"}
        G = step.factors["bias/up"]["G"]
        assert_close(G, u.T @ u / BATCH, 1e-5, "G of the bias")


def test_one_position_is_a_dense_layer() -> None:
    """The step solves with the whole Fisher block of a single example.

    There the Kronecker product is no approximation: the gradient of one
    example is an outer product, which is written out here by a tape.
    """
    factory, shape = TRANSPOSED["transposed2d_one_position"]
    model = one_layer(factory(name="up"), shape)
    x = make_input("", shape, 1)
    y = targets(model, x)
    kernel, bias = keras_gradients(model, x, y)
    step = train_once(model, x, y, solver="eigen", damping=0.3)
    for gradient, delta in zip((kernel, bias), step.delta, strict=True):
        u = gradient.ravel()
        fisher = np.outer(u, u) + 0.3 * np.eye(len(u))
        want = np.linalg.solve(fisher, u).reshape(gradient.shape)
        assert_close(delta, want, 1e-4, "step")


def test_step_of_several_examples() -> None:
    """P is what the dense matrix of A and G gives, in the kernel's layout."""
    factory, shape = TRANSPOSED["transposed2d_overlap"]
    layer = factory(name="up")
    model = one_layer(layer, shape)
    x = make_input("", shape, BATCH)
    y = targets(model, x)
    want = expected(layer, weights_of(model), x, y)
    step = train_once(model, x, y, solver="eigen", damping=0.3)
    W = np.einsum("nsp,nsi->ip", want.patches, want.a) / BATCH
    P = dense_solve(W, *factors(want.a, want.patches), 0.3)
    assert_close(step.delta[0], P.T.reshape(step.delta[0].shape), 1e-4, "step")


def geometries() -> Iterator[tuple[int, int, int, str, int | None]]:
    """Rank, kernel, stride, padding and output padding."""
    choices = itertools.product(
        (1, 2, 3), (1, 2, 3, 5), (1, 2, 3), ("valid", "same"), (None, 0, 1, 2)
    )
    for rank, kernel, stride, padding, output in choices:
        possible = output is None or output < stride
        # TensorFlow refuses an output that is one cell too short.
        if kernel == 2 and padding == "same" and output == 0:
            possible = False
        if possible and (rank < 3 or kernel < 4):
            yield rank, kernel, stride, padding, output


@pytest.mark.slow
@pytest.mark.parametrize("geometry", geometries(), ids=str)
def test_every_geometry(geometry: Any) -> None:
    """The rows reproduce the gradient of Keras' own layer."""
    rank, kernel, stride, padding, output = geometry
    layer = getattr(layers, f"Conv{rank}DTranspose")(
        3, kernel, stride, padding=padding, output_padding=output
    )
    shape = (*(4, 5, 3)[:rank], 2)
    model = keras.Sequential([keras.Input(shape), layer])
    x = tf.constant(make_input("", shape, BATCH))
    with tf.GradientTape() as tape:
        z = layer(x)
        g = tf.constant(targets(model, x))
        loss = tf.reduce_sum(z * g)
    want = tape.gradient(loss, layer.kernel.value)
    block = build_registry(model, ()).blocks[0]
    rows = block.rows(Record(x, g))
    got = tf.einsum("nsi,nso->io", rows.a, rows.g)
    assert_close(got, block.to_matrix([want]), 1e-5, "gradient")


# What TensorFlow cannot run on a CPU, and images of unknown size.
OTHERS: dict[str, Case] = {
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


def scatter(layer: Any, x: Array) -> Array:
    """Positions `(inputs, offsets)` to which each input adds, NumPy only.

    Whole output without padding; "same" cuts it to the size of the input.
    """
    grid = np.indices(x.shape[1:-1]).reshape(len(layer.kernel_size), -1)
    offsets = np.indices(layer.kernel_size).reshape(len(grid), -1)
    strides, dilation = (
        np.array(v)[:, None, None] for v in (layer.strides, layer.dilation_rate)
    )
    return grid[:, :, None] * strides + offsets[:, None] * dilation


@pytest.mark.parametrize("case", OTHERS)
def test_rows_by_hand(case: str) -> None:
    """Rows of a record that no forward pass has made."""
    factory, shape = OTHERS[case]
    layer = factory(name="up")
    model = keras.Sequential([keras.Input(shape), layer])
    first = layer.data_format == "channels_first"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, *shape))
    out = layer.compute_output_shape((BATCH, *shape))
    g = rng.normal(size=out)
    block = build_registry(model, ()).blocks[0]
    rows = block.rows(Record(tf.constant(x), tf.constant(g)))
    if first:
        x, g = (np.moveaxis(v, 1, -1) for v in (x, g))

    at = scatter(layer, x)
    extent = at.max((1, 2)) + 1
    cut = (extent - g.shape[1:-1]) // 2
    wide = np.zeros((BATCH, *extent, g.shape[-1]))
    inside = tuple(
        slice(c, c + n) for c, n in zip(cut, g.shape[1:-1], strict=True)
    )
    wide[(slice(None), *inside)] = g
    patches = wide[(slice(None), *at)]
    assert rows.a is not None
    assert_close(rows.a, x.reshape(BATCH, -1, x.shape[-1]), 1e-6, "a")
    assert_close(rows.g, patches.reshape(*rows.g.shape), 1e-6, "g")


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_images_of_unknown_size(padding: str) -> None:
    """Two sizes through one trace: the rows of known sizes."""
    layer = layers.Conv2DTranspose(2, 3, 2, padding=padding, name="up")
    model = one_layer(layer, (None, None, 2))
    block = build_registry(model, ()).blocks[0]

    def rows(x: tf.Tensor, g: tf.Tensor) -> Any:
        made = block.rows(Record(x, g))
        return made.a, made.g

    unknown = tf.TensorSpec((None, None, None, 2))
    traced = tf.function(rows, input_signature=[unknown, unknown])
    for shape in ((3, 4, 2), (5, 2, 2)):
        x = tf.constant(make_input("", shape, BATCH))
        g = tf.constant(targets(model, x))
        for got, want in zip(traced(x, g), rows(x, g), strict=True):
            np.testing.assert_array_equal(got, want)
