"""Compress images of 784 pixels to 30 numbers, with a deep autoencoder.

    python examples/autoencoder.py --optimizer kfac adam
    python examples/autoencoder.py --dataset mnist

Without --dataset the images are scikit-learn's digits, enlarged and moved.
"""

import keras
import tensorflow as tf

from common import data
from common.networks import autoencoder
from common.session import Defaults, Session, make_parser

DEFAULTS = Defaults(
    epochs=4,
    batch_size=250,
    metric="error",
    target=12.0,
    lower_is_better=True,
    rates={"adam": 0.002},
)


def main() -> None:
    options = make_parser(__doc__, DEFAULTS, "moved_digits").parse_args()
    session = Session(options, f"autoencoder on {options.dataset}")
    images = data.load(options)
    if options.quick:
        images = images.first(1000)
    for run in session.runs(len(images.train)):
        with session.strategy.scope():
            model = autoencoder(shrink=4 if options.quick else 1)
            model.compile(
                optimizer=run.optimizer,
                loss=keras.losses.BinaryCrossentropy(from_logits=True),
                metrics=[keras.metrics.MeanMetricWrapper(error, name="error")],
            )
        batches = images.train_batches(options.batch_size, options.seed)
        model.fit(
            batches.map(pixels),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=images.test_batches().map(pixels),
            callbacks=run.callbacks,
        )


def pixels(x: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the image as its own target."""
    rows = tf.reshape(x, (-1, 784))
    return rows, rows


def error(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """Return the squared error of each image."""
    return tf.reduce_sum(tf.square(tf.sigmoid(logits) - y), -1)


if __name__ == "__main__":
    main()
