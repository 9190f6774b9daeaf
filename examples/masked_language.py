"""Predict hidden characters, with a BERT that is trained in two phases.

    python examples/masked_language.py --optimizer kfac adam

The first phase trains short pieces of text with Adam, the second phase long
pieces with each given optimizer. The text is the installed Python standard
library unless --dataset names a set of TensorFlow Datasets with a feature
"text". The BERT of keras-hub is used if keras-hub is installed.
"""

import argparse
import importlib.util

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from common import text
from common.data import Data, Split
from common.networks import transformer_block
from common.session import Defaults, Session, make_parser

DEFAULTS = Defaults(
    epochs=1,
    batch_size=32,
    target=0.35,
    rates={"adam": 0.002},
    optimizers=("kfac:kl_clip=0.005", "adam"),
)
SHORT, LONG = 32, 128
HIDDEN, SHARE = text.CHARACTERS, 0.15  # the token of hidden characters
LAYERS, HEADS = 2, 4


def main() -> None:
    options = make_parser(__doc__, DEFAULTS, "python").parse_args()
    session = Session(options, f"BERT on {options.dataset}")
    examples = 256 if options.quick else 8_000
    short, long = (load(options, length, examples) for length in (SHORT, LONG))
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    for run in session.runs(examples):
        with session.strategy.scope():
            model = bert(HIDDEN + 1, 32 if options.quick else 128, LONG)
            model.compile(keras.optimizers.Adam(2e-3), loss)
        first = short.train_batches(options.batch_size, options.seed)
        model.fit(first.map(weigh), shuffle=False)
        with session.strategy.scope():
            model.compile(run.optimizer, loss, weighted_metrics=["accuracy"])
        model.fit(
            long.train_batches(options.batch_size, options.seed).map(weigh),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=long.test_batches(100).map(weigh),
            callbacks=run.callbacks,
        )


def load(options: argparse.Namespace, length: int, examples: int) -> Data:
    """Load pieces of text, and hide some of their characters."""
    data = text.load(options, length, examples)
    random = np.random.default_rng(0)

    def hide(split: Split) -> Split:
        hidden = random.random(split.x.shape) < SHARE
        return Split(np.where(hidden, HIDDEN, split.x), split.y)

    return Data(hide(data.train), hide(data.test))


def weigh(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Return sample weights of 1 for hidden characters, else 0."""
    return x, y, tf.cast(x == HIDDEN, tf.float32)


def bert(vocabulary: int, width: int, longest: int) -> keras.Model:
    """Map tokens to the logits of the original characters."""
    tokens = keras.Input((None,), dtype="int32")
    if importlib.util.find_spec("keras_hub"):
        import keras_hub

        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=vocabulary,
            num_layers=LAYERS,
            num_heads=HEADS,
            hidden_dim=width,
            intermediate_dim=4 * width,
            max_sequence_length=longest,
        )
        # Without the pooler, which has no gradient in this task.
        output = backbone.output["sequence_output"]
        x = keras.Model(backbone.input, output)(
            {
                "token_ids": tokens,
                "segment_ids": ops.zeros_like(tokens),
                "padding_mask": ops.ones_like(tokens),
            }
        )
    else:
        positions = ops.cumsum(ops.ones_like(tokens), 1) - 1
        x = layers.Embedding(vocabulary, width)(tokens)
        x = layers.Add()([x, layers.Embedding(longest, width)(positions)])
        for _ in range(LAYERS):
            x = transformer_block(x, causal=False)
        x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(vocabulary)(x), name="bert")


if __name__ == "__main__":
    main()
