"""Models that are saved."""

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from tests.support.small import CLASSES, FEATURES, data, mlp


def functional() -> Any:
    """Two branches, with layers of every kind of state."""
    inputs = keras.Input((FEATURES,))
    left = layers.Dense(4, activation="tanh", name="left")(inputs)
    right = layers.Reshape((FEATURES, 1))(inputs)
    right = layers.Conv1D(4, 2, groups=1, name="right")(right)
    right = layers.BatchNormalization(name="norm")(right)
    right = layers.GlobalAveragePooling1D()(right)
    both = layers.Add()([left, right])
    outputs = layers.Dense(CLASSES, name="logits")(both)
    return keras.Model(inputs, outputs)


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """Its layers get new automatic names in each copy."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first = layers.Dense(4, activation="tanh")
        self.second = layers.Dense(4, activation="tanh")
        self.third = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.third(self.second(self.first(x)))


def nested() -> Any:
    """Layers of one name in containers of one kind."""

    def part() -> Any:
        return keras.Sequential(
            [layers.Dense(FEATURES, activation="tanh", name="dense")]
        )

    inputs = keras.Input((FEATURES,))
    x = part()(part()(inputs))
    return keras.Model(inputs, layers.Dense(CLASSES, name="dense")(x))


MODELS: dict[str, Callable[[], Any]] = {
    "sequential": mlp,
    "functional": functional,
    "subclassed": Subclassed,
    "nested": nested,
}


def train(model: Any, start: int, stop: int) -> None:
    for step in range(start, stop):
        model.train_on_batch(*data(seed=step))
