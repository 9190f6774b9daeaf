"""Detect the digits on a canvas: classes, boxes and masks, as Mask R-CNN.

    python examples/detection.py --optimizer 'kfac:skip_layers=["neck"]' sgd

The backbone is pretrained and frozen. K-FAC preconditions the heads; the rest
optimizer trains the neck, which `skip_layers` excludes.
"""

import keras
from keras import layers

from common import canvases, data
from common.session import Defaults, Session, make_parser

DEFAULTS = Defaults(
    epochs=6,
    batch_size=32,
    metric="masks_iou",
    target=0.8,
    rates={"adam": 0.002},
    optimizers=('kfac:skip_layers=["neck"]', "adam"),
)
LOSSES = {
    "classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "boxes": keras.losses.MeanSquaredError(),
    "masks": keras.losses.BinaryCrossentropy(from_logits=True),
}


def main() -> None:
    options = make_parser(__doc__, DEFAULTS).parse_args()
    session = Session(options, "box and mask heads")
    source = data.load(options)
    regions = canvases.load_regions(source, 128 if options.quick else 1024)
    keras.utils.set_random_seed(options.seed)
    weights = pretrain(source, epochs=2 if options.quick else 10)
    for run in session.runs(len(regions.train)):
        with session.strategy.scope():
            frozen = backbone()
            frozen.set_weights(weights)
            frozen.trainable = False
            model = detector(frozen)
            iou = keras.metrics.BinaryIoU([1], threshold=0, name="iou")
            metrics = {"classes": "accuracy", "masks": iou}
            model.compile(run.optimizer, LOSSES, metrics=metrics)
        model.fit(
            regions.train_batches(options.batch_size, options.seed),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=regions.test_batches(),
            callbacks=run.callbacks,
        )


def backbone() -> keras.Model:
    """Three convolutions; its features have half of the resolution."""
    return keras.Sequential(
        [
            keras.Input((None, None, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, 2, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
        ],
        name="backbone",
    )


def pretrain(images: data.Data, epochs: int) -> list:
    """Return the weights of a backbone trained to classify digits."""
    trained = backbone()
    model = keras.Sequential(
        [
            keras.Input(images.image_shape),
            layers.Resizing(20, 20),  # about the size of a digit on a canvas
            trained,
            layers.GlobalMaxPooling2D(),
            layers.Dense(images.num_classes),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-3), LOSSES["classes"])
    batches = images.train_batches(64, seed=0)
    model.fit(batches, epochs=epochs, shuffle=False, verbose=0)
    return trained.get_weights()


def detector(features_of: keras.Model) -> keras.Model:
    """Two heads on the features of all proposals."""
    pixels = keras.Input((canvases.SIDE, canvases.SIDE, 1), name="images")
    proposals = keras.Input((canvases.DIGITS, 4), name="proposals")
    neck = layers.Conv2D(32, 1, activation="relu", name="neck")
    features = neck(features_of(pixels))
    x = canvases.RegionAlign(7)(features, proposals)
    x = layers.Reshape((canvases.DIGITS, -1))(x)
    for _ in range(2):
        x = layers.Dense(128, activation="relu")(x)
    y = canvases.RegionAlign(14)(features, proposals)
    for _ in range(2):
        convolution = layers.Conv2D(32, 3, padding="same", activation="relu")
        y = layers.TimeDistributed(convolution)(y)
    enlarge = layers.Conv2DTranspose(32, 2, strides=2, activation="relu")
    y = layers.TimeDistributed(enlarge)(y)
    inputs = {"images": pixels, "proposals": proposals}
    classes, boxes = layers.Dense(10)(x), layers.Dense(4)(x)
    outputs = {"classes": classes, "boxes": boxes, "masks": layers.Dense(1)(y)}
    return keras.Model(inputs, outputs, name="detector")


if __name__ == "__main__":
    main()
