"""The data at full size: images, characters, torques of a robot's arm."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from keras import tree

from targets.problems import HELD_OUT

SEQUENCE = 64
SIDE = 28
MEASURED = 5_000  # examples of a measurement


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and test examples.

    Attributes:
        x: Inputs, one array or several; pixels are in [0, 1].
        y: Targets: labels, numbers, or the pixels.
        test_x: Inputs of the test examples.
        test_y: Targets of the test examples.
    """

    x: Any
    y: np.ndarray
    test_x: Any
    test_y: np.ndarray

    def held_out(self) -> "Data":
        """Return the training examples, split into two sets."""
        first = round(len(self.y) * (1 - HELD_OUT))
        last = slice(first, first + MEASURED)

        def part(rows: slice) -> tuple[Any, np.ndarray]:
            return tree.map_structure(lambda a: a[rows], self.x), self.y[rows]

        return Data(*part(slice(first)), *part(last))


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
    if name in ("text", "tokens"):
        data = characters(examples)
        if name == "text":
            return data
        return Data(tokens(data.x), data.y, tokens(data.test_x), data.test_y)
    if name == "arm":
        return arm(examples)
    if directory is None:
        return moved_digits(examples)
    return idx_images(directory, examples)


def idx_images(directory: pathlib.Path, examples: int) -> Data:
    """Return the first images of a directory in MNIST's format."""
    from common import data

    images = data.idx_images(directory)
    return _images(images.train.first(examples), images.test)


def moved_digits(examples: int, measured: int = MEASURED) -> Data:
    """Return scikit-learn's digits at random places of 28x28."""
    from common import data

    digits = data.moved_digits(examples, min(measured, examples))
    return _images(digits.train, digits.test)


def _images(train: Any, test: Any) -> Data:
    """Scale the pixels to [0, 1]."""
    arrays = []
    for split in (train, test.first(MEASURED)):
        arrays += [split.x.astype("float32") / 255, split.y.astype("int32")]
    return Data(*arrays)


def characters(examples: int) -> Data:
    """Return Python's standard library; its end is the test set."""
    from common import text

    pieces = text.pieces(text.standard_library(), SEQUENCE + 1)
    held_out = MEASURED // 10
    train, test = pieces[:-held_out][:examples], pieces[-held_out:]
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


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
    return Data(x[:examples], y[:examples], x[examples:], y[examples:])


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
