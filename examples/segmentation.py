"""Classify the pixels of digits on a canvas, with a U-Net.

    python examples/segmentation.py --optimizer kfac adam
    python tools/launch.py 2 -- python examples/segmentation.py

The digits are scikit-learn's unless --dataset names another set, such as mnist.
The Dice score is the mean over the ten digits.
"""

import keras
from keras import layers

from common import canvases, data
from common.session import Defaults, Session, make_parser

DEFAULTS = Defaults(
    epochs=6, batch_size=32, metric="dice", target=0.9, rates={"adam": 0.002}
)
CLASSES = 11  # the background and ten digits


class Dice(keras.metrics.MeanIoU):
    """Mean Dice score 2 |A n B| / (|A| + |B|) of all classes but class 0."""

    def __init__(self) -> None:
        super().__init__(CLASSES, sparse_y_pred=False, name="dice")

    def result(self) -> keras.KerasTensor:
        counts = keras.ops.cast(self.total_cm, "float32")
        hits = keras.ops.diagonal(counts)
        sizes = keras.ops.sum(counts, 0) + keras.ops.sum(counts, 1)
        return keras.ops.mean(2 * hits[1:] / keras.ops.maximum(sizes[1:], 1))


def main() -> None:
    options = make_parser(__doc__, DEFAULTS).parse_args()
    session = Session(options, "U-Net on canvases")
    count = 128 if options.quick else 1024
    train, test = (
        data.Split(part.images, part.labels)
        for part in canvases.compose_all(data.load(options), count)
    )
    images = data.Data(train, test)
    for run in session.runs(len(images.train)):
        with session.strategy.scope():
            model = unet(filters=4 if options.quick else 16)
            model.compile(
                optimizer=run.optimizer,
                loss=keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True
                ),
                metrics=[Dice()],
            )
        model.fit(
            images.train_batches(options.batch_size, options.seed),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=images.test_batches(),
            callbacks=run.callbacks,
        )


def unet(filters: int) -> keras.Model:
    """U-Net of Ronneberger et al., with three resolutions."""
    inputs = keras.Input((canvases.SIDE, canvases.SIDE, 1))
    fine = convolutions(inputs, filters)
    middle = convolutions(layers.MaxPooling2D()(fine), 2 * filters)
    x = convolutions(layers.MaxPooling2D()(middle), 4 * filters)
    for skipped, width in ((middle, 2 * filters), (fine, filters)):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = convolutions(layers.Concatenate()([skipped, x]), width)
    return keras.Model(inputs, layers.Conv2D(CLASSES, 1)(x), name="unet")


def convolutions(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization(momentum=0.9, synchronized=True)(x)
        x = layers.ReLU()(x)
    return x


if __name__ == "__main__":
    main()
