"""The step does not depend on the scaling of the loss.

For means or sums over features or examples, constant factors and labels per
token, damping, clip and factors refer to the negative log-likelihood of a term,
`L = u (1/T) sum_t nll_t`. Expected factors are computed in NumPy.
"""

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
from tests.support.small import gradients_of

ROWS, FEATURES = 12, 4
LOSSES = keras.losses
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
REAL = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
BITS = (REAL > 0).astype("float32")
HOT = np.eye(FEATURES, dtype="float32")[RNG.integers(0, FEATURES, ROWS)]


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
            lambda y, p: tf.reduce_mean(tf.square(y - p)),
            lambda y, p: tf.reduce_sum(tf.square(y - p)),
            LOSSES.MeanSquaredError(reduction="none"),
            LOSSES.MeanSquaredError(reduction="sum"),
        ],
    ),
    "binary": (
        BITS,
        "sigmoid",
        [
            "binary_crossentropy",
            lambda y, p: 3 * FEATURES * LOSSES.binary_crossentropy(y, p),
            LOSSES.BinaryCrossentropy(reduction="sum"),
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
    """12 terms (labels per token), or the layer's leading dimension."""
    model = keras.Sequential([keras.Input((3, 4)), layers.Dense(2, name="d")])
    randomize(model)
    x = np.random.default_rng(2).normal(size=(4, 3, 4)).astype("float32")
    a, g = residuals(model, x, np.zeros((4, 3, 2)))
    optimizer = tfkfac.KFAC(step="natural").attach(model, loss_terms=terms)

    def loss(_: Any, p: Any) -> Any:
        """The mean of 12 terms, or their sum."""
        return tf.reduce_sum(tf.square(p)) / (2 if terms == 1 else 24)

    gradients = gradients_of(model, x, None, loss)
    optimizer.apply(gradients, model.trainable_variables)
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


HUBER = [
    huber,
    lambda y, p: tf.reduce_mean(huber(y, p)),
    lambda y, p: tf.reduce_sum(huber(y, p)),
]


@pytest.mark.parametrize("loss", [*HUBER, asserting])
def test_unknown_losses_have_unit_1(loss: Any) -> None:
    """A sum is treated as a mean times the number of examples."""
    y = REAL if loss in HUBER else np.full_like(REAL, 100)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(FEATURES, name="out")]
    )
    randomize(model)
    a = append_one(X.astype(np.float64))
    p = a @ np.vstack(weights_of(model))
    g = (np.clip(p - y, -0.5, 0.5) if loss in HUBER else 2 * p) / FEATURES
    _, optimizer = step_of(model, X, y, loss)
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "out"), *want)
