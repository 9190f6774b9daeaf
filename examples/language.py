"""Predict the next character of Python's standard library by a Transformer.

python examples/language.py --optimizer kfac adam
"""

import argparse
import pathlib
import sysconfig

import keras
import numpy as np
from keras import layers

import tfkfac

# Learning rates, which fall linearly to 0.
RATES = {"kfac": 0.1, "adam": 0.004}
LENGTH, WIDTH, BATCH = 64, 128, 32
CHARACTERS = 128  # ASCII


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=RATES, default=["kfac", "adam"])
    add("--examples", type=int, default=16_000)
    options = parser.parse_args()
    text = pieces()
    train, test = text[:-500][: options.examples], text[-500:]
    for name in options.optimizer:
        keras.utils.set_random_seed(0)
        model = build()
        model.compile(
            optimizer=make_optimizer(name, -(-len(train) // BATCH)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        print(f"Transformer on the standard library with {name}")
        # The target of each character is the next character.
        model.fit(
            train[:, :-1],
            train[:, 1:],
            BATCH,
            verbose=2,
            validation_data=(test[:, :-1], test[:, 1:]),
        )


def pieces() -> np.ndarray:
    """Return the sources' characters, in rows of one more than `LENGTH`."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(f.read_bytes() for f in sorted(folder.glob("*.py")))
    codes = np.frombuffer(text, np.uint8).astype("int32") % CHARACTERS
    row = LENGTH + 1
    return codes[: len(codes) // row * row].reshape(-1, row)


def build() -> keras.Model:
    """Two causal blocks on embedded characters and positions."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(inputs), 1) - 1
    x = layers.Embedding(CHARACTERS, WIDTH)(inputs)
    x = layers.Add()([x, layers.Embedding(LENGTH, WIDTH)(positions)])
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, WIDTH // 4)
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    outputs = layers.Dense(CHARACTERS)(layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


def make_optimizer(name: str, steps: int) -> keras.optimizers.Optimizer:
    rate = keras.optimizers.schedules.PolynomialDecay(RATES[name], steps, 0.0)
    if name == "adam":
        return keras.optimizers.Adam(rate)
    return tfkfac.KFAC(rate, kl_clip=0.005)


if __name__ == "__main__":
    main()
