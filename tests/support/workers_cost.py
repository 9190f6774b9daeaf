"""What the tests of `distribution="auto"` run on every worker."""

from typing import Any

import keras
import numpy as np
from keras import layers

import tfkfac
from tests.support.strategies import copies, local_ranks, strategy


def _trained(kind: str | None, distribution: str) -> Any:
    with strategy(kind).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, activation="tanh"),
                layers.Dense(3),
            ]
        )
        optimizer = tfkfac.KFAC(distribution=distribution)
        model.compile(
            optimizer,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
    model.fit(x, np.arange(24) % 3, batch_size=8, shuffle=False, verbose=0)
    return model


def choose(kind: str | None) -> dict[str, Any]:
    """What is chosen, and the weights that come of it."""
    model = _trained(kind, "auto")
    optimizer, lines = model.optimizer, []
    optimizer.summary(lines.append)
    placed = optimizer.method.placement.distribution
    return {
        "chosen": (placed.mode, placed.gradient_worker_fraction),
        "summary": "\n".join(lines),
        "config": optimizer.get_config()["distribution"],
        "weights": copies(kind, model.trainable_variables),
    }


def disagree(kind: str) -> str:
    """What is said when one worker lets choose and the others do not."""
    first = 0 in local_ranks(kind)
    try:
        _trained(kind, "auto" if first else "comm_opt")
    except ValueError as error:
        return str(error)
    return ""
