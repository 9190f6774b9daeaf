"""Factors after a training step, against float64 NumPy references.

The tested model is one layer with the loss on its output, so inputs and
pre-activation gradients have a closed form. `test_every_layer.py` tests linear
layers of all types.
"""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.harness import (
    FACTOR_RTOL,
    assert_close,
    check_factors,
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import NORMS, PRELU, make_input
from tests.support.layer_models import (
    expected_factors,
    expected_rows,
    one_layer,
    per_example,
    per_example_norm_gradients,
    problem,
    targets,
)
from tests.support.layer_views import view_of
from tests.support.reference import append_one

BATCH = 4


# ---------------------------------------------------------- linear layers
@pytest.mark.parametrize(
    ("position", "activation", "eager"),
    [
        ("fused", "relu", False),
        ("separate", "tanh", True),
        ("none", None, True),
    ],
)
def test_activation_position(
    position: str, activation: str | None, eager: bool
) -> None:
    """G is computed before the activation, inside or after the layer."""
    fused = activation if position == "fused" else None
    layer = layers.Conv1D(3, 2, name="block", activation=fused)
    after = activation if position == "separate" else None
    model, x, y = problem(layer, (5, 2), BATCH, after)
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, activation)
    step = train_once(model, x, y, eager=eager)
    check_factors(step.of("block"), *expected_factors(view, a, g, "expand"))


@pytest.mark.parametrize(
    ("sharing", "rank", "options", "shape"),
    [
        ("reduce", 2, {"padding": "same", "strides": 2}, (5, 4, 2)),
        ("expand", 1, {"depth_multiplier": 2}, (4, 2)),
    ],
)
def test_separable(
    sharing: str, rank: int, options: Any, shape: tuple[int, ...]
) -> None:
    """Its blocks equal the blocks of a depthwise and a 1x1 convolution."""
    separable = getattr(layers, f"SeparableConv{rank}D")
    depthwise = getattr(layers, f"DepthwiseConv{rank}D")
    pointwise = getattr(layers, f"Conv{rank}D")
    models = [
        one_layer(
            separable(3, 3, activation="tanh", name="both", **options), shape
        ),
        keras.Sequential(
            [
                keras.Input(shape),
                depthwise(3, use_bias=False, name="first", **options),
                pointwise(3, 1, activation="tanh", name="second"),
            ]
        ),
    ]
    models[1].set_weights(models[0].get_weights())
    x = make_input("", shape, BATCH)
    y = targets(models[0], x)
    got, want = (train_once(m, x, y, weight_sharing=sharing) for m in models)
    check_factors(got.of("depthwise/both"), *want.of("first").values())
    check_factors(got.of("pointwise/both"), *want.of("second").values())


# ---------------------------------------------------------- normalisation
@pytest.mark.parametrize("case", NORMS)
def test_normalization(case: str) -> None:
    factory, shape = NORMS[case]
    layer = factory(name="block")
    model, x, y = problem(layer, shape, 6, after="tanh")
    u = per_example_norm_gradients(layer, x, y)
    for i, want in enumerate(keras_gradients(model, x, y)):
        assert_close(u.mean(0)[:, i], want.reshape(-1), 3e-5, "gradient")
    step = train_once(model, x, y)
    block = step.of("block")
    assert set(block) == {"G"}
    G = np.einsum("nci,ncj->cij", u, u) / len(x)
    assert_close(block["G"], G, FACTOR_RTOL, "G")


# -------------------------------------------------------------- attention
@pytest.mark.parametrize("name", ["multi_head", "grouped_query", "gated"])
def test_attention(name: str) -> None:
    """Projections of cross attention, with `weight_sharing="reduce"`.

    G is the second moment of the bias gradients. A is computed from queries or
    memory; A of the output projection is not checked.
    """

    def build(dtype: str) -> Any:
        if name == "multi_head":
            # Only this layer supports a memory of another width.
            layer, width = layers.MultiHeadAttention(2, 3, dtype=dtype), 6
        else:
            gate, width = name == "gated", 4
            layer = layers.GroupQueryAttention(
                3, 4, 2, use_gate=gate, dtype=dtype
            )
        inputs = [keras.Input((3, 4)), keras.Input((5, width))]
        model = keras.Model(inputs, layer(*inputs))
        randomize(model)
        return model

    twin = build("float64")
    x, memory = (make_input("", shape[1:], 3) for shape in twin.input_shape)
    y = targets(twin, [x, memory])
    grads = {
        path.split("/")[-2]: gradient
        for path, gradient in per_example(twin, [x, memory], y).items()
        if path.endswith("bias")
    }
    model = build("float32")
    step = train_once(model, [x, memory], y, weight_sharing="reduce")
    assert len(step.factors) == len(grads)
    for layer, gradient in grads.items():
        block, b = step.of(layer), gradient.reshape(3, -1)
        G = b.T @ b / 3
        if layer == "key":
            # Softmax is invariant to a shift of all keys.
            assert np.abs(G).max() < 1e-20
            assert np.abs(block["G"]).max() < 1e-9
        else:
            assert_close(block["G"], G, 3e-5, f"G of {layer}")
        if layer != "attention_output":
            inputs = memory if layer in ("key", "value") else x
            a = append_one(inputs.mean(1, dtype=np.float64))
            assert_close(block["A"], a.T @ a / 3, FACTOR_RTOL, f"A of {layer}")


# ------------------------------------------------------------------- PReLU
@pytest.mark.parametrize(
    ("case", "solver"),
    zip(PRELU, ["inverse", "eigen"] * len(PRELU), strict=False),
)
def test_prelu(case: str, solver: str) -> None:
    """G, and the step, which divides by the damped diagonal."""
    factory, shape = PRELU[case]
    model, x, y = problem(factory(name="block"), shape, BATCH)
    (u,) = per_example(model, x, y).values()
    u = u.reshape(BATCH, -1)
    step = train_once(model, x, y, solver=solver, damping=0.2)
    block = step.of("block")
    assert set(block) == {"G"}
    diagonal = np.mean(u**2, axis=0)
    assert_close(block["G"], diagonal, 1e-5, "G")
    want = u.mean(0) / (diagonal + 0.2)
    assert_close(step.delta[0].ravel(), want, 1e-5, "step")


def test_prelu_as_activation_of_a_layer() -> None:
    """Both have a block; G of the layer is computed before the activation."""
    prelu = layers.PReLU(name="slopes")
    dense = layers.Dense(3, activation=prelu, name="dense")
    model, x, y = problem(dense, (4,), BATCH)
    gradients = per_example(model, x, y)
    slopes, biases = (gradients[v.path] for v in (prelu.alpha, dense.bias))
    step = train_once(model, x, y, eager=False)
    G = np.mean(slopes**2, axis=0)
    assert_close(step.of("slopes")["G"], G, 1e-5, "G of the slopes")
    G = biases.T @ biases / BATCH
    assert_close(step.of("dense")["G"], G, 1e-5, "G of the layer")
