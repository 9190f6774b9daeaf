"""Layers and models of keras-hub, an optional package.

Imitations of its layers are always tested; the layers themselves are tested if
keras-hub is installed.
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfkfac
from tests.support.harness import assert_close, randomize, train_once
from tests.support.layers import make_input, per_example, targets
from tests.support.summaries import bind, leftovers_of, sequential
from tfkfac.blocks.registry import NAMED_BLOCKS

BATCH, WIDTH = 6, 5
SHAPE = (4, WIDTH)


class Rms(layers.Layer):
    """Base class of imitated normalisation layers."""

    # The layer multiplies by `shift + scale`.
    shift = 0.0

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")

    def normalized(self, x: Any) -> Any:
        square = ops.mean(ops.square(x), -1, keepdims=True)
        return x * ops.rsqrt(square + 1e-6)

    def call(self, x: Any) -> Any:
        return self.normalized(x) * (self.shift + self.scale)


def hub(name: str, base: type[layers.Layer] = Rms, **members: Any) -> Any:
    """Create a class with the name and module of a keras-hub class."""
    members["__module__"] = "keras_hub.src.models.some"
    return type(name, (base,), {"call": call_of(base), **members})


def call_of(base: Any) -> Any:
    def call(self: Any, x: Any) -> Any:
        return base.call(self, x)

    return call


def by_another_name(self: Any, shape: Any) -> None:
    self.weight = self.add_weight((shape[-1],), "ones", name="weight")


IMITATIONS: dict[str, Any] = {
    "Llama's": lambda: hub("LlamaLayerNorm")(),
    "Gemma's": lambda: hub("RMSNormalization", shift=1.0)(),
    "T5's": lambda: hub(
        "T5LayerNorm",
        build=by_another_name,
        call=lambda self, x: self.weight * self.normalized(x),
    )(),
}
# Module below `keras_hub.src` and class.
HUB = [
    "layers.modeling.rms_normalization:RMSNormalization",
    "models.edrec.edrec_layers:EdRecRMSNormalization",
    "models.gemma.rms_normalization:RMSNormalization",
    "models.gemma3.gemma3_layers:RMSNormalization",
    "models.gemma4.gemma4_layers:RMSNormalization",
    "models.gemma3n.rms_normalization:Gemma3nRMSNorm",
    "models.gemma3n.gemma3n_audio_layers:Gemma3nAudioCumulativeGroupNorm",
    "models.gpt_oss.gpt_oss_layer_norm:GptOssLayerNormalization",
    "models.llama.llama_layernorm:LlamaLayerNorm",
    "models.mistral.mistral_layer_norm:MistralLayerNormalization",
    "models.mixtral.mixtral_layer_norm:MixtralLayerNormalization",
    "models.mobilenetv5.mobilenetv5_layers:RmsNorm2d",
    "models.phi3.phi3_layernorm:Phi3LayerNorm",
    "models.qwen.qwen_layernorm:QwenLayerNorm",
    "models.qwen_moe.qwen_moe_layernorm:QwenMoeLayerNorm",
    "models.qwen3.qwen3_layernorm:Qwen3LayerNorm",
    "models.qwen3_moe.qwen3_moe_layernorm:Qwen3MoeLayerNorm",
    "models.qwen3_5.qwen3_5_layers:Qwen3_5LayerNorm",
    "models.qwen3_5.qwen3_5_layers:Qwen3_5RMSNormGated",
    "models.roformer_v2.roformer_v2_attention:RoformerNorm",
    "models.t5.t5_layer_norm:T5LayerNorm",
]
# Constructor arguments and shape of an example, if not the default.
ARGUMENTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    HUB[0]: ({"input_dim": WIDTH}, SHAPE),
    "models.gemma3n.rms_normalization:Gemma3nRMSNorm": ({"dim": WIDTH}, SHAPE),
    "models.gemma3n.gemma3n_audio_layers:Gemma3nAudioCumulativeGroupNorm": (
        {"num_channels": WIDTH, "feature_dims": (3,)},
        (4, 3, WIDTH),
    ),
    "models.mobilenetv5.mobilenetv5_layers:RmsNorm2d": (
        {"dim": WIDTH},
        (2, 3, WIDTH),
    ),
    "models.qwen3.qwen3_layernorm:Qwen3LayerNorm": (
        {"head_dim": WIDTH},
        (3, 2, WIDTH),
    ),
}


def check_normalization(layer: Any, shape: tuple[int, ...]) -> None:
    """G against the squared gradients of the scale, example by example."""
    inputs = keras.Input(shape)
    model = keras.Model(inputs, ops.tanh(layer(inputs)))
    randomize(model)
    x = make_input("", shape, BATCH)
    y = targets(model, x)
    (u,) = per_example(model, x, y).values()
    (block,) = train_once(model, x, y).factors.values()
    assert set(block) == {"G"}
    assert_close(np.ravel(block["G"]), np.ravel(np.mean(u**2, 0)), 1e-5, "G")


@pytest.mark.parametrize("name", IMITATIONS)
def test_imitated_normalization(name: str) -> None:
    check_normalization(IMITATIONS[name](), SHAPE)


@pytest.mark.parametrize("name", HUB)
def test_keras_hub_normalization(name: str) -> None:
    pytest.importorskip("keras_hub")
    module, _, cls = name.partition(":")
    layer = getattr(importlib.import_module(f"keras_hub.src.{module}"), cls)
    arguments, shape = ARGUMENTS.get(name, ({}, SHAPE))
    check_normalization(layer(**arguments), shape)


def test_all_named_blocks_are_tested() -> None:
    tested = {name.partition(":")[2] for name in HUB} | {"PositionEmbedding"}
    assert set(NAMED_BLOCKS) == {("keras_hub", name) for name in tested}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        # A class of this name in another package may compute something else.
        (
            lambda: type("LlamaLayerNorm", (Rms,), {"call": call_of(Rms)}),
            "no block for LlamaLayerNorm",
        ),
        # Only normalisation over the last axis has a block.
        (
            lambda: hub("RmsNorm2d", data_format="channels_first"),
            "normalises channels in the first axis",
        ),
    ],
)
def test_layers_without_block(make: Callable[[], Any], reason: str) -> None:
    optimizer = bind(
        sequential(make()(name="custom"), layers.Dense(40), shape=SHAPE)
    )
    assert leftovers_of(optimizer) == {"custom:scale": reason}


@pytest.mark.parametrize("tie_weights", [True, False])
def test_llama(tie_weights: bool) -> None:
    """All weights are covered, and compiling does not warn."""
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.Llama3Backbone(
        vocabulary_size=30,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=8,
        intermediate_dim=12,
        tie_word_embeddings=tie_weights,
    )
    model = hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    optimizer = tfkfac.KFAC(step="natural")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.compile(optimizer, loss, run_eagerly=True)
    assert leftovers_of(optimizer) == {}
    text = np.arange(48, dtype="int32").reshape(4, 12) % 30
    x = {"token_ids": text[:, :-1], "padding_mask": np.ones((4, 11), "int32")}
    y = text[:, 1:]
    steps = [model.train_on_batch(x, y, return_dict=True) for _ in range(8)]
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    tokens = [path for path in optimizer.factors() if "token_embedding" in path]
    assert len(tokens) == 2 - tie_weights
