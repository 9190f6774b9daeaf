"""Factors of every layer type against float64 NumPy references.

The model under test is one layer with the loss on its output, so inputs and
pre-activation gradients are known in closed form.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
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
from tests.support.layer_cases import EMBEDDING, LINEAR, NORMS, make_input
from tests.support.layer_models import (
    activation_name,
    expected_factors,
    expected_rows,
    one_layer,
    per_example_norm_gradients,
    targets,
)
from tests.support.layer_views import (
    ConvView,
    DepthwiseView,
    View,
    normalized,
    view_of,
)
from tests.support.reference import Array, append_one, factors, gradient

SHARING = ["expand", "reduce"]
BATCH = 4


def check_reference(
    view: View, model: Any, x: Array, y: Array, a: Array, g: Array
) -> None:
    """The rows reproduce the layer's gradient as Keras computes it."""
    mean = [gradient(*pair) for pair in zip(a, g, strict=True)]
    want = view.matrix(keras_gradients(model, x, y))
    assert_close(np.stack(mean), want, 1e-5, "gradient from the rows")


# ---------------------------------------------------------- linear layers
@pytest.mark.parametrize(
    ("case", "sharing"),
    [
        ("dense_rank3", "reduce"),
        ("conv1d_causal_strided", "expand"),
        ("conv2d_groups", "reduce"),
        ("depthwise2d_same_strided", "expand"),
        ("einsum_heads", "expand"),
        ("embedding_sequence", "average"),
    ],
)
def test_linear_layer(case: str, sharing: str) -> None:
    """In a training step; all layers are in `test_every_layer.py`."""
    factory, shape = LINEAR[case]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    x = make_input(case, shape, BATCH)
    y = targets(model, x)
    view, curve = view_of(layer), activation_name(layer)
    a, g = expected_rows(view, weights_of(model), x, y, curve)
    check_reference(view, model, x, y, a, g)
    step = train_once(model, x, y, weight_sharing=sharing)
    assert len(step.factors) == 1
    check_factors(step.of("block"), *expected_factors(view, a, g, sharing))


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("fused", "tanh"),
        ("fused", "relu"),
        ("separate", "tanh"),
        ("separate", "relu"),
        ("none", None),
    ],
)
@pytest.mark.parametrize("eager", [True, False])
def test_activation_position(where: str, kind: str | None, eager: bool) -> None:
    """G is taken before the activation, wherever that one stands."""
    layer = layers.Conv1D(
        3, 2, name="block", activation=kind if where == "fused" else None
    )
    after = kind if where == "separate" else None
    model = one_layer(layer, (5, 2), after)
    x = make_input("", (5, 2), BATCH)
    y = targets(model, x)
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, kind)
    step = train_once(model, x, y, eager=eager)
    check_factors(step.of("block"), *expected_factors(view, a, g, "expand"))


def test_activation_layer_object_and_callable() -> None:
    """Activations that are layers or plain functions are fused ones too."""
    for activation in (layers.LeakyReLU(0.3), lambda z: z * z):
        layer = layers.Dense(3, activation=activation, name="block")
        model = one_layer(layer, (4,))
        x = make_input("", (4,), BATCH)
        y = targets(model, x).astype(np.float64)
        kernel, bias = weights_of(model)
        a = append_one(x.astype(np.float64))
        z = a @ np.vstack([kernel, bias])
        if isinstance(activation, layers.LeakyReLU):
            slope = np.where(z > 0, 1.0, 0.3)
            g = (slope * z - y) * slope
        else:
            g = (z * z - y) * 2 * z
        step = train_once(model, x, y.astype("float32"))
        check_factors(step.of("block"), *factors(a[:, None], g[:, None]))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    ("rank", "kwargs", "shape"),
    [
        (1, {"kernel_size": 3, "padding": "same"}, (6, 3)),
        (2, {"kernel_size": 3, "padding": "same", "strides": 2}, (5, 4, 2)),
        (
            2,
            {"kernel_size": 2, "depth_multiplier": 2, "use_bias": False},
            (4, 4, 2),
        ),
    ],
)
def test_separable(
    rank: int, kwargs: Any, shape: tuple[int, ...], sharing: str
) -> None:
    """Two blocks: one per input channel, then a 1x1 convolution."""
    suffix = f"{rank}D"
    layer = getattr(layers, "SeparableConv" + suffix)(
        3, activation="tanh", name="separable", **kwargs
    )
    model = one_layer(layer, shape)
    x = make_input("", shape, BATCH)
    y = targets(model, x).astype(np.float64)
    weights = weights_of(model)

    # The same two linear maps as layers of their own, for their views.
    both = dict(kwargs)
    use_bias = both.pop("use_bias", True)
    first = getattr(layers, "DepthwiseConv" + suffix)(use_bias=False, **both)
    first.build((None, *shape))
    middle = first.compute_output_shape((None, *shape))
    second = getattr(layers, "Conv" + suffix)(3, 1, use_bias=use_bias)
    second.build(middle)
    views = DepthwiseView(first), ConvView(second)

    a1 = views[0].rows(x.astype(np.float64))
    h = np.einsum("gnsi,gio->gnso", a1, views[0].matrix(weights[:1]))
    # Channel c, multiplier q is output channel c * multiplier + q.
    h = np.moveaxis(h, 0, 2).reshape(BATCH, *middle[1:])
    a2 = views[1].rows(h)
    matrix = views[1].matrix(weights[1:])
    out = np.tanh(np.einsum("gnsi,gio->gnso", a2, matrix))
    assert_close(
        out[0].reshape(y.shape),
        np.asarray(model(x)),
        1e-5,
        "forward pass",
    )
    g2 = (out - views[1].split(y)) * (1 - out**2)
    back = np.einsum("nso,io->nsi", g2[0], matrix[0, : h.shape[-1]])
    g1 = views[0].split(back.reshape(h.shape))

    step = train_once(model, x, y.astype("float32"), weight_sharing=sharing)
    assert len(step.factors) == 2
    check_factors(
        step.of("depthwise/separable"),
        *expected_factors(views[0], a1, g1, sharing),
    )
    check_factors(
        step.of("pointwise/separable"),
        *expected_factors(views[1], a2, g2, sharing),
    )


def test_embedding_counts() -> None:
    """Frequencies written down by hand, in both modes."""
    x = np.array([[0, 0, 2], [2, 2, 2]], "int32")
    for sharing, want in (
        ("expand", [2 / 6, 0, 4 / 6, 0]),
        ("reduce", [(4 / 9) / 2, 0, (1 / 9 + 1) / 2, 0]),
    ):
        model = one_layer(layers.Embedding(4, 2, name="block"), (3,))
        step = train_once(model, x, targets(model, x), weight_sharing=sharing)
        assert_close(step.of("block")["A"], want, 1e-6)


def test_embedding_one_token() -> None:
    """Tokens without a sequence axis: one position per example."""
    factory, _ = EMBEDDING["embedding_sequence"]
    layer = factory(name="block")
    model = one_layer(layer, ())
    x = np.array([1, 5, 1, 0], "int32")
    y = targets(model, x)
    a, g = expected_rows(view_of(layer), weights_of(model), x, y, None)
    step = train_once(model, x, y)
    want = expected_factors(view_of(layer), a, g, "expand")
    check_factors(step.of("block"), *want)


# ---------------------------------------------------------- normalisation
@pytest.mark.parametrize("case", NORMS)
def test_normalization(case: str) -> None:
    factory, shape = NORMS[case]
    layer = factory(name="block")
    model = one_layer(layer, shape, after="tanh")
    x = make_input(case, shape, 6)
    y = targets(model, x)
    u = per_example_norm_gradients(layer, x, y)
    for i, want in enumerate(keras_gradients(model, x, y)):
        assert_close(u.mean(0)[:, i], want.reshape(-1), 3e-5, "gradient")
    step = train_once(model, x, y)
    block = step.of("block")
    assert set(block) == {"G"}
    G = np.einsum("nci,ncj->cij", u, u) / len(x)
    assert_close(block["G"], G, FACTOR_RTOL, "G")


def test_normalization_reference_is_keras() -> None:
    """The NumPy normalisations agree with Keras' forward passes."""
    for case, (factory, shape) in NORMS.items():
        layer = factory()
        x = make_input(case, shape, 6)
        out = np.asarray(layer(x, training=True))
        assert_close(normalized(layer, x.astype(float)), out, 1e-5, case)


# -------------------------------------------------------------- attention
def attention_rows(
    weights: dict[str, Array],
    x: Array,
    memory: Array,
    y: Array,
    repeats: int,
    gate: bool = False,
) -> dict[str, tuple[Array, Array]]:
    """Inputs and pre-activation gradients of the projections, by tape."""
    w = {k: tf.constant(v) for k, v in weights.items()}
    q = tf.einsum("bqm,muh->bquh", x, w["query/kernel"]) + w["query/bias"]
    k = tf.einsum("bkm,mvh->bkvh", memory, w["key/kernel"]) + w["key/bias"]
    v = tf.einsum("bkm,mvh->bkvh", memory, w["value/kernel"])
    v += w["value/bias"]
    z = {"query": q, "key": k, "value": v}
    if gate:
        e = tf.einsum("bqm,muh->bquh", x, w["gate/kernel"])
        z["gate"] = e + w["gate/bias"]
    inputs = {"query": x, "gate": x, "key": memory, "value": memory}
    with tf.GradientTape() as tape:
        tape.watch(z)
        keys = tf.repeat(z["key"], repeats, axis=2)
        values = tf.repeat(z["value"], repeats, axis=2)
        scores = tf.einsum("bquh,bkuh->buqk", z["query"], keys)
        scores = tf.nn.softmax(scores / np.sqrt(q.shape[-1]), axis=-1)
        mixed = tf.einsum("buqk,bkuh->bquh", scores, values)
        if gate:
            mixed *= tf.sigmoid(z["gate"])
        out = tf.einsum("bquh,uhm->bqm", mixed, w["attention_output/kernel"])
        out += w["attention_output/bias"]
        loss = 0.5 * tf.reduce_sum(tf.square(out - y))
    grads = tape.gradient(loss, z)
    rows = {}
    for name, g in grads.items():
        rows[name] = inputs[name], g.numpy().reshape(*g.shape[:2], -1)
    heads = mixed.numpy()
    rows["attention_output"] = (
        heads.reshape(*heads.shape[:2], -1),
        out.numpy() - y,
    )
    return rows


def attention_model(kind: str) -> tuple[Any, Any, int]:
    # Only multi-head attention takes a memory of another width.
    width = 6 if kind == "multi_head" else 4
    x, memory = keras.Input((3, 4)), keras.Input((5, width))
    if kind == "multi_head":
        layer = layers.MultiHeadAttention(2, 3, name="attention")
        out = layer(x, memory)
        repeats = 1
    else:
        layer = layers.GroupQueryAttention(
            3, 4, 2, use_gate=kind == "gated", name="attention"
        )
        out = layer(x, memory)
        repeats = 2
    model = keras.Model([x, memory], out)
    randomize(model)
    return model, layer, repeats


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", ["multi_head", "grouped_query", "gated"])
def test_attention(kind: str, sharing: str) -> None:
    """Projections of cross attention; the key's reduced G is zero."""
    model, layer, repeats = attention_model(kind)
    x = make_input("", (3, 4), 3)
    memory = make_input("", model.input_shape[1][1:], 3, seed=5)
    y = targets(model, [x, memory])
    weights = {
        "/".join(v.path.split("/")[-2:]): np.asarray(v, np.float64)
        for v in layer.trainable_variables
    }
    rows = attention_rows(
        weights,
        x.astype(np.float64),
        memory.astype(np.float64),
        y.astype(np.float64),
        repeats,
        kind == "gated",
    )
    step = train_once(model, [x, memory], y, weight_sharing=sharing)
    assert len(step.factors) == len(rows)
    for name, (a, g) in rows.items():
        block = step.of(f"attention/{name}")
        A, G = factors(append_one(a), g, sharing)
        assert_close(block["A"], A, FACTOR_RTOL, f"A of {name}")
        if name == "key" and sharing == "reduce":
            # Softmax does not see a shift of all keys.
            assert np.abs(G).max() < 1e-20
            assert np.abs(block["G"]).max() < 1e-9
        else:
            assert_close(block["G"], G, 3e-5, f"G of {name}")
    for value in step.after:
        assert np.isfinite(value).all()
