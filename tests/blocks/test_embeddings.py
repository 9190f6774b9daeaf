"""Blocks of position embeddings."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.support.harness import (
    assert_close,
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import targets
from tests.support.reference import Array, factors

BATCH, TOKENS, WIDTH, TIME = 4, 6, 3, 5


class PositionEmbedding(layers.Layer):
    """Imitates the layer of this name in keras-hub."""

    __module__ = "keras_hub.src.layers.modeling.position_embedding"

    def __init__(self, sequence_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sequence_length = sequence_length

    def build(self, shape: Any) -> None:
        self.position_embeddings = self.add_weight(
            name="embeddings", shape=[self.sequence_length, shape[-1]]
        )

    def call(self, inputs: Any, start_index: Any = 0, positions: Any = None):
        shape = ops.shape(inputs)
        table = ops.convert_to_tensor(self.position_embeddings)
        if positions is None:
            table = ops.slice(table, (start_index, 0), shape[-2:])
        else:
            if len(positions.shape) == 1:
                positions = ops.expand_dims(positions, 0)
            table = ops.take(table, positions, axis=0)
        return ops.broadcast_to(table, shape)


CHOSEN = np.array([[0, 1, 2], [3, 4, 5], [1, 1, 1], [5, 0, 2]], "int32")
CALLS: dict[str, tuple[Callable[[Any, Any], Any], Array]] = {
    "from the start": (
        lambda layer, x: layer(x),
        np.tile(np.arange(3), (BATCH, 1)),
    ),
    "later": (
        lambda layer, x: layer(x, ops.convert_to_tensor(2, "int64")),
        np.tile(np.arange(2, 5), (BATCH, 1)),
    ),
    "given positions": (
        lambda layer, x: layer(x, positions=ops.convert_to_tensor(CHOSEN)),
        CHOSEN,
    ),
}


@pytest.mark.parametrize(
    ("case", "sharing"),
    zip(CALLS, ["expand", "reduce", "expand"], strict=True),
)
def test_position_embedding(case: str, sharing: str) -> None:
    """The factors equal an embedding's factors with positions as tokens."""
    call, positions = CALLS[case]
    layer = PositionEmbedding(6, name="block")

    class Positioned(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.block = layer

        def call(self, x: Any) -> Any:
            return ops.tanh(x + call(self.block, x))

    model = Positioned()
    x = make_input("", (3, WIDTH), BATCH)
    model(x)
    randomize(model)
    y = targets(model, x)
    (table,) = weights_of(model)
    out = np.tanh(x + table[positions])
    g = (out - y) * (1 - out**2)
    a = np.eye(6)[positions]
    mean = np.einsum("nsi,nso->io", a, g) / BATCH
    assert_close(mean, keras_gradients(model, x, y)[0], 1e-5, "gradient")
    block = train_once(model, x, y, weight_sharing=sharing).of("block")
    A, G = factors(a, g, sharing)
    assert_close(block["A"], np.diagonal(A), 1e-5, "A")
    assert_close(block["G"], G, 1e-5, "G")


@pytest.mark.filterwarnings("ignore:Layer 'block'.*does not support masking")
def test_positions_of_padding_do_not_count() -> None:
    """Padded positions without a gradient do not count in A."""
    inputs = keras.Input((TIME,), dtype="int32")
    tokens = layers.Embedding(TOKENS, WIDTH, mask_zero=True)(inputs)
    positions = PositionEmbedding(TIME, name="block")(tokens)
    kept = ops.cast(inputs > 0, "float32")[..., None]
    hidden = (positions + tokens) * kept
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    x = np.array([[1, 2, 0, 0, 0], [3, 1, 1, 2, 0]], "int32")
    step = train_once(model, x, targets(model, x), loss="mse")
    want = np.array([2, 2, 1, 1, 0]) / 6
    assert_close(step.of("block")["A"], want, 1e-6, "A")
