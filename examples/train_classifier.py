"""Trains an image classifier with several optimizers and compares them.

python examples/train_classifier.py --model cnn --optimizer kfac fosi_adam adam

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
from preparation import (
    UsageError,
    load_data,
    make_directory,
    make_model,
    prepare_plot,
)
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
        with strategy.scope():
            for name in options.optimizer[1:]:
                make_model(name, data, options)  # or fail before the training
        runs = {
            name: train(name, data, options, strategy)
            for name in options.optimizer
        }
    except (image_data.DatasetError, UsageError) as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: error: {error}")
    if not is_chief():
        return
    title = f"{data.name}, {options.model}, batches of {options.batch_size}"
    print(f"\n{title}, {options.epochs} epochs\n")
    print(report.make_table(runs, options.learning_rate, options.target))
    if any(len(run.seconds_by_kind) > 1 for run in runs.values()):
        print(f"\n{report.kinds_table(runs)}")
    if options.plot:
        report.save_plot(options.plot, runs, title)
        print(f"Plot: {options.plot}")


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
    if options.plot:
        prepare_plot(options.plot, "--plot")
    if options.log_dir:
        make_directory(options.log_dir)


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
    with strategy.scope():
        model = make_model(name, data, options)
    print(f"\nTraining {options.model} with {name} on {data.name}")
    if isinstance(model.optimizer, (tfkfac.KFAC, tfkfac.FOSI)):
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
    if "accelerator_fraction" in options.fosi_options and isinstance(
        model.optimizer, tfkfac.FOSI
    ):
        print(report.idle_text(model.optimizer))
    return recorder


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
