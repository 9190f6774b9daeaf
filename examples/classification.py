"""Classify images, with ResNet-32 or a model of keras.applications.

    python examples/classification.py --optimizer kfac adam --plot digits.png
    python examples/classification.py --dataset cifar10 --batch-size 128
    python examples/classification.py --model MobileNetV2 --image-size 32

Without --dataset the images are scikit-learn's digits, 8x8 pixels.
"""

import keras

from common import data
from common.arguments import positive
from common.networks import CLASSIFIERS
from common.session import Defaults, Session, make_parser

# The best of four learning rates each, for cnn.
DEFAULTS = Defaults(
    epochs=20,
    batch_size=64,
    target=0.98,
    rates={"sgd": 0.1, "adam": 0.008},
    optimizers=("kfac", "sgd", "adam"),
)


def main() -> None:
    parser = make_parser(__doc__, DEFAULTS)
    parser.add_argument("--model", choices=CLASSIFIERS, default="resnet32")
    parser.add_argument("--image-size", type=positive, metavar="PIXELS")
    options = parser.parse_args()
    session = Session(options, f"{options.model} on {options.dataset}")
    images = data.load(options)
    if options.quick:
        images = images.first(256)
    for run in session.runs(len(images.train)):
        with session.strategy.scope():
            model = build(
                options.model,
                images.image_shape,
                images.num_classes,
                options.image_size,
            )
            model.compile(
                optimizer=run.optimizer,
                loss=keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True
                ),
                metrics=["accuracy"],
            )
        model.fit(
            images.train_batches(options.batch_size, options.seed),
            shuffle=False,  # the batches are shuffled
            epochs=options.epochs,
            validation_data=images.test_batches(),
            callbacks=run.callbacks,
        )


def build(
    name: str, shape: tuple[int, ...], classes: int, size: int | None
) -> keras.Model:
    """Build a model; resize its images if a size is given."""
    make = CLASSIFIERS[name]
    if size is None:
        return make(shape, classes)
    body = make((size, size, shape[-1]), classes)
    resize = keras.layers.Resizing(size, size)
    return keras.Sequential([keras.Input(shape), resize, body])


if __name__ == "__main__":
    main()
