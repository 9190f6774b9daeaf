"""Clip, damping and intervals; blocks with a late first gradient."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import InverseTimeDecay

import tfkfac
from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    compiled,
    find,
    flat,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import deep_model, one_layer, targets
from tests.support.reference import (
    SOLVES,
    Array,
    RunningAverage,
    append_one,
    clip_factor,
    factors,
    gradient,
)
from tests.support.small import gradients_of, loss
from tests.support.summaries import sequential

DAMPING = 0.05


# -------------------------------------------------------------------- clip
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


def two_layer_pairs(*args: Any) -> list[tuple[Array, Array]]:
    """(P, W) of both layers."""
    plain = [(gradient(a, g), factors(a, g)) for a, g in two_layer_rows(*args)]
    return [(SOLVES["inverse"](W, *f, DAMPING), W) for W, f in plain]


def test_clip_counts_every_block() -> None:
    """The sum <P, W> runs over all blocks, normalisation included."""
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    model = deep_model("float32")
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


def test_skipped_layer_keeps_its_gradient() -> None:
    """A skipped layer does not count in nu and is not scaled by it."""
    model = two_layer_model()
    x = make_input("", (3,), 6)
    y = targets(model, x)
    (P, W), (_, plain) = two_layer_pairs(weights_of(model), x, y)
    nu = clip_factor([(P, W)], 1.0, 0.02)
    assert nu < 0.5
    step = train_once(
        model,
        x,
        y,
        damping=DAMPING,
        kl_clip=0.02,
        skip_layers=["second"],
    )
    assert len(step.factors) == 1
    assert_close(np.vstack(step.delta[:2]), nu * P, SOLVE_RTOL, "first")
    assert_close(np.vstack(step.delta[2:]), plain, 1e-5, "second")


def test_clip_follows_the_learning_rate() -> None:
    """nu uses the learning rate of the current step."""
    rates = [0.5, 0.05, 0.2]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates)
    model = two_layer_model()
    x = make_input("", (3,), 6)
    y = targets(model, x)
    compiled(
        model,
        inner=keras.optimizers.SGD(schedule),
        damping=DAMPING,
        kl_clip=1e-4,
        factor_decay=0.0,
        eager=False,
    )
    for rate in rates:
        before = weights_of(model)
        pairs = two_layer_pairs(before, x, y)
        nu = clip_factor(pairs, rate, 1e-4)
        assert nu < 0.9
        model.train_on_batch(x, y)
        after = weights_of(model)
        delta = [b - c for b, c in zip(before, after, strict=True)]
        for i, (P, _) in enumerate(pairs):
            got = np.vstack(delta[2 * i : 2 * i + 2])
            assert_close(got, rate * nu * P, 1e-3, f"rate {rate}")


# --------------------------------------------------------------- intervals
@pytest.mark.parametrize(
    ("solver", "eager", "damping"),
    [
        ("eigen", True, lambda step: DAMPING),
        ("inverse", False, InverseTimeDecay(0.5, 1, 4.0)),
    ],
)
def test_intervals_over_changing_batches(
    solver: str, eager: bool, damping: Any
) -> None:
    """Inverses, and the damping of their step, are used for an interval."""
    decay, every, solve_every, lr = 0.7, 2, 3, 0.05
    model = one_layer(layers.Dense(2, name="block"), (3,))
    compiled(
        model,
        inner=lr,
        solver=solver,
        damping=DAMPING if eager else damping,
        factor_decay=decay,
        factor_update_interval=every,
        inverse_update_interval=solve_every,
        eager=eager,
    )
    matrix = np.vstack(weights_of(model))
    averages = RunningAverage(decay), RunningAverage(decay)
    current: list[Array] = []
    used: list[Array] = []
    for step in range(8):
        x = make_input("", (3,), 6, seed=step)
        y = targets(model, x, seed=step)
        a = append_one(x.astype(np.float64))[:, None]
        g = a @ matrix - y[:, None]
        if step % every == 0:
            new = factors(a, g)
            current = [m.update(v) for m, v in zip(averages, new, strict=True)]
        if step % solve_every == 0:
            used, damp = current, float(damping(step))
        P = SOLVES[solver](gradient(a, g), *used, damp)
        matrix = matrix - lr * P
        model.train_on_batch(x, y)
        got = np.vstack(weights_of(model))
        assert_close(got, matrix, 5e-5, f"weights after step {step}")


# ------------------------------------- blocks with a late first gradient
def test_a_late_block_has_factors_of_its_first_batch() -> None:
    model = two_layer_model()
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(1e-3),
        damping=DAMPING,
        kl_clip=None,
        factor_update_interval=6,
        inverse_update_interval=6,
    ).attach(model)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def run(first: int, x: Any, y: Any) -> None:
        gradients = gradients_of(
            model, x, y, lambda y, p: tf.reduce_mean(half_squared_error(y, p))
        )
        optimizer.apply(gradients[first:], variables[first:])

    x = make_input("", (3,), 14)
    y = targets(model, x)
    early = factors(*two_layer_rows(weights_of(model), x[:4], y[:4])[1])
    for i, first in enumerate([2, 2, 2, 0, 0]):
        rows = slice(2 * i, 2 * i + 4)
        before = weights_of(model)
        (a, g), _ = two_layer_rows(before, x[rows], y[rows])
        run(first, x[rows], y[rows])
        moved = np.vstack(before[:2]) - np.vstack(weights_of(model)[:2])
        if first:
            assert not moved.any()
            continue
        if i == 3:  # used until step 6
            A, G = factors(a, g)
        want = SOLVES["inverse"](gradient(a, g), A, G, DAMPING)
        assert_close(moved / 1e-3, want, 2e-3)
        # The other block has the factors of step 0 until step 6.
        kept = find(optimizer.factors(), "second")
        for name, value in zip("AG", early, strict=True):
            assert_close(kept[name], value, 1e-4)
    assert int(optimizer.factor_updates) == 2
