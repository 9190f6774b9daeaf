"""Programs on series, text, tables and graphs."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from common.text import CHARACTERS
from real import data
from real.data import Losses, Make, losses


def lstm_seq2seq(make: Make, options: dict[str, Any]) -> Losses:
    """One-hot Roman numerals to words; an LSTM reads and another writes."""
    target, outputs, source, inputs = data.numbers()
    x = keras.utils.to_categorical(source, inputs)
    y = keras.utils.to_categorical(target, outputs)
    # The decoder reads the words before the one that it writes.
    train, test = data.split(((x, np.roll(y, 1, 1)), y), 0.5)
    encoder_inputs = keras.Input((None, inputs))
    _, *state = layers.LSTM(64, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, outputs))
    decoder = layers.LSTM(64, return_sequences=True, return_state=True)
    hidden, *_ = decoder(decoder_inputs, initial_state=state)
    predictions = layers.Dense(outputs, "softmax")(hidden)
    model = keras.Model([encoder_inputs, decoder_inputs], predictions)
    model.compile(make(), "categorical_crossentropy", metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=12, **options)
    return losses(model, train, test)


class Tokens(layers.Layer):
    """Embeddings of tokens and of their positions."""

    def __init__(self, length: int, codes: int, width: int) -> None:
        super().__init__()
        self.tokens = layers.Embedding(codes, width)
        self.positions = layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        """Add the two."""
        places = ops.arange(ops.shape(x)[-1])
        return self.tokens(x) + self.positions(places)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        """Mask the padding."""
        return ops.not_equal(x, 0)


class Block(layers.Layer):
    """Attention, also to a memory if there is one, and a dense part."""

    def __init__(self, width: int, causal: bool, memory: bool = False) -> None:
        super().__init__()
        self.supports_masking = True
        self.causal = causal
        count = 1 + memory
        self.attention = [
            layers.MultiHeadAttention(2, width // 2) for _ in range(count)
        ]
        self.dense = keras.Sequential(
            [layers.Dense(2 * width, "relu"), layers.Dense(width)]
        )
        self.norms = [layers.LayerNormalization() for _ in range(count + 1)]
        self.dropout = layers.Dropout(0.1)

    def call(self, x: Any, memory: Any = None) -> Any:
        """Apply attention and dense layers, each with a residual connection."""
        first, *others = self.attention
        y = first(x, x, use_causal_mask=self.causal)
        x = self.norms[0](x + self.dropout(y))
        for layer in others:
            x = self.norms[1](x + layer(x, memory))
        return self.norms[-1](x + self.dropout(self.dense(x)))


def miniature_gpt(make: Make, options: dict[str, Any]) -> Losses:
    """One causal block; the model also returns its features, without loss."""
    train, test = data.characters(1500, 48)
    inputs = keras.Input((48,), dtype="int32")
    features = Block(64, causal=True)(Tokens(48, CHARACTERS, 64)(inputs))
    outputs = layers.Dense(CHARACTERS)(features)
    model = keras.Model(inputs, [outputs, features])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(), loss=[loss, None])
    model.fit(*train, batch_size=32, epochs=10, **options)
    return losses(model, train, test)


def translation(make: Make, options: dict[str, Any]) -> Losses:
    """Transformer from the words of a number to its Roman numerals."""
    source, words, target, signs = data.numbers()
    inputs = {"source": source, "target": target[:, :-1]}
    train, test = data.split((inputs, target[:, 1:]), 0.5)
    encoder_inputs = keras.Input((None,), dtype="int32", name="source")
    x = Tokens(source.shape[1], words, 64)(encoder_inputs)
    memory = Block(64, causal=False)(x)
    decoder_inputs = keras.Input((None,), dtype="int32", name="target")
    x = Tokens(target.shape[1], signs, 64)(decoder_inputs)
    x = layers.Dropout(0.5)(Block(64, causal=True, memory=True)(x, memory))
    outputs = layers.Dense(signs, "softmax")(x)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    model.compile(make(), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=10, **options)
    return losses(model, train, test)


def wide_and_deep(make: Make, options: dict[str, Any]) -> Losses:
    """Linear in one-hot names, deep in embeddings of them."""
    train, test = data.split(data.incomes(6000))
    inputs, wide, deep = {}, [], []
    for name, column in train[0].items():
        is_name = column.dtype == object
        kind = "string" if is_name else "float32"
        inputs[name] = column_input = keras.Input((), name=name, dtype=kind)
        if is_name:
            words = sorted(set(column))
            index = layers.StringLookup(vocabulary=words)(column_input)
            codes = len(words) + 1
            width = int(codes**0.5)
            deep.append(layers.Embedding(codes, width)(index))
            wide.append(layers.CategoryEncoding(codes, "one_hot")(index))
        else:
            deep.append(ops.expand_dims(column_input, -1))
    x = layers.concatenate(deep)
    for units in (32, 32):
        x = layers.BatchNormalization()(layers.Dense(units)(x))
        x = layers.Dropout(0.1)(layers.ReLU()(x))
    linear = layers.BatchNormalization()(layers.concatenate(wide))
    outputs = layers.Dense(1, "sigmoid")(layers.concatenate([linear, x]))
    model = keras.Model(inputs, outputs)
    model.compile(make(), "binary_crossentropy", metrics=["accuracy"])
    model.fit(*train, batch_size=128, epochs=15, **options)
    return losses(model, train, test)


def graph_attention(make: Make, options: dict[str, Any]) -> Losses:
    """Layers with weights of their own; the data of a step are node numbers."""
    states, edges, labels = data.neighbours(900, 5)
    nodes = np.arange(900)

    class GraphAttention(layers.Layer):
        def __init__(self, units: int) -> None:
            super().__init__()
            self.units = units

        def build(self, shape: Any) -> None:
            settings = {"initializer": "glorot_uniform"}
            self.kernel = self.add_weight((shape[-1], self.units), **settings)
            self.scores = self.add_weight((2 * self.units, 1), **settings)

        def call(self, inputs: Any) -> Any:
            h = inputs @ self.kernel
            pairs = tf.reshape(tf.gather(h, edges), (-1, 2 * self.units))
            scores = tf.nn.leaky_relu(pairs @ self.scores)[:, 0]
            scores = tf.exp(tf.clip_by_value(scores, -2.0, 2.0))
            sums = tf.math.unsorted_segment_sum(scores, edges[:, 0], len(nodes))
            shares = scores / tf.gather(sums, edges[:, 0])
            values = tf.gather(h, edges[:, 1]) * shares[:, None]
            return tf.math.unsorted_segment_sum(values, edges[:, 0], len(nodes))

    class Network(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(64, "relu")
            self.heads = [
                [GraphAttention(16) for _ in range(4)] for _ in range(2)
            ]
            self.last = layers.Dense(10)

        def call(self, rows: Any) -> Any:
            x = self.first(states)
            for heads in self.heads:
                joined = tf.concat([head(x) for head in heads], -1)
                x = tf.nn.relu(joined + x)
            return tf.gather(self.last(x), rows)

    train, test = data.split((nodes, labels), 0.5)
    model = Network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(), loss, metrics=["acc"])
    model.fit(*train, batch_size=150, epochs=60, **options)
    return losses(model, train, test)


def lora(make: Make, options: dict[str, Any]) -> Losses:
    """Adapt a keras-hub model, trained on words, to Roman numerals."""
    from keras_hub import models

    source, words, target, signs = data.numbers()
    backbone = models.GPT2Backbone(
        vocabulary_size=max(words, signs),
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=32,
    )
    model = models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=0)

    def pairs(rows: np.ndarray) -> Any:
        inputs = {"token_ids": rows[:, :-1], "padding_mask": rows[:, :-1] > 0}
        return data.split((inputs, rows[:, 1:]), 0.5)

    model.compile("adam", loss)
    model.fit(*pairs(source)[0], batch_size=64, epochs=2, verbose=0)
    backbone.enable_lora(4)
    train, test = pairs(target)
    model.compile(make(), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=8, **options)
    return losses(model, train, test)
