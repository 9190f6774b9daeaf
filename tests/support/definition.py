"""K-FAC on several workers by its definition, in float64 NumPy.

A single process has the rows of all workers. Gradients are those of the
global batch. The factors of a layer come from all rows, or in DP-KFAC from the
rows of the layer's owner. The model is `training.cnn`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.support.reference import (
    Array,
    RunningAverage,
    adam,
    append_one,
    clip_factor,
    cross_entropy,
    cross_entropy_gradient,
    eigen_solve,
    factors,
    gradient,
    inverse_solve,
    patches,
    sgd,
)
from tests.support.training import (
    ADAM_RATE,
    BETAS,
    BLOCK,
    CLIP,
    DAMPING,
    DECAY,
    MOMENTUM,
    RATE,
    SPECTRAL_MOMENTUM,
    Steps,
    images,
    warm_up,
)

SOLVES = {"eigen": eigen_solve, "inverse": inverse_solve}
LAYERS = "conv", "hidden", "logits"
Rate = Callable[[int], float]


class Spectral:
    """Spectral steps with polar factors from singular values.

    Attributes:
        rate: Function from the iteration to the learning rate.
    """

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self._before: dict[int, Array] = {}

    def add(self, layer: int, W: Array) -> Array:
        """Return Nesterov's momentum N."""
        M = SPECTRAL_MOMENTUM * self._before.get(layer, 0.0) + W
        self._before[layer] = M
        return np.asarray(W + SPECTRAL_MOMENTUM * M)

    def polar(self, P: Array) -> Array:
        """Return the polar factor D of each block of columns; 0 stays 0."""
        columns = P.shape[1]
        widths = range(min(BLOCK, columns), 0, -1)
        width = next(k for k in widths if columns % k == 0)
        blocks = []
        for start in range(0, columns, width):
            block = P[:, start : start + width]
            u, s, vt = np.linalg.svd(block, full_matrices=False)
            blocks.append((u * (s > 1e-9 * s.max())) @ vt)
        return np.concatenate(blocks, axis=1)

    def changes(
        self,
        pairs: Mapping[int, tuple[Array, Array]],
        damping: float,
        loss: float,
        iteration: int,
    ) -> dict[int, Array]:
        """Return the changes of the weights from N and P by layer."""
        D = {layer: self.polar(P) for layer, (_, P) in pairs.items()}
        gain = sum(np.sum(D[k] * N) for k, (N, _) in pairs.items())
        natural = sum(np.sum(P * N) for N, P in pairs.values())
        # Lower bounds of the Fisher length of all D.
        size = sum(np.sum(d**2) for d in D.values())
        length = max(gain / math.sqrt(natural), math.sqrt(damping * size))
        kappa = max(0.07, math.sqrt(0.005 * loss)) * self.rate(iteration)
        return {layer: -kappa / length * d for layer, d in D.items()}


def by_definition(
    start: Sequence[Array],
    steps: Steps,
    owners: Sequence[int] | None = None,
    *,
    inner: str = "sgd",
    solver: str = "inverse",
    weight_sharing: str = "expand",
    step: str = "natural",
    damping: float = DAMPING,
    kl_clip: float | None = CLIP,
    factor_update_interval: int = 2,
    inverse_update_interval: int = 4,
    skip_layers: Sequence[str] = (),
    rest_optimizer: str | None = None,
    **unused: object,
) -> list[Array]:
    """Return the weights after some steps of `training.cnn`.

    Args:
        start: Initial weights.
        steps: Rows of each worker by step.
        owners: Worker whose rows give a layer its factors; None for the rows
            of all workers.
        inner: "adam", "warm-up" (only with spectral steps) or another name,
            for SGD.
        rest_optimizer: "warm-up", or None for Keras' Adam.
        **unused: Options that do not change the steps.
    """
    x, y = images()

    def multiplier(iteration: int) -> float:
        return 0.25 * float(warm_up(iteration)) if inner == "warm-up" else 1.0

    rule, rate = sgd(RATE, MOMENTUM), RATE
    if inner == "adam":
        rule, rate = adam(ADAM_RATE, betas=BETAS), ADAM_RATE
    usual = 1e-3 if step == "natural" else 1e-2
    rest = adam(
        lambda n: float(np.float32(usual)) * multiplier(n), 0, (0.9, 0.999)
    )
    if rest_optimizer is not None:
        rest = adam(lambda n: ADAM_RATE * float(warm_up(n)), betas=BETAS)
    spectral = Spectral(multiplier) if step == "spectral" else None
    kernels, biases = start[::2], start[1::2]
    weights = [
        np.concatenate([kernel.reshape(-1, len(bias)), bias[None]], dtype=float)
        for kernel, bias in zip(kernels, biases, strict=True)
    ]
    slots: dict[int, dict[str, Array]] = defaultdict(dict)
    averages = [[RunningAverage(DECAY) for _ in "AG"] for _ in weights]
    current: list[list[Array]] = [[] for _ in weights]
    used = list(current)
    for iteration, by_worker in enumerate(steps):
        everyone = [row for rows in by_worker for row in rows]
        records = backward(weights, x[everyone], y[everyone])
        plain = {k: gradient(a, g) for k, (a, g) in enumerate(records)}
        covered = [
            k for k, name in enumerate(LAYERS) if name not in skip_layers
        ]
        given = {k: plain[k] for k in covered}
        if spectral is not None:
            given = {k: spectral.add(k, W) for k, W in given.items()}
        new = dict(given)
        for layer in covered:
            rows = everyone if owners is None else by_worker[owners[layer]]
            # The first factors and inverses are computed at once. Without any
            # rows of its owner so far, the curvature of a layer is I.
            update_due = iteration % factor_update_interval == 0
            if rows and (update_due or not current[layer]):
                a, g = backward(weights, x[rows], y[rows])[layer]
                batch = factors(a, g, weight_sharing)
                pairs = zip(averages[layer], batch, strict=True)
                current[layer] = [old.update(value) for old, value in pairs]
            if iteration % inverse_update_interval == 0 or not used[layer]:
                used[layer] = current[layer]
            if used[layer]:
                new[layer] = SOLVES[solver](given[layer], *used[layer], damping)
        if spectral is not None:
            logits = records[-1][0][:, 0] @ weights[-1]
            both = {k: (given[k], new[k]) for k in covered}
            loss = cross_entropy(logits, y[everyone])
            changes = spectral.changes(both, damping, loss, iteration)
        else:
            nu = clip_factor(
                [(new[k], given[k]) for k in covered], rate, kl_clip
            )
            changes = {
                k: rule(nu * new[k], weights[k], slots[k], iteration + 1)
                for k in covered
            }
        for layer in plain.keys() - given.keys():
            changes[layer] = rest(
                plain[layer], weights[layer], slots[layer], iteration + 1
            )
        for layer, change in changes.items():
            weights[layer] += change
    return [
        array
        for matrix, kernel in zip(weights, kernels, strict=True)
        for array in (matrix[:-1].reshape(kernel.shape), matrix[-1])
    ]


def backward(
    weights: Sequence[Array], x: Array, y: Array
) -> list[tuple[Array, Array]]:
    """Return each layer's inputs and gradients, `(batch, shared, features)`."""
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
