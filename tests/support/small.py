"""Tiny models and data for tests of behaviour, and what they leave behind."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.options import kfac as options_kfac
from tests.support.reference import Array

FEATURES, CLASSES, ROWS = 6, 3, 16


def data(rows: int = ROWS, seed: int = 0) -> tuple[Array, Array]:
    """Inputs, and labels that depend on them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    y = np.argmax(x[:, :CLASSES] + x[:, CLASSES:], axis=1)
    return x, y


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(seed: int = 0) -> Any:
    """Two dense layers of known names; the same weights for a seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits"),
        ],
        name="mlp",
    )


class Scale(layers.Layer):
    def build(self, shape: Any) -> None:
        self.gain = self.add_weight((shape[-1],), "ones", name="gain")

    def call(self, x: Any) -> Any:
        return x * self.gain


def unbuilt_sequential() -> Any:
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    return keras.Sequential([hidden, layers.Dense(CLASSES, name="logits")])


class LateBuilt(keras.Model):
    """Layers that do not exist before the model is built."""

    def build(self, shape: Any) -> None:
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.hidden.build(shape)
        self.logits = layers.Dense(CLASSES, name="logits")
        self.logits.build((None, 5))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.logits(self.hidden(x))


def compiled_mlp(
    inner: Any = None, seed: int = 0, eager: bool = False, **kwargs: Any
) -> Any:
    """`mlp` compiled with K-FAC."""
    model = mlp(seed)
    model.compile(options_kfac(inner, **kwargs), loss(), run_eagerly=eager)
    return model


def rows_of(
    states: Sequence[Any], path: str, names: str | tuple[str, ...]
) -> list[Any]:
    """Return the entries of a layer's state whose names begin with `names`."""
    return [
        entry.variable
        for state in states
        for group in state.groups
        for entry in group.entries()
        if entry.layer.endswith(path) and entry.name.startswith(names)
    ]


def kfac_of(model: Any) -> tfkfac.KFAC:
    """The model's K-FAC, also from within a LossScaleOptimizer."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    assert isinstance(optimizer, tfkfac.KFAC)
    return optimizer


def gradients_of(
    model: Any, x: Any, y: Any, objective: Callable[..., Any] | None = None
) -> list[Any]:
    """The model's gradients from a tape of its own."""
    objective = objective or loss()
    with tf.GradientTape() as tape:
        value = objective(y, model(x, training=True))
    return list(tape.gradient(value, model.trainable_variables))


def curvature(optimizer: Any) -> dict[str, Array]:
    """All that K-FAC itself keeps, by name."""
    store: dict[str, Array] = {}
    optimizer._saved_state.save(store)
    return {name: np.array(value) for name, value in store.items()}


def slots(optimizer: Any) -> dict[str, Array]:
    """The inner optimizer's variables, by path."""
    return {
        f"{i} {v.path}": np.array(v) for i, v in enumerate(optimizer.variables)
    }


def everything(model: Any) -> dict[str, Array]:
    """Weights, curvature and inner variables, without names of runs."""
    optimizer = kfac_of(model)
    values = [
        *model.get_weights(),
        *curvature(optimizer).values(),
        *slots(optimizer).values(),
    ]
    return {str(i): np.array(value) for i, value in enumerate(values)}


def assert_same(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """Equal to the last bit."""
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def same(got: Mapping[str, Array], want: Mapping[str, Array]) -> bool:
    assert list(got) == list(want)
    return all(np.array_equal(got[k], want[k]) for k in want)


def summary_text(optimizer: Any) -> str:
    text = io.StringIO()
    optimizer.summary(print_fn=lambda line: print(line, file=text))
    return text.getvalue()


def is_tapped(model: Any) -> bool:
    """Whether any object of ours hangs on the model or its layers."""
    return any(
        name in ("call", "compute_loss", "_moments") or "tfkfac" in name
        for layer in model._flatten_layers()
        for name in vars(layer)
    )
