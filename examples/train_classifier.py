"""Trains an image classifier with K-FAC, SGD and Adam and compares them.

python examples/train_classifier.py --model cnn --optimizer kfac adam

With TF_CONFIG set it is one worker of a job; tools/launch.py starts several on
one machine. The batch size is that of all workers together.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys

import keras
import tensorflow as tf

import arguments
import image_data
import report
import tfkfac
from networks import NETWORKS
from recording import Recorder


def main() -> None:
    options = arguments.parse()
    # Before anything else of TensorFlow.
    strategy = make_strategy()
    if not is_chief():
        options.plot = options.log_dir = None
    try:
        prepare_outputs(options)
        data = load_data(options)
    except (image_data.DatasetError, UsageError) as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: error: {error}")
    runs = {
        name: train(name, data, options, strategy) for name in options.optimizer
    }
    if not is_chief():
        return
    title = f"{data.name}, {options.model}, batches of {options.batch_size}"
    print(f"\n{title}, {options.epochs} epochs\n")
    print(report.make_table(runs, options.learning_rate, options.target))
    if options.plot:
        report.save_plot(options.plot, runs, title)
        print(f"Plot: {options.plot}")


class UsageError(Exception):
    """Something asked for that cannot be done; the message says why."""


def make_strategy() -> tf.distribute.Strategy:
    """The job that TF_CONFIG describes, or the default of one device."""
    if "TF_CONFIG" in os.environ:
        return tfkfac.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def is_chief() -> bool:
    """Whether this worker prints the results and writes the files."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    return task.get("index", 0) == 0


def prepare_outputs(options: argparse.Namespace) -> None:
    """Fails before the training rather than after it."""
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib: pip install 'tfkfac[examples]'"
        )
    directories = [options.plot and options.plot.parent, options.log_dir]
    for directory in filter(None, directories):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to {directory}: {error}") from error


def load_data(options: argparse.Namespace) -> image_data.ImageData:
    data = image_data.load(options.dataset, options.data_dir, options.cache_dir)
    if options.batch_size > len(data.train):
        raise UsageError(
            f"--batch-size {options.batch_size} is more than the "
            f"{len(data.train)} training images of {data.name}"
        )
    return data


def train(
    name: str,
    data: image_data.ImageData,
    options: argparse.Namespace,
    strategy: tf.distribute.Strategy,
) -> Recorder:
    """Trains a new model; everything random depends on the seed alone."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(options.seed)
    batches = data.train_batches(options.batch_size, options.seed)
    steps = options.epochs * len(batches)
    with strategy.scope():
        model = NETWORKS[options.model](data.image_shape, data.num_classes)
        model.compile(
            optimizer=make_optimizer(name, steps, options),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(f"\nTraining {options.model} with {name} on {data.name}")
    if isinstance(model.optimizer, tfkfac.KFAC):
        model.optimizer.summary()
        if strategy.num_replicas_in_sync > 1:
            print(report.traffic_table(model.optimizer))
    recorder, *others = make_callbacks(name, options.log_dir)
    model.fit(
        batches,
        shuffle=False,  # they are already
        epochs=options.epochs,
        validation_data=data.test_batches(),
        callbacks=[recorder, *others],
    )
    return recorder


def make_optimizer(
    name: str, steps: int, options: argparse.Namespace
) -> keras.optimizers.Optimizer:
    """An optimizer whose learning rate decays linearly to 0."""
    rate = keras.optimizers.schedules.PolynomialDecay(
        options.learning_rate[name], steps, end_learning_rate=0.0
    )
    if name == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9)
    if name == "adam":
        return keras.optimizers.Adam(rate)
    return tfkfac.KFAC(
        keras.optimizers.SGD(rate, momentum=0.5), **options.kfac_options
    )


def make_callbacks(
    name: str, log_dir: pathlib.Path | None
) -> list[keras.callbacks.Callback]:
    """A recorder and, if there is a directory for it, TensorBoard."""
    if log_dir is None:
        return [Recorder()]
    callbacks = [Recorder(log_dir / f"{name}.csv")]
    if importlib.util.find_spec("tensorboard"):
        callbacks.append(keras.callbacks.TensorBoard(log_dir / name))
    else:
        print("TensorBoard is not installed: logging to CSV only")
    return callbacks


if __name__ == "__main__":
    main()
