"""Factors of every layer type against float64 NumPy references.

The model under test is one layer with the loss on its output, so inputs and
pre-activation gradients are known in closed form; deeper models are compared
with explicit per-example gradients of a float64 twin.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    FACTOR_RTOL,
    Step,
    assert_close,
    compiled,
    find,
    half_squared_error,
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import EMBEDDING, LINEAR, NORMS, make_input
from tests.support.layer_models import (
    activation_name,
    deep_model,
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
from tests.support.reference import (
    Array,
    RunningAverage,
    append_one,
    factors,
    gradient,
)

SHARING = ["expand", "reduce"]
BATCH = 4


def check(block: Any, A: Array, G: Array, rtol: float = FACTOR_RTOL) -> None:
    assert set(block) == {"A", "G"}
    assert_close(block["A"], A, rtol, "A")
    assert_close(block["G"], G, rtol, "G")


def check_reference(
    view: View, model: Any, x: Array, y: Array, a: Array, g: Array
) -> None:
    """The rows reproduce the layer's gradient as Keras computes it."""
    mean = [gradient(*pair) for pair in zip(a, g, strict=True)]
    want = view.matrix(keras_gradients(model, x, y))
    assert_close(np.stack(mean), want, 1e-5, "gradient from the rows")


# ---------------------------------------------------------- linear layers
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("case", LINEAR)
def test_linear_layer(case: str, sharing: str) -> None:
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
    check(step.of("block"), *expected_factors(view, a, g, sharing))


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
    check(step.of("block"), *expected_factors(view, a, g, "expand"))


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
        check(step.of("block"), *factors(a[:, None], g[:, None]))


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    ("rank", "kwargs", "shape"),
    [
        (1, {"kernel_size": 3, "padding": "same"}, (6, 3)),
        (1, {"kernel_size": 2, "depth_multiplier": 2}, (5, 2)),
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
    check(
        step.of("depthwise/separable"),
        *expected_factors(views[0], a1, g1, sharing),
    )
    check(
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
    check(step.of("block"), *want)


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


# ---------------------------------------- per-example gradients, deep nets
def per_example_gradients(
    model: Any, x: Array, labels: Array
) -> dict[str, Array]:
    """Gradients of each l_n: path of the variable -> (batch, ...)."""
    found: dict[str, list[Array]] = {}
    for n in range(len(x)):
        with tf.GradientTape() as tape:
            logits = model(x[n : n + 1], training=True)
            loss = keras.losses.sparse_categorical_crossentropy(
                labels[n : n + 1], logits, from_logits=True
            )
        variables = model.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        for v, g in zip(variables, grads, strict=True):
            found.setdefault(v.path, []).append(g.numpy())
    return {k: np.stack(v) for k, v in found.items()}


@pytest.mark.parametrize("eager", [True, False])
def test_deep_model_per_example(eager: bool) -> None:
    """Reduced G is the second moment of the per-example bias gradients.

    A bias's per-example gradient is the sum of g over the positions, so this
    holds for every layer and needs no knowledge of what the layer does.
    """
    x = make_input("", (6, 6, 2), 5)
    labels = np.array([0, 2, 1, 2, 0])
    grads = per_example_gradients(deep_model("float64"), x, labels)
    model = deep_model("float32")
    step = train_once(
        model,
        x,
        labels,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weight_sharing="reduce",
        eager=eager,
    )
    groups = {"grouped": 2, "depthwise": 4}
    names = [
        *("conv", "depthwise", "grouped", "einsum"),
        *("sequence", "hidden", "logits"),
    ]
    for name in names:
        b = grads[f"{name}/bias"].reshape(5, groups.get(name, 1), -1)
        G = np.einsum("ngi,ngj->gij", b, b) / 5
        G = G if name in groups else G[0]
        assert_close(step.of(name)["G"], G, 3e-5, f"G of {name}")
    u = np.stack([grads["norm/gamma"], grads["norm/beta"]], axis=-1)
    G = np.einsum("nci,ncj->cij", u, u) / 5
    assert_close(step.of("norm")["G"], G, 3e-5, "G of norm")
    # One position: the kernel's per-example gradient is a (x) g.
    for name in ("hidden", "logits"):
        b, k = grads[f"{name}/bias"], grads[f"{name}/kernel"]
        at = np.argmax(np.abs(b), axis=1)
        n = np.arange(5)
        a = append_one(k[n, :, at] / b[n, at][:, None])
        assert_close(step.of(name)["A"], a.T @ a / 5, 3e-5, f"A of {name}")
    assert len(step.factors) == len(names) + 1


# --------------------------------------------- shared and composed models
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("eager", [True, False])
def test_shared_layer_pools_rows(sharing: str, eager: bool) -> None:
    """Called twice on inputs of different lengths."""
    first, second = keras.Input((3, 4)), keras.Input((5, 4))
    layer = layers.Dense(2, name="twice")
    model = keras.Model([first, second], [layer(first), layer(second)])
    randomize(model)
    x = [make_input("", (3, 4), BATCH), make_input("", (5, 4), BATCH, 7)]
    rng = np.random.default_rng(3)
    y = [rng.normal(size=(BATCH, s, 2)).astype("float32") for s in (3, 5)]
    kernel, bias = weights_of(model)
    pairs = []
    for inputs, target in zip(x, y, strict=True):
        a = append_one(inputs.astype(np.float64))
        pairs.append((a, a @ np.vstack([kernel, bias]) - target))
    if sharing == "expand":
        rows = [a.reshape(-1, 5) for a, _ in pairs]
        A = sum(r.T @ r for r in rows) / (8 * BATCH)
        G = sum(np.einsum("nsi,nsj->ij", g, g) for _, g in pairs) / BATCH
    else:
        A = sum(factors(a, g, sharing)[0] for a, g in pairs) / 2
        G = sum(factors(a, g, sharing)[1] for a, g in pairs)
    step = train_once(
        model,
        x,
        y,
        loss=[half_squared_error, half_squared_error],
        weight_sharing=sharing,
        eager=eager,
    )
    check(step.of("twice"), np.asarray(A), np.asarray(G))


def test_shared_layer_in_a_chain() -> None:
    """The second call's input is the first call's output."""

    def build() -> Any:
        layer = layers.Dense(3, activation="tanh", name="twice")
        inputs = keras.Input((3,))
        twice = keras.Model(inputs, layer(layer(inputs)))
        randomize(twice)
        return twice

    model = build()
    x = make_input("", (3,), BATCH)
    y = targets(model, x)
    kernel, bias = weights_of(model)
    matrix = np.vstack([kernel, bias])
    a1 = append_one(x.astype(np.float64))
    h = np.tanh(a1 @ matrix)
    a2 = append_one(h)
    out = np.tanh(a2 @ matrix)
    g2 = (out - y) * (1 - out**2)
    g1 = (g2 @ kernel.T) * (1 - h**2)
    A = (a1.T @ a1 + a2.T @ a2) / (2 * BATCH)
    G = (g1.T @ g1 + g2.T @ g2) / BATCH
    step = train_once(model, x, y, eager=False)
    check(step.of("twice"), A, G)
    # The update uses the sum of both calls' gradients.
    W = (a1.T @ g1 + a2.T @ g2) / BATCH
    P = np.vstack(train_once(build(), x, y, inner=1e10, damping=1e10).delta)
    assert_close(P, W, 1e-4, "gradient")


def two_dense(x: Array, y: Array, weights: list[Array]) -> dict[str, Any]:
    """Factors of Dense(tanh), Dense without bias under the half square."""
    kernel, bias, last = weights
    a1 = append_one(x.astype(np.float64))
    h = np.tanh(a1 @ np.vstack([kernel, bias]))
    g2 = h @ last - y
    g1 = (g2 @ last.T) * (1 - h**2)
    return {
        "first": factors(a1[:, None], g1[:, None]),
        "second": factors(h[:, None], g2[:, None]),
    }


def nested_model() -> Any:
    inner = keras.Sequential(
        [layers.Dense(4, activation="tanh", name="first")], name="inner"
    )
    x = keras.Input((3,))
    outer = layers.Dense(2, use_bias=False, name="second")
    return keras.Model(x, outer(inner(x)))


def deeply_nested_model() -> Any:
    first = layers.Dense(4, activation="tanh", name="first")
    core = keras.Sequential([keras.Input((3,)), first], name="core")
    shell = keras.Sequential([keras.Input((3,)), core], name="shell")
    last = layers.Dense(2, use_bias=False, name="second")
    return keras.Sequential([keras.Input((3,)), shell, last])


class Pair(keras.Model):
    """Subclassed, with its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [
            layers.Dense(4, activation="tanh", name="first"),
            layers.Dense(2, use_bias=False, name="second"),
        ]

    def call(self, x: Any) -> Any:
        for layer in self.stack:
            x = layer(x)
        return x


class Wrapped(layers.Layer):
    """A custom layer that owns a Dense."""

    def __init__(self) -> None:
        super().__init__(name="wrapped")
        self.dense = layers.Dense(4, name="first")

    def build(self, input_shape: Any) -> None:
        self.dense.build(input_shape)
        super().build(input_shape)

    def call(self, x: Any) -> Any:
        return keras.ops.tanh(self.dense(x))


def wrapped_model() -> Any:
    last = layers.Dense(2, use_bias=False, name="second")
    return keras.Sequential([keras.Input((3,)), Wrapped(), last])


COMPOSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nested": (nested_model, "inner/first"),
    "deeply_nested": (deeply_nested_model, "core/first"),
    "subclassed": (Pair, "first"),
    "custom_layer": (wrapped_model, "wrapped/first"),
}


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", COMPOSED)
def test_composed_model(kind: str, eager: bool) -> None:
    factory, first = COMPOSED[kind]
    model = factory()
    x = make_input("", (3,), BATCH)
    model(x)
    randomize(model)
    y = np.random.default_rng(4).normal(size=(BATCH, 2)).astype("float32")
    want = two_dense(x, y, weights_of(model))
    step = train_once(model, x, y, eager=eager)
    assert len(step.factors) == 2
    check(step.of(first), *want["first"])
    check(step.of("second"), *want["second"])


def test_paths_are_unique() -> None:
    """Two branches with equally named layers keep their own factors."""
    x = keras.Input((3,))
    branches = [
        keras.Sequential([layers.Dense(2, name="dense")], name=name)
        for name in ("left", "right")
    ]
    left, right = (branch(x) for branch in branches)
    right = layers.Activation("tanh")(right)
    model = keras.Model(x, layers.Add()([left, right]))
    randomize(model)
    data = make_input("", (3,), BATCH)
    y = targets(model, data)
    a = append_one(data.astype(np.float64))
    left, right = (a @ np.vstack(weights_of(b)) for b in branches)
    g = left + np.tanh(right) - y
    want = {"left": g, "right": g * (1 - np.tanh(right) ** 2)}
    step = train_once(model, data, y)
    assert len(step.factors) == 2
    for name, rows in want.items():
        check(step.of(f"{name}/dense"), *factors(a[:, None], rows[:, None]))


# ------------------------------------------------ rows that carry no loss
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("eager", [True, False])
def test_zero_sample_weights(sharing: str, eager: bool) -> None:
    layer = layers.Dense(3, activation="tanh", name="block")
    model = one_layer(layer, (2, 4))
    x = make_input("", (2, 4), 6)
    y = targets(model, x)
    weight = np.array([1, 0, 2, 0, 1, 0.5], "float32")
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, "tanh")
    g = g * weight[:, None, None]
    keep = np.repeat(weight[:, None] > 0, 2, axis=1)
    step = train_once(
        model,
        x,
        y,
        sample_weight=weight,
        weight_sharing=sharing,
        eager=eager,
    )
    want = expected_factors(view, a, g, sharing, keep)
    check(step.of("block"), *want)


def test_zero_sample_weights_convolution() -> None:
    factory, shape = LINEAR["conv2d_same_even_strided"]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    x = make_input("", shape, BATCH)
    y = targets(model, x)
    weight = np.array([0, 1, 1, 0], "float32")
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, None)
    g = g * weight[:, None, None]
    keep = np.repeat(weight[:, None] > 0, a.shape[2], axis=1)
    step = train_once(model, x, y, sample_weight=weight)
    want = expected_factors(view, a, g, "expand", keep)
    check(step.of("block"), *want)


def test_sample_weights_per_output() -> None:
    """A head's rows are those that its own loss has a weight for."""
    inputs = keras.Input((3,))
    heads = [layers.Dense(2, name=f"head_{i}") for i in range(2)]
    model = keras.Model(inputs, [head(inputs) for head in heads])
    randomize(model)
    x = make_input("", (3,), 5)
    y = list(np.random.default_rng(5).normal(size=(2, 5, 2)).astype("float32"))
    weights = [
        np.array([1, 0, 1, 0, 2], "float32"),
        np.array([0, 1, 1, 0, 1], "float32"),
    ]
    a = append_one(x.astype(np.float64))
    want = {}
    for head, target, weight in zip(heads, y, weights, strict=True):
        g = (a @ np.vstack(weights_of(head)) - target) * weight[:, None]
        keep = (weight > 0)[:, None]
        want[head.name] = factors(a[:, None], g[:, None], keep=keep)
    step = train_once(
        model, x, y, sample_weight=weights, loss=[half_squared_error] * 2
    )
    for name, (A, G) in want.items():
        check(step.of(name), A, G)


def test_all_sample_weights_zero() -> None:
    """A batch without any loss leaves everything finite and in place."""
    model = one_layer(layers.Dense(3, name="block"), (4,))
    x = make_input("", (4,), BATCH)
    step = train_once(
        model, x, targets(model, x), sample_weight=np.zeros(BATCH, "float32")
    )
    for value in step.of("block").values():
        assert np.isfinite(value).all()
    for value in step.delta:
        np.testing.assert_array_equal(value, 0.0)


MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], bool)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("eager", [True, False])
def test_padding_mask(sharing: str, eager: bool) -> None:
    """Keras averages the loss over the valid positions only."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layer(layers.Masking()(inputs)))
    randomize(model)
    x = make_input("", (3, 4), 4) * MASK[..., None]
    y = targets(model, x)
    kernel, bias = weights_of(model)
    a = append_one(x.astype(np.float64))
    # mean over all valid positions of the mean over 2 features.
    residual = a @ np.vstack([kernel, bias]) - y
    g = len(x) * residual * MASK[..., None] / MASK.sum()
    A, G = factors(a, g, sharing, MASK)
    step = train_once(
        model, x, y, loss="mse", weight_sharing=sharing, eager=eager
    )
    check(step.of("block"), A, G)


def test_valid_positions_without_gradient_still_count() -> None:
    """Under a mask, a dead unit is not a padded position."""
    layer = layers.Dense(1, activation="relu", name="block")
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layer(layers.Masking()(inputs)))
    randomize(model)
    x = make_input("", (3, 4), 4) * MASK[..., None]
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    out = np.maximum(a @ np.vstack(weights_of(model)), 0)
    g = len(x) * (out - y) * (out > 0) * 2 / MASK.sum() * MASK[..., None]
    assert 0 < np.count_nonzero(g) < MASK.sum()
    step = train_once(model, x, y, loss="mse")
    check(step.of("block"), *factors(a, g, keep=MASK))


def test_mask_that_the_loss_ignores() -> None:
    """Padded positions whose outputs are used do carry loss."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    masked = layer(layers.Masking()(inputs))
    # The mask ends here, its positions go on.
    flat_rows = keras.ops.reshape(masked * 1.0, (-1, 6))
    model = keras.Model(inputs, flat_rows)
    randomize(model)
    x = make_input("", (3, 4), 4) * MASK[..., None]
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y.reshape(4, 3, 2)
    step = train_once(model, x, y)
    check(step.of("block"), *factors(a, g))


def test_embedding_padding_mask() -> None:
    """Padding tokens carry no loss, so they do not count."""
    inputs = keras.Input((3,), dtype="int32")
    layer = layers.Embedding(5, 2, mask_zero=True, name="embedding")
    head = layers.Dense(2, use_bias=False, name="head")
    model = keras.Model(inputs, head(layer(inputs)))
    randomize(model)
    x = np.array([[1, 4, 0], [4, 0, 0], [2, 2, 4]], "int32")
    mask = x != 0
    y = targets(model, x)
    table, kernel = weights_of(model)
    h = table[x]
    g2 = len(x) * (h @ kernel - y) * mask[..., None] / mask.sum()
    g1 = g2 @ kernel.T
    step = train_once(model, x, y, loss="mse")
    check(step.of("head"), *factors(h, g2, keep=mask))
    A, G = factors(np.eye(5)[x], g1, keep=mask)
    check(step.of("embedding"), np.diagonal(A), G)


def test_temporal_sample_weights() -> None:
    """Weights per position: those of weight zero do not count in A."""
    layer = layers.Dense(2, name="block")
    model = one_layer(layer, (3, 4))
    x = make_input("", (3, 4), 4)
    y = targets(model, x)
    weight = MASK * np.array([1.0, 2.0, 0.5], "float32")
    a = append_one(x.astype(np.float64))
    residual = a @ np.vstack(weights_of(model)) - y
    g = residual * weight[..., None] / 3
    step = train_once(model, x, y, loss="mse", sample_weight=weight)
    check(step.of("block"), *factors(a, g, keep=MASK))


@pytest.mark.parametrize("sharing", SHARING)
def test_positions_without_gradient_still_count(sharing: str) -> None:
    """Only the last position is used: nothing is padded, all rows count."""
    layer = layers.Dense(2, activation="tanh", name="block")
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layer(inputs)[:, -1])
    randomize(model)
    x = make_input("", (3, 4), BATCH)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    out = np.tanh(a @ np.vstack(weights_of(model)))
    g = (out - y[:, None]) * (1 - out**2)
    g[:, :-1] = 0
    step = train_once(model, x, y, weight_sharing=sharing)
    check(step.of("block"), *factors(a, g, sharing))


def test_dead_units_still_count() -> None:
    """An example behind a dead ReLU has no gradient but is a row of A."""
    layer = layers.Dense(1, activation="relu", name="block")
    model = one_layer(layer, (3,))
    x = make_input("", (3,), 12)
    y = targets(model, x)
    a, g = expected_rows(view_of(layer), weights_of(model), x, y, "relu")
    assert 0 < np.count_nonzero(g) < 12
    weight = np.ones(12, "float32")
    for sample_weight in (None, weight):
        model = one_layer(layers.Dense.from_config(layer.get_config()), (3,))
        step = train_once(model, x, y, sample_weight=sample_weight)
        check(step.of("block"), *factors(a[0], g[0]))


@pytest.mark.parametrize("weighted", [False, True])
def test_batch_folded_into_positions(weighted: bool) -> None:
    """The loss' examples are the batch, however a layer sees them."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    rows = layer(keras.ops.reshape(inputs, (-1, 4)))
    model = keras.Model(inputs, keras.ops.reshape(rows, (-1, 3, 2)))
    randomize(model)
    x = make_input("", (3, 4), BATCH)
    y = targets(model, x)
    weight = np.array([1, 0, 2, 1], "float32")
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y
    keep = None
    if weighted:
        g = g * weight[:, None, None]
        keep = np.repeat(weight[:, None] > 0, 3, axis=1)
    step = train_once(
        model, x, y, sample_weight=weight if weighted else None, eager=False
    )
    check(step.of("block"), *factors(a, g, keep=keep))


def test_two_outputs_and_loss_weights() -> None:
    """l_n is the weighted sum of an example's losses."""
    inputs = keras.Input((3,))
    trunk = layers.Dense(4, activation="tanh", name="trunk")
    heads = [layers.Dense(n, name=f"head_{n}") for n in (1, 2)]
    h = trunk(inputs)
    model = keras.Model(inputs, [head(h) for head in heads])
    randomize(model)
    x = make_input("", (3,), BATCH)
    rng = np.random.default_rng(6)
    y = [rng.normal(size=(BATCH, n)).astype("float32") for n in (1, 2)]
    weights = [0.5, 3.0]
    a1 = append_one(x.astype(np.float64))
    out = np.tanh(a1 @ np.vstack(weights_of(trunk)))
    a2, back, want = append_one(out), 0.0, {}
    for head, target, weight in zip(heads, y, weights, strict=True):
        kernel, bias = weights_of(head)
        g = weight * (a2 @ np.vstack([kernel, bias]) - target)
        want[head.name] = factors(a2[:, None], g[:, None])
        back = back + g @ kernel.T
    g1 = back * (1 - out**2)
    want["trunk"] = factors(a1[:, None], g1[:, None])
    optimizer = compiled(model)
    model.compile(
        optimizer=optimizer,
        loss=[half_squared_error, half_squared_error],
        loss_weights=weights,
    )
    model.train_on_batch(x, y)
    for name, (A, G) in want.items():
        check(find(optimizer.factors(), name), A, G)


@pytest.mark.parametrize("eager", [True, False])
def test_only_applied_gradients_count(eager: bool) -> None:
    """A gradient taken twice, or never applied, leaves no row behind."""
    layer = layers.Dense(2, activation="tanh", name="block")
    model = one_layer(layer, (3,))
    x = make_input("", (3,), BATCH)
    y = targets(model, x)
    a, g = expected_rows(view_of(layer), weights_of(model), x, y, "tanh")
    optimizer = compiled(model)
    # Somebody looks at the gradients of another batch first.
    keras_gradients(model, x[:2] + 1.0, y[:2])

    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            losses = half_squared_error(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        values = [v.value for v in variables]
        tape.gradient(loss, values)
        optimizer.apply(tape.gradient(loss, values), variables)

    (step if eager else tf.function(step))()
    check(find(optimizer.factors(), "block"), *factors(a[0], g[0]))


class HalfSquaredError(keras.losses.Loss):
    """The same loss as an object, which can have a dtype."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return half_squared_error(y_true, y_pred)


def test_float64_model_is_exact() -> None:
    """Factors of a float64 model have float64 precision."""
    layer = layers.Conv2D(3, 2, padding="same", dtype="float64", name="block")
    inputs = keras.Input((4, 3, 2), dtype="float64")
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    x = make_input("", (4, 3, 2), BATCH).astype(np.float64)
    y = targets(model, x).astype(np.float64)
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, None)
    loss = HalfSquaredError(dtype="float64")
    step = train_once(model, x, y, loss=loss)
    want = expected_factors(view, a, g, "expand")
    check(step.of("block"), *want, rtol=1e-12)


# ------------------------------------------------------- scale and updates
@pytest.mark.parametrize("eager", [True, False])
def test_loss_scale_is_undone(eager: bool) -> None:
    """Inside Keras' LossScaleOptimizer: same factors, same step."""
    runs = []
    for scaled in (False, True):
        layer = layers.Dense(2, activation="tanh", name="block")
        model = one_layer(layer, (3,))
        x = make_input("", (3,), BATCH)
        optimizer = compiled(model)
        if scaled:
            outer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=1024.0
            )
            model.compile(
                optimizer=outer, loss=half_squared_error, run_eagerly=eager
            )
        model.train_on_batch(x, targets(model, x))
        block = find(optimizer.factors(), "block")
        runs.append([block["A"], block["G"], *weights_of(model)])
    for got, want in zip(runs[1], runs[0], strict=True):
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("sharing", SHARING)
def test_loss_per_position_counts_examples(sharing: str) -> None:
    """Keras' mean over (batch, time) losses: l_n is the mean over time."""
    layer = layers.Dense(2, name="block")
    model = one_layer(layer, (3, 4))
    x = make_input("", (3, 4), BATCH)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    g = (a @ np.vstack(weights_of(model)) - y) / 3
    step = train_once(model, x, y, loss="mse", weight_sharing=sharing)
    check(step.of("block"), *factors(a, g, sharing))


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("sharing", SHARING)
def test_batch_size_invariance(copies: int, sharing: str) -> None:
    """A repeated batch has the same factors and makes the same step."""
    x = make_input("", (6, 6, 2), 3)
    labels = np.array([0, 2, 1])
    steps: list[Step] = []
    for n in (1, copies):
        steps.append(
            train_once(
                deep_model("float32"),
                np.tile(x, (n, 1, 1, 1)),
                np.tile(labels, n),
                loss=keras.losses.SparseCategoricalCrossentropy(
                    from_logits=True
                ),
                weight_sharing=sharing,
                kl_clip=0.02,
            )
        )
    one, many = steps
    assert set(one.factors) == set(many.factors)
    for path, block in one.factors.items():
        for key, value in block.items():
            assert_close(
                many.factors[path][key], value, 3e-5, f"{key} of {path}"
            )
    for got, want in zip(many.delta, one.delta, strict=True):
        assert_close(got, want, 1e-3, "step")


def test_running_average_over_changing_batches() -> None:
    """Bias-corrected, counted in factor updates, decay on the old value."""
    decay, every = 0.6, 2
    model = one_layer(layers.Dense(2, name="block"), (3,))
    optimizer = compiled(
        model, factor_decay=decay, factor_update_interval=every, inner=0.1
    )
    averages = RunningAverage(decay), RunningAverage(decay)
    current: list[Array] = []
    for step in range(5):
        x = make_input("", (3,), BATCH, seed=step)
        y = targets(model, x, seed=step)
        if step % every == 0:
            a = append_one(x.astype(np.float64))
            g = a @ np.vstack(weights_of(model)) - y
            new = factors(a[:, None], g[:, None])
            current = [m.update(v) for m, v in zip(averages, new, strict=True)]
        model.train_on_batch(x, y)
        A, G = current
        check(find(optimizer.factors(), "block"), A, G)
