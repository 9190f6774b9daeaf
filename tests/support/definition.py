"""K-FAC on several workers by its definition, in float64 NumPy.

A single process has the rows of all workers. Gradients are those of the
global batch. The factors of a layer come from all rows, or in DP-KFAC from the
rows of the layer's owner. The model is `training.cnn`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from tests.support.reference import (
    Array,
    RunningAverage,
    adam,
    append_one,
    clip_factor,
    cross_entropy,
    cross_entropy_gradient,
    eigen_root,
    eigen_solve,
    factors,
    gradient,
    inverse_root,
    inverse_solve,
    patches,
    sgd,
    softmax,
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
ROOTS = {"eigen": eigen_root, "inverse": inverse_root}
LAYERS = "conv", "hidden", "logits"


class Spectral:
    """Spectral steps with polar factors from singular values.

    Args:
        root: Item of `ROOTS`.
    """

    def __init__(self, root: Callable[..., Array]) -> None:
        self._root = root
        self._momenta: dict[int, Array] = {}
        self._ratio = 0.0

    def direction(
        self, layer: int, W: Array, factors: Sequence[Array], damping: float
    ) -> tuple[Array, float]:
        """Return D with the RMS 0.2, and the equally scaled `|Q|^2`.

        Without factors, the root is the identity.
        """
        M = SPECTRAL_MOMENTUM * self._momenta.get(layer, 0.0) + W
        self._momenta[layer] = M
        X = W + SPECTRAL_MOMENTUM * M
        if factors:
            X = self._root(X, *factors, damping)
        D = Q = polar(X)
        if factors:
            D = self._root(Q, *factors, damping, back=True)
        scale = 0.2 * math.sqrt(D.size) / np.linalg.norm(D)
        return scale * D, float(scale**2 * np.sum(Q**2))

    def multiplier(
        self,
        squares: float,
        form: float,
        loss: float,
        step: int,
        labels: int = 1,
    ) -> float:
        """Return r, with H = 0.

        Args:
            squares: Sum of `|Q|^2` over the layers.
            form: `D^T F D`.
            loss: L.
            step: Number of the step; the first is 1.
            labels: n.
        """
        new = max(form / squares, 1e-3)
        self._ratio = max(new, 0.9 * self._ratio + 0.1 * new)
        kappa = min(0.6 * math.sqrt(loss), 0.45 * math.sqrt(labels))
        length = math.sqrt(self._ratio * squares)
        return max(0.006, min(1, step / 10) * max(0.07, kappa) / length)


def polar(X: Array) -> Array:
    """Return the polar factor of each block of columns; 0 stays 0."""
    columns = X.shape[1]
    widths = range(min(BLOCK, columns), 0, -1)
    width = next(k for k in widths if columns % k == 0)
    blocks = []
    for start in range(0, columns, width):
        block = X[:, start : start + width]
        u, s, vt = np.linalg.svd(block, full_matrices=False)
        blocks.append((u * (s > 1e-9 * s.max())) @ vt)
    return np.concatenate(blocks, axis=1)


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
    weight_decay: float = 0.0,
    is_late: bool = False,
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
        is_late: True if a step uses the inverses of the previous step.
        **unused: Options that do not change the steps.
    """
    x, y = images()

    def multiplier(iteration: int) -> float:
        return 0.25 * float(warm_up(iteration)) if inner == "warm-up" else 1.0

    def decayed(matrix: Array) -> Array:  # the last row is the bias
        return weight_decay * np.vstack([matrix[:-1], 0 * matrix[-1:]])

    rule, rate = sgd(RATE, MOMENTUM), RATE
    if inner == "adam":
        rule, rate = adam(ADAM_RATE, betas=BETAS), ADAM_RATE
    r = 0.0

    def rest_rate(iteration: int) -> float:
        peak = 1e-3 if step == "natural" else min(r, 0.1)
        return float(np.float32(peak)) * multiplier(iteration)

    rest = adam(rest_rate, 0, (0.9, 0.999))
    if rest_optimizer is not None:
        rest = adam(lambda n: ADAM_RATE * float(warm_up(n)), betas=BETAS)
    spectral = Spectral(ROOTS[solver]) if step == "spectral" else None
    kernels, biases = start[::2], start[1::2]
    weights = [
        np.concatenate([kernel.reshape(-1, len(bias)), bias[None]], dtype=float)
        for kernel, bias in zip(kernels, biases, strict=True)
    ]
    slots: dict[int, dict[str, Array]] = defaultdict(dict)
    averages = [[RunningAverage(DECAY) for _ in "AG"] for _ in weights]
    current: list[list[Array]] = [[] for _ in weights]
    newest, used = list(current), list(current)
    for iteration, by_worker in enumerate(steps):
        everyone = [row for rows in by_worker for row in rows]
        records = backward(weights, x[everyone], y[everyone])
        plain = {k: gradient(a, g) for k, (a, g) in enumerate(records)}
        covered = [
            k for k, name in enumerate(LAYERS) if name not in skip_layers
        ]
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
            if iteration % inverse_update_interval == 0 or not newest[layer]:
                newest[layer] = current[layer]
        if not is_late:
            used = list(newest)
        if spectral is not None:
            D, squares = [np.zeros_like(w) for w in weights], 0.0
            for k in covered:
                D[k], square = spectral.direction(k, plain[k], used[k], damping)
                squares += square
            form = sum(
                len(rows)
                / len(everyone)
                * curvature(weights, D, x[quarter(rows, iteration)])
                for rows in by_worker
                if rows
            )
            logits = records[-1][0][:, 0] @ weights[-1]
            loss = cross_entropy(logits, y[everyone])
            r = spectral.multiplier(squares, form, loss, iteration + 1)
            changes = {
                k: -r * multiplier(iteration) * (D[k] + decayed(weights[k]))
                for k in covered
            }
        else:
            new = {
                k: SOLVES[solver](plain[k], *used[k], damping)
                if used[k]
                else plain[k]
                for k in covered
            }
            nu = clip_factor(
                [(P, plain[k]) for k, P in new.items()], rate, kl_clip
            )
            changes = {
                k: rule(nu * P, weights[k], slots[k], iteration + 1)
                - rate * decayed(weights[k])
                for k, P in new.items()
            }
        for layer in plain.keys() - changes.keys():
            changes[layer] = rest(
                plain[layer], weights[layer], slots[layer], iteration + 1
            )
            if rest_optimizer is None:
                changes[layer] -= rest_rate(iteration) * decayed(weights[layer])
        for layer, change in changes.items():
            weights[layer] += change
        used = list(newest)
    return [
        array
        for matrix, kernel in zip(weights, kernels, strict=True)
        for array in (matrix[:-1].reshape(kernel.shape), matrix[-1])
    ]


def forward(weights: Sequence[Array], x: Array) -> list[Array]:
    """Return the inputs of each layer, with the bias's 1."""
    conv, hidden, _ = weights
    p = patches(x, (3, 3), (1, 1), (1, 1), "valid")
    a0 = append_one(p.reshape(*p.shape[:2], -1))
    a1 = append_one(np.tanh(a0 @ conv).reshape(len(x), -1))
    return [a0, a1, append_one(np.tanh(a1 @ hidden))]


def backward(
    weights: Sequence[Array], x: Array, y: Array
) -> list[tuple[Array, Array]]:
    """Return each layer's inputs and gradients, `(batch, shared, features)`."""
    a0, a1, a2 = forward(weights, x)
    _, hidden, logits = weights
    g2 = cross_entropy_gradient(a2 @ logits, y)
    g1 = (g2 @ logits[:-1].T) * (1 - a2[:, :-1] ** 2)
    g0 = (g1 @ hidden[:-1].T) * (1 - a1[:, :-1] ** 2)
    g0 = g0.reshape(*a0.shape[:2], -1)
    return [(a0, g0), (a1[:, None], g1[:, None]), (a2[:, None], g2[:, None])]


def curvature(weights: Sequence[Array], D: Sequence[Array], x: Array) -> float:
    """Return `D^T F D` of the Gauss-Newton matrix F of the mean loss."""
    a0, a1, a2 = forward(weights, x)
    _, hidden, logits = weights
    # Derivatives along D of the outputs of each layer.
    t = (a0 @ D[0]).reshape(len(x), -1)
    t = t * (1 - a1[:, :-1] ** 2) @ hidden[:-1] + a1 @ D[1]
    t = t * (1 - a2[:, :-1] ** 2) @ logits[:-1] + a2 @ D[2]
    p = softmax(a2 @ logits)
    variances = np.sum(p * t**2, -1) - np.sum(p * t, -1) ** 2
    return float(variances.mean())


def quarter(rows: Sequence[int], offset: int) -> list[int]:
    """Return the evenly spaced rows of which F is computed.

    All rows if their number is also a side of the images: the library cannot
    exclude then that an input relates the examples to each other.
    """
    if len(rows) in images()[0].shape[1:]:
        return list(rows)
    count = max(1, math.ceil(len(rows) / 4))
    first = offset * count % len(rows)
    return [rows[(first + i * len(rows)) // count] for i in range(count)]
