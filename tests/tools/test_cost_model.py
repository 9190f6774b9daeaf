"""The cost model of `tools/studies/plan.py` against numbers counted by hand."""

import math
from typing import Any

import keras
import pytest
from keras import layers

import tfkfac
from cost_model import Batch, Machine, Network

CLUSTER = Machine(10e12, 1e9, 1e-6)


def attached(built: Any) -> tfkfac.KFAC:
    return tfkfac.KFAC(step="natural").attach(built)


def convolutional() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 5, 3)),
            layers.Conv2D(4, 3, name="conv", use_bias=False),
            layers.Flatten(name="flat"),
            layers.Dense(7, name="dense"),
        ]
    )


def test_rows_and_products_by_hand() -> None:
    """A batch of 2: 4 x 3 positions of 27 x 4, then 49 x 7 with the bias."""
    built = convolutional()
    blocks = attached(built).method.placement.blocks
    network = Network(built, 2)
    assert [network.rows(block) for block in blocks] == [2 * 12, 2]
    forward = 24 * 27 * 4 + 2 * 49 * 7
    assert network.multiplications(blocks) == forward
    assert network.elements == 2 * (48 + 48 + 7)
    batch = Batch.of(network, blocks, 2, 1.0, blocks)
    # Of the dense layer: rows times squares of the sizes.
    assert batch.statistics[1] == 2 * (49**2 + 7**2)
    assert batch.read[1] == 2 * (49 + 7)


def test_rows_of_layers_in_layers() -> None:
    """Two sentences of five tokens; the convolution has four positions."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, name="tokens")(tokens)
    x = layers.TimeDistributed(layers.Dense(6), name="each")(x)
    x = layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    x = layers.SeparableConv1D(8, 2, depth_multiplier=3, name="separable")(x)
    built = keras.Model(tokens, layers.GlobalAveragePooling1D()(x))
    blocks = attached(built).method.placement.blocks
    network = Network(built, 2)
    rows = {block.path: network.rows(block) for block in blocks}
    convolution = {p: n for p, n in rows.items() if "separable" in p}
    assert set(convolution.values()) == {2 * 4} and len(convolution) == 2
    assert {n for p, n in rows.items() if p not in convolution} == {2 * 5}
    # An embedding multiplies nothing, and counts its tokens.
    assert network.multiplications(blocks[:1]) == 0
    batch = Batch.of(network, blocks, 2, 1.0, blocks)
    assert batch.statistics[0] == 10 * 4**2


@pytest.mark.parametrize(
    ("fraction", "observers", "share"),
    [(1.0, 1, 1), (0.25, 1, 0.25), (None, 1, 0.5), (None, 8, 0.25)],
)
def test_share_of_the_examples(
    fraction: float | None, observers: int, share: float
) -> None:
    """None is a quarter, but at least 64 of all workers together."""
    batch = Batch(128, fraction, 0, 0, [], [], [])
    assert batch.share(observers) == share


@pytest.mark.parametrize("workers", [2, 3, 64])
def test_collectives(workers: int) -> None:
    """A ring receives 2 (P - 1) / P of the data; few hops go up a tree."""
    size = 4e6
    hops = min(2 * (workers - 1), 2 * math.ceil(math.log2(workers)))
    want = 2 * (workers - 1) / workers * size / 1e9 + 3 * hops * 1e-6
    assert CLUSTER.all_reduce(size, workers, 3) == pytest.approx(want)
    # Two messages, each from one worker to the next.
    want = 5e-3 + 2 * (workers - 1) * 1e-6
    assert CLUSTER.broadcast(5e6, workers, 2) == pytest.approx(want)
    assert CLUSTER.all_reduce(size, 1) == CLUSTER.broadcast(0, workers) == 0
