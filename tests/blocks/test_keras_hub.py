"""Layers and models of keras-hub, which need not be installed.

Layers that look like its own stand for them; where it is installed, so do its
own ones.
"""

import ast
import importlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfkfac
from tests.support.harness import (
    assert_close,
    half_squared_error,
    randomize,
    train_once,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import targets
from tests.support.reference import Array
from tests.support.summaries import blocks_of, leftovers_of
from tests.test_rooms import imported, modules
from tfkfac.blocks.registry import NAMED_BLOCKS

BATCH, WIDTH = 6, 5
SHAPE = (4, WIDTH)


def test_nothing_imports_it() -> None:
    for path in modules():
        names = list(imported(ast.parse(path.read_text())))
        assert not [name for name in names if name.startswith("keras_hub")]


# ------------------------------------------------------------ normalisations
class Rms(layers.Layer):
    """What its normalisations have in common."""

    # What a scale of zero multiplies by.
    shift = 0.0

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")

    def normalized(self, x: Any) -> Any:
        square = ops.mean(ops.square(x), -1, keepdims=True)
        return x * ops.rsqrt(square + 1e-6)

    def call(self, x: Any) -> Any:
        return self.normalized(x) * (self.shift + self.scale)


def hub(name: str, base: type[layers.Layer] = Rms, **members: Any) -> Any:
    """A class that bears the name of one of keras-hub's."""
    members["__module__"] = "keras_hub.src.models.some"
    return type(name, (base,), {"call": call_of(base), **members})


def call_of(base: Any) -> Any:
    def call(self: Any, x: Any) -> Any:
        return base.call(self, x)

    return call


def by_another_name(self: Any, shape: Any) -> None:
    self.weight = self.add_weight((shape[-1],), "ones", name="weight")


LOOK_ALIKES: dict[str, Any] = {
    "Llama's": lambda: hub("LlamaLayerNorm")(),
    "Gemma's": lambda: hub("RMSNormalization", shift=1.0)(),
    "T5's": lambda: hub(
        "T5LayerNorm",
        build=by_another_name,
        call=lambda self, x: self.weight * self.normalized(x),
    )(),
}
MODELS = "keras_hub.src.models."
# Module, class, arguments, shape of an example.
OWN: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...]]] = {
    "RMS": (
        "keras_hub.src.layers.modeling.rms_normalization",
        "RMSNormalization",
        {"input_dim": WIDTH},
        SHAPE,
    ),
    "EdRec": (
        MODELS + "edrec.edrec_layers",
        "EdRecRMSNormalization",
        {},
        SHAPE,
    ),
    "Gemma": (
        MODELS + "gemma.rms_normalization",
        "RMSNormalization",
        {},
        SHAPE,
    ),
    "Gemma 3": (MODELS + "gemma3.gemma3_layers", "RMSNormalization", {}, SHAPE),
    "Gemma 4": (MODELS + "gemma4.gemma4_layers", "RMSNormalization", {}, SHAPE),
    "Gemma 3n": (
        MODELS + "gemma3n.rms_normalization",
        "Gemma3nRMSNorm",
        {"dim": WIDTH},
        SHAPE,
    ),
    "Gemma 3n, audio": (
        MODELS + "gemma3n.gemma3n_audio_layers",
        "Gemma3nAudioCumulativeGroupNorm",
        {"num_channels": WIDTH, "feature_dims": (3,)},
        (4, 3, WIDTH),
    ),
    "GPT-OSS": (
        MODELS + "gpt_oss.gpt_oss_layer_norm",
        "GptOssLayerNormalization",
        {},
        SHAPE,
    ),
    "Llama": (MODELS + "llama.llama_layernorm", "LlamaLayerNorm", {}, SHAPE),
    "Mistral": (
        MODELS + "mistral.mistral_layer_norm",
        "MistralLayerNormalization",
        {},
        SHAPE,
    ),
    "Mixtral": (
        MODELS + "mixtral.mixtral_layer_norm",
        "MixtralLayerNormalization",
        {},
        SHAPE,
    ),
    "MobileNet": (
        MODELS + "mobilenetv5.mobilenetv5_layers",
        "RmsNorm2d",
        {"dim": WIDTH},
        (2, 3, WIDTH),
    ),
    "Phi 3": (MODELS + "phi3.phi3_layernorm", "Phi3LayerNorm", {}, SHAPE),
    "Qwen": (MODELS + "qwen.qwen_layernorm", "QwenLayerNorm", {}, SHAPE),
    "Qwen, experts": (
        MODELS + "qwen_moe.qwen_moe_layernorm",
        "QwenMoeLayerNorm",
        {},
        SHAPE,
    ),
    "Qwen 3, heads": (
        MODELS + "qwen3.qwen3_layernorm",
        "Qwen3LayerNorm",
        {"head_dim": WIDTH},
        (3, 2, WIDTH),
    ),
    "Qwen 3, experts": (
        MODELS + "qwen3_moe.qwen3_moe_layernorm",
        "Qwen3MoeLayerNorm",
        {},
        SHAPE,
    ),
    "Qwen 3.5": (
        MODELS + "qwen3_5.qwen3_5_layers",
        "Qwen3_5LayerNorm",
        {},
        SHAPE,
    ),
    "Qwen 3.5, gated": (
        MODELS + "qwen3_5.qwen3_5_layers",
        "Qwen3_5RMSNormGated",
        {},
        SHAPE,
    ),
    "RoFormer": (
        MODELS + "roformer_v2.roformer_v2_attention",
        "RoformerNorm",
        {},
        SHAPE,
    ),
    "T5": (MODELS + "t5.t5_layer_norm", "T5LayerNorm", {}, SHAPE),
}


def check_normalization(layer: Any, shape: tuple[int, ...]) -> None:
    """G against the squared gradients of the scale, example by example."""
    inputs = keras.Input(shape)
    model = keras.Model(inputs, ops.tanh(layer(inputs)))
    randomize(model)
    x = make_input("", shape, BATCH)
    y = targets(model, x)
    (scale,) = model.trainable_variables
    gradients: list[Array] = []
    for i in range(BATCH):
        with tf.GradientTape() as tape:
            loss = half_squared_error(y[i : i + 1], model(x[i : i + 1]))
        gradients.append(tape.gradient(loss, scale.value).numpy())
    want = np.mean(np.square(gradients, dtype=np.float64), 0)
    (block,) = train_once(model, x, y).factors.values()
    assert set(block) == {"G"}
    assert_close(np.ravel(block["G"]), want, 1e-5, "G")


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_normalization_like_one_of_its(name: str) -> None:
    check_normalization(LOOK_ALIKES[name](), SHAPE)


@pytest.mark.parametrize("name", OWN)
def test_its_normalization(name: str) -> None:
    pytest.importorskip("keras_hub")
    module, cls, arguments, shape = OWN[name]
    layer = getattr(importlib.import_module(module), cls)(**arguments)
    check_normalization(layer, shape)


def test_the_table_has_what_is_tested() -> None:
    tested = {cls for _, cls, *_ in OWN.values()} | {"PositionEmbedding"}
    assert set(NAMED_BLOCKS) == {("keras_hub", name) for name in tested}


def test_names_of_other_packages() -> None:
    """A class of that name elsewhere may compute something else."""
    layer = type("LlamaLayerNorm", (Rms,), {"call": call_of(Rms)})(name="own")
    model = keras.Sequential(
        [keras.Input(SHAPE), layer, layers.Dense(40, name="dense")]
    )
    optimizer = tfkfac.KFAC()
    model.compile(optimizer, "mse", run_eagerly=True)
    assert list(blocks_of(optimizer)) == ["dense"]
    assert leftovers_of(optimizer) == {
        "own:scale": "no block for LlamaLayerNorm"
    }


def test_channels_first() -> None:
    """Whatever is not normalised over the last axis has no block."""
    layer = hub("RmsNorm2d", data_format="channels_first")(name="own")
    model = keras.Sequential([keras.Input(SHAPE), layer, layers.Dense(40)])
    optimizer = tfkfac.KFAC()
    model.compile(optimizer, "mse", run_eagerly=True)
    why = "normalises channels that come first"
    assert leftovers_of(optimizer) == {"own:scale": why}


# -------------------------------------------------------------------- models
@pytest.mark.parametrize("tie_weights", [True, False])
def test_its_llama(tie_weights: bool) -> None:
    """All weights have blocks, and nobody is warned."""
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
    optimizer = tfkfac.KFAC()
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


def test_its_masked_language_model() -> None:
    """It projects inside of its head; the bias there is left, and named."""
    hub = pytest.importorskip("keras_hub")
    backbone = hub.models.BertBackbone(
        vocabulary_size=30,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        max_sequence_length=12,
    )
    model = hub.models.BertMaskedLM(backbone=backbone, preprocessor=None)
    optimizer = tfkfac.KFAC(fisher="empirical")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with pytest.warns(UserWarning, match=r"mlm_head \(30 weights: no block"):
        model.compile(optimizer, loss, run_eagerly=True)
    assert list(leftovers_of(optimizer)) == ["mlm_head:output_bias"]
    text = np.arange(48, dtype="int32").reshape(4, 12) % 30
    x = {
        "token_ids": text,
        "segment_ids": np.zeros_like(text),
        "padding_mask": np.ones_like(text),
        "mask_positions": np.tile(np.array([[1, 5]], "int32"), (4, 1)),
    }
    model.train_on_batch(x, text[:, [1, 5]])
    path = next(p for p in optimizer.factors() if "token_embedding" in p)
    # The tokens' factor is of the logits: no one is without a gradient there.
    assert (optimizer.factors()[path]["A"] > 0).all()
