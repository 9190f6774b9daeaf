"""The step against dense float64 solves.

With plain SGD and no clipping, (weights before - after) / learning rate is
the preconditioned gradient P. References: `(A (x) G + damping I)^-1 vec W`
with the matrix written out for "eigen", factored damping for "inverse".
"""

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from tests.support.harness import (
    SOLVE_RTOL,
    assert_close,
    train_once,
    weights_of,
)
from tests.support.layer_cases import LINEAR, NORMS, make_input
from tests.support.layer_models import (
    activation_name,
    expected_rows,
    one_layer,
    per_example_norm_gradients,
    targets,
)
from tests.support.layer_views import view_of
from tests.support.reference import SOLVES, Array, append_one, factors, gradient

SOLVERS = ["eigen", "inverse"]
SHARING = ["expand", "reduce"]
DAMPING = 0.05
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


def test_matrices_of_equal_shapes() -> None:
    """With a bias in them or without: each layer has its own weights' step."""
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
    step = train_once(model, xs, y, damping=DAMPING, eager=False)
    biased, plain = step.delta[:6], step.delta[6:]
    got = [np.vstack(biased[i : i + 2]) for i in (0, 2, 4)] + plain
    for i, matrix in enumerate(got):
        rows = a[i // 3][None, :, None]
        want = expected_step(rows, g[None], "inverse", "expand", DAMPING)
        assert_close(matrix, want[0], SOLVE_RTOL, f"layer {i}")


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
