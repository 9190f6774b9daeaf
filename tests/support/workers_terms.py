"""Losses whose terms are unevenly many on each worker."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.strategies import local_ranks, strategy
from tests.support.worker_parts import DEFAULTS, INNERS, shares, uneven

# Rows of each quarter of the workers by step.
_ROWS = [(3, 2, 1, 0), (0, 1, 0, 3), (2, 2, 2, 0), (0, 0, 1, 1)]
_REDUCTIONS = {"weights": "mean_with_sample_weight", "sum": "sum"}


def _squares(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p), -1)


# Of one's own; a single number has no terms that could be counted.
_OWN = {
    "own mean": lambda y, p: 7 * tf.reduce_mean(_squares(y, p)),
    "own sum": lambda y, p: tf.reduce_sum(_squares(y, p)),
    # A square in some steps alone, on some workers.
    "own capped": lambda y, p: tf.minimum(_squares(y, p), 7.0),
}
_MASKED = ("mask", "own capped")
CASES = ("mask", "weights", "sum", "outputs", *_OWN)


def network(case: str) -> keras.Model:
    """Two layers on tokens; in the case "outputs" one of two is masked."""
    inputs = keras.Input((3, 4))
    masked = layers.Masking()(inputs)
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    if case == "outputs":
        heads = [layers.Dense(2, name=name) for name in ("one", "two")]
        return keras.Model(
            inputs, [heads[0](hidden(masked)), heads[1](hidden(inputs))]
        )
    h = hidden(masked if case in _MASKED else inputs)
    return keras.Model(inputs, layers.Dense(2, name="out")(h))


def train(kind: str | None, case: str) -> dict[str, Any]:
    """Trains on tokens of which some carry no loss.

    Args:
        kind: "multi", "mirrored", or None for a single process.
        case: One of `CASES`.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 3, 4)), rng.normal(size=(24, 3, 2))
    valid = rng.integers(0, 2, size=(24, 3))
    valid[:, 0] = 1
    x *= valid[..., None] if case in ("outputs", *_MASKED) else 1
    weights = rng.integers(0, 3, size=(24, 3)) + 0.0
    loss = _OWN.get(case) or keras.losses.MeanSquaredError(
        _REDUCTIONS.get(case, "sum_over_batch_size")
    )
    fisher = "type2" if case in _OWN else "empirical"
    with floats("float64"):
        with strategy(kind).scope():
            keras.utils.set_random_seed(0)
            model = network(case)
            model.compile(
                tfkfac.KFAC(INNERS["sgd"](), fisher=fisher, **DEFAULTS),
                loss,
            )
        start = model.get_weights()
        steps = shares(uneven(_ROWS), strategy(kind).num_replicas_in_sync)
        labels = (y, y[::-1]) if case == "outputs" else y
        data = (x, labels, weights) if case == "weights" else (x, labels)
        model.fit(
            batches(kind, steps, data),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
        )
    return {
        "start": start,
        "weights": model.get_weights(),
        "factors": model.optimizer.factors(),
        "events": model.optimizer.events(),
    }


def batches(kind: str | None, steps: list[list[list[int]]], data: Any) -> Any:
    """Exactly these rows for each worker of this process in each step."""

    def rows() -> Iterator[Any]:
        for step in steps:
            for rank in local_ranks(kind):
                index = np.array(step[rank], int)
                yield tf.nest.map_structure(lambda a, i=index: a[i], data)

    def make(context: Any = None) -> tf.data.Dataset:
        signature = tf.nest.map_structure(
            lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), data
        )
        return tf.data.Dataset.from_generator(rows, output_signature=signature)

    if kind is None:
        return make()
    return strategy(kind).distribute_datasets_from_function(make)
