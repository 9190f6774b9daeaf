"""Small models with many layers, and Hessians by finite differences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.support.harness import flat, randomize
from tests.support.reference import Array

ROWS = 7
# Function that applies layers to a tensor, and the shape of one example.
Zoo = dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]]


class Penalty(layers.Layer):
    """Adds a loss that is not quadratic in the inputs."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.3 * ops.mean(ops.tanh(inputs) ** 2))
        return inputs


def absolute(h: Any) -> Any:
    """Compute `|h|`, where the derivative of the stopped sign is 0."""
    return h * tf.stop_gradient(tf.sign(h))


def synchronized(h: Any) -> Any:
    norm = layers.BatchNormalization(synchronized=True)
    return norm(layers.Conv2D(3, 2)(h))


def projected(second: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda h: second()(layers.Dense(4)(h))


def recurrent(tokens: Any) -> Any:
    """Sparse gradients, a mask and a loop."""
    return layers.SimpleRNN(2)(layers.Embedding(5, 3, mask_zero=True)(tokens))


IMAGE, SERIES, TEXT = (5, 4, 2), (4, 3), (4,)
ZOO: Zoo = {
    "tanh": (lambda h: layers.Dense(4, activation="tanh")(h), (3,)),
    "conv_groups": (lambda h: layers.Conv2D(4, 2, groups=2)(h), IMAGE),
    "batch_synchronized": (synchronized, IMAGE),
    "layer_two_axes":
        (projected(partial(layers.LayerNormalization, axis=(-2, -1))), SERIES),
    "masked_rnn": (recurrent, TEXT),
    "dropout": (projected(partial(layers.Dropout, 0.4)), SERIES),
    "add_loss": (projected(Penalty), (3,)),
    "stop_gradient": (projected(partial(layers.Lambda, absolute)), (3,)),
}  # fmt: skip


def network(body: Callable[[Any], Any], shape: tuple[int, ...]) -> Any:
    """Return a model: the layers, tanh and a dense layer of two units."""
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, dtype="int32" if shape == TEXT else None)
    h = layers.Activation("tanh")(body(x))
    model = keras.Model(x, layers.Dense(2)(layers.Flatten()(h)))
    randomize(model)
    return model


def inputs(shape: tuple[int, ...], seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    if shape == TEXT:
        return rng.integers(0, 5, size=(ROWS, *shape)).astype("int32")
    return rng.normal(size=(ROWS, *shape)).astype(keras.config.floatx())


def ready(case: str = "tanh") -> tuple[Any, Any, Any]:
    """Return a compiled model of the zoo, its inputs and targets."""
    body, shape = ZOO[case]
    model = network(body, shape)
    model.compile("sgd", "mse")
    return model, inputs(shape), noise(ROWS, 2)


def noise(*shape: int, seed: int = 3) -> Array:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(keras.config.floatx())


def weight_count(model: Any) -> int:
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def split(model: Any, vector: Array) -> list[Array]:
    """Split a flat vector into the shapes of the variables."""
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    ends = np.cumsum([np.prod(s, dtype=int) for s in shapes])[:-1]
    parts = np.split(vector, ends)
    return [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]


def slope(model: Any, x: Any, y: Any, sample_weight: Any = None) -> Array:
    """Return the gradient of the compiled loss from a tape."""
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight
        )
    values = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(loss, values, unconnected_gradients="zero")
    return flat([tf.convert_to_tensor(g) for g in gradients])


def differences(
    model: Any, function: Callable[[], Array], rows: Array, step: float
) -> Array:
    """Return central differences of a function of the weights along rows."""

    def at(change: Array) -> Array:
        before = [np.array(v) for v in model.variables]
        changes = split(model, change)
        for v, part in zip(model.trainable_variables, changes, strict=True):
            v.assign(np.asarray(v) + part)
        result = function()
        for variable, value in zip(model.variables, before, strict=True):
            variable.assign(value)
        return result

    return np.stack([(at(step * d) - at(-step * d)) / (2 * step) for d in rows])


def difference_products(
    model: Any, columns: Array, *batch: Any, step: float = 1e-5
) -> Array:
    """Return the Hessian times columns."""
    return differences(model, lambda: slope(model, *batch), columns.T, step).T
