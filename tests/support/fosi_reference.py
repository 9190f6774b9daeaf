"""Float64 NumPy reference of FOSI, on a network differentiated by hand.

The network has one hidden tanh layer and softmax cross-entropy on top. Its
weights are flat, in Keras' order. Only the models at the end use TensorFlow.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers

import tfkfac
from tests.support.reference import BETAS, Array, Rule, adam, sgd  # noqa: F401
from tests.support.small import loss

FEATURES, HIDDEN, CLASSES, ROWS = 2, 2, 2, 12
SIZE = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
WEAK = 1e-3  # share of the largest curvature


# ------------------------------------------------------------- the loss
@dataclasses.dataclass
class Network:
    """Mean cross-entropy of a batch, as a function of the weights."""

    x: Array
    y: Array
    hidden: int = HIDDEN  # units
    weight: Array | None = None  # of the rows

    def forward(self, w: Array) -> tuple[Array, Array, Array]:
        """Hidden units, the matrix above them, and probabilities."""
        n = self.x.shape[1]
        k = (len(w) - (n + 1) * self.hidden) // (self.hidden + 1)
        sizes = np.cumsum([n * self.hidden, self.hidden, self.hidden * k])
        first, bias, second, offset = np.split(w, sizes)
        second = second.reshape(self.hidden, k)
        a = np.tanh(self.x @ first.reshape(n, self.hidden) + bias)
        z = a @ second + offset
        e = np.exp(z - z.real.max(axis=1, keepdims=True))
        return a, second, e / e.sum(axis=1, keepdims=True)

    def gradient(self, w: Array) -> Array:
        """Analytic in the weights, so that they may be complex."""
        a, second, p = self.forward(w)
        scale = 1.0 if self.weight is None else self.weight[:, None]
        g = (p - np.eye(p.shape[1])[self.y]) * scale / len(self.x)
        h = g @ second.T * (1 - a**2)
        parts = [self.x.T @ h, h.sum(0), a.T @ g, g.sum(0)]
        return np.concatenate([np.ravel(part) for part in parts])

    def hessian(self, w: Array) -> Array:
        """Return the Hessian by complex steps, exact up to rounding."""
        step = 1e-30
        columns = [
            self.gradient(w + 1j * step * unit).imag / step
            for unit in np.eye(len(w))
        ]
        return np.stack(columns, axis=1)


# ----------------------------------------------------------------- FOSI
@dataclasses.dataclass
class Fosi:
    """FOSI with exact Hessians; `alpha` and `interval` depend on the update.

    With `iterations`, accelerators estimate during the steps (MR-DHO2): the
    Lanczos iterations are spread over an interval, and their directions are
    used from its end on. With `is_paper`, an interval ends with equation 17.
    The gradients of steps in `skipped` are not finite.
    """

    inner: Rule
    num_largest: int = 3
    num_smallest: int = 0
    alpha: Callable[[int], float] = lambda t: 0.5
    interval: Callable[[int], int] = lambda t: 3
    warmup: int = 2
    momentum: float = 0.9
    clip: float = 1.0
    finish: Callable[[Array, int], Array] = lambda w, t: w
    iterations: int = 0
    is_paper: bool = False
    skipped: Container[int] = ()
    number: int = 0  # of the current step
    scales: list[float] = dataclasses.field(default_factory=list)
    estimated: list[int] = dataclasses.field(default_factory=list)
    values: Array | None = None
    square: float = 0.0  # mean of the Newton steps' squared lengths

    def run(
        self,
        gradient: Callable[[Array], Array],
        hessian: Callable[[Array], Array | None],
        w: Array,
        steps: int,
    ) -> Array:
        """Return the weights before and after each step.

        `hessian` returns None for a step without rows.
        """
        slots: dict[str, Array] = {}
        V, c = np.zeros((len(w), 0)), np.zeros(0)
        path, t, last, done = [w], 0, -1, 0
        found, start, total = None, w, np.zeros_like(w)
        for self.number in range(steps):
            every = self.interval(t)
            begins = self._is_due(t, every) and t != last and not done
            if begins:
                last, found = t, hessian(w)
                start, total = w, np.zeros_like(w)
                self.estimated.append(t)
                if not self.iterations:
                    V, c = self._replace(found, V, c)
            if self.iterations and (begins or done):
                target = -(-self.iterations * (t - last + 1) // every)
                most = done - (-self.iterations // self.interval(0))
                done = min(max(target, done), most, self.iterations)
            if self.number not in self.skipped:
                g = gradient(w)
                if self.is_paper:
                    total = total + g
                    d = self.inner(g, w, slots, t + 1)
                else:
                    d, c = self._split(g, V, c, w, slots, t)
                w = self.finish(w + d, t)
                t += 1
            ends = self._is_due(t, every) and t != last
            if self.iterations and done == self.iterations and ends:
                V, c = self._replace(found, V, c)
                done = 0
                if self.is_paper and self.values is not None:
                    o, p = w - start, V.T @ total / np.abs(self.values)
                    # The projector is a matrix made from V alone.
                    o = o - V @ np.linalg.pinv(V) @ o
                    w = start - self.alpha(t) * V @ p + o
            path.append(w)
        return np.stack(path)

    def _is_due(self, t: int, every: int) -> bool:
        return t >= self.warmup and (t - self.warmup) % every == 0

    def _split(
        self, g: Array, V: Array, c: Array, w: Array, slots: Any, t: int
    ) -> tuple[Array, Array]:
        """Return the change of the weights, and the momentum of `V^T g`."""
        inside = V.T @ g
        d = self.inner(g - V @ inside, w, slots, t + 1)
        if self.values is None:
            return d, c
        c = self.momentum * c + self._bounded(inside, np.abs(self.values))
        d = self._scale() * (d - V @ (V.T @ d))
        return d - self.alpha(t) * V @ (c / np.abs(self.values)), c

    def _bounded(self, inside: Array, sizes: Array) -> Array:
        """Clip an outlier at 10 times the RMS length of the Newton steps."""
        square, share = np.sum((inside / sizes) ** 2), 1.0
        if self.square == 0:
            self.square = square
        else:
            share = min(1.0, 10 * np.sqrt(self.square / max(square, 1e-300)))
            self.square += 0.01 * (share**2 * square - self.square)
        return share * inside

    def _replace(
        self, hessian: Array | None, V: Array, c: Array
    ) -> tuple[Array, Array]:
        """Return directions of both ends of the spectrum, and their momentum.

        Columns of small eigenvalues are zero.
        """
        if hessian is None:
            return V, c
        values, vectors = np.linalg.eigh(hessian)
        n = len(values)
        ends = range(self.num_smallest), range(n - self.num_largest, n)
        keep = [place for end in ends for place in end]
        self.values = values[keep]
        self.square = 0.0
        sizes = np.abs(self.values)
        new = vectors[:, keep] * (sizes > WEAK * sizes.max())
        return new, new.T @ (V @ c)

    def _scale(self) -> float:
        assert self.values is not None
        top, least = self.values[-1], self.values[-self.num_largest]
        ratio = top / least if least > 0 else np.inf
        self.scales.append(float(np.clip(ratio, 1.0, self.clip)))
        return self.scales[-1]


# --------------------------------------------------------------- models
def data(rows: int = ROWS, seed: int = 4) -> tuple[Array, Array]:
    """Return inputs and labels that are not separable."""
    rng = np.random.default_rng(seed)
    x = 1.5 * rng.normal(size=(rows, FEATURES))
    y = np.argmax(x[:, :CLASSES] + rng.normal(size=(rows, CLASSES)), axis=1)
    y[:CLASSES] = np.arange(CLASSES)
    return x.astype(keras.config.floatx()), y


def mlp(
    kind: Any = keras.Sequential, hidden: int = HIDDEN, **kwargs: Any
) -> Any:
    """Return the network as a Keras model, always with the same weights."""
    rng = np.random.default_rng(10)
    model = kind(
        [
            keras.Input((FEATURES,)),
            layers.Dense(hidden, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits", **kwargs),
        ],
        name="mlp",
    )
    for v in model.trainable_variables:
        v.assign(rng.normal(size=v.shape))
    return model


def fosi(inner: Any, **options: Any) -> Any:
    """Return the optimizer with the defaults of `Fosi`, exact directions."""
    defaults = {
        "num_largest": 3,
        "alpha": 0.5,
        "update_interval": 3,
        "warmup_steps": 2,
        "lanczos_steps": SIZE,
    }
    return tfkfac.FOSI(inner, **{**defaults, **options})


def small(inner: Any = None, **options: Any) -> Any:
    """Return the optimizer with few Lanczos steps."""
    sizes = {"num_largest": 2, "lanczos_steps": 4, "warmup_steps": 1}
    inner = keras.optimizers.SGD(0.1, 0.9) if inner is None else inner
    return fosi(inner, **{**sizes, "update_interval": 2, **options})


def flat(model: Any) -> Array:
    return np.concatenate([np.ravel(v) for v in model.trainable_variables])


class Record(keras.callbacks.Callback):
    """Records the weights before and after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.path: list[Array] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.path.append(flat(self.model))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.path.append(flat(self.model))


def fit(
    model: Any,
    x: Any,
    y: Any,
    epochs: int,
    batch: int = ROWS,
    callbacks: Sequence[Any] = (),
    **kw: Any,
) -> Array:
    """Train on batches in order; return the weights before and after each."""
    record = Record()
    model.fit(
        x,
        y,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, record],
        **kw,
    )
    return np.stack(record.path)


def assert_path(got: Array, want: Array, rtol: float) -> None:
    """Compare after every step, relative to the distance from the start."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    for t in range(1, len(want)):
        travelled = np.linalg.norm(want[t] - want[0])
        error = np.linalg.norm(got[t] - want[t])
        assert error <= rtol * travelled, (t, error / travelled)


def assert_follows(
    optimizer: Any,
    program: Fosi,
    weight: Array | None = None,
    model_class: Any = keras.Sequential,
) -> Any:
    """Train a model on all rows, compare with a program, return the model."""
    (x, y), model = data(), mlp(model_class)
    model.compile(optimizer, loss())
    rows, start = Network(x, y, weight=weight), flat(model).astype("float64")
    want = program.run(rows.gradient, rows.hessian, start, 10)
    assert_path(fit(model, x, y, 10, sample_weight=weight), want, 1e-6)
    return model
