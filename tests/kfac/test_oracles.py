"""Three steps on two small models against stored float64 runs.

The files hold an independent NumPy program's factors, clipping factors and
weights (`<run>/step<t>/...`); see the keys in `load`.
"""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.harness import assert_close, compiled, find
from tests.support.reference import (
    Array,
    clip_factor,
    eigen_solve,
    inverse_solve,
)

DATA = pathlib.Path(__file__).parents[1] / "data"
RUNS = [
    (solver, clip)
    for solver in ("eigen", "inverse")
    for clip in ("noclip", "clip")
]


@functools.cache
def load(name: str) -> dict[str, Array]:
    """x, y, weights0/..., settings, <run>/step<t>/<quantity>/<layer>/..."""
    with np.load(DATA / f"kfac_{name}.npz") as data:
        return {k: data[k] for k in data.files}


def build(name: str) -> keras.Model:
    """The model of the file, with its initial weights."""
    layers = keras.layers
    if name == "mlp":
        stack = [
            keras.Input((12,)),
            layers.Dense(16, activation="tanh", name="dense_1"),
            layers.Dense(10, activation="tanh", name="dense_2"),
            layers.Dense(5, name="dense_3"),
        ]
    else:
        stack = [
            keras.Input((8, 8, 2)),
            layers.Conv2D(
                4, 3, padding="same", activation="tanh", name="conv_1"
            ),
            layers.Conv2D(6, 3, strides=2, name="conv_2"),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(5, name="dense_3"),
        ]
    model = keras.Sequential(stack)
    for layer in layers_of(model):
        layer.set_weights(
            [
                load(name)[f"weights0/{layer.name}/{part}"]
                for part in ("kernel", "bias")
            ]
        )
    return model


def layers_of(model: keras.Model) -> list[keras.Layer]:
    return [m for m in model.layers if m.weights]


def compile_for(model: keras.Model, name: str, **kwargs: Any) -> Any:
    data = load(name)
    return compiled(
        model,
        inner=float(data["learning_rate"]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        damping=float(data["damping"]),
        factor_decay=float(data["factor_decay"]),
        **kwargs,
    )


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("solver", "clip"), RUNS)
def test_three_steps(name: str, solver: str, clip: str) -> None:
    data, model = load(name), build(name)
    kl_clip = float(data["kl_clip"]) if clip == "clip" else None
    optimizer = compile_for(
        model,
        name,
        eager=clip == "clip",
        solver=solver,
        kl_clip=kl_clip,
    )
    for t in (1, 2, 3):
        step = f"{solver}_{clip}/step{t}"
        loss = model.train_on_batch(data["x"], data["y"])
        if t == 1:  # later values of Keras are means over the calls
            assert_close(loss, data[f"{step}/loss"], 1e-5, "loss")
        factors = optimizer.factors()
        assert len(factors) == len(layers_of(model))
        for layer in layers_of(model):
            block = find(factors, layer.name)
            for key in ("A", "G"):
                want = data[f"{step}/factor/{layer.name}/{key}"]
                what = f"step {t}, {key} of {layer.name}"
                assert_close(block[key], want, 1e-5, what)
            for part, value in zip(
                ("kernel", "bias"), layer.get_weights(), strict=True
            ):
                start = data[f"weights0/{layer.name}/{part}"]
                want = data[f"{step}/weights/{layer.name}/{part}"]
                what = f"step {t}, {part} of {layer.name}"
                assert_close(
                    value.astype(np.float64) - start,
                    want - start,
                    5e-5,
                    what,
                )


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_reduce_factors(name: str) -> None:
    data, model = load(name), build(name)
    optimizer = compile_for(model, name, weight_sharing="reduce")
    model.train_on_batch(data["x"], data["y"])
    for layer in layers_of(model):
        block = find(optimizer.factors(), layer.name)
        for key in ("A", "G"):
            want = data[f"reduce/factor/{layer.name}/{key}"]
            assert_close(block[key], want, 1e-5, f"{key} of {layer.name}")


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("solver", "clip"), RUNS)
def test_own_reference_agrees(name: str, solver: str, clip: str) -> None:
    """The reference the other tests lean on reproduces the stored runs."""
    data = load(name)
    solve = eigen_solve if solver == "eigen" else inverse_solve
    names = [k.split("/")[1] for k in data if k.startswith("weights0/")]
    for t in (1, 2, 3):
        step = f"{solver}_{clip}/step{t}"
        pairs = []
        for layer in dict.fromkeys(names):
            kernel = data[f"{step}/gradient/{layer}/kernel"]
            bias = data[f"{step}/gradient/{layer}/bias"]
            W = np.vstack([kernel.reshape(-1, len(bias)), bias])
            A = data[f"{step}/factor/{layer}/A"]
            G = data[f"{step}/factor/{layer}/G"]
            P = solve(W, A, G, float(data["damping"]))
            want = data[f"{step}/preconditioned/{layer}/kernel"]
            assert_close(P[:-1].reshape(kernel.shape), want, 1e-12, layer)
            pairs.append((P, W))
        nu = clip_factor(
            pairs,
            float(data["learning_rate"]),
            float(data["kl_clip"]) if clip == "clip" else None,
        )
        assert nu == pytest.approx(float(data[f"{step}/nu"]), rel=1e-12)
