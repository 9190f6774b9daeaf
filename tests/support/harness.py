"""Runs one K-FAC step on a small model and reads back what it did."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.options import kfac as options_kfac
from tests.support.reference import Array

# Float32 sums of a few hundred products, and solves of matrices whose
# condition number is a few hundred.
FACTOR_RTOL = 1e-5
SOLVE_RTOL = 1e-4


def half_squared_error(y_true: Any, y_pred: Any) -> Any:
    """l_n = half the squared distance; d l_n / d y_pred is the residual."""
    square = tf.square(y_pred - tf.cast(y_true, y_pred.dtype))
    axes = list(range(1, len(square.shape)))
    return 0.5 * tf.reduce_sum(square, axis=axes)


# Activation and its derivative as a function of the output.
SLOPES: dict[str | None, Callable[[Array], Array]] = {
    None: np.ones_like,
    "tanh": lambda out: 1.0 - out**2,
    "sigmoid": lambda out: out * (1.0 - out),
    "relu": lambda out: (out > 0).astype(float),
}


def randomize(model: Any) -> None:
    """Gives every trainable weight, bias and scale included, noise."""
    rng = np.random.default_rng(0)
    for v in model.trainable_variables:
        noise = 0.4 * rng.normal(size=v.shape)
        v.assign(noise + 1.0 if v.name == "gamma" else noise)


def compiled(
    model: keras.Model,
    inner: Any = 1.0,
    loss: Any = half_squared_error,
    eager: bool = True,
    **kwargs: Any,
) -> Any:
    """Compiles the model with K-FAC in front of plain SGD."""
    if isinstance(inner, float):
        inner = keras.optimizers.SGD(inner)
    kwargs.setdefault("kl_clip", None)
    kwargs.setdefault("rest_optimizer", "inner")
    kwargs.setdefault("fisher", "empirical")
    kwargs.setdefault("factor_update_interval", 1)
    kwargs.setdefault("inverse_update_interval", 1)
    optimizer = options_kfac(inner, **kwargs)
    model.compile(optimizer=optimizer, loss=loss, run_eagerly=eager)
    return optimizer


def keras_gradients(model: Any, x: Any, y: Any) -> list[Array]:
    """Gradients of the mean half squared error, straight from a tape."""
    with tf.GradientTape() as tape:
        losses = half_squared_error(y, model(x, training=True))
        loss = tf.reduce_mean(losses)
    values = [v.value for v in model.trainable_variables]
    grads = tape.gradient(loss, values)
    return [np.asarray(tf.convert_to_tensor(g), np.float64) for g in grads]


@dataclasses.dataclass
class Step:
    """Factors after one step, weights by layer around it."""

    factors: Mapping[str, Mapping[str, Array]]
    before: list[Array]
    after: list[Array]

    def of(self, name: str) -> Mapping[str, Array]:
        return find(self.factors, name)

    @property
    def delta(self) -> list[Array]:
        """Weights before minus after, in the model's order."""
        return [b - a for b, a in zip(self.before, self.after, strict=True)]


def weights_of(model: Any) -> list[Array]:
    return [np.asarray(v, np.float64) for v in model.trainable_variables]


def flat(values: list[Array]) -> Array:
    return np.concatenate([np.ravel(v) for v in values])


def train_once(
    model: keras.Model,
    x: Any,
    y: Any,
    sample_weight: Any = None,
    **kwargs: Any,
) -> Step:
    """Compiles, takes one step and returns what it did."""
    optimizer = compiled(model, **kwargs)
    before = weights_of(model)
    model.train_on_batch(x, y, sample_weight=sample_weight)
    return Step(optimizer.factors(), before, weights_of(model))


def find(
    factors: Mapping[str, Mapping[str, Array]], name: str
) -> Mapping[str, Array]:
    """The only block whose path is `name` or ends with `/name`."""
    hits = [p for p in factors if p == name or p.endswith("/" + name)]
    assert len(hits) == 1, f"{name!r} matches {hits} of {list(factors)}"
    return factors[hits[0]]


def assert_close(got: Any, want: Any, rtol: float, what: str = "") -> None:
    """Equal shapes and a small relative Frobenius distance."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape} != {want.shape}"
    scale = float(np.linalg.norm(want))
    error = float(np.linalg.norm(got - want))
    assert error <= rtol * scale, (
        f"{what}: relative difference {error / max(scale, 1e-300):.2e} "
        f"> {rtol:.0e}; got {got.ravel()[:6]}, want {want.ravel()[:6]}"
    )


def check_factors(
    block: Any, A: Array, G: Array, rtol: float = FACTOR_RTOL
) -> None:
    assert set(block) == {"A", "G"}
    assert_close(block["A"], A, rtol, "A")
    assert_close(block["G"], G, rtol, "G")
