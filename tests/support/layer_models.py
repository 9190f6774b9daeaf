"""Small models whose inputs and gradients are known in closed form."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    CURVES,
    SLOPES,
    half_squared_error,
    randomize,
)
from tests.support.layer_cases import make_input
from tests.support.layer_views import View, feature_rows, normalized
from tests.support.reference import Array, factors


def targets(model: Any, x: Any, seed: int = 2) -> Array:
    """Noise in the shape of the model's output."""
    rng = np.random.default_rng(seed)
    noise: Array = rng.normal(size=model(x).shape).astype("float32")
    return noise


def one_layer(
    layer: keras.Layer, shape: tuple[int, ...], after: str | None = None
) -> Any:
    """Input, the layer and, if given, a separate activation layer."""
    dtype = "int32" if isinstance(layer, layers.Embedding) else None
    x = keras.Input(shape, dtype=dtype)
    y = layer(x)
    if after is not None:
        y = layers.Activation(after)(y)
    model = keras.Model(x, y)
    randomize(model)
    return model


def problem(
    layer: keras.Layer,
    shape: tuple[int, ...],
    batch: int,
    after: str | None = None,
) -> tuple[Any, Array, Array]:
    """A model of one layer, with inputs and targets."""
    model = one_layer(layer, shape, after)
    kind = "embedding" if isinstance(layer, layers.Embedding) else ""
    x = make_input(kind, shape, batch)
    return model, x, targets(model, x)


def activation_name(layer: keras.Layer) -> str | None:
    name = getattr(getattr(layer, "activation", None), "__name__", None)
    return None if name == "linear" else name


def expected_rows(
    view: View, weights: list[Array], x: Array, y: Array, curve: str | None
) -> tuple[Array, Array]:
    """Rows a and g per group when the loss is half the squared error."""
    a = view.rows(x.astype(np.float64))
    z = np.einsum("gnsi,gio->gnso", a, view.matrix(weights))
    out = CURVES[curve](z)
    return a, (out - view.split(y.astype(np.float64))) * SLOPES[curve](out)


def expected_factors(
    view: View, a: Array, g: Array, sharing: str, keep: Array | None = None
) -> tuple[Array, Array]:
    """A and G in the layer's public shapes."""
    blocks = [factors(*pair, sharing, keep) for pair in zip(a, g, strict=True)]
    A, G = (np.stack(m) for m in zip(*blocks, strict=True))
    if view.groups is None:
        A, G = A[0], G[0]
    return (np.diagonal(A) if view.diagonal else A), G


def per_example(model: Any, x: Any, y: Array) -> dict[str, Array]:
    """Gradients of each l_n, `(batch, *shape)`, by path of the variable."""
    variables = model.trainable_variables
    found: list[list[Array]] = []
    for n in range(len(y)):
        example = tf.nest.map_structure(lambda a, n=n: a[n : n + 1], x)
        with tf.GradientTape() as tape:
            outputs = model(example, training=True)
            value = half_squared_error(y[n : n + 1], outputs)
        gradients = tape.gradient(value, [v.value for v in variables])
        found.append([np.asarray(g, np.float64) for g in gradients])
    stacks = [np.stack(column) for column in zip(*found, strict=True)]
    return {v.path: g for v, g in zip(variables, stacks, strict=True)}


def per_example_norm_gradients(layer: Any, x: Array, y: Array) -> Array:
    """(batch, features, 1 or 2): scale's and offset's l_n gradients."""
    hat = feature_rows(layer, normalized(layer, x.astype(np.float64)))
    target = feature_rows(layer, y.astype(np.float64))
    # RMSNormalization's `scale` is a variable, elsewhere it is a flag.
    scale = getattr(layer, "gamma", getattr(layer, "scale", None))
    offset = getattr(layer, "beta", None)
    has_scale, has_offset = hasattr(scale, "shape"), offset is not None
    gamma = np.ravel(scale).astype(np.float64) if has_scale else 1.0
    beta = np.ravel(offset).astype(np.float64) if has_offset else 0.0
    out = np.tanh(gamma * hat + beta)
    g = (out - target) * (1 - out**2)
    parts = [(g * hat).sum(1)] * has_scale + [g.sum(1)] * has_offset
    return np.stack(parts, axis=-1)


def deep_model(dtype: str) -> keras.Model:
    """Every kind of kernel with a bias, under a softmax cross-entropy."""
    x = keras.Input((6, 6, 2), dtype=dtype)
    kw = {"dtype": dtype}
    h = layers.Conv2D(4, 3, activation="tanh", name="conv", **kw)(x)
    h = layers.DepthwiseConv2D(2, name="depthwise", **kw)(h)
    h = layers.Activation("tanh", **kw)(h)
    h = layers.Conv2D(6, 2, groups=2, name="grouped", **kw)(h)
    h = layers.Reshape((4, 6), **kw)(h)
    h = layers.LayerNormalization(name="norm", **kw)(h)
    h = layers.EinsumDense(
        "abc,cde->abde", (None, 2, 3), bias_axes="de", name="einsum", **kw
    )(h)
    h = layers.Reshape((4, 6), **kw)(h)
    h = layers.Dense(5, activation="tanh", name="sequence", **kw)(h)
    h = layers.Flatten(**kw)(h)
    h = layers.Dense(7, activation="sigmoid", name="hidden", **kw)(h)
    y = layers.Dense(3, name="logits", **kw)(h)
    model = keras.Model(x, y)
    randomize(model)
    return model
