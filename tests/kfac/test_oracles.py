"""Steps with known results: stored float64 runs, or closed forms.

The files have factors, clip factors and weights of an independent NumPy
program (`<run>/step<t>/...`); see the keys in `load`.
"""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    compiled,
    find,
    flat,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layers import make_input, targets
from tests.support.reference import (
    Array,
    append_one,
    clip_factor,
    factors,
    gradient,
    inverse_solve,
)
from tests.support.small import gradients_of, loss
from tests.support.summaries import sequential

DATA = pathlib.Path(__file__).parents[1] / "data" / "kfac_cnn.npz"
PARTS = "kernel", "bias"


@functools.cache
def load() -> dict[str, Array]:
    """x, y, weights0/..., settings, <run>/step<t>/<quantity>/<layer>/..."""
    with np.load(DATA) as data:
        return {k: data[k] for k in data.files}


def build() -> keras.Model:
    """The model of the file, with its initial weights."""
    conv = layers.Conv2D(4, 3, padding="same", activation="tanh", name="conv_1")
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            conv,
            layers.Conv2D(6, 3, strides=2, name="conv_2"),
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(5, name="dense_3"),
        ]
    )
    for layer in layers_of(model):
        names = [f"weights0/{layer.name}/{part}" for part in PARTS]
        layer.set_weights([load()[name] for name in names])
    return model


def layers_of(model: keras.Model) -> list[keras.Layer]:
    return [m for m in model.layers if m.weights]


@pytest.mark.parametrize(
    ("solver", "clip"), [("inverse", "clip"), ("eigen", "noclip")]
)
def test_three_steps(solver: str, clip: str) -> None:
    data, model = load(), build()
    optimizer = compiled(
        model,
        inner=float(data["learning_rate"]),
        loss=loss(),
        eager=solver == "eigen",
        solver=solver,
        damping=float(data["damping"]),
        factor_decay=float(data["factor_decay"]),
        kl_clip=float(data["kl_clip"]) if clip == "clip" else None,
    )
    for t in (1, 2, 3):
        step = f"{solver}_{clip}/step{t}"
        value = model.train_on_batch(data["x"], data["y"])
        if t == 1:  # later values of Keras are means over the calls
            assert_close(value, data[f"{step}/loss"], 1e-5, "loss")
        blocks = optimizer.factors()
        assert len(blocks) == len(layers_of(model))
        for layer in layers_of(model):
            for key in "AG":
                want = data[f"{step}/factor/{layer.name}/{key}"]
                got = find(blocks, layer.name)[key]
                assert_close(got, want, 1e-5, f"step {t}, {key}")
            for part, got in zip(PARTS, layer.get_weights(), strict=True):
                start = data[f"weights0/{layer.name}/{part}"]
                want = data[f"{step}/weights/{layer.name}/{part}"] - start
                what = f"step {t}, {part} of {layer.name}"
                assert_close(got.astype(np.float64) - start, want, 5e-5, what)


# ---------------------------------------------------------- without a solver
DAMPING = 0.05


def test_matrices_of_equal_shapes() -> None:
    """Equal gradient shapes with and without bias give correct steps."""
    narrow, wide = keras.Input((3,)), keras.Input((4,))
    outputs = layers.Add()(
        [
            layer(x)
            for x, use_bias in ((narrow, True), (wide, False))
            for layer in (layers.Dense(4, use_bias=use_bias) for _ in range(3))
        ]
    )
    model = keras.Model([narrow, wide], outputs)
    random = np.random.default_rng(8)
    xs = [random.normal(size=(5, n)).astype("float32") for n in (3, 4)]
    y = random.normal(size=(5, 4)).astype("float32")
    a = [append_one(xs[0]), xs[1].astype("float64")]
    g = (model.predict(xs, verbose=0) - y)[:, None]
    step = train_once(model, xs, y, damping=DAMPING)
    biased, plain = step.delta[:6], step.delta[6:]
    got = [np.vstack(biased[i : i + 2]) for i in (0, 2, 4)] + plain
    for i, matrix in enumerate(got):
        rows = a[i // 3][None, :, None]
        W, (A, G) = gradient(rows[0], g), factors(rows[0], g)
        want = inverse_solve(W, A, G, DAMPING)
        assert_close(matrix, want, SOLVE_RTOL, f"layer {i}")


# ------------------------------------------------------------- two dense layers
def two_layer_model() -> Any:
    first = layers.Dense(4, activation="tanh", name="first")
    model = sequential(first, layers.Dense(2, name="second"), shape=(3,))
    randomize(model)
    return model


def two_layer_rows(
    weights: list[Array], x: Array, y: Array
) -> list[tuple[Array, Array]]:
    """(a, g) of both layers, (batch, 1, features)."""
    k1, b1, k2, b2 = weights
    a1 = append_one(x.astype(np.float64))
    h = np.tanh(a1 @ np.vstack([k1, b1]))
    a2 = append_one(h)
    g2 = a2 @ np.vstack([k2, b2]) - y
    g1 = (g2 @ k2.T) * (1 - h**2)
    return [(a1[:, None], g1[:, None]), (a2[:, None], g2[:, None])]


def deep_model() -> keras.Model:
    """Factors that are dense, stacks, or without A."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="tanh"),
            layers.DepthwiseConv2D(2, activation="tanh"),
            layers.LayerNormalization(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    randomize(model)
    return model


def test_clip_counts_every_block() -> None:
    """The sum <P, W> runs over all blocks, normalisation included."""
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    model = deep_model()
    W = list(map(np.array, gradients_of(model, x, labels)))
    start = model.get_weights()
    free, clipped = [], []
    for steps, kl_clip in ((free, None), (clipped, 1e-3)):
        model.set_weights(start)
        options = {"loss": loss(), "damping": 0.1, "kl_clip": kl_clip}
        steps += train_once(model, x, labels, **options).delta
    nu = clip_factor(list(zip(free, W, strict=True)), 1.0, 1e-3)
    assert nu < 0.5
    assert_close(flat(clipped), nu * flat(free), 1e-3, "clipped step")


def test_clip_follows_the_learning_rate() -> None:
    """nu uses the learning rate of the current step; `last_step` has it."""
    rates = [0.5, 0.05, 0.2]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates)
    model = two_layer_model()
    x = make_input("", (3,), 6)
    y = targets(model, x)
    optimizer = compiled(
        model,
        inner=keras.optimizers.SGD(schedule),
        damping=DAMPING,
        kl_clip=1e-4,
        factor_decay=0.0,
    )
    assert optimizer.last_step == {}
    for rate in rates:
        before = weights_of(model)
        pairs = []
        for a, g in two_layer_rows(before, x, y):
            W = gradient(a, g)
            pairs.append((inverse_solve(W, *factors(a, g), DAMPING), W))
        nu = clip_factor(pairs, rate, 1e-4)
        assert nu < 0.9
        model.train_on_batch(x, y)
        after = weights_of(model)
        delta = [b - c for b, c in zip(before, after, strict=True)]
        for i, (P, _) in enumerate(pairs):
            got = np.vstack(delta[2 * i : 2 * i + 2])
            assert_close(got, rate * nu * P, 1e-3, f"rate {rate}")
        length = (rate * nu) ** 2 * sum(np.sum(P * W) for P, W in pairs)
        want = {"clip_factor": nu, "length": length, "damping": DAMPING}
        assert optimizer.last_step == pytest.approx(want, rel=1e-3)
