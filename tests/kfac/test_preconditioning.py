"""The step against dense float64 solves.

With plain SGD and no clipping, (weights before - after) / learning rate is
the preconditioned gradient P. References: `(A (x) G + damping I)^-1 vec W`
with the matrix written out for "eigen", factored damping for "inverse".
"""

import keras
import numpy as np
import pytest
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

DAMPING = 0.05
# One of every block kind, with each solver and each way to share weights;
# the factor tests run through the rest, those of solvers through all factors.
BLOCKS = [
    ("dense_rank3", "eigen", "reduce"),
    ("dense_1x1", "inverse", "expand"),
    ("conv2d_same_even_strided", "inverse", "reduce"),
    ("conv3d_valid", "eigen", "expand"),
    ("conv1d_groups", "eigen", "reduce"),
    ("conv2d_groups", "inverse", "expand"),
    ("depthwise2d_same_strided", "inverse", "expand"),
    ("depthwise1d", "eigen", "reduce"),
    ("einsum_mixed_kernel_order", "inverse", "reduce"),
    ("einsum_moved_output", "eigen", "expand"),
    ("einsum_groups_shared", "inverse", "expand"),
    ("embedding_sequence", "inverse", "reduce"),
    ("embedding_sequence", "eigen", "expand"),
]


def expected_step(
    a: Array,
    g: Array,
    solver: str = "inverse",
    sharing: str = "expand",
    diagonal: bool = False,
) -> Array:
    """P of every group, (groups, d_in, d_out)."""
    result = []
    for rows, grads in zip(a, g, strict=True):
        A, G = factors(rows, grads, sharing)
        if diagonal:
            A = np.diag(np.diagonal(A))
        W = gradient(rows, grads)
        result.append(SOLVES[solver](W, A, G, DAMPING))
    return np.stack(result)


# ------------------------------------------------------------ every block
@pytest.mark.parametrize(("case", "solver", "sharing"), BLOCKS)
def test_block_is_the_dense_solve(case: str, solver: str, sharing: str) -> None:
    factory, shape = LINEAR[case]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    x = make_input(case, shape, 5)
    y = targets(model, x)
    view, curve = view_of(layer), activation_name(layer)
    a, g = expected_rows(view, weights_of(model), x, y, curve)
    want = expected_step(a, g, solver, sharing, view.diagonal)
    step = train_once(
        model, x, y, solver=solver, weight_sharing=sharing, damping=DAMPING
    )
    assert_close(view.matrix(step.delta), want, SOLVE_RTOL, "P")


@pytest.mark.parametrize("case", NORMS)
def test_normalization_block(case: str) -> None:
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
    step = train_once(model, x, y, damping=DAMPING)
    got = np.stack([d.reshape(-1) for d in step.delta], axis=-1)
    assert_close(got, want, SOLVE_RTOL, "P")


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
    step = train_once(model, xs, y, damping=DAMPING, eager=False)
    biased, plain = step.delta[:6], step.delta[6:]
    got = [np.vstack(biased[i : i + 2]) for i in (0, 2, 4)] + plain
    for i, matrix in enumerate(got):
        rows = a[i // 3][None, :, None]
        want = expected_step(rows, g[None])
        assert_close(matrix, want[0], SOLVE_RTOL, f"layer {i}")


def test_separable_blocks() -> None:
    """Each kernel has its solve; the pointwise includes the bias."""
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
    step = train_once(model, x, y.astype("float32"), damping=DAMPING)
    for c in range(2):
        want = expected_step(windows[None, ..., c], g1[None, :, :, c])
        assert_close(step.delta[0][:, c], want[0], SOLVE_RTOL, f"depth {c}")
    want = expected_step(a2[None], g2[None])
    got = np.vstack([step.delta[1][0], step.delta[2]])
    assert_close(got, want[0], SOLVE_RTOL, "pointwise")
