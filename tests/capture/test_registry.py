"""What is preconditioned, what is not and why, and what `summary` says."""

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    slots,
    summary_text,
)

X, Y = data()
SEQUENCE = (4, FEATURES)


# ----------------------------------------------------------------- reading
def tables(optimizer: Any) -> list[list[list[str]]]:
    """Cells of each table of the summary, without the headers."""
    lines = summary_text(optimizer).splitlines()
    rules = [i for i, line in enumerate(lines) if re.fullmatch("-+", line)]
    assert len(rules) % 3 == 0
    return [
        [re.split(r" {2,}", line) for line in lines[rules[i + 1] + 1 : end]]
        for i, end in zip(range(0, len(rules), 3), rules[2::3], strict=True)
    ]


def blocks_of(optimizer: Any) -> dict[str, list[str]]:
    """Kind, A, G, weights and bytes of each block, by path."""
    if "No layer is preconditioned." in summary_text(optimizer):
        return {}
    rows = tables(optimizer)[0]
    found = {row[0]: row[1:] for row in rows}
    assert len(found) == len(rows)
    return found


def leftovers_of(optimizer: Any) -> dict[str, str]:
    """Reason for each leftover variable, by path and name."""
    text = summary_text(optimizer)
    if "Left to the inner optimizer" not in text:
        return {}
    rows = tables(optimizer)[-1]
    found = {f"{row[0]}:{row[1]}": row[3] for row in rows}
    assert len(found) == len(rows)
    return found


def bind(model: Any, **kwargs: Any) -> tfkfac.KFAC:
    model.compile(tfkfac.KFAC(**kwargs), "mse", run_eagerly=True)
    return kfac_of(model)


def sequential(*parts: Any, shape: tuple[int, ...] = (FEATURES,)) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input(shape), *parts])


# ----------------------------------------------------------- what is listed
def test_summary_of_a_model_with_everything() -> None:
    """One row for a block: shapes, weights and bytes are the real ones."""
    model = sequential(
        layers.Conv2D(4, 3, name="conv"),
        layers.Conv2D(6, 1, groups=2, use_bias=False, name="grouped"),
        layers.BatchNormalization(name="norm"),
        layers.GroupNormalization(2, center=False, name="scale"),
        layers.SeparableConv2D(5, 2, name="separable"),
        layers.Flatten(),
        layers.Dense(7, name="dense"),
        shape=(5, 5, 2),
    )
    optimizer = bind(model)
    assert {k: v[:4] for k, v in blocks_of(optimizer).items()} == {
        "conv": ["Conv", "19 x 19", "4 x 4", "76"],
        "grouped": ["Conv", "2 of 2 x 2", "2 of 3 x 3", "12"],
        "norm": ["Normalization", "-", "6 of 2 x 2", "12"],
        "scale": ["Normalization", "-", "6 of 1 x 1", "6"],
        "depthwise/separable": [
            "SeparableConv, depthwise",
            "6 of 4 x 4",
            "6 of 1 x 1",
            "24",
        ],
        "pointwise/separable": [
            "SeparableConv, pointwise",
            "7 x 7",
            "5 x 5",
            "35",
        ],
        "dense": ["Dense", "21 x 21", "7 x 7", "147"],
    }
    assert leftovers_of(optimizer) == {}
    text = summary_text(optimizer)
    weights = model.count_params() - 12  # moving mean and variance
    assert f"Preconditioned weights: {weights} of {weights}." in text
    assert "solver inverse, inner optimizer SGD" in text
    assert f"model '{model.name}'" in text
    # The factors and the inverses of the last layer, in single precision.
    assert blocks_of(optimizer)["dense"][4] == "3.83 KB"
    size = 2 * 4 * (21**2 + 7**2) / 1024
    assert size == pytest.approx(3.83, abs=5e-3)


def test_summary_of_an_embedding() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            layers.Embedding(9, 3, name="tokens"),
            layers.Dense(2, use_bias=False, name="dense"),
        ]
    )
    rows = {k: v[:4] for k, v in blocks_of(bind(model)).items()}
    assert rows == {
        "tokens": ["Embedding", "diagonal 9", "3 x 3", "27"],
        "dense": ["Dense", "3 x 3", "2 x 2", "6"],
    }


def test_summary_prints() -> None:
    """The default goes to standard output, as of `model.summary`."""
    lines: list[str] = []
    bind(mlp()).summary(print_fn=lines.append)
    assert "hidden" in "".join(lines)


def test_summary_prints_by_default(capsys: Any) -> None:
    bind(mlp()).summary()
    out, err = capsys.readouterr()
    assert "hidden" in out
    assert err == ""


def test_paths_are_unique_and_end_with_the_name() -> None:
    """Containers of equal names, layers of equal names in them."""

    class Tower(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="tower")
            self.parts = [
                keras.Sequential(
                    [layers.Dense(FEATURES, name="dense")], name="part"
                )
                for _ in range(3)
            ]
            self.head = layers.Dense(CLASSES, name="dense")

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return self.head(x)

    model = Tower()
    model(X)
    optimizer = bind(model)
    paths = list(blocks_of(optimizer))
    assert len(set(paths)) == 4
    assert all(path.rsplit("/")[-1] == "dense" for path in paths)
    assert paths[0] == "part/dense"
    assert paths[-1] == "dense"
    model.train_on_batch(X, np.zeros((len(X), CLASSES)))
    assert list(optimizer.factors()) == paths


# ---------------------------------------------------------- what is left out
class OwnCall(layers.Dense):
    """Computes something else than a dense layer."""

    def call(self, x: Any, training: Any = None) -> Any:
        return 2 * super().call(x)


class SameCall(layers.Dense):
    """Adds nothing to the computation."""


class Scale(layers.Layer):
    def build(self, shape: Any) -> None:
        self.gain = self.add_weight((shape[-1],), "ones", name="gain")

    def call(self, x: Any) -> Any:
        return x * self.gain


class Tied(layers.Dense):
    """A dense layer with the kernel of another one."""

    def __init__(self, other: layers.Dense, **kwargs: Any) -> None:
        super().__init__(other.units, **kwargs)
        self._other = [other]

    def build(self, shape: Any) -> None:
        super().build(shape)
        self._untrack_variable(self._kernel)
        self._kernel = self._other[0]._kernel


def lora() -> Any:
    layer = layers.Dense(CLASSES, name="adapted")
    model = sequential(layers.Dense(5, name="first"), layer)
    layer.enable_lora(2)
    return model


def quantized() -> Any:
    layer = layers.Dense(CLASSES, name="small")
    model = sequential(layers.Dense(5, name="first"), layer)
    layer.quantize("int8")
    return model


def tied() -> Any:
    first = layers.Dense(FEATURES, name="first")
    return sequential(first, Tied(first, name="second"))


def frozen_kernel() -> Any:
    model = sequential(layers.Dense(3, name="first"))
    model.layers[0].kernel.trainable = False
    return model


def model_weight() -> Any:
    class Biased(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(3, name="first")
            self.first.build((None, FEATURES))
            self.shift = self.add_weight(shape=(3,), name="shift")
            self.built = True

        def call(self, x: Any) -> Any:
            return self.first(x) + self.shift

    return Biased()


def reversible() -> Any:
    class Language(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = layers.ReversibleEmbedding(7, 3, name="tokens")
            self.first = layers.Dense(3, name="first")

        def call(self, x: Any) -> Any:
            return self.tokens(self.first(self.tokens(x)), reverse=True)

    model = Language()
    model(np.zeros((2, 4), "int32"))
    return model


LSTM = "used in the loop of a LSTM"
GRU = "used in the loop of a GRU"
LEFT: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "rnn": (
        lambda: sequential(
            layers.LSTM(2, name="lstm"), layers.Dense(2), shape=SEQUENCE
        ),
        {
            "lstm/lstm_cell:kernel": LSTM,
            "lstm/lstm_cell:recurrent_kernel": LSTM,
            "lstm/lstm_cell:bias": LSTM,
        },
    ),
    "bidirectional rnn": (
        lambda: sequential(
            layers.Bidirectional(
                layers.GRU(2, use_bias=False, name="gru"), name="both"
            ),
            layers.Dense(2),
            shape=SEQUENCE,
        ),
        {
            f"both/{way}_gru/gru_cell:{name}": GRU
            for way in ("forward", "backward")
            for name in ("kernel", "recurrent_kernel")
        },
    ),
    "time distributed": (
        lambda: sequential(
            layers.TimeDistributed(layers.Dense(3, name="d"), name="each"),
            layers.Dense(2),
            shape=SEQUENCE,
        ),
        {
            f"each/d:{name}": "used in the loop of a TimeDistributed"
            for name in ("kernel", "bias")
        },
    ),
    "lora": (
        lora,
        {
            f"adapted:{name}": "LoRA weights"
            for name in ("bias", "lora_kernel_a", "lora_kernel_b")
        },
    ),
    "quantized": (quantized, {"small:bias": "quantized weights"}),
    "reversible embedding": (
        reversible,
        {"tokens:embeddings": "no block for ReversibleEmbedding"},
    ),
    "subclass with its own call": (
        lambda: sequential(layers.Dense(3), OwnCall(2, name="own")),
        {f"own:{n}": "no block for OwnCall" for n in ("kernel", "bias")},
    ),
    "custom layer": (
        lambda: sequential(Scale(name="scale"), layers.Dense(2)),
        {"scale:gain": "no block for Scale"},
    ),
    "weight of the model": (
        model_weight,
        {"(model):shift": "no block for Biased"},
    ),
    "shared kernel": (
        tied,
        {"second:bias": "kernel frozen or shared with another layer"},
    ),
    "frozen kernel": (
        frozen_kernel,
        {"first:bias": "kernel frozen or shared with another layer"},
    ),
    "transposed convolution": (
        lambda: sequential(
            layers.Conv1DTranspose(2, 2, use_bias=False, name="up"),
            layers.Conv1D(2, 2),
            shape=SEQUENCE,
        ),
        {"up:kernel": "no block for Conv1DTranspose"},
    ),
}


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_listed_with_the_reason(case: str) -> None:
    build, want = LEFT[case]
    model = build()
    optimizer = bind(model)
    assert leftovers_of(optimizer) == want
    variables = len(want) + sum(
        2 if "first" in path or "dense" in path or "conv1d" in path else 0
        for path in blocks_of(optimizer)
    )
    assert variables == len(model.trainable_variables)


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_trains(case: str) -> None:
    """Every variable moves, the leftover ones included."""
    model = LEFT[case][0]()
    bind(model)
    before = [v.numpy() for v in model.trainable_variables]
    rng = np.random.default_rng(0)
    if case == "reversible embedding":
        x = rng.integers(0, 7, (8, 4))
    else:
        shape = getattr(model, "input_shape", (None, FEATURES))[1:]
        x = rng.normal(size=(8, *shape))
    target = rng.normal(size=model(x).shape)
    for _ in range(2):
        model.train_on_batch(x, target)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        assert not np.array_equal(variable.numpy(), value), variable.path
        assert np.isfinite(variable.numpy()).all()


def test_subclass_without_its_own_call_is_covered() -> None:
    optimizer = bind(sequential(SameCall(3, name="same")))
    assert list(blocks_of(optimizer)) == ["same"]


def test_layer_in_a_wrapper_is_covered() -> None:
    """Spectral normalisation calls the layer it wraps."""
    inner = layers.Dense(3, name="inner")
    wrapper = layers.SpectralNormalization(inner, name="wrapper")
    model = sequential(wrapper, layers.Dense(CLASSES, name="logits"))
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    blocks = kfac_of(model).factors()
    assert list(blocks) == ["wrapper/inner", "logits"]
    assert all(block["G"].any() for block in blocks.values())


# --------------------------------------------------------------- skip_layers
def nested() -> Any:
    """Layers `encoder/first`, `encoder/second` and `head`."""
    encoder = keras.Sequential(
        [
            layers.Dense(4, activation="tanh", name="first"),
            layers.BatchNormalization(name="second"),
        ],
        name="encoder",
    )
    return sequential(encoder, layers.Dense(CLASSES, name="head"))


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (["first"], ["encoder/second", "head"]),
        (["encoder/first"], ["encoder/second", "head"]),
        (["encoder/.*"], ["head"]),
        (["encoder"], ["head"]),
        ([".*d"], ["encoder/first"]),
        ([re.compile("SECOND", re.I)], ["encoder/first", "head"]),
        ([re.compile("enc.*/.*t")], ["encoder/second", "head"]),
        ([layers.Dense], ["encoder/second"]),
        ([layers.BatchNormalization, "head"], ["encoder/first"]),
        ([keras.Sequential], ["head"]),
        (("head", "first"), ["encoder/second"]),
        ((), ["encoder/first", "encoder/second", "head"]),
    ],
)
def test_skip_layers(skip: Sequence[Any], kept: list[str]) -> None:
    """By name, path, expression, class or container."""
    optimizer = bind(nested(), skip_layers=skip)
    assert list(blocks_of(optimizer)) == kept
    assert set(leftovers_of(optimizer).values()) <= {"skip_layers"}
    names = {path.split(":")[0] for path in leftovers_of(optimizer)}
    everything = {"encoder/first", "encoder/second", "head"}
    assert names == everything - set(kept)


def test_expressions_match_whole_names() -> None:
    with pytest.raises(ValueError, match=r"skip_layers.*'firs'.*'ead'") as e:
        bind(nested(), skip_layers=["head", "firs", "ead"])
    assert "'head'" not in str(e.value)


# -------------------------------------------------- as the inner one would do
@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
@pytest.mark.parametrize("inner", ["sgd", "adam"])
def test_everything_skipped_is_the_inner_optimizer(inner: str) -> None:
    """To the last bit, slots included."""
    makers: dict[str, Callable[[], Any]] = {
        "sgd": lambda: keras.optimizers.SGD(
            0.1, momentum=0.9, weight_decay=0.01, clipnorm=0.5
        ),
        "adam": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    }
    runs = []
    for wrapped in (True, False):
        optimizer = makers[inner]()
        if wrapped:
            optimizer = tfkfac.KFAC(optimizer, skip_layers=[".*"])
        model = mlp()
        model.compile(optimizer, loss(), run_eagerly=inner == "sgd")
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights = {str(i): w for i, w in enumerate(model.get_weights())}
        kept = {k.split("/")[-1]: v for k, v in slots(model.optimizer).items()}
        runs.append({**weights, **kept})
    assert_same(*runs)
    assert not np.array_equal(runs[0]["0"], mlp().get_weights()[0])


@pytest.mark.parametrize("eager", [True, False])
def test_leftovers_take_the_plain_step(eager: bool) -> None:
    """Beside preconditioned and clipped layers, to the last bit."""
    model = sequential(
        layers.Dense(4, activation="tanh", name="dense"),
        Scale(name="scale"),
        layers.Dense(CLASSES, name="skipped"),
    )
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1), skip_layers=["skipped"], kl_clip=1e-6
    ).attach(model)

    def step() -> list[Any]:
        gradients = gradients_of(model, X, Y)
        optimizer.apply(gradients, model.trainable_variables)
        return gradients

    before = [v.numpy() for v in model.trainable_variables]
    gradients = (step if eager else tf.function(step))()
    rate = np.float32(0.1)
    plain = [
        np.array_equal(v.numpy(), b - rate * np.asarray(g))
        for v, b, g in zip(
            model.trainable_variables, before, gradients, strict=True
        )
    ]
    names = [v.path.split("/")[-2] for v in model.trainable_variables]
    assert names == ["dense", "dense", "scale", "skipped", "skipped"]
    assert plain == [False, False, True, True, True]


@pytest.mark.parametrize("eager", [True, False])
def test_leftover_sparse_gradient(eager: bool) -> None:
    """A skipped embedding's gradient stays sparse and takes its step."""
    keras.utils.set_random_seed(0)
    tokens = layers.Embedding(7, 2, name="tokens")
    model = sequential(
        tokens, layers.Flatten(), layers.Dense(CLASSES), shape=(3,)
    )
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1), skip_layers=["tokens"]
    ).attach(model)
    x, y = np.array([[0, 1, 2], [2, 3, 3]]), np.array([0, 1])

    def step() -> Any:
        gradients = gradients_of(model, x, y)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, model.trainable_variables)
        return tf.convert_to_tensor(gradients[0])

    before = tokens.get_weights()[0]
    gradient = (step if eager else tf.function(step))()
    want = before - np.float32(0.1) * np.asarray(gradient)
    got = tokens.get_weights()[0]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(got[4:], before[4:])
    assert not np.array_equal(got[:4], before[:4])


def test_model_without_a_supported_layer() -> None:
    """A warning that says what happens; then the inner optimizer works."""
    model = sequential(Scale(name="scale"))
    with pytest.warns(UserWarning, match=r"has no layer that K-FAC.*SGD"):
        model.compile(tfkfac.KFAC(), "mse", run_eagerly=True)
    optimizer = kfac_of(model)
    assert "No layer is preconditioned." in summary_text(optimizer)
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    assert optimizer.factors() == {}
    assert optimizer.state_bytes()["total"] == 0
    model.train_on_batch(X, 0 * X)
    assert (model.get_weights()[0] < 1).all()


# ------------------------------------------------------- layers out of sight
def test_weights_used_without_calling_the_layer() -> None:
    """The error names the layer, and its advice works."""

    class Shortcut(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = layers.Dense(4, name="hidden")
            self.logits = layers.Dense(CLASSES, name="logits")

        def build(self, shape: Any) -> None:
            self.hidden.build(shape)
            self.logits.build((None, 4))
            self.built = True

        def call(self, x: Any) -> Any:
            x = keras.ops.matmul(x, self.hidden.kernel) + self.hidden.bias
            return self.logits(x)

    model = Shortcut()
    model.compile(tfkfac.KFAC(), loss())
    with pytest.raises(ValueError, match=r"'hidden'.*no call") as caught:
        model.train_on_batch(X, Y)
    advice = re.search(r"skip_layers=\['(\w+)'\]", str(caught.value))
    assert advice is not None
    model = Shortcut()
    optimizer = tfkfac.KFAC(skip_layers=[advice[1]])
    model.compile(optimizer, loss())
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["logits"]


def test_layer_called_in_a_function_of_its_own() -> None:
    """An inner `tf.function` has its own graph: the layer is named."""
    model = mlp()
    model.layers[0].call = tf.function(model.layers[0].call)
    optimizer = tfkfac.KFAC().attach(model)

    @tf.function
    def forward(x: Any) -> Any:
        return model.layers[0](x)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()(Y, model.layers[1](forward(X)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    with pytest.raises(ValueError, match=r"'hidden'.*`tf\.function`"):
        step()


def test_gradients_for_half_of_a_layer() -> None:
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    gradients = gradients_of(model, X, Y)
    gradients[1] = None
    with pytest.raises(ValueError, match=r"'hidden'.*kernel.*bias.*only"):
        optimizer.apply(gradients, model.trainable_variables)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("eager", [True, False])
def test_unused_layer_is_fine(eager: bool) -> None:
    """No gradient, no step, no factors; the others are preconditioned."""

    class Unused(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.logits = layers.Dense(CLASSES, name="logits")
            self.spare = layers.Dense(2, name="spare")
            self.spare.build((None, FEATURES))

        def call(self, x: Any) -> Any:
            return self.logits(x)

    model = Unused()
    model.compile(tfkfac.KFAC(), loss(), run_eagerly=eager)
    model.train_on_batch(X, Y)
    before = model.spare.get_weights()
    model.train_on_batch(X, Y)
    for value, want in zip(model.spare.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, want)
    blocks = kfac_of(model).factors()
    assert set(blocks) == {"logits", "spare"}
    assert blocks["logits"]["A"].any()
    assert not blocks["spare"]["A"].any()


# ------------------------------------------------------------- before build
class Constructed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(4, name="first")
        self.second = layers.Dense(CLASSES, name="second")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


class BuiltLate(keras.Model):
    def build(self, shape: Any) -> None:
        self.first = layers.Dense(4, name="first")
        self.first.build(shape)
        self.second = layers.Dense(CLASSES, name="second")
        self.second.build((None, 4))
        self.built = True

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


UNBUILT: dict[str, Any] = {
    "sequential": lambda: keras.Sequential(
        [layers.Dense(4, name="first"), layers.Dense(CLASSES, name="second")]
    ),
    "subclassed": Constructed,
    "layers made in build": BuiltLate,
}


def unbuilt_cases() -> list[Any]:
    return [
        value if hasattr(value, "values") else pytest.param(value, id=name)
        for name, value in UNBUILT.items()
    ]


@pytest.mark.parametrize("build", unbuilt_cases())
def test_summary_before_the_model_is_built(build: Callable[[], Any]) -> None:
    """A clear error, not a wrong table; after a step all is there."""
    model = build()
    optimizer = tfkfac.KFAC()
    model.compile(optimizer, loss(), run_eagerly=True)
    for report in (optimizer.summary, optimizer.state_bytes):
        with pytest.raises(ValueError, match=r"not built.*`model\.build"):
            report()
    model.train_on_batch(X, Y)
    assert list(blocks_of(optimizer)) == ["first", "second"]


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
def test_an_early_summary_does_not_switch_kfac_off() -> None:
    model = BuiltLate()
    optimizer = tfkfac.KFAC()
    model.compile(optimizer, loss(), run_eagerly=True)
    with contextlib.suppress(ValueError):
        optimizer.summary(print_fn=lambda text: None)
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["first", "second"]


def test_reports_before_a_first_step() -> None:
    """A built model has its factors at once: zeros."""
    optimizer = compiled_mlp().optimizer
    for block in optimizer.factors().values():
        assert not block["A"].any()
        assert not block["G"].any()
    late = tfkfac.KFAC()
    keras.Sequential([layers.Dense(2)]).compile(late)
    with pytest.raises(ValueError, match=r"no factors yet.*Train a step"):
        late.factors()
    for report in (tfkfac.KFAC().summary, tfkfac.KFAC().state_bytes):
        with pytest.raises(ValueError, match="does not know its model"):
            report()


# ------------------------------------------------------------------- bytes
@pytest.mark.parametrize(
    ("solver", "dtype", "factor", "inverse"),
    [
        ("inverse", "float32", None, None),
        ("eigen", "float64", None, None),
        ("eigen", "float32", "float16", None),
        ("inverse", "float32", None, "bfloat16"),
    ],
)
def test_state_bytes_are_those_of_the_variables(
    solver: str, dtype: str, factor: str | None, inverse: str | None
) -> None:
    keras.config.set_dtype_policy(dtype)
    try:
        tokens = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 4),
                layers.Conv1D(4, 2, groups=2),
                layers.BatchNormalization(),
                layers.SeparableConv1D(3, 2),
                layers.Flatten(),
                layers.Dense(2, use_bias=False),
            ]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = bind(
        tokens, solver=solver, factor_dtype=factor, inverse_dtype=inverse
    )
    state = curvature(optimizer)

    def real(kind: str, stored: str) -> int:
        found = [
            v for k, v in state.items() if k.split(":")[1].startswith(kind)
        ]
        assert all(v.dtype.name == stored for v in found)
        return sum(v.nbytes for v in found)

    got = optimizer.state_bytes()
    assert got == {
        "factors": real("factor_A", factor or dtype)
        + real("factor_G", factor or dtype),
        "decompositions": real("solver_", inverse or dtype),
        "total": got["factors"] + got["decompositions"],
    }
    assert got["factors"] > 0
    assert got["decompositions"] > 0
