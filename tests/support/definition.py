"""K-FAC on several workers by its definition, in float64 NumPy.

One process that knows the rows of every worker. Gradients are those of the
global batch; the factors of a layer come from the rows that the mode says.
The network is `worker_parts.cnn`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.support.reference import (
    Array,
    RunningAverage,
    append_one,
    clip_factor,
    cross_entropy,
    cross_entropy_gradient,
    eigen_solve,
    factors,
    gradient,
    inverse_solve,
    patches,
)

SOLVES = {
    "eigen": eigen_solve,
    # Other messages, the same steps.
    "eigen_outer": eigen_solve,
    "inverse": inverse_solve,
}
Rows = Sequence[int]
Inner = Callable[[int, Array], Array]
Rate = Callable[[int], float]


class Spectral:
    """Spectral steps, the polar factors by singular values.

    The `shape` is the learning rate over the largest one, by iteration.
    """

    def __init__(self, momentum: float, block: int, shape: Rate) -> None:
        self.momentum, self.block, self.shape = momentum, block, shape
        self._before: dict[int, Array] = {}

    def add(self, layer: int, W: Array) -> Array:
        """Nesterov's momentum N."""
        M = self.momentum * self._before.get(layer, 0.0) + W
        self._before[layer] = M
        return np.asarray(W + self.momentum * M)

    def polar(self, P: Array) -> Array:
        """The polar factor D of each block of columns; what is 0 stays 0."""
        columns = P.shape[1]
        widths = range(min(self.block, columns), 0, -1)
        width = next(k for k in widths if columns % k == 0)
        parts = []
        for start in range(0, columns, width):
            block = P[:, start : start + width]
            u, s, vt = np.linalg.svd(block, full_matrices=False)
            parts.append((u * (s > 1e-9 * s.max())) @ vt)
        return np.concatenate(parts, axis=1)

    def changes(
        self,
        pairs: Mapping[int, tuple[Array, Array]],
        damping: float,
        loss: float,
        iteration: int,
    ) -> dict[int, Array]:
        """What is added to the weights, of N and P by layer."""
        D = {layer: self.polar(P) for layer, (_, P) in pairs.items()}
        gain = sum(np.sum(D[k] * N) for k, (N, _) in pairs.items())
        natural = sum(np.sum(P * N) for N, P in pairs.values())
        # Lower bounds of the Fisher length of all D together.
        size = sum(np.sum(d**2) for d in D.values())
        length = max(gain / math.sqrt(natural), math.sqrt(damping * size))
        kappa = max(0.07, math.sqrt(0.005 * loss)) * self.shape(iteration)
        return {layer: -kappa / length * d for layer, d in D.items()}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of `KFAC`, the inner optimizer, and who observes a layer.

    `owners` has the worker whose rows give a layer its factors; None stands
    for the rows of all workers. `left` has the optimizer of layers without a
    block.
    """

    solver: str
    weight_sharing: str
    damping: float
    kl_clip: float | None
    factor_decay: float
    factor_update_interval: int
    inverse_update_interval: int
    learning_rate: float
    inner: Inner
    owners: Sequence[int] | None = None
    spectral: Spectral | None = None
    left: Mapping[int, Inner] = dataclasses.field(default_factory=dict)


def train(
    start: Sequence[Array],
    data: tuple[Array, Array],
    steps: Sequence[Sequence[Rows]],
    settings: Settings,
) -> list[Array]:
    """The weights after some steps, each the rows of every worker."""
    x, y = data
    kernels, biases = start[::2], start[1::2]
    weights = [
        np.concatenate([kernel.reshape(-1, len(bias)), bias[None]])
        for kernel, bias in zip(kernels, biases, strict=True)
    ]
    decay = settings.factor_decay
    averages = [[RunningAverage(decay) for _ in "AG"] for _ in weights]
    current: list[list[Array]] = [[] for _ in weights]
    used = list(current)
    for iteration, by_worker in enumerate(steps):
        everyone = [row for rows in by_worker for row in rows]
        records = backward(weights, x[everyone], y[everyone])
        plain = [gradient(a, g) for a, g in records]
        own = [k for k in range(len(weights)) if k not in settings.left]
        spectral = settings.spectral
        given = {k: plain[k] for k in own}
        if spectral is not None:
            given = {k: spectral.add(k, W) for k, W in given.items()}
        new = dict(given)
        for layer in own:
            rows = everyone
            if settings.owners is not None:
                rows = list(by_worker[settings.owners[layer]])
            # What there is none of yet is due at once; without any rows of
            # its owner so far, a layer has the identity for its curvature.
            due = iteration % settings.factor_update_interval == 0
            if rows and (due or not current[layer]):
                a, g = backward(weights, x[rows], y[rows])[layer]
                batch = factors(a, g, settings.weight_sharing)
                pairs = zip(averages[layer], batch, strict=True)
                current[layer] = [old.update(value) for old, value in pairs]
            due = iteration % settings.inverse_update_interval == 0
            if due or not used[layer]:
                used[layer] = current[layer]
            if used[layer]:
                solve = SOLVES[settings.solver]
                new[layer] = solve(given[layer], *used[layer], settings.damping)
        if spectral is not None:
            logits = records[-1][0][:, 0] @ weights[-1]
            loss = cross_entropy(logits, y[everyone])
            both = {k: (given[k], new[k]) for k in own}
            changes = spectral.changes(both, settings.damping, loss, iteration)
        else:
            nu = clip_factor(
                [(new[k], given[k]) for k in own],
                settings.learning_rate,
                settings.kl_clip,
            )
            changes = {k: settings.inner(k, nu * new[k]) for k in own}
        for layer, inner in settings.left.items():
            changes[layer] = inner(layer, plain[layer])
        for layer, change in changes.items():
            weights[layer] += change
    return [
        part
        for matrix, kernel in zip(weights, kernels, strict=True)
        for part in (matrix[:-1].reshape(kernel.shape), matrix[-1])
    ]


def backward(
    weights: Sequence[Array], x: Array, y: Array
) -> list[tuple[Array, Array]]:
    """Each layer's inputs and gradients, `(batch, shared, features)`."""
    conv, hidden, logits = weights
    p = patches(x, (3, 3), (1, 1), (1, 1), "valid")
    a0 = append_one(p.reshape(*p.shape[:2], -1))
    h0 = np.tanh(a0 @ conv)
    a1 = append_one(h0.reshape(len(x), -1))
    h1 = np.tanh(a1 @ hidden)
    a2 = append_one(h1)
    g2 = cross_entropy_gradient(a2 @ logits, y)
    g1 = (g2 @ logits[:-1].T) * (1 - h1**2)
    g0 = (g1 @ hidden[:-1].T).reshape(h0.shape) * (1 - h0**2)
    return [(a0, g0), (a1[:, None], g1[:, None]), (a2[:, None], g2[:, None])]


def sgd(rate: float, momentum: float) -> Inner:
    """Keras' SGD: what it adds to a layer's weights for a gradient."""
    velocity: dict[int, Array] = {}

    def delta(layer: int, g: Array) -> Array:
        velocity[layer] = momentum * velocity.get(layer, 0.0) - rate * g
        return velocity[layer]

    return delta


def adam(rate: float | Rate, beta_1: float, beta_2: float) -> Inner:
    """Keras' Adam: the same, at a rate that may be one of the iteration."""
    state: dict[int, tuple[int, Array, Array]] = {}

    def delta(layer: int, g: Array) -> Array:
        t, m, v = state.get(layer, (0, np.zeros_like(g), np.zeros_like(g)))
        t, m, v = (
            t + 1,
            m + (1 - beta_1) * (g - m),
            v + (1 - beta_2) * (g**2 - v),
        )
        state[layer] = t, m, v
        now = rate(t - 1) if callable(rate) else rate
        # Keras has the bases of powers in single precision.
        b1, b2 = float(np.float32(beta_1)), float(np.float32(beta_2))
        alpha = now * np.sqrt(1 - b2**t) / (1 - b1**t)
        return -alpha * m / (np.sqrt(v) + 1e-7)

    return delta
