"""The data at full size: images, characters, torques of a robot's arm."""

import pathlib

import numpy as np
from keras import tree

from common import data, text
from common.data import Data, Split
from targets.problems import HELD_OUT

SEQUENCE = 64
SIDE = 28
MEASURED = 5_000  # examples of a measurement


def hold_out(train: Split) -> Data:
    """Split training examples into training and test examples."""
    first = round(len(train) * (1 - HELD_OUT))
    return Data(train.first(first), rows_of(train, first, first + MEASURED))


def rows_of(split: Split, start: int, end: int | None = None) -> Split:
    """Return the examples from `start` to `end`."""
    x, y = tree.map_structure(lambda a: a[start:end], (split.x, split.y))
    return Split(x, y)


def tokens(words: np.ndarray) -> dict[str, np.ndarray]:
    """Return the inputs of keras-hub's models."""
    return {"token_ids": words, "padding_mask": np.ones_like(words)}


def load(name: str, directory: pathlib.Path | None, examples: int) -> Data:
    """Load data of the full size.

    Args:
        name: "text" (sources of Python's standard library), "tokens" (the text
            as inputs of keras-hub's models), "arm", or a set of images.
        directory: Directory of idx files; None takes scikit-learn's digits.
        examples: Number of training examples.
    """
    if name == "text":
        return characters(examples)
    if name == "tokens":
        pieces = characters(examples)
        train, test = pieces.train, pieces.test
        return Data(
            Split(tokens(train.x), train.y), Split(tokens(test.x), test.y)
        )
    if name == "arm":
        return arm(examples)
    if directory is None:
        return moved_digits(examples)
    return idx_images(directory, examples)


def idx_images(directory: pathlib.Path, examples: int) -> Data:
    """Return the first images of a directory in MNIST's format."""
    images = data.idx_images(directory)
    return _scaled(images.train.first(examples), images.test)


def moved_digits(examples: int, measured: int = MEASURED) -> Data:
    """Return scikit-learn's digits at random places of 28x28."""
    digits = data.moved_digits(examples, min(measured, examples))
    return _scaled(digits.train, digits.test)


def _scaled(train: Split, test: Split) -> Data:
    """Scale the pixels to [0, 1]."""

    def scale(split: Split) -> Split:
        x = split.x.astype("float32") / 255
        return Split(x, split.y.astype("int32"))

    return Data(scale(train), scale(test.first(MEASURED)))


def characters(examples: int) -> Data:
    """Return Python's standard library; its end is the test set."""
    pieces = text.pieces(text.standard_library(), SEQUENCE + 1)
    held_out = MEASURED // 10
    train, test = pieces[:-held_out][:examples], pieces[-held_out:]
    return Data(
        Split(train[:, :-1], train[:, 1:]), Split(test[:, :-1], test[:, 1:])
    )


def arm(examples: int) -> Data:
    """Return the inverse dynamics of two equal rods in a plane.

    Angles, velocities and accelerations of two joints to normalised torques.
    """
    random = np.random.RandomState(0)
    count = examples + MEASURED
    angles = random.uniform(-np.pi, np.pi, (count, 2))
    motion = random.uniform(-1, 1, (count, 4))
    torques = _torques(angles, 3 * motion[:, :2], 5 * motion[:, 2:])
    y = (torques - torques.mean(0)) / torques.std(0)
    x = np.concatenate([angles / np.pi, motion], 1).astype("float32")
    y = y.astype("float32")
    rows = Split(x, y)
    return Data(rows.first(examples), rows_of(rows, examples))


def _torques(
    angles: np.ndarray, velocities: np.ndarray, accelerations: np.ndarray
) -> np.ndarray:
    """Return torques of rods of unit mass and length (Lagrange)."""
    (q1, q2), (v1, v2) = angles.T, velocities.T
    a1, a2 = accelerations.T
    cosine, sine, gravity = np.cos(q2), np.sin(q2), 9.81
    shared = 1 / 3 + cosine / 2
    weight = gravity / 2 * np.cos(q1 + q2)
    first = (5 / 3 + cosine) * a1 + shared * a2
    first -= sine * (v1 * v2 + v2**2 / 2)
    first += 3 * gravity / 2 * np.cos(q1) + weight
    second = shared * a1 + a2 / 3 + sine * v1**2 / 2 + weight
    return np.stack([first, second], 1)
