"""The clip, the damping and the intervals of several steps."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    compiled,
    flat,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import deep_model, one_layer, targets
from tests.support.marks import with_slow
from tests.support.reference import (
    SOLVES,
    Array,
    RunningAverage,
    append_one,
    clip_factor,
    factors,
    gradient,
)

SOLVERS = ["eigen", "inverse"]
DAMPING = 0.05
LOGITS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# -------------------------------------------------------------------- clip
def two_layer_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, name="second"),
        ]
    )
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


@pytest.mark.parametrize(
    ("kl_clip", "learning_rate", "eager"),
    [
        (1e-4, 0.05, True),
        (1e-4, 0.5, True),
        (0.02, 0.5, True),
        (0.02, 0.5, False),
        (1e6, 0.5, True),
        (None, 0.5, True),
    ],
)
def test_clip_two_layers(
    kl_clip: float | None, learning_rate: float, eager: bool
) -> None:
    """nu from both layers' inner products scales both."""
    model = two_layer_model()
    x = make_input("", (3,), 6)
    y = targets(model, x)
    pairs = []
    for a, g in two_layer_rows(weights_of(model), x, y):
        W = gradient(a, g)
        A, G = factors(a, g)
        pairs.append((SOLVES["inverse"](W, A, G, DAMPING), W))
    nu = clip_factor(pairs, learning_rate, kl_clip)
    assert (nu < 1) == (kl_clip in (1e-4, 0.02))
    step = train_once(
        model,
        x,
        y,
        inner=learning_rate,
        kl_clip=kl_clip,
        damping=DAMPING,
        eager=eager,
    )
    for i, (P, _) in enumerate(pairs):
        got = np.vstack(step.delta[2 * i : 2 * i + 2])
        assert_close(got, learning_rate * nu * P, SOLVE_RTOL, f"layer {i}")


@pytest.mark.parametrize("solver", with_slow(SOLVERS, "eigen"))
def test_clip_counts_every_block_kind(solver: str) -> None:
    """The sum <P, W> runs over all blocks, normalisation included."""
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    kwargs: dict[str, Any] = {
        "loss": LOGITS_LOSS,
        "damping": 0.1,
        "solver": solver,
    }
    free = train_once(deep_model("float32"), x, labels, **kwargs)
    plain = deep_model("float32")
    before = weights_of(plain)
    plain.compile(optimizer=keras.optimizers.SGD(1.0), loss=LOGITS_LOSS)
    plain.train_on_batch(x, labels)
    W = [b - a for b, a in zip(before, weights_of(plain), strict=True)]
    nu = clip_factor(list(zip(free.delta, W, strict=True)), 1.0, 1e-3)
    assert nu < 0.5
    clipped = train_once(
        deep_model("float32"), x, labels, kl_clip=1e-3, **kwargs
    )
    got = flat(clipped.delta)
    assert_close(got, nu * flat(free.delta), 1e-3, "clipped step")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kl_clip", [None, 0.02])
def test_zero_gradient_moves_nothing(
    solver: str, kl_clip: float | None
) -> None:
    """G = 0 and <P, W> = 0: no division by either."""
    layer = layers.Dense(3, name="block")
    model = one_layer(layer, (4,))
    x = make_input("", (4,), 5)
    y = np.asarray(model(x))
    step = train_once(model, x, y, solver=solver, kl_clip=kl_clip)
    for value in step.delta:
        np.testing.assert_allclose(value, 0.0, atol=1e-5)


@pytest.mark.parametrize("eager", [True, False])
def test_skipped_layer_keeps_its_gradient(eager: bool) -> None:
    """It neither counts in nu nor is scaled by it."""
    model = two_layer_model()
    x = make_input("", (3,), 6)
    y = targets(model, x)
    (a1, g1), (a2, g2) = two_layer_rows(weights_of(model), x, y)
    W = gradient(a1, g1)
    P = SOLVES["inverse"](W, *factors(a1, g1), DAMPING)
    nu = clip_factor([(P, W)], 1.0, 0.02)
    assert nu < 0.5
    step = train_once(
        model,
        x,
        y,
        damping=DAMPING,
        kl_clip=0.02,
        skip_layers=["second"],
        eager=eager,
    )
    assert len(step.factors) == 1
    assert_close(np.vstack(step.delta[:2]), nu * P, SOLVE_RTOL, "first")
    assert_close(np.vstack(step.delta[2:]), gradient(a2, g2), 1e-5, "second")


@pytest.mark.parametrize("eager", [True, False])
def test_clip_follows_the_learning_rate(eager: bool) -> None:
    """nu of a step uses the rate that this very step is made with."""
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
        eager=eager,
    )
    for rate in rates:
        before = weights_of(model)
        pairs = []
        for a, g in two_layer_rows(before, x, y):
            W = gradient(a, g)
            A, G = factors(a, g)
            pairs.append((SOLVES["inverse"](W, A, G, DAMPING), W))
        nu = clip_factor(pairs, rate, 1e-4)
        assert nu < 0.9
        model.train_on_batch(x, y)
        after = weights_of(model)
        delta = [b - c for b, c in zip(before, after, strict=True)]
        for i, (P, _) in enumerate(pairs):
            got = np.vstack(delta[2 * i : 2 * i + 2])
            assert_close(got, rate * nu * P, 1e-3, f"rate {rate}")


@pytest.mark.parametrize("solver", SOLVERS)
def test_damping_as_a_function_of_the_iteration(solver: str) -> None:
    """Each decomposition takes the damping of its own step."""
    model = one_layer(layers.Dense(2, name="block"), (3,))
    x = make_input("", (3,), 6)
    y = targets(model, x)
    compiled(
        model,
        inner=0.1,
        solver=solver,
        damping=lambda iteration: 0.5 / (1.0 + 4.0 * iteration),
        factor_decay=0.0,
        eager=False,
    )
    a = append_one(x.astype(np.float64))[:, None]
    for t in range(3):
        before = np.vstack(weights_of(model))
        g = a @ before - y[:, None]
        A, G = factors(a, g)
        P = SOLVES[solver](gradient(a, g), A, G, 0.5 / (1 + 4 * t))
        model.train_on_batch(x, y)
        got = before - np.vstack(weights_of(model))
        assert_close(got, 0.1 * P, 3e-4, f"step {t}")


def test_inner_clipping_acts_on_the_preconditioned_gradient() -> None:
    """`clipnorm` of the inner optimizer shortens P, not W."""
    model = one_layer(layers.Dense(2, name="block"), (3,))
    x = make_input("", (3,), 6)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))[:, None]
    g = a @ np.vstack(weights_of(model)) - y[:, None]
    A, G = factors(a, g)
    P = SOLVES["inverse"](gradient(a, g), A, G, DAMPING)
    inner = keras.optimizers.SGD(1.0, clipnorm=0.1)
    step = train_once(model, x, y, inner=inner, damping=DAMPING)
    for got, part in zip(step.delta, (P[:-1], P[-1]), strict=True):
        norm = float(np.linalg.norm(part))
        assert norm > 0.1
        assert_close(got, 0.1 * part / norm, SOLVE_RTOL)


# --------------------------------------------------------------- intervals
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eager", [True, False])
def test_intervals_over_changing_batches(solver: str, eager: bool) -> None:
    """Old inverses serve new gradients until their interval is over."""
    decay, every, solve_every, lr = 0.7, 2, 3, 0.05
    model = one_layer(layers.Dense(2, name="block"), (3,))
    compiled(
        model,
        inner=lr,
        solver=solver,
        damping=DAMPING,
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
            used = current
        A, G = used
        P = SOLVES[solver](gradient(a, g), A, G, DAMPING)
        matrix = matrix - lr * P
        model.train_on_batch(x, y)
        got = np.vstack(weights_of(model))
        assert_close(got, matrix, 5e-5, f"weights after step {step}")


def test_inner_optimizer_sees_the_preconditioned_gradient() -> None:
    """Momentum 0.5 of the default: the buffer sums earlier P."""
    model = one_layer(layers.Dense(2, name="block"), (3,))
    lr = 0.05
    optimizer = compiled(
        model,
        inner=keras.optimizers.SGD(lr, momentum=0.5),
        damping=DAMPING,
        factor_update_interval=100,
        inverse_update_interval=100,
    )
    assert float(optimizer.learning_rate) == pytest.approx(lr)
    x = make_input("", (3,), 6)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))[:, None]
    matrix = np.vstack(weights_of(model))
    velocity = np.zeros_like(matrix)
    A, G = factors(a, a @ matrix - y[:, None])
    for _ in range(3):
        W = gradient(a, a @ matrix - y[:, None])
        P = SOLVES["inverse"](W, A, G, DAMPING)
        velocity = 0.5 * velocity - lr * P
        matrix = matrix + velocity
        model.train_on_batch(x, y)
        assert_close(np.vstack(weights_of(model)), matrix, 5e-5, "weights")


def test_float_is_sgd_with_momentum() -> None:
    """KFAC(lr) and KFAC(SGD(lr, momentum=0.5)) are the same run."""
    x = make_input("", (3,), 6)
    runs = []
    for inner in (0.05, keras.optimizers.SGD(0.05, momentum=0.5)):
        model = one_layer(layers.Dense(2, name="block"), (3,))
        model.compile(
            optimizer=tfkfac.KFAC(inner),
            loss=half_squared_error,
            run_eagerly=True,
        )
        for _ in range(3):
            model.train_on_batch(x, targets(model, x))
        runs.append(flat(weights_of(model)))
    np.testing.assert_array_equal(runs[0], runs[1])
