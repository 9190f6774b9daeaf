"""What one process is told to train."""

import dataclasses
from typing import Any

MODES = ("function", "batch", "fit", "dynamic")


class UnavailableError(Exception):
    """A variant does not exist here; the others can go on."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its optimizer and how to train it.

    Attributes:
        model: One of `data.MODELS`.
        optimizer: The name of a `Variant`.
        arguments: Those of its constructor.
        batch: Rows of a batch, of all workers together.
        mode: "function" is a loop of one's own in a `tf.function`, "dynamic"
            the same with an unknown number of rows, "batch"
            `train_on_batch`, and "fit" `fit` on batches of an unknown number
            of rows, of which one in 25 is smaller. PyTorch has one only.
    """

    model: str
    optimizer: str
    arguments: dict[str, Any]
    batch: int
    mode: str
