"""Normalisation layers of one graph that must not share a traced function."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.reference import Array
from tfkfac.blocks.normalization import NormalizationBlock
from tfkfac.capture.taps import Record

POSITIONS, FEATURES = 5, 3


class Shifted(layers.LayerNormalization):
    """Layer with an attribute that is not in its config."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) + self.shift


def over_features(x: Array, epsilon: float = 1e-3) -> Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon)


def over_batch(x: Array) -> Array:
    return (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-3)


def built(layer: Any, moving_mean: float = 0, frozen: str = "") -> Any:
    if not layer.built:
        layer.build((None, POSITIONS, FEATURES))
    if moving_mean:
        layer.moving_mean.assign(np.full(FEATURES, moving_mean))
    if frozen:
        getattr(layer, frozen).trainable = False
    return layer


LAYER, BATCH = layers.LayerNormalization, layers.BatchNormalization
# Arguments of the calls; layers with their normalised inputs.
CASES: dict[str, tuple[dict[str, Any], list[tuple[Any, Any]]]] = {
    "other epsilon": (
        {},
        [
            (LAYER(), over_features),
            (LAYER(epsilon=10.0), lambda x: over_features(x, 10.0)),
        ],
    ),
    "custom class": (
        {},
        [(Shifted(n), lambda x, n=n: over_features(x) + n) for n in (1, 2)],
    ),
    "batch moments": (
        {"training": True},
        [(BATCH(), over_batch) for _ in range(2)],
    ),
    "moving moments": (
        {"training": False},
        [
            (built(BATCH(), m), lambda x, m=m: (x - m) / np.sqrt(1 + 1e-3))
            for m in (1, 2)
        ],
    ),
    "frozen": (
        {},
        [
            (built(LAYER(), frozen="beta"), over_features),
            (built(LAYER(), frozen="gamma"), over_features),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_each_layer(case: str) -> None:
    """Rows are sums over positions of `g [xhat, 1]`."""
    kwargs, pairs = CASES[case]
    blocks = [NormalizationBlock(built(layer), "n") for layer, _ in pairs]

    @tf.function(autograph=False)
    def step(inputs: Any, gradients: Any) -> Any:
        rows = []
        for block, x, g in zip(blocks, inputs, gradients, strict=True):
            training = kwargs.get("training")
            moments = tf.nn.moments(x, [0, 1]) if training else None
            record = Record(x, g, kwargs=kwargs, moments=moments)
            rows.append(block.rows(record).g)
        return rows

    random = np.random.default_rng(0)
    shape = (len(pairs), 4, POSITIONS, FEATURES)
    inputs = random.normal(1, 2, shape).astype("float32")
    gradients = random.normal(size=shape).astype("float32")
    rows = step(tf.unstack(inputs), tf.unstack(gradients))
    for row, x, g, (layer, normalize) in zip(
        rows, inputs, gradients, pairs, strict=True
    ):
        sums = [(g * normalize(x)).sum(1), g.sum(1)]
        trainable = [layer.gamma.trainable, layer.beta.trainable]
        want = np.stack(sums, -1)[..., trainable]
        np.testing.assert_allclose(row[:, 0], want, rtol=1e-4, atol=1e-4)
