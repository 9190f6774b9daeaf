"""The page for users of other libraries: the code runs, the units are right."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.examples.test_readme import GUIDE, ROOT, run, snippets

# After a block: train with its optimizer, and restore the model.
TRAIN = """
if "optimizer" in globals():
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=250, verbose=0)
    print("trained")
    del optimizer
model = first_model
"""


@pytest.mark.slow
def test_blocks_run(tmp_path: pathlib.Path) -> None:
    [_, program, *_] = snippets(ROOT / "README.md")
    blocks = snippets(GUIDE / "coming_from.md")
    script = [program, "x, y = x[:500], y[:500]", "first_model = model"]
    for block in blocks:
        script += [block, TRAIN]
    assert run(tmp_path, "\n".join(script)).count("trained") == 9


UNIT = 2 / 3  # of the mean squared error of three features
EXAMPLES = 32
DAMPING, KL_CLIP, RATE = 0.003, 1e-5, 0.1


@pytest.mark.parametrize("source", ["kfac-pytorch", "kfac-jax", "papers"])
def test_units(source: str) -> None:
    """The first step of one dense layer, from the formulas of the source."""
    random = np.random.default_rng(0)
    a = np.hstack([random.normal(size=(EXAMPLES, 4)), np.ones((EXAMPLES, 1))])
    w = random.normal(size=(5, 3))
    z = a @ w
    if source == "kfac-pytorch":
        labels: Any = random.integers(3, size=EXAMPLES)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        c = p - np.eye(3)[labels]  # gradients of the loss of each example
        # `get_cov` of the gradients of the mean loss.
        G = (c / EXAMPLES).T @ (c / EXAMPLES) / EXAMPLES
        factor = EXAMPLES**2
        ours = DAMPING * factor, KL_CLIP * factor, RATE * factor
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        labels = random.normal(size=(EXAMPLES, 3))
        c = UNIT * (z - labels)
        loss = "mse"
        if source == "papers":
            G = c.T @ c / EXAMPLES
            ours = DAMPING / UNIT**2, KL_CLIP / UNIT**2, RATE / UNIT
        else:  # Gauss-Newton matrix of the loss
            G = UNIT * np.eye(3)
            ours = DAMPING / UNIT, KL_CLIP / UNIT, RATE
    W = a.T @ c / EXAMPLES
    values_a, Q_A = np.linalg.eigh(a.T @ a / EXAMPLES)
    values_g, Q_G = np.linalg.eigh(G)
    quotient = Q_A.T @ W @ Q_G / (np.outer(values_a, values_g) + DAMPING)
    P = Q_A @ quotient @ Q_G.T
    clip = np.sqrt(KL_CLIP / (RATE**2 * (P * W).sum()))
    assert clip < 1
    damping, kl_clip, rate = ours
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(rate),
        damping=damping,
        kl_clip=kl_clip,
        solver="eigen",
        fisher="type2" if source == "kfac-jax" else "empirical",
        factor_decay=0.0,
    )
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.set_weights([w[:4], w[4]])
    model.compile(optimizer, loss)
    model.train_on_batch(a[:, :4], labels)
    change = np.vstack([*model.get_weights()]) - w
    np.testing.assert_allclose(change, -RATE * clip * P, rtol=2e-3, atol=1e-6)
