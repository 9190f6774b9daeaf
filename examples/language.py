"""Predict the next character of Python sources, with a Transformer.

    python examples/language.py --optimizer kfac adam
    python examples/language.py --dataset tiny_shakespeare

The text is the installed standard library unless --dataset names a set of
TensorFlow Datasets with a feature "text".
"""

import keras
import tensorflow as tf

from common import networks, text
from common.session import Defaults, Session, make_parser

DEFAULTS = Defaults(
    epochs=1,
    batch_size=32,
    target=0.5,
    rates={"adam": 0.004},
    optimizers=("kfac:kl_clip=0.005", "adam"),
)
LENGTH = 64


def main() -> None:
    options = make_parser(__doc__, DEFAULTS, "python").parse_args()
    session = Session(options, f"Transformer on {options.dataset}")
    data = text.load(options, LENGTH + 1, 512 if options.quick else 16_000)
    for run in session.runs(len(data.train)):
        with session.strategy.scope():
            model = networks.transformer(
                text.CHARACTERS, LENGTH, width=32 if options.quick else 128
            )
            model.compile(
                optimizer=run.optimizer,
                loss=keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True
                ),
                metrics=["accuracy"],
            )
        model.fit(
            data.train_batches(options.batch_size, options.seed).map(shift),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=data.test_batches().map(shift),
            callbacks=run.callbacks,
        )


def shift(pieces: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the next character as the target of each character."""
    return pieces[:, :-1], pieces[:, 1:]


if __name__ == "__main__":
    main()
