"""The data: images, characters, and the torques of a robot's arm."""

import dataclasses
import pathlib
from typing import Any

import numpy as np
from keras import tree

from targets.problems import HELD_OUT

SEQUENCE = 64
SIDE = 28
# Examples at most that are measured with.
MEASURED = 5_000


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples to train on, and others to measure with.

    Attributes:
        x: Inputs, one array or several; pixels are in [0, 1].
        y: Targets: labels, numbers, or the pixels themselves.
        test_x: Inputs of the other examples.
        test_y: Their targets.
    """

    x: Any
    y: np.ndarray
    test_x: Any
    test_y: np.ndarray

    def held_out(self) -> "Data":
        """The training examples, the last of them to measure with."""
        first = round(len(self.y) * (1 - HELD_OUT))
        last = slice(first, first + MEASURED)

        def part(rows: slice) -> tuple[Any, np.ndarray]:
            return tree.map_structure(lambda a: a[rows], self.x), self.y[rows]

        return Data(*part(slice(first)), *part(last))


def tokens(words: np.ndarray) -> dict[str, np.ndarray]:
    """Words as keras-hub's models take them."""
    return {"token_ids": words, "padding_mask": np.ones_like(words)}


def load(name: str, directory: pathlib.Path | None, examples: int) -> Data:
    """Loads the data of the full size.

    Args:
        name: "text" (sources of Python's standard library), "tokens" (the same
            as keras-hub's models take it), "arm", or the name of a set of
            images.
        directory: Where the images' idx files are; without it digits that are
            embedded in scikit-learn stand in for them.
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
    """The first images of a directory in MNIST's format."""
    from common.idx_images import find_idx_files, read_split

    files = find_idx_files(directory)
    x, y = read_split(files["train"])
    return _images(x[:examples], y[:examples], *read_split(files["test"]))


def moved_digits(examples: int, measured: int = MEASURED) -> Data:
    """Scikit-learn's digits, enlarged and moved about a frame of 28x28."""
    from common import images

    digits = images.moved_digits(examples, min(measured, examples))
    train, test = digits.train, digits.test
    return _images(train.x, train.y, test.x, test.y)


def _images(
    x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> Data:
    def pixels(images: np.ndarray) -> np.ndarray:
        return images.astype("float32") / 255

    return Data(
        pixels(x),
        y.astype("int32"),
        pixels(test_x[:MEASURED]),
        test_y[:MEASURED].astype("int32"),
    )


def characters(examples: int) -> Data:
    """Python's standard library, and as held-out text the last of it."""
    from common import text

    pieces = text.pieces(text.standard_library(), SEQUENCE + 1)
    held_out = MEASURED // 10
    train, test = pieces[:-held_out][:examples], pieces[-held_out:]
    return Data(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:])


def arm(examples: int) -> Data:
    """Torques in the two joints of an arm, for its motion.

    The inverse dynamics of two equal rods in a plane: angles, velocities and
    accelerations of the joints to torques, in units of their deviation.
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
    """Of rods of unit mass and length, by Lagrange's equations."""
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
