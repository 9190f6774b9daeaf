"""Counts the calls of the package's functions while a step is traced."""

import itertools
import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import tfkfac
from tests.support.strategies import strategy

PACKAGE = f"{pathlib.Path(tfkfac.__file__).parent}/"
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "natural": lambda: tfkfac.KFAC(step="natural"),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    "FOSI": lambda: tfkfac.FOSI("sgd", warmup_steps=1, update_interval=3),
    "GaussNewton": tfkfac.GaussNewton,
}


class Counts(NamedTuple):
    """Counts of the main thread, or of the replica's thread.

    Attributes:
        changes: Calls into another file than that of the call before, outside
            of `compat/`.
        files: Files of the called functions.
        calls: Calls.
    """

    changes: int
    files: int
    calls: int


def count_calls(optimizer: str) -> Counts:
    """Trace a step of two dense layers."""
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((9,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss)
    model.optimizer.build(model.trainable_variables)
    files: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            files.append(file)

    sys.setprofile(record)
    threading.setprofile(record)
    try:
        model.train_on_batch(np.ones((16, 9)), np.arange(16) % 4)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    outside = [file for file in files if "/compat/" not in file]
    changes = sum(a != b for a, b in itertools.pairwise(outside))
    return Counts(changes, len(set(files)), len(files))


def count_on_worker(optimizer: str) -> Counts:
    """Trace a step under the strategy of this process."""
    with strategy().scope():
        return count_calls(optimizer)
