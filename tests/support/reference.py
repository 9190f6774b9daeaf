"""Float64 NumPy reference of the Kronecker factors and of their solves.

Conventions: `a` (batch, shared, d_in) are layer inputs with the bias's 1
already appended last, `g` (batch, shared, d_out) are the gradients of the
per-example losses l_n at the pre-activation, the loss is L = mean_n l_n and
gradients are (d_in, d_out) matrices.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


# ------------------------------------------------------------------ rows
def append_one(a: Array) -> Array:
    """Append the input of the bias, 1, as the last feature."""
    return np.concatenate([a, np.ones((*a.shape[:-1], 1))], axis=-1)


def patches(
    x: Array,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: str,
) -> Array:
    """Return patches of channels-last inputs, (batch, shared, prod(k), c_in).

    With "same", the last zero of an odd padding is at the end; with "causal",
    all zeros are at the beginning.
    """
    pads, starts, out = [(0, 0)], [], []
    for n, k, s, d in zip(
        x.shape[1:-1], kernel_size, strides, dilation, strict=True
    ):
        reach = (k - 1) * d + 1
        before = after = 0
        if padding == "same":
            size = -(-n // s)
            total = max((size - 1) * s + reach - n, 0)
            before, after = total // 2, total - total // 2
        else:
            before = reach - 1 if padding == "causal" else 0
            size = (n + before - reach) // s + 1
        pads.append((before, after))
        starts.append([i * d for i in range(k)])
        out.append(size)
    padded = np.pad(x, [*pads, (0, 0)])
    columns = []
    for offset in itertools.product(*starts):
        window = tuple(
            slice(o, o + (size - 1) * s + 1, s)
            for o, size, s in zip(offset, out, strides, strict=True)
        )
        columns.append(padded[(slice(None), *window)])
    stacked = np.stack(columns, axis=-2)
    return stacked.reshape(len(x), math.prod(out), len(columns), x.shape[-1])


# --------------------------------------------------------------- factors
def factors(
    a: Array,
    g: Array,
    weight_sharing: str = "expand",
    keep: Array | None = None,
    terms: float | None = None,
) -> tuple[Array, Array]:
    """Return A and G of one batch.

    Args:
        a: Inputs.
        g: Gradients of the losses of terms.
        weight_sharing: "expand", "reduce" or another name, for the mean of g.
        keep: True for rows with a loss, (batch, shared); only these count in A.
        terms: Number of terms of the loss, by default of examples.
    """
    batch, shared = a.shape[:2]
    terms = batch if terms is None else terms
    if keep is None:
        keep = np.ones((batch, shared), bool)
    w = keep.astype(float)[..., None]
    if weight_sharing == "expand":
        A = np.einsum("nsi,nsj->ij", a * w, a) / w.sum()
        G = np.einsum("nsi,nsj->ij", g * w, g) / terms
        return A, G
    count = w.sum(1)
    mean_a = (a * w).sum(1) / np.maximum(count, 1)
    one_g = (g * w).sum(1) if weight_sharing == "reduce" else g.mean(1)
    A = mean_a.T @ mean_a / np.count_nonzero(count)
    return A, one_g.T @ one_g / terms


def gradient(a: Array, g: Array) -> Array:
    """Return the gradient of the mean loss as a (d_in, d_out) matrix."""
    return np.einsum("nsi,nso->io", a, g) / len(a)


class RunningAverage:
    """Bias-corrected exponential average; `decay` weighs the old value."""

    def __init__(self, decay: float) -> None:
        self.decay, self.count = decay, 0
        self.total: Any = 0.0

    def update(self, value: Array) -> Array:
        self.total = self.decay * self.total + (1 - self.decay) * value
        self.count += 1
        return np.asarray(self.total / (1 - self.decay**self.count))


# ---------------------------------------------------------------- solves
def dense_solve(W: Array, A: Array, G: Array, damping: float) -> Array:
    """Return `(A (x) G + damping I)^-1 vec(W)` from the dense matrix."""
    curvature = np.kron(A, G) + damping * np.eye(W.size)
    return np.asarray(np.linalg.solve(curvature, W.ravel()).reshape(W.shape))


def eigen_solve(
    W: Array, A: Array, G: Array, damping: float, power: float = 1.0
) -> Array:
    """Return `(A (x) G + damping I)^-power vec(W)` by eigendecompositions."""
    va, qa = np.linalg.eigh(A)
    vg, qg = np.linalg.eigh(G)
    d = (np.outer(np.maximum(va, 0), np.maximum(vg, 0)) + damping) ** power
    return np.asarray(qa @ ((qa.T @ W @ qg) / d) @ qg.T)


def damped_factors(A: Array, G: Array, damping: float) -> tuple[Array, Array]:
    """Return `A + pi sqrt(d) I` and `G + sqrt(d)/pi I` of the damping d."""
    pi = math.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = math.sqrt(damping)
    return A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))


def inverse_solve(W: Array, A: Array, G: Array, damping: float) -> Array:
    """Solve with factored damping, split by pi between the factors."""
    A, G = damped_factors(A, G, damping)
    return np.asarray(np.linalg.solve(G, np.linalg.solve(A, W).T).T)


def eigen_root(
    W: Array, A: Array, G: Array, damping: float, back: bool = False
) -> Array:
    """Multiply by the symmetric root of `(A (x) G + damping I)^-1`."""
    return eigen_solve(W, A, G, damping, 0.5)


def inverse_root(
    W: Array, A: Array, G: Array, damping: float, back: bool = False
) -> Array:
    """Return `R_A^T W R_G`, or `R_A W R_G^T` if `back`.

    `R_A = L^-T` for the Cholesky factor L of the damped A, likewise `R_G`.
    """
    R_A, R_G = (
        np.linalg.inv(np.linalg.cholesky(M)).T
        for M in damped_factors(A, G, damping)
    )
    return np.asarray(R_A @ W @ R_G.T if back else R_A.T @ W @ R_G)


SOLVES = {"eigen": dense_solve, "inverse": inverse_solve}


def clip_factor(
    pairs: Sequence[tuple[Array, Array]],
    learning_rate: float,
    kl_clip: float | None,
) -> float:
    """Return nu for the (P, W) pairs of all preconditioned layers."""
    dot = abs(sum(float(np.sum(p * w)) for p, w in pairs))
    if kl_clip is None or dot == 0.0:
        return 1.0
    return min(1.0, math.sqrt(kl_clip / (learning_rate**2 * dot)))


# ------------------------------------------------------ inner optimizers
# Function of gradient, weights, slots and step, which counts from 1. Returns
# the change of the weights.
Rule = Callable[[Array, Array, dict[str, Array], int], Array]
# Exact in float32, in which Keras computes some powers.
BETAS = {"beta_1": 0.875, "beta_2": 0.96875}


def sgd(rate: float, momentum: float = 0.0, nesterov: bool = False) -> Rule:
    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        v = momentum * slots.get("v", np.zeros_like(g)) - rate * g
        slots["v"] = v
        return momentum * v - rate * g if nesterov else v

    return rule


def adam(
    rate: float | Callable[[int], float],
    decay: float = 0.0,
    betas: Iterable[float] = BETAS.values(),
) -> Rule:
    """Adam; a function for the rate gets the iteration, which starts at 0."""
    first, second = betas
    power_1, power_2 = map(float, np.float32([first, second]))  # as in Keras

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        m = first * slots.get("m", np.zeros_like(g)) + (1 - first) * g
        v = second * slots.get("v", np.zeros_like(g)) + (1 - second) * g**2
        slots |= {"m": m, "v": v}
        scale = np.sqrt(1 - power_2**t) / (1 - power_1**t)
        current = rate(t - 1) if callable(rate) else rate
        return -current * (decay * w + scale * m / (np.sqrt(v) + 1e-7))

    return rule


# ---------------------------------------------------------------- losses
def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def cross_entropy_gradient(logits: Array, labels: Array) -> Array:
    """Return d l_n / d logits of the softmax cross-entropy."""
    return softmax(logits) - np.eye(logits.shape[-1])[labels]


def cross_entropy(logits: Array, labels: Array) -> float:
    """Return the mean softmax cross-entropy of integer labels."""
    rows = range(len(logits))
    return float(-np.log(softmax(logits)[rows, labels]).mean())
