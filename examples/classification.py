"""Classify images, with a small CNN or a model of keras.applications.

    python examples/classification.py --optimizer kfac adam
    python examples/classification.py --dataset cifar10 --model ResNet50
    python tools/launch.py 2 -- python examples/classification.py --epochs 5

The digits are scikit-learn's, 8x8 pixels; keras.datasets downloads the others.
Each optimizer starts from the same weights.
"""

import argparse
from typing import Any

import keras
from keras import layers
from sklearn.datasets import load_digits

import tfkfac

# Learning rates, which fall linearly to 0; for the CNN the best of four each.
RATES = {"kfac": 0.1, "sgd": 0.1, "adam": 0.008, "fosi": 0.008}
DATASETS = "digits", "mnist", "fashion_mnist", "cifar10", "cifar100"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--optimizer", nargs="+", choices=RATES, default=["kfac", "adam"])
    add("--dataset", choices=DATASETS, default="digits")
    add("--model", default="cnn", help="cnn, MobileNetV2, ResNet50, ...")
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=64, help="of all workers together")
    options = parser.parse_args()
    strategy = tfkfac.MultiWorkerMirroredStrategy()  # one worker or several
    (x, y), test = load(options.dataset)
    for name in options.optimizer:
        keras.utils.set_random_seed(0)
        steps = options.epochs * -(-len(x) // options.batch_size)
        with strategy.scope():
            model = build(options.model, x.shape[1:], int(y.max()) + 1)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = make_optimizer(name, steps)
            model.compile(optimizer, loss, metrics=["accuracy"])
        print(f"{options.model} on {options.dataset} with {name}")
        sizes = options.batch_size, options.epochs
        model.fit(x, y, *sizes, verbose=2, validation_data=test)


def load(dataset: str) -> Any:
    if dataset == "digits":
        x, y = load_digits(return_X_y=True)
        x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
        return (x[360:], y[360:]), (x[:360], y[:360])
    return [
        (x.reshape(*x.shape[:3], -1).astype("float32") / 255, y.ravel())
        for x, y in getattr(keras.datasets, dataset).load_data()
    ]


def build(name: str, shape: tuple[int, ...], classes: int) -> keras.Model:
    x = inputs = keras.Input(shape)
    if name == "cnn":
        for filters in (32, 64):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
            x = layers.MaxPooling2D()(x)
        x = layers.Dense(128, "relu")(layers.Flatten()(x))
    else:
        make = getattr(keras.applications, name)
        x = layers.Resizing(32, 32)(x)  # the least size of these models
        body = {"include_top": False, "weights": None, "pooling": "avg"}
        x = make(input_shape=x.shape[1:], **body)(x)
    return keras.Model(inputs, layers.Dense(classes)(x))


def make_optimizer(name: str, steps: int) -> Any:
    rate = keras.optimizers.schedules.PolynomialDecay(RATES[name], steps, 0.0)
    if name == "kfac":
        return tfkfac.KFAC(rate)
    if name == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9)
    adam = keras.optimizers.Adam(rate)
    return tfkfac.FOSI(adam) if name == "fosi" else adam


if __name__ == "__main__":
    main()
