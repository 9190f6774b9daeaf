"""The step does not depend on the scaling of the loss.

For means or sums over features or examples, constant factors and labels per
token, damping, clip and factors refer to the negative log-likelihood of a term,
`L = u (1/T) sum_t nll_t`. Custom losses are compared with likelihoods. Expected
steps and factors are computed in NumPy.
"""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import (
    assert_close,
    check_factors,
    find,
    randomize,
    weights_of,
)
from tests.support.reference import Array, append_one, factors
from tests.support.small import gradients_of, summary_text

ROWS, FEATURES = 12, 4
LOSSES = keras.losses
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
REAL = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
BITS = (REAL > 0).astype("float32")
CLASSES = RNG.integers(0, FEATURES, ROWS)
HOT = np.eye(FEATURES, dtype="float32")[CLASSES]


def squares(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p), -1)


def smoothed(**options: Any) -> Any:
    return LOSSES.CategoricalCrossentropy(label_smoothing=0.1, **options)


# Labels, activation of the outputs, losses equal but for a constant.
SAME: dict[str, tuple[Array, str | None, list[Any]]] = {
    "square": (
        REAL,
        None,
        [
            "mse",
            lambda y, p: 17.0 * squares(y, p),
            LOSSES.MeanSquaredError(reduction="none"),
            lambda y, p: tf.reduce_sum(tf.square(y - p)),
        ],
    ),
    "binary": (
        BITS,
        "sigmoid",
        [
            "binary_crossentropy",
            lambda y, p: 3 * FEATURES * LOSSES.binary_crossentropy(y, p),
        ],
    ),
    "smoothed": (HOT, "softmax", [smoothed(), smoothed(reduction="sum")]),
}


def network(activation: str | None = None) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(6, activation="tanh", name="hidden"),
            layers.Dense(FEATURES, activation=activation, name="out"),
        ]
    )


def linear(activation: str | None = None) -> Any:
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(FEATURES, activation, name="d")]
    )
    randomize(model)
    return model


def step_of(
    model: Any,
    x: Any,
    y: Any,
    loss: Any,
    fisher: str | None = "empirical",
    **options: Any,
) -> tuple[list[Array], Any]:
    """Weight change of one step of `KFAC`, and the optimizer."""
    optimizer = tfkfac.KFAC(step="natural", fisher=fisher)
    model.compile(optimizer, loss, run_eagerly=True, **options)
    before = model.get_weights()
    model.train_on_batch(x, y)
    after = model.get_weights()
    moved = [a - b for a, b in zip(after, before, strict=True)]
    return moved, model.optimizer


def assert_same_step(got: list[Array], want: list[Array]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert np.linalg.norm(theirs) > 0
        assert_close(ours, theirs, 2e-5)


@pytest.mark.parametrize("case", SAME)
def test_constant_factors(case: str) -> None:
    """Steps are equal, also with sampled labels."""
    y, activation, (loss, *others) = SAME[case]
    for fisher, some in (("empirical", others), ("monte_carlo", others[-1:])):
        want, _ = step_of(network(activation), X, y, loss, fisher)
        for other in some:
            got, _ = step_of(network(activation), X, y, other, fisher)
            assert_same_step(got, want)


def test_loss_weights_are_constant_factors() -> None:
    def two() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        h = layers.Dense(6, activation="tanh")(inputs)
        return keras.Model(inputs, [layers.Dense(4)(h), layers.Dense(2)(h)])

    y, losses = [REAL, REAL[:, :2]], ["mse", "mse"]
    want, _ = step_of(two(), X, y, losses, loss_weights=[1.0, 2.0])
    got, _ = step_of(two(), X, y, losses, loss_weights=[10.0, 20.0])
    assert_same_step(got, want)
    # A negative loss has the negative step.
    got, _ = step_of(two(), X, y, losses, loss_weights=[-1.0, -2.0])
    assert_same_step([-g for g in got], want)


def residuals(model: Any, x: Array, y: Array) -> tuple[Array, Array]:
    """Rows of a model's only dense layer, with gradients of a squared error."""
    a = append_one(x.astype(np.float64))
    return a, a @ np.vstack(weights_of(model)) - y


MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], bool)


@pytest.mark.parametrize(
    ("case", "sharing"),
    [
        ("tokens", "reduce"),
        ("examples", "expand"),
        ("mask", "reduce"),
        ("weights", "expand"),
        ("sum", "expand"),
        ("open", "reduce"),
    ],
)
def test_terms_of_a_mean(case: str, sharing: str) -> None:
    """`G = T sum c c^T / u^2 = (1/T) sum g g^T`, g of each term."""
    width = 1 if case == "open" else 2
    inputs = keras.Input((None if case == "open" else 3, 4))
    h = layers.Masking()(inputs) if case == "mask" else inputs
    model = keras.Model(inputs, layers.Dense(width, name="block")(h))
    randomize(model)
    x = np.random.default_rng(2).normal(size=(4, 3, 4)).astype("float32")
    if case == "mask":
        x *= MASK[..., None]
    y = np.random.default_rng(3).normal(size=(4, 3, width)).astype("float32")
    a, g = residuals(model, x, y)
    weight = np.array([[1, 0, 2], [0.5, 1, 1], [0, 0, 1], [1, 1, 1]], "float32")
    options: dict[str, Any] = {}
    loss, keep, terms = "mse", None, 12.0
    if case == "examples":
        # One loss per example: its positions are outputs of one term.
        terms = 4

        def loss(y: Any, p: Any) -> Any:
            return tf.reduce_mean(tf.square(y - p), [1, 2])
    elif case == "mask":
        keep, terms = MASK, MASK.sum()
    elif case == "weights":
        g, keep = g * weight[..., None], weight > 0
        # T = (sum w)^2 / sum w^2, with c = w g / sum w.
        terms, options["sample_weight"] = np.sum(weight**2), weight
        loss = LOSSES.MeanSquaredError(reduction="mean_with_sample_weight")
    elif case == "sum":
        loss = LOSSES.MeanSquaredError(reduction="sum")
    elif case == "open":
        # Keras averages over the last axis, here the positions.
        y, terms = y[..., 0], 4
    if keep is not None:
        g = g * keep[..., None]
    model.compile(
        tfkfac.KFAC(step="natural", weight_sharing=sharing, fisher="empirical"),
        loss,
        run_eagerly=case != "weights",
    )
    model.train_on_batch(x, y, **options)
    want = factors(a, g, sharing, keep, terms)
    check_factors(find(model.optimizer.factors(), "block"), *want)


# ------------------------------------------------------------- custom loops
@pytest.mark.parametrize("terms", [1, 12, None, lambda: tf.constant(12)])
def test_loss_terms_of_a_custom_loop(terms: Any) -> None:
    """12 terms (labels per token), or the layer's leading dimension.

    The latter is an assumption, with one warning.
    """
    model = keras.Sequential([keras.Input((3, 4)), layers.Dense(2, name="d")])
    randomize(model)
    x = np.random.default_rng(2).normal(size=(4, 3, 4)).astype("float32")
    a, g = residuals(model, x, np.zeros((4, 3, 2)))
    optimizer = tfkfac.KFAC(0.0).attach(model, loss_terms=terms)

    def loss(_: Any, p: Any) -> Any:
        """The mean of 12 terms, or their sum."""
        return tf.reduce_sum(tf.square(p)) / (2 if terms == 1 else 24)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gradients = gradients_of(model, x, None, loss)
            optimizer.apply(gradients, model.trainable_variables)
    texts = [str(x.message) for x in caught]
    assert sum("1 for a sum" in text for text in texts) == (terms is None)
    # T sum c c^T with the gradient c of the loss.
    count = 4 if terms is None else 1 if terms == 1 else 12
    c = g if terms == 1 else g / 12
    want = factors(a, c * count, terms=count)
    check_factors(find(optimizer.factors(), "d"), *want)


def test_loss_terms_are_checked() -> None:
    for value in (0, -1, 2.5, "all", True):
        with pytest.raises((TypeError, ValueError), match="`loss_terms`"):
            tfkfac.KFAC(step="natural").attach(network(), loss_terms=value)


# ------------------------------------------------------------ unknown losses
def huber(y: Any, p: Any) -> Any:
    return LOSSES.huber(y, p, delta=0.5)


def asserting(y: Any, p: Any) -> Any:
    """A loss that fails on labels below 100."""
    tf.debugging.assert_greater(y, 99.0)
    return tf.reduce_mean(tf.square(p), -1)


def quartic(_: Any, p: Any) -> Any:
    return tf.reduce_sum(p**4) / FEATURES


def total_huber(y: Any, p: Any) -> Any:
    return tf.reduce_sum(huber(y, p))


@pytest.mark.parametrize("loss", [huber, total_huber, asserting, quartic])
def test_unknown_losses_have_unit_1(loss: Any) -> None:
    """A sum is treated as a mean times the number of examples."""
    y = np.full_like(REAL, 100) if loss is asserting else REAL
    model = linear()
    a = append_one(X.astype(np.float64))
    p = a @ np.vstack(weights_of(model))
    slopes = {asserting: 2 * p, quartic: 4 * p**3}
    g = slopes.get(loss, np.clip(p - y, -0.5, 0.5)) / FEATURES
    _, optimizer = step_of(model, X, y, loss)
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "d"), *want)


# ------------------------------------------------------- recognised losses
def lines_of(optimizer: Any) -> str:
    lines = summary_text(optimizer).splitlines()
    return "\n".join(line for line in lines if line.startswith("Loss '"))


def capped(y: Any, p: Any) -> Any:
    return tf.minimum(tf.reduce_mean((y - p) ** 2, -1), 20.0)


def bernoulli_of(y: Any, p: Any) -> Any:
    return -tf.reduce_sum(y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p), -1)


def categorical_of(y: Any, p: Any) -> Any:
    return -tf.reduce_sum(y * tf.math.log(p), -1)


def plain_sigmoid(x: Any) -> Any:
    """A sigmoid that, unlike Keras', does not keep the logits."""
    return tf.sigmoid(x)


def plain_softmax(x: Any) -> Any:
    return tf.nn.softmax(x)


def root(y: Any, p: Any) -> Any:
    return tf.sqrt(tf.reduce_mean((y - p) ** 2))


BINARY = LOSSES.binary_crossentropy
SPARSE = LOSSES.sparse_categorical_crossentropy
W = np.array([1, 1.1, 1, 1], "float32")
# Distribution: loss, labels, activation.
KNOWN: dict[str, tuple[Any, Any, Any]] = {
    "normal": (lambda y, p: tf.reduce_mean(squares(y, p)), REAL, None),
    "bernoulli": (bernoulli_of, BITS, plain_sigmoid),
    "bernoulli, Keras'": (lambda y, p: 4 * BINARY(y, p), BITS, "sigmoid"),
    "categorical": (categorical_of, HOT, plain_softmax),
    "categorical, Keras'": (
        lambda y, p: SPARSE(y, p) / 7,
        CLASSES[:, None],
        "softmax",
    ),
}
weighted = tf.nn.weighted_cross_entropy_with_logits
BETA = tf.Variable(3.0, trainable=False)
COUNT = tf.Variable(0.0, trainable=False)


def counting(y: Any, p: Any) -> Any:
    COUNT.assign_add(1.0)
    return squares(y, p)


@tf.function(autograph=False)
def nested(y: Any, p: Any) -> Any:
    return BETA * squares(y, p)


def unlabelled(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(p)) + 0 * tf.reduce_sum(y)


# Distribution: loss, labels.
OTHERS: dict[str, tuple[Any, Any]] = {
    "location, root": (root, REAL),
    "location, weighted features": (lambda y, p: squares(W * y, W * p), REAL),
    "location, bounded": (capped, REAL),
    "location, Huber": (huber, REAL),
    "normal, and a constant": (lambda y, p: squares(y, p) + 0.1, REAL),
    "normal, variable": (lambda y, p: nested(y, p), REAL),
    "normal, written variable": (counting, REAL),
    "normal, without labels": (unlabelled, np.ones((ROWS, 2))),
    "no likelihood": (lambda y, p: weighted(y, p, 10.0), BITS),
    "no likelihood, print": (
        lambda y, p: [tf.print(""), squares(y, p)][1],
        REAL,
    ),
    "no likelihood, assertion": (asserting, np.full_like(REAL, 100)),
}


@pytest.mark.parametrize("name", [*KNOWN, *OTHERS])
def test_recognised_distributions(name: str) -> None:
    loss, y, *activation = (KNOWN | OTHERS)[name]
    model = linear(*activation)
    # Eager, as a graph takes longer, but for one of both tables.
    eager = name not in ("normal", "no likelihood, assertion")
    model.compile(tfkfac.KFAC(step="natural"), loss, run_eagerly=eager)
    size = ROWS if eager else ROWS - 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, y, size, verbose=0)
    distribution = name.partition(",")[0]
    assert f"taken for: {distribution}" in lines_of(model.optimizer)
    is_unknown = distribution == "no likelihood"
    texts = [str(x.message) for x in caught]
    assert any("no known likelihood" in x for x in texts) == is_unknown


def test_gauss_newton_with_an_unknown_loss() -> None:
    """GaussNewton warns of an unknown loss and still decreases it."""
    model = linear()
    model.compile(
        tfkfac.GaussNewton(), lambda y, p: root(y, p) + root(y, 0.9 * p)
    )
    x, y = X[:8], REAL[:8]
    with pytest.warns(UserWarning, match="no known likelihood"):
        losses = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


# ------------------------------------------------------------- state of a loss
class Stateful(LOSSES.Loss):
    """An unhashable loss with a counter, an average and random numbers."""

    def __init__(self, in_function: bool) -> None:
        super().__init__(name="stateful")
        self.calls = tf.Variable(0.0, trainable=False)
        self.average = tf.Variable(tf.zeros([FEATURES]), trainable=False)
        self.noise = tf.random.Generator.from_seed(3)
        self.seeds = keras.random.SeedGenerator(5)
        self.update = tf.function(self._update) if in_function else self._update

    def _update(self, y: Any) -> Any:
        self.calls.assign_add(1.0)
        self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(y, 0))
        return 0.0

    def call(self, y: Any, p: Any) -> Any:
        self.update(y)
        noise = 1e-3 * self.noise.normal([])
        noise += 1e-3 * keras.random.normal((), seed=self.seeds)
        return squares(y, p) * (1 + noise)

    def state(self) -> list[Array]:
        values = self.calls, self.average, self.noise.state, self.seeds.state
        return [np.array(value) for value in values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stateful)

    __hash__ = None  # type: ignore[assignment]


def small_fosi() -> tfkfac.FOSI:
    return tfkfac.FOSI("sgd", num_largest=1, warmup_steps=1, lanczos_steps=4)


@pytest.mark.parametrize(
    ("make", "in_function", "eager"),
    [
        (tfkfac.KFAC, True, False),
        (small_fosi, True, False),
        (tfkfac.GaussNewton, False, True),
    ],
)
def test_state_of_a_loss_equals_that_with_sgd(
    make: Any, in_function: bool, eager: bool
) -> None:
    """The loss is called once per step."""
    states = []
    for optimizer in ("sgd", make()):
        loss = Stateful(in_function)
        model = linear()
        model.compile(optimizer, loss, run_eagerly=eager)
        for _ in range(2):
            model.train_on_batch(X, REAL)
        states.append(loss.state())
    assert states[0][0] == 2
    for want, got in zip(*states, strict=True):
        np.testing.assert_array_equal(got, want)


def test_percentages_equal_relative_errors() -> None:
    """Keras' loss is `100 / D` times the sum of the relative errors."""

    def relative(y: Any, p: Any) -> Any:
        return tf.reduce_sum(tf.abs((y - p) / y), -1)

    got, _ = step_of(network(), X, 1 + BITS, "mape")
    want, _ = step_of(network(), X, 1 + BITS, relative)
    assert_same_step(got, want)


def test_the_unit_of_the_circle_loss_is_gamma() -> None:
    """Damping 0.01 is that of cosine distances."""
    labels = CLASSES[:, None]
    got, _ = step_of(network(), X, labels, LOSSES.Circle(gamma=80.0))

    def part(y: Any, p: Any) -> Any:
        values = LOSSES.circle(y, p, gamma=80.0)
        scaled = values / 80
        scaled._keras_mask = values._keras_mask
        return scaled

    with pytest.warns(UserWarning, match="no known likelihood"):
        want, _ = step_of(network(), X, labels, part)
    assert_same_step(got, want)
