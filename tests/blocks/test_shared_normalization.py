"""Normalisation layers that are alike in a graph, and yet have other rows."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfkfac.blocks.normalization import NormalizationBlock
from tfkfac.capture.taps import Record

POSITIONS, FEATURES = 5, 3


class Shifted(layers.LayerNormalization):
    """Has what it does not save."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) + self.shift


def over_features(x: Any, epsilon: float = 1e-3) -> Any:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon)


def over_batch(x: Any) -> Any:
    return (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-3)


def with_moving_mean(mean: float) -> Any:
    layer = layers.BatchNormalization()
    layer.build((None, POSITIONS, FEATURES))
    layer.moving_mean.assign(np.full(FEATURES, mean))
    return layer


def without(name: str) -> Any:
    layer = layers.LayerNormalization()
    layer.build((None, POSITIONS, FEATURES))
    getattr(layer, name).trainable = False
    return layer


# Layers, what else their calls had, and their normalised inputs.
CASES: dict[str, tuple[list[Any], dict[str, Any], list[Any]]] = {
    "equal": (
        [layers.LayerNormalization() for _ in range(3)],
        {},
        [over_features] * 3,
    ),
    "other epsilon": (
        [layers.LayerNormalization(epsilon=e) for e in (1e-3, 10.0)],
        {},
        [over_features, lambda x: over_features(x, 10.0)],
    ),
    "own class": (
        [Shifted(1.0), Shifted(2.0)],
        {},
        [lambda x: over_features(x) + 1, lambda x: over_features(x) + 2],
    ),
    "batch moments": (
        [layers.BatchNormalization() for _ in range(2)],
        {"training": True},
        [over_batch] * 2,
    ),
    "moving moments": (
        [with_moving_mean(1.0), with_moving_mean(2.0)],
        {"training": False},
        [lambda x, m=m: (x - m) / np.sqrt(1 + 1e-3) for m in (1, 2)],
    ),
}


def rows_in_a_graph(
    normalizations: list[Any],
    kwargs: dict[str, Any],
    inputs: list[Any],
    gradients: list[Any],
) -> list[Any]:
    """Rows of layers in one graph."""
    for layer in normalizations:
        if not layer.built:
            layer.build((None, POSITIONS, FEATURES))
    blocks = [NormalizationBlock(layer, "n") for layer in normalizations]

    @tf.function(autograph=False)
    def step(inputs: Any, gradients: Any) -> Any:
        rows = []
        for block, x, g in zip(blocks, inputs, gradients, strict=True):
            training = kwargs.get("training")
            moments = tf.nn.moments(x, [0, 1]) if training else None
            record = Record(x, g, kwargs=kwargs, moments=moments)
            rows.append(block.rows(record).g)
        return rows

    arguments = tuple(
        [tf.constant(t) for t in ts] for ts in (inputs, gradients)
    )
    return [r.numpy() for r in step(*arguments)]


@pytest.mark.parametrize("case", CASES)
def test_each_layer_has_its_own_rows(case: str) -> None:
    """Sums over positions of `g [xhat, 1]`, in NumPy."""
    normalizations, kwargs, expected = CASES[case]
    random = np.random.default_rng(0)
    shape = (len(normalizations), 4, POSITIONS, FEATURES)
    inputs = random.normal(1, 2, shape).astype("float32")
    gradients = random.normal(size=shape).astype("float32")
    found = rows_in_a_graph(
        normalizations, kwargs, list(inputs), list(gradients)
    )
    for row, x, g, normalize in zip(
        found, inputs, gradients, expected, strict=True
    ):
        both = [(g * normalize(x)).sum(1), g.sum(1)]
        np.testing.assert_allclose(
            row[:, 0], np.stack(both, -1), rtol=1e-4, atol=1e-4
        )


def test_a_frozen_weight_has_no_part_in_it() -> None:
    random = np.random.default_rng(0)
    x, g = random.normal(size=(2, 4, POSITIONS, FEATURES)).astype("float32")
    found = rows_in_a_graph(
        [without("beta"), without("gamma")], {}, [x, x], [g, g]
    )
    scale = (g * over_features(x)).sum(1)
    np.testing.assert_allclose(found[0][:, 0, :, 0], scale, 1e-4, 1e-4)
    np.testing.assert_allclose(found[1][:, 0, :, 0], g.sum(1), 1e-4, 1e-4)
