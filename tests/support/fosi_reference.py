"""Float64 NumPy reference of FOSI, on a network differentiated by hand.

The network has one hidden tanh layer and softmax cross-entropy on top. Its
weights are flat, in Keras' order. Nothing here knows about TensorFlow, but for
the models at the end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import tfkfac
from tests.support.reference import Array

FEATURES, HIDDEN, CLASSES, ROWS = 2, 2, 2, 12
SIZE = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
WEAK = 1e-3  # share of the largest curvature


# ------------------------------------------------------------- the loss
@dataclasses.dataclass
class Network:
    """Mean cross-entropy of a batch, as a function of the weights.

    Attributes:
        x: Inputs.
        y: Labels.
        hidden: Number of hidden units.
        weight: Weights of the rows.
    """

    x: Array
    y: Array
    hidden: int = HIDDEN
    weight: Array | None = None

    def gradient(self, w: Array) -> Array:
        """Analytic in the weights, so that they may be complex."""
        x = self.x.astype("float64")
        (rows, n), k = x.shape, int(self.y.max()) + 1
        sizes = np.cumsum([n * self.hidden, self.hidden, self.hidden * k])
        first, bias, second, offset = np.split(w, sizes)
        second = second.reshape(self.hidden, k)
        a = np.tanh(x @ first.reshape(n, self.hidden) + bias)
        z = a @ second + offset
        e = np.exp(z - z.real.max(axis=1, keepdims=True))
        g = e / e.sum(axis=1, keepdims=True) - np.eye(k)[self.y]
        scale = np.ones(rows) if self.weight is None else self.weight
        g = g * scale[:, None] / rows
        h = g @ second.T * (1 - a**2)
        parts = [(x.T @ h).ravel(), h.sum(0), (a.T @ g).ravel(), g.sum(0)]
        return np.concatenate(parts)

    def hessian(self, w: Array) -> Array:
        """By complex steps: exact to rounding."""
        step = 1e-30
        columns = [
            self.gradient(w + 1j * step * unit).imag / step
            for unit in np.eye(len(w))
        ]
        return np.stack(columns, axis=1)


# ---------------------------------------------------- inner optimizers
# (gradient, weights, slots, step from 1 on) -> change of the weights
Rule = Callable[[Array, Array, dict[str, Array], int], Array]


def sgd(rate: float, momentum: float = 0.0, nesterov: bool = False) -> Rule:
    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        v = momentum * slots.get("v", np.zeros_like(g)) - rate * g
        slots["v"] = v
        return momentum * v - rate * g if nesterov else v

    return rule


# Keras keeps some powers of these in float32, which must not round them.
BETAS = {"beta_1": 0.875, "beta_2": 0.96875}


def adam(rate: float, decay: float = 0.0) -> Rule:
    first, second = BETAS.values()

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        m = first * slots.get("m", np.zeros_like(g)) + (1 - first) * g
        v = second * slots.get("v", np.zeros_like(g)) + (1 - second) * g**2
        slots |= {"m": m, "v": v}
        scale = np.sqrt(1 - second**t) / (1 - first**t)
        return -rate * (decay * w + scale * m / (np.sqrt(v) + 1e-7))

    return rule


def rmsprop(rate: float) -> Rule:
    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        v = 0.9 * slots.get("v", np.zeros_like(g)) + 0.1 * g**2
        slots["v"] = v
        return -rate * g / np.sqrt(v + 1e-7)

    return rule


# ----------------------------------------------------------------- FOSI
@dataclasses.dataclass
class Fosi:
    """FOSI with exact Hessians. `at` maps a step to what is in force then."""

    inner: Rule
    num_largest: int = 3
    num_smallest: int = 0
    alpha: Callable[[int], float] = lambda t: 0.5
    interval: Callable[[int], int] = lambda t: 3
    warmup: int = 2
    momentum: float = 0.9
    clip: float = 1.0
    finish: Callable[[Array, int], Array] = lambda w, t: w
    scales: list[float] = dataclasses.field(default_factory=list)
    estimated: list[int] = dataclasses.field(default_factory=list)
    values: Array | None = None

    def run(
        self,
        gradient: Callable[[Array], Array],
        hessian: Callable[[Array], Array],
        w: Array,
        steps: int,
    ) -> Array:
        """Returns the weights at first and after each step."""
        V, c = np.zeros((len(w), 0)), np.zeros(0)
        slots: dict[str, Array] = {}
        path = [w]
        for t in range(steps):
            since = t - self.warmup
            if since == 0 or (since > 0 and since % self.interval(t) == 0):
                new = self._directions(hessian(w))
                c = new.T @ (V @ c)
                V = new
                self.estimated.append(t)
            g = gradient(w)
            inside = V.T @ g
            d = self.inner(g - V @ inside, w, slots, t + 1)
            if self.values is not None:
                c = self.momentum * c + inside
                d = self._scale() * (d - V @ (V.T @ d))
                d = d - self.alpha(t) * V @ (c / np.abs(self.values))
            w = self.finish(w + d, t)
            path.append(w)
        return np.stack(path)

    def _directions(self, hessian: Array) -> Array:
        """Both ends of the spectrum; columns of weak ones are zero."""
        values, vectors = np.linalg.eigh(hessian)
        low = list(range(self.num_smallest))
        n = len(values)
        keep = [*low, *range(n - self.num_largest, n)]
        self.values = values[keep]
        sizes = np.abs(self.values)
        return np.asarray(vectors[:, keep] * (sizes > WEAK * sizes.max()))

    def _scale(self) -> float:
        assert self.values is not None
        top, least = self.values[-1], self.values[-self.num_largest]
        ratio = top / least if least > 0 else np.inf
        self.scales.append(float(np.clip(ratio, 1.0, self.clip)))
        return self.scales[-1]


# --------------------------------------------------------------- models
def data(rows: int = ROWS, seed: int = 4) -> tuple[Array, Array]:
    """Inputs and labels that cannot be told apart without error."""
    rng = np.random.default_rng(seed)
    x = 1.5 * rng.normal(size=(rows, FEATURES))
    y = np.argmax(x[:, :CLASSES] + rng.normal(size=(rows, CLASSES)), axis=1)
    y[:CLASSES] = np.arange(CLASSES)
    return x.astype(keras.config.floatx()), y


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(kind: Any = keras.Sequential, **kwargs: Any) -> Any:
    """The network as a Keras model; always the same weights."""
    rng = np.random.default_rng(10)
    model = kind(
        [
            keras.Input((FEATURES,)),
            layers.Dense(HIDDEN, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits", **kwargs),
        ],
        name="mlp",
    )
    for v in model.trainable_variables:
        v.assign(rng.normal(size=v.shape))
    return model


def fosi(inner: Any, **options: Any) -> Any:
    """The optimizer with the sizes of `Fosi`, and exact directions."""
    own = {
        "num_largest": 3,
        "alpha": 0.5,
        "update_interval": 3,
        "warmup_steps": 2,
        "lanczos_steps": SIZE,
    }
    return tfkfac.FOSI(inner, **{**own, **options})


def small(inner: Any = None, **options: Any) -> Any:
    """The optimizer with few Lanczos steps, for tests of behaviour."""
    own = {"num_largest": 2, "lanczos_steps": 4, "warmup_steps": 1}
    inner = keras.optimizers.SGD(0.1, 0.9) if inner is None else inner
    return fosi(inner, **{**own, "update_interval": 2, **options})


def flat(model: Any) -> Array:
    parts = [np.ravel(np.array(v)) for v in model.trainable_variables]
    return np.concatenate(parts)


class Record(keras.callbacks.Callback):
    """Notes the weights at first and after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[Array] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.path.append(flat(self.model))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.path.append(flat(self.model))


def fit(
    model: Any, x: Any, y: Any, epochs: int, batch: int = ROWS, **kw: Any
) -> Array:
    """Trains on batches in order; the weights at first and after each."""
    record = Record()
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[record],
        **kw,
    )
    return np.stack(record.path)


def assert_path(got: Array, want: Array, rtol: float) -> None:
    """Close after every step, relative to the distance travelled."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    for t in range(1, len(want)):
        travelled = np.linalg.norm(want[t] - want[0])
        error = np.linalg.norm(got[t] - want[t])
        assert error <= rtol * travelled, (t, error / travelled)
