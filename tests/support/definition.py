"""K-FAC on several workers by its definition, in float64 NumPy.

One process that knows the rows of every worker. Gradients are those of the
global batch; the factors of a layer come from the rows that the mode says.
The network is `worker_parts.cnn`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tests.support.reference import (
    Array,
    RunningAverage,
    append_one,
    clip_factor,
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


@dataclasses.dataclass(frozen=True)
class Settings:
    """Arguments of `KFAC`, the inner optimizer, and who observes a layer.

    `owners` has the worker whose rows give a layer its factors; None stands
    for the rows of all workers.
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
        new = list(plain)
        for layer, average in enumerate(averages):
            rows = everyone
            if settings.owners is not None:
                rows = list(by_worker[settings.owners[layer]])
            # What there is none of yet is due at once; without any rows of
            # its owner so far, a layer has the identity for its curvature.
            due = iteration % settings.factor_update_interval == 0
            if rows and (due or not current[layer]):
                a, g = backward(weights, x[rows], y[rows])[layer]
                batch = factors(a, g, settings.weight_sharing)
                pairs = zip(average, batch, strict=True)
                current[layer] = [old.update(value) for old, value in pairs]
            due = iteration % settings.inverse_update_interval == 0
            if due or not used[layer]:
                used[layer] = current[layer]
            if used[layer]:
                solve = SOLVES[settings.solver]
                new[layer] = solve(plain[layer], *used[layer], settings.damping)
        both = list(zip(new, plain, strict=True))
        nu = clip_factor(both, settings.learning_rate, settings.kl_clip)
        for layer, matrix in enumerate(weights):
            matrix += settings.inner(layer, nu * new[layer])
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


def adam(rate: float, beta_1: float, beta_2: float) -> Inner:
    """Keras' Adam: the same."""
    state: dict[int, tuple[int, Array, Array]] = {}

    def delta(layer: int, g: Array) -> Array:
        t, m, v = state.get(layer, (0, np.zeros_like(g), np.zeros_like(g)))
        t, m, v = (
            t + 1,
            m + (1 - beta_1) * (g - m),
            v + (1 - beta_2) * (g**2 - v),
        )
        state[layer] = t, m, v
        alpha = rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return -alpha * m / (np.sqrt(v) + 1e-7)

    return delta
