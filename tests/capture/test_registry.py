"""Layers with a block, and reasons of layers without."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD

import tfkfac
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    data,
    everything,
    kfac_of,
    loss,
)
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential
from tfkfac.capture.taps import NESTED

X, Y = data()
SEQUENCE = (4, FEATURES)


# ---------------------------------------------------------- what is left out


class DoubledTimes(layers.TimeDistributed):
    def call(self, x: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(x, training=training, mask=mask)


class Tied(layers.Dense):
    def __init__(self, other: layers.Dense, **kwargs: Any) -> None:
        super().__init__(other.units, **kwargs)
        self._other = [other]

    def build(self, shape: Any) -> None:
        super().build(shape)
        self._untrack_variable(self._kernel)
        self._kernel = self._other[0]._kernel


def lora() -> Any:
    model = sequential(layers.Dense(5), layers.Dense(CLASSES, name="adapted"))
    model.layers[-1].enable_lora(2)
    return model


def quantized() -> Any:
    model = sequential(layers.Dense(5), layers.Dense(CLASSES, name="small"))
    model.layers[-1].quantize("int8")
    return model


def tied() -> Any:
    first = layers.Dense(FEATURES, name="first")
    return sequential(first, Tied(first, name="second"))


def frozen_kernel() -> Any:
    model = sequential(layers.Dense(3, name="first"))
    model.layers[0].kernel.trainable = False
    return model


def model_weight() -> Any:
    class Biased(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(3, name="first")
            self.first.build((None, FEATURES))
            self.shift = self.add_weight(shape=(3,), name="shift")
            self.built = True

        def call(self, x: Any) -> Any:
            return self.first(x) + self.shift

    return Biased()


def distributed_and_not() -> Any:
    layer = layers.Dense(FEATURES, name="shared")
    inputs = keras.Input(SEQUENCE)
    steps = layers.TimeDistributed(layer, name="each")(inputs)
    last = layer(layers.Flatten()(steps[:, -1:]))
    return keras.Model(inputs, layers.Dense(2, name="first")(last))


def in_sequences(layer: Any) -> Any:
    return sequential(layer, layers.Dense(2), shape=SEQUENCE)


def rnn() -> Any:
    lstm = layers.LSTM(2, use_bias=False, name="lstm")
    return in_sequences(layers.Bidirectional(lstm, name="both"))


def in_loop() -> Any:
    inner = keras.Sequential([layers.Dense(3, name="d")], name="inner")
    return in_sequences(layers.TimeDistributed(inner, name="each"))


def moments() -> Any:
    norm = layers.BatchNormalization(name="n")
    return in_sequences(layers.TimeDistributed(norm, name="each"))


def doubled() -> Any:
    return in_sequences(DoubledTimes(layers.Dense(3, name="d"), name="each"))


CELLS = "both/forward_lstm/lstm_cell", "both/backward_lstm/lstm_cell"
LOOP = "used in the loop of a "
NO_KERNEL = "kernel frozen or shared with another layer"
# Model, paths of layers, names of their variables, reason.
LEFT: list[tuple[Callable[[], Any], tuple[str, ...], str, str]] = [
    (rnn, CELLS, "kernel recurrent_kernel", f"{LOOP}LSTM"),
    (in_loop, ("each/inner/d",), "kernel bias", f"{LOOP}TimeDistributed"),
    (moments, ("each/n",), "gamma beta", "normalises each time step by itself"),
    (doubled, ("each/d",), "kernel bias", f"{LOOP}DoubledTimes"),
    (distributed_and_not, ("each/shared",), "kernel bias",
     "used in a TimeDistributed and elsewhere"),
    (lora, ("adapted",), "bias lora_kernel_a lora_kernel_b", "LoRA weights"),
    (quantized, ("small",), "bias", "quantized weights"),
    (model_weight, ("(model)",), "shift", "no block for Biased"),
    (tied, ("second",), "bias", NO_KERNEL),
    (frozen_kernel, ("first",), "bias", NO_KERNEL),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*K-FAC")
@pytest.mark.parametrize(("build", "paths", "names", "reason"), LEFT)
def test_uncovered_layers_have_a_reason(
    build: Any, paths: Any, names: str, reason: str
) -> None:
    """And a step changes every variable."""
    want = {f"{p}:{name}": reason for p in paths for name in names.split()}
    model = build()
    optimizer = bind(model)
    assert leftovers_of(optimizer) == want
    variables = len(want) + sum(
        2 * ("first" in path or "dense" in path)
        for path in blocks_of(optimizer)
    )
    assert variables == len(model.trainable_variables)
    before = [v.numpy() for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    shape = getattr(model, "input_shape", (None, FEATURES))[1:]
    x = rng.normal(size=(8, *shape))
    target = rng.normal(size=model(x).shape)
    for _ in range(2 if "lora" in names else 1):
        model.train_on_batch(x, target)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(variable.numpy(), value), variable.path
        assert np.isfinite(variable.numpy()).all()


def test_layer_in_a_wrapper_is_covered() -> None:
    """Spectral normalisation calls the layer it wraps."""
    inner = layers.Dense(3, name="inner")
    wrapper = layers.SpectralNormalization(inner, name="wrapper")
    model = sequential(wrapper, layers.Dense(CLASSES, name="logits"))
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    assert list(blocks) == ["wrapper/inner", "logits"]
    assert all(block["G"].any() for block in blocks.values())


# ----------------------------------------------- skip_layers and only_layers
def nested() -> Any:
    """Layers `encoder/first`, `encoder/second` and `head`."""
    encoder = keras.Sequential(
        [
            layers.Dense(4, activation="tanh", name="first"),
            layers.BatchNormalization(name="second"),
        ],
        name="encoder",
    )
    return sequential(encoder, layers.Dense(CLASSES, name="head"))


@pytest.mark.parametrize(
    ("rules", "matched"),
    [
        ("encoder", ["encoder/first", "encoder/second"]),
        ([".*d"], ["encoder/second", "head"]),
        (re.compile("SECOND", re.I), ["encoder/second"]),
        ([re.compile("enc.*/.*t")], ["encoder/first"]),
        ([layers.BatchNormalization, "head"], ["encoder/second", "head"]),
        ([keras.Sequential], ["encoder/first", "encoder/second"]),
        ((layers.Dense, "first"), ["encoder/first", "head"]),
        ((), []),
    ],
)
def test_layer_rules(rules: Any, matched: list[str]) -> None:
    """By name, path, regular expression, class or container."""
    everything = ["encoder/first", "encoder/second", "head"]
    for argument, kept in (
        ("skip_layers", [path for path in everything if path not in matched]),
        ("only_layers", matched),
    ):
        optimizer = bind(nested(), **{argument: rules})
        assert list(blocks_of(optimizer)) == kept
        left = leftovers_of(optimizer)
        assert set(left.values()) <= {"skip_layers or only_layers"}
        names = {path.split(":")[0] for path in left}
        assert names == set(everything) - set(kept)


def test_both_layer_rules() -> None:
    both = bind(nested(), only_layers=["first", "head"], skip_layers="encoder")
    assert list(blocks_of(both)) == ["head"]


@pytest.mark.parametrize("container", ["one", "two"])
def test_rules_include_shared_layers(container: str) -> None:
    """Also where another container comes first."""
    shared = layers.Dense(FEATURES, name="shared")
    model = sequential(
        keras.Sequential([shared], name="one"),
        keras.Sequential([shared], name="two"),
        layers.Dense(CLASSES, name="head"),
    )
    for argument, kept in (
        ("only_layers", "one/shared"),
        ("skip_layers", "head"),
    ):
        assert list(blocks_of(bind(model, **{argument: container}))) == [kept]


# ------------------------------------------- layers called in other graphs
class Indirect(layers.Layer):
    """Call a layer in a `tf.cond`, a loop or a function."""

    def __init__(self, way: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = way
        self.inner = layers.Dense(FEATURES, "tanh", name="inner")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "way": self.way}

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        if not training:
            return x + self.inner(x)
        return WAYS[self.way](self.inner, x)


def in_cond(f: Any, x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) < 1e9, lambda: x + f(x), lambda: x)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "cond and outside": lambda f, x: in_cond(f, x) + f(x),
    "loop": lambda f, x: tf.while_loop(
        lambda i, _: i < 2, lambda i, h: (i + 1, h + f(h)), [0, x]
    )[1],
    "vectorized": lambda f, x: tf.vectorized_map(
        lambda row: f(row[None])[0], x
    ),
    "function": lambda f, x: tf.function(f, autograph=False)(x),
}


def test_layers_in_other_graphs(tmp_path: Any) -> None:
    """The rest optimizer trains them, as it alone does in Keras."""
    weights = []
    for optimizer in (SGD(0.1), tfkfac.KFAC(SGD(0.0), rest_optimizer=SGD(0.1))):
        keras.utils.set_random_seed(0)
        outer = [Indirect(way, name=way[:4]) for way in WAYS]
        model = sequential(*outer, layers.Dense(CLASSES))
        model.compile(optimizer, loss())
        model.train_on_batch(X, Y)
        weights.append(model.get_weights()[:-2])
    for got, want in zip(*weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    reasons = {
        f"{layer.name}/inner:{x}": NESTED
        for layer in outer
        for x in ("kernel", "bias")
    }
    assert leftovers_of(optimizer) == reasons
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras", {"Indirect": Indirect}
    )
    assert leftovers_of(loaded.optimizer) == reasons
    for each in (model, loaded):
        each.train_on_batch(X, Y)
    assert_same(everything(loaded), everything(model))
