"""The loss of a Keras model as a function of flat weights."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tests.support.reference import Array

Rows = Sequence[int]


class Point(NamedTuple):
    """What a model makes of some rows at some weights."""

    loss: float
    gradient: Array
    hits: int
    statistics: list[Array]


class Objective:
    """Loss and gradient of a compiled Keras model, by flat weights."""

    def __init__(self, model: Any, data: tuple[Array, Array]) -> None:
        self._model = model
        self._x, self._y = data
        self._trace = tf.function(self._point, reduce_retracing=True)

    def start(self) -> tuple[Array, list[Array]]:
        """The weights of the model, and its moving statistics."""
        kept = [v.numpy() for v in self._model.non_trainable_variables]
        return flat([v.numpy() for v in self._model.trainable_variables]), kept

    def split(self, weights: Array) -> list[Array]:
        shapes = [tuple(v.shape) for v in self._model.trainable_variables]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        parts = np.split(weights, ends[:-1])
        return [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]

    def at(self, weights: Array, rows: Rows, kept: Sequence[Array]) -> Point:
        x, y = self._x[list(rows)], self._y[list(rows)]
        values = [tf.constant(p) for p in self.split(weights)]
        loss, slopes, hits, kept = self._trace(values, list(kept), x, y)
        gradient = flat([g.numpy() for g in slopes])
        return Point(
            float(loss), gradient, int(hits), [v.numpy() for v in kept]
        )

    def _point(self, values: Any, kept: Any, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs, kept = self._model.stateless_call(
                values, kept, x, training=True
            )
            loss = self._model.compute_loss(y=y, y_pred=outputs)
        found = tf.argmax(outputs, 1, y.dtype)
        hits = tf.reduce_sum(tf.cast(found == y, tf.int32))
        return loss, tape.gradient(loss, values), hits, kept


def flat(parts: Sequence[Array]) -> Array:
    return np.concatenate([np.ravel(part) for part in parts])
