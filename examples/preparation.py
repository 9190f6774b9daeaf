"""What comes before the training: outputs, data and a compiled model."""

import argparse
import importlib.util
import pathlib

import keras

import image_data
from networks import NETWORKS
from optimizers import make_optimizer


class UsageError(Exception):
    """Something asked for that cannot be done; the message says why."""


def prepare_plot(path: pathlib.Path, argument: str) -> None:
    """Fails before the training rather than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{argument} needs matplotlib: pip install 'tfkfac[examples]'"
        )
    make_directory(path.parent)


def make_directory(directory: pathlib.Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error}") from error


def load_data(options: argparse.Namespace) -> image_data.ImageData:
    data = image_data.load(options.dataset, options.data_dir, options.cache_dir)
    check_size("--batch-size", options.batch_size, data)
    return data


def check_size(argument: str, size: int, data: image_data.ImageData) -> None:
    """Refuses batches of more images than there are."""
    if size > len(data.train):
        raise UsageError(
            f"{argument} {size} is more than the {len(data.train)} training "
            f"images of {data.name}"
        )


def make_model(
    name: str, data: image_data.ImageData, options: argparse.Namespace
) -> keras.Model:
    """A new model, compiled with an optimizer for all steps of the run.

    Raises:
        UsageError: If the optimizer refuses its settings.
    """
    steps = options.epochs * (len(data.train) // options.batch_size)
    model = NETWORKS[options.model](data.image_shape, data.num_classes)
    try:
        model.compile(
            optimizer=make_optimizer(name, steps, options),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    except ValueError as error:
        raise UsageError(f"--optimizer {name}: {error}") from error
    return model
