"""Predict hidden characters, with a small BERT that is trained in two phases.

    python examples/masked_language.py --optimizer kfac adam

The first phase trains short pieces of Python's standard library with Adam, the
second phase long pieces with each given optimizer.
"""

import argparse
import pathlib
import sysconfig
from typing import Any

import keras
import numpy as np
from keras import layers

import tfkfac

# Learning rates, which fall linearly to 0.
RATES = {"kfac": 0.1, "adam": 0.002}
SHORT, LONG, WIDTH, BATCH = 32, 128, 128, 32
HIDDEN, SHARE = 128, 0.15  # the token of hidden characters follows ASCII
LOSS = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="mean_with_sample_weight"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=RATES, default=["kfac", "adam"])
    add("--examples", type=int, default=8_000)
    options = parser.parse_args()
    (x, y, weights), test = load(options.examples)
    for name in options.optimizer:
        rate = keras.optimizers.schedules.PolynomialDecay(
            RATES[name], -(-len(x) // BATCH), 0.0
        )
        adam = keras.optimizers.Adam(rate)
        optimizer = adam if name == "adam" else tfkfac.KFAC(rate, kl_clip=0.005)
        model = pretrained(options.examples)
        model.compile(optimizer, LOSS, weighted_metrics=["accuracy"])
        print(f"BERT on the standard library with {name}")
        data = {"sample_weight": weights, "validation_data": test}
        model.fit(x, y, BATCH, verbose=2, **data)


def load(examples: int, length: int = LONG) -> Any:
    """Return inputs, targets and weights, to train and to test.

    The weights are 1 for hidden characters, else 0.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(f.read_bytes() for f in sorted(folder.glob("*.py")))
    codes = np.frombuffer(text, np.uint8).astype("int32") % HIDDEN
    y = codes[: len(codes) // length * length].reshape(-1, length)
    hidden = np.random.default_rng(0).random(y.shape) < SHARE
    x, weights = np.where(hidden, HIDDEN, y), hidden.astype("float32")
    return [
        (x[rows], y[rows], weights[rows])
        for rows in (slice(min(examples, len(y) - 500)), slice(-500, None))
    ]


def pretrained(examples: int) -> keras.Model:
    """Return a BERT after the first phase."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((None,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), 1) - 1
    x = layers.Embedding(HIDDEN + 1, WIDTH)(tokens)
    x = layers.Add()([x, layers.Embedding(LONG, WIDTH)(positions)])
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, WIDTH // 4)(y, y)])
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    outputs = layers.Dense(HIDDEN + 1)(layers.LayerNormalization()(x))
    model = keras.Model(tokens, outputs)
    model.compile(keras.optimizers.Adam(2e-3), LOSS)
    (x, y, weights), _ = load(examples, SHORT)
    model.fit(x, y, BATCH, sample_weight=weights, verbose=2)
    return model


if __name__ == "__main__":
    main()
