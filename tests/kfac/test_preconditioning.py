"""The step against dense float64 solves.

With plain SGD and no clipping, (weights before - after) / learning rate is
the preconditioned gradient P. References: `(A (x) G + damping I)^-1 vec W`
with the matrix written out for "eigen", factored damping for "inverse".
"""

import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tfkfac
from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    compiled,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import (
    CONV,
    DENSE,
    EINSUM,
    EMBEDDING,
    GROUPED,
    LINEAR,
    NORMS,
    make_input,
)
from tests.support.layer_models import (
    activation_name,
    deep_model,
    expected_rows,
    one_layer,
    per_example_norm_gradients,
    targets,
)
from tests.support.layer_views import view_of
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
SHARING = ["expand", "reduce"]
DAMPING = 0.05
LOGITS_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# One or more of every block kind; the factor tests run through the rest.
BLOCKS = [
    "dense_rank2",
    "dense_rank3",
    "dense_rank4",
    "dense_1x1",
    "dense_units_1",
    "conv1d_causal_dilated",
    "conv2d_same_odd",
    "conv2d_same_even_strided",
    "conv3d_valid",
    "conv1d_groups",
    "conv2d_groups",
    "depthwise1d",
    "depthwise2d",
    "depthwise2d_same_strided",
    "depthwise2d_one_channel",
    "einsum_heads",
    "einsum_join_heads",
    "einsum_mixed_kernel_order",
    "einsum_moved_output",
    "einsum_groups",
    "einsum_groups_shared",
    "embedding_sequence",
]
assert all(
    set(BLOCKS) & set(kind)
    for kind in (DENSE, CONV, GROUPED, EINSUM, EMBEDDING)
)


def expected_step(
    a: Array,
    g: Array,
    solver: str,
    sharing: str,
    damping: float,
    diagonal: bool = False,
) -> Array:
    """P of every group, (groups, d_in, d_out)."""
    result = []
    for rows, grads in zip(a, g, strict=True):
        A, G = factors(rows, grads, sharing)
        if diagonal:
            A = np.diag(np.diagonal(A))
        W = gradient(rows, grads)
        result.append(SOLVES[solver](W, A, G, damping))
    return np.stack(result)


# ------------------------------------------------------------ every block
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", BLOCKS)
def test_block_is_the_dense_solve(case: str, solver: str, sharing: str) -> None:
    factory, shape = LINEAR[case]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    x = make_input(case, shape, 5)
    y = targets(model, x)
    view = view_of(layer)
    curve = activation_name(layer)
    a, g = expected_rows(view, weights_of(model), x, y, curve)
    want = expected_step(a, g, solver, sharing, DAMPING, view.diagonal)
    step = train_once(
        model,
        x,
        y,
        solver=solver,
        weight_sharing=sharing,
        damping=DAMPING,
    )
    assert_close(view.matrix(step.delta), want, SOLVE_RTOL, "P")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", NORMS)
def test_normalization_block(case: str, solver: str) -> None:
    """(G_c + damping I)^-1 for each feature, whatever the solver."""
    factory, shape = NORMS[case]
    layer = factory(name="block")
    model = one_layer(layer, shape, after="tanh")
    x = make_input(case, shape, 6)
    y = targets(model, x)
    u = per_example_norm_gradients(layer, x, y)
    G = np.einsum("nci,ncj->cij", u, u) / len(x)
    G = G + DAMPING * np.eye(u.shape[-1])
    want = np.linalg.solve(G, u.mean(0)[..., None])[..., 0]
    step = train_once(model, x, y, solver=solver, damping=DAMPING)
    got = np.stack([d.reshape(-1) for d in step.delta], axis=-1)
    assert_close(got, want, SOLVE_RTOL, "P")


@pytest.mark.parametrize("solver", SOLVERS)
def test_separable_blocks(solver: str) -> None:
    """Both kernels move by their own solve, the pointwise with the bias."""
    layer = layers.SeparableConv1D(2, 2, depth_multiplier=2, name="block")
    model = one_layer(layer, (4, 2))
    x = make_input("", (4, 2), 5)
    y = targets(model, x).astype(np.float64)
    depth, point, bias = weights_of(model)
    windows = np.stack([x[:, :-1], x[:, 1:]], axis=2).astype(np.float64)
    # (batch, position, tap, channel) x (tap, channel, multiplier)
    h = np.einsum("nskc,kcm->nscm", windows, depth)
    a2 = append_one(h.reshape(*h.shape[:2], -1))
    g2 = a2 @ np.vstack([point[0], bias]) - y
    g1 = (g2 @ point[0].T).reshape(h.shape)
    step = train_once(
        model, x, y.astype("float32"), solver=solver, damping=DAMPING
    )
    for c in range(2):
        want = expected_step(
            windows[None, ..., c], g1[None, :, :, c], solver, "expand", DAMPING
        )
        assert_close(step.delta[0][:, c], want[0], SOLVE_RTOL, f"depth {c}")
    want = expected_step(a2[None], g2[None], solver, "expand", DAMPING)
    got = np.vstack([step.delta[1][0], step.delta[2]])
    assert_close(got, want[0], SOLVE_RTOL, "pointwise")


# ------------------------------------------------------------ random shapes
SMALL = st.integers(1, 5)
RANDOM = settings(
    max_examples=12, deadline=None, derandomize=True, database=None
)


def check_random(
    layer: Any, shape: tuple[int, ...], batch: int, solver: str, sharing: str
) -> None:
    model = one_layer(layer, shape)
    x = make_input("", shape, batch)
    y = targets(model, x)
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, None)
    want = expected_step(a, g, solver, sharing, DAMPING)
    step = train_once(
        model, x, y, solver=solver, weight_sharing=sharing, damping=DAMPING
    )
    assert_close(view.matrix(step.delta), want, SOLVE_RTOL, "P")


@RANDOM
@given(
    batch=SMALL,
    middle=st.lists(st.integers(1, 3), max_size=2),
    d_in=SMALL,
    d_out=SMALL,
    use_bias=st.booleans(),
    solver=st.sampled_from(SOLVERS),
    sharing=st.sampled_from(SHARING),
)
def test_random_dense(
    batch: int,
    middle: list[int],
    d_in: int,
    d_out: int,
    use_bias: bool,
    solver: str,
    sharing: str,
) -> None:
    layer = layers.Dense(d_out, use_bias=use_bias)
    check_random(layer, (*middle, d_in), batch, solver, sharing)


@RANDOM
@given(
    batch=st.integers(1, 3),
    size=st.tuples(st.integers(3, 6), st.integers(3, 6)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 3),
    padding=st.sampled_from(["same", "valid"]),
    use_bias=st.booleans(),
    solver=st.sampled_from(SOLVERS),
    sharing=st.sampled_from(SHARING),
)
def test_random_convolution(
    batch: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    channels: tuple[int, int],
    stride: int,
    padding: str,
    use_bias: bool,
    solver: str,
    sharing: str,
) -> None:
    layer = layers.Conv2D(
        channels[1],
        kernel,
        strides=stride,
        padding=padding,
        use_bias=use_bias,
    )
    check_random(layer, (*size, channels[0]), batch, solver, sharing)


# -------------------------------------------------------------- identities
def per_example_fisher(model: Any, x: Array, y: Array) -> tuple[Array, Array]:
    """Empirical Fisher 1/B sum vec vec^T and mean gradient, by tape.

    `model` is a float64 twin; vec runs over its trainable variables in order.
    """
    rows = []
    for n in range(len(x)):
        with tf.GradientTape() as tape:
            loss = half_squared_error(y[n : n + 1], model(x[n : n + 1]))
        values = [v.value for v in model.trainable_variables]
        grads = tape.gradient(loss, values)
        rows.append(np.concatenate([np.ravel(g.numpy()) for g in grads]))
    stack = np.stack(rows)
    return stack.T @ stack / len(x), stack.mean(0)


def linear_model(dtype: str, scale: float = 0.0) -> Any:
    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2, dtype=dtype, name="linear")]
    )
    for v in model.trainable_variables:
        v.assign(scale * np.ones(v.shape))
    return model


def flat(values: list[Array]) -> Array:
    return np.concatenate([np.ravel(v) for v in values])


def test_equals_the_dense_fisher_of_a_linear_layer() -> None:
    """Every input paired with every residual: a and g are independent.

    At zero weights g is minus the label, so the Kronecker product of the
    factors is the whole empirical Fisher, not an approximation of it.
    """
    inputs = make_input("", (3,), 4)
    labels = make_input("", (2,), 3, seed=9)
    x = np.repeat(inputs, 3, axis=0)
    y = np.tile(labels, (4, 1))
    fisher, grad = per_example_fisher(linear_model("float64"), x, y)
    want = np.linalg.solve(fisher + DAMPING * np.eye(8), grad)
    step = train_once(
        linear_model("float32"), x, y, solver="eigen", damping=DAMPING
    )
    assert_close(flat(step.delta), want, SOLVE_RTOL, "natural gradient")


@pytest.mark.parametrize("copies", [1, 3])
def test_one_example_is_exact_in_every_layer(copies: int) -> None:
    """With a single example each layer's Fisher block is A (x) G.

    It has rank one, so the step is W / (damping + |W|^2).
    """
    x = np.tile(make_input("", (3,), 1), (copies, 1))
    y = np.tile(make_input("", (2,), 1, seed=8), (copies, 1))

    def build(dtype: str) -> Any:
        model = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Dense(4, activation="tanh", dtype=dtype),
                layers.Dense(5, activation="sigmoid", dtype=dtype),
                layers.Dense(2, dtype=dtype),
            ]
        )
        randomize(model)
        return model

    twin = build("float64")
    fisher, grad = per_example_fisher(twin, x, y)
    step = train_once(build("float32"), x, y, solver="eigen", damping=DAMPING)
    at = 0
    for i in range(0, 6, 2):
        got = flat(step.delta[i : i + 2])
        block = slice(at, at + got.size)
        at += got.size
        W, F = grad[block], fisher[block, block]
        want = np.linalg.solve(F + DAMPING * np.eye(got.size), W)
        assert_close(want, W / (DAMPING + W @ W), 1e-10, "rank one")
        assert_close(got, want, SOLVE_RTOL, f"layer {i // 2}")


def white_batch(d_in: int, d_out: int) -> tuple[Array, Array]:
    """A = G = I for a layer with zero weights and no bias."""
    x = np.repeat(math.sqrt(d_in) * np.eye(d_in), d_out, axis=0)
    y = np.tile(math.sqrt(d_out) * np.eye(d_out), (d_in, 1))
    # Signs break the symmetry, so the mean gradient is not all ones.
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=len(x))
    return x.astype("float32"), (signs[:, None] * y).astype("float32")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_white_factors_leave_the_inner_optimizer(
    solver: str, inner: str
) -> None:
    """A = G = I, no damping to speak of: the run is the inner one's."""
    x, y = white_batch(3, 4)
    runs = []
    for second_order in (True, False):
        model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, use_bias=False, name="white")]
        )
        model.layers[0].set_weights([np.zeros((3, 4))])
        optimizer: Any = (
            keras.optimizers.SGD(0.1, momentum=0.9)
            if inner == "sgd"
            else keras.optimizers.Adam(0.1)
        )
        if second_order:
            # The factors of the first step serve all five.
            found = compiled(
                model,
                inner=optimizer,
                solver=solver,
                damping=1e-12,
                factor_update_interval=100,
                inverse_update_interval=100,
            )
        else:
            model.compile(
                optimizer=optimizer, loss=half_squared_error, run_eagerly=True
            )
        for _ in range(5):
            model.train_on_batch(x, y)
        if second_order:
            (block,) = found.factors().values()
            assert_close(block["A"], np.eye(3), 1e-6)
            assert_close(block["G"], np.eye(4), 1e-6)
        runs.append(weights_of(model)[0])
    assert np.linalg.norm(runs[1]) > 0.1
    assert_close(runs[0], runs[1], 3e-5, "weights")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("eager", [True, False])
def test_huge_damping_is_the_gradient(solver: str, eager: bool) -> None:
    """damping * P -> W in every block of a deep model."""
    huge = 1e8
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    step = train_once(
        deep_model("float32"),
        x,
        labels,
        inner=huge,
        damping=huge,
        solver=solver,
        loss=LOGITS_LOSS,
        eager=eager,
    )
    plain = deep_model("float32")
    before = weights_of(plain)
    plain.compile(optimizer=keras.optimizers.SGD(1.0), loss=LOGITS_LOSS)
    plain.train_on_batch(x, labels)
    names = [v.path for v in plain.trainable_variables]
    for name, got, start, end in zip(
        names, step.delta, before, weights_of(plain), strict=True
    ):
        assert_close(got, start - end, 1e-3, name)


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


@pytest.mark.parametrize("solver", SOLVERS)
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
