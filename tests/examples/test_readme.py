"""README, guide and notebook: the snippets run, and the units are right."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

import tfkfac

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(path: pathlib.Path) -> list[str]:
    """The Python of a file in Markdown."""
    return SNIPPET.findall(path.read_text())


def run(folder: pathlib.Path, text: str) -> str:
    """Runs a script in a folder; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
def test_snippets_run(tmp_path: pathlib.Path) -> None:
    """Of "Coming from other libraries", then those of the guide."""
    [four_lines, program, *_] = snippets(ROOT / "README.md")
    [tuned] = snippets(GUIDE / "tuning.md")
    [spectral] = snippets(GUIDE / "spectral.md")
    [*_, loop] = snippets(GUIDE / "training.md")
    script = [program, "x, y = x[:500], y[:500]", "first_model = model"]
    for block in snippets(GUIDE / "coming_from.md"):
        script += [block, TRAIN]
    script += [
        tuned.replace("epochs=6", "epochs=1"),
        spectral,
        "model.compile(optimizer, loss)\nmodel.fit(x, y, batch_size=250)",
        loop,
        "print('loss', float(train_step(x[:250], y[:250])))",
        four_lines,
    ]
    output = run(tmp_path, "\n".join(script))
    assert output.count("trained") == 9
    assert "loss 0." in output


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
    model.compile(optimizer, loss, run_eagerly=True)
    model.train_on_batch(a[:, :4], labels)
    change = np.vstack([*model.get_weights()]) - w
    np.testing.assert_allclose(change, -RATE * clip * P, rtol=2e-3, atol=1e-6)


# ----------------------------------------------------------------- the notebook
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def check(text: str) -> None:
    """Check what all cells have printed."""
    losses = re.findall(r"^(Adam|KFAC\(\)) +loss ([\d.]+)", text, re.M)
    adam, kfac = (float(number) for _, number in losses)
    assert kfac < adam < 0.1
    assert "Preconditioned weights: 26,122 of 26,122" in text
    assert text.count("largest eigenvalues: [") == 2
    assert "[worker 1] Epoch 2/2" in text


def test_ten_cells_with_outputs() -> None:
    """Printed text and one small picture; no warnings, no path of a machine."""
    assert len(cells()) == len({cell["id"] for cell in cells()}) == 10
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4, 5]
    outputs = [output for cell in code for output in cell["outputs"]]
    texts = [o for o in outputs if o.get("name") == "stdout"]
    check("".join("".join(output["text"]) for output in texts))
    [picture] = [o["data"] for o in outputs if o not in texts]
    assert 10_000 < len(picture["image/png"]) < 60_000
    assert not re.search(r"/(home|tmp|usr|work)/", str(outputs))


@pytest.mark.slow
def test_all_cells_run() -> None:
    code = [c["source"] for c in cells() if c["cell_type"] == "code"]
    check(run(NOTEBOOK.parent, "\n".join(map("".join, code))))
