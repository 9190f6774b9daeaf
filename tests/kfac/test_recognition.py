"""Custom losses are compared with likelihoods in every batch.

Steps and factors equal dense NumPy references. Losses are not called again,
and their state is as with SGD.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, check_factors, find, randomize
from tests.support.marks import with_slow
from tests.support.reference import (
    Array,
    append_one,
    factors,
    inverse_solve,
    softmax,
)
from tests.support.summaries import sequential

ROWS, FEATURES = 8, 3
LOSSES = keras.losses
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
REAL = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
BITS = (REAL > 0).astype("float32")
CLASSES = RNG.integers(0, FEATURES, ROWS)
HOT = np.eye(FEATURES, dtype="float32")[CLASSES]
DAMPING = 0.01


def linear(activation: str | None = None) -> Any:
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(FEATURES, activation, name="d")]
    )
    randomize(model)
    return model


def matrix(model: Any) -> Array:
    """Kernel and bias of a dense layer, as one matrix."""
    return np.vstack(model.get_weights()).astype(np.float64)


def plain_kfac() -> tfkfac.KFAC:
    """KFAC whose weight change is minus the preconditioned gradient."""
    return tfkfac.KFAC(
        keras.optimizers.SGD(1.0),
        kl_clip=None,
        fisher="type2",
        damping=DAMPING,
    )


def squares(y: Any, p: Any) -> Any:
    return tf.reduce_sum(tf.square(y - p), -1)


def lines_of(optimizer: Any) -> str:
    texts: list[str] = []
    optimizer.summary(texts.append)
    return "\n".join(x for x in texts[0].split("\n") if x.startswith("Loss '"))


# ------------------------------------------------------------- weight changes
def step_from(model: Any, slopes: Array, G: Array) -> Array:
    """`(A + pi sqrt(d))^-1 W (G + sqrt(d)/pi)^-1` of slopes of mean nll."""
    a = append_one(X.astype(np.float64))
    return inverse_solve(a.T @ slopes / ROWS, a.T @ a / ROWS, G, DAMPING)


def test_the_weight_of_a_loss_may_change() -> None:
    """A squared error is 2 nll; G of sampled labels is I."""
    beta = tf.Variable(0.01, trainable=False)
    model = linear()
    model.compile(
        plain_kfac(), lambda y, p: tf.reduce_mean(beta * squares(y, p))
    )
    for weight in (0.01, 100.0, 7.0):
        beta.assign(weight)
        before = matrix(model)
        slopes = append_one(X) @ before - REAL
        model.train_on_batch(X, REAL)
        moved = before - matrix(model)
        assert_close(moved, step_from(model, slopes, np.eye(FEATURES)), 2e-5)
    assert model.optimizer.events() == {}
    assert "normal in 3 steps; unit 14 in the last" in lines_of(model.optimizer)


# --------------------------------------------------- distribution of each batch
def capped(y: Any, p: Any) -> Any:
    return tf.minimum(tf.reduce_mean((y - p) ** 2, -1), 20.0)


@pytest.mark.parametrize("outlier", [False, True])
def test_a_square_for_small_residuals_only(outlier: bool, capfd: Any) -> None:
    """With an outlier u = 1 and G is empirical; else u = 2/D."""
    model = linear()
    model.compile(plain_kfac(), capped)
    y = REAL.copy()
    y[2] += 40.0 * outlier
    before = matrix(model)
    r = append_one(X.astype(np.float64)) @ before - y
    model.train_on_batch(X, y)
    moved = before - matrix(model)
    G = np.eye(FEATURES)
    if outlier:
        r = 2 * r / FEATURES * (np.mean(r**2, -1) < 20)[:, None]
        G = r.T @ r / ROWS
    assert_close(find(model.optimizer.factors(), "d")["G"], G, 1e-5)
    assert_close(moved, step_from(model, r, G), 1e-4)
    assert sum(model.optimizer.events().values()) == outlier
    assert ("no likelihood" in capfd.readouterr().err) == outlier


def bernoulli_of(y: Any, p: Any) -> Any:
    return -tf.reduce_sum(y * tf.math.log(p) + (1 - y) * tf.math.log(1 - p), -1)


def categorical_of(y: Any, p: Any) -> Any:
    return -tf.reduce_sum(y * tf.math.log(p), -1)


def classes_of(y: Any, p: Any) -> Any:
    y = tf.cast(y, "int32")
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, p)


def plain_sigmoid(x: Any) -> Any:
    """A sigmoid that, unlike Keras', does not keep the logits."""
    return tf.sigmoid(x)


def plain_softmax(x: Any) -> Any:
    return tf.nn.softmax(x)


def root(y: Any, p: Any) -> Any:
    return tf.sqrt(tf.reduce_mean((y - p) ** 2))


BINARY = LOSSES.binary_crossentropy
SPARSE = LOSSES.sparse_categorical_crossentropy
W = np.array([1, 1.1, 1], "float32")
# Distribution: loss, labels, activation.
KNOWN: dict[str, tuple[Any, Any, Any]] = {
    "normal": (lambda y, p: tf.reduce_mean(squares(y, p)), REAL, None),
    "bernoulli logits": (tf.nn.sigmoid_cross_entropy_with_logits, BITS, None),
    "bernoulli": (bernoulli_of, BITS, plain_sigmoid),
    "bernoulli, Keras'": (lambda y, p: 4 * BINARY(y, p), BITS, "sigmoid"),
    "categorical logits": (classes_of, CLASSES, None),
    "categorical": (categorical_of, HOT, plain_softmax),
    "categorical, Keras'": (
        lambda y, p: SPARSE(y, p) / 7,
        CLASSES[:, None],
        "softmax",
    ),
}
weighted = tf.nn.weighted_cross_entropy_with_logits
UNKNOWN: dict[str, tuple[Any, Any]] = {
    "root": (root, REAL),
    "weighted features": (lambda y, p: squares(W * y, W * p), REAL),
    "squares and more": (lambda y, p: squares(y, p) + 0.1, REAL),
    "weighted classes": (lambda y, p: weighted(y, p, 10.0), BITS),
}


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_recognised_distributions(name: str) -> None:
    """The recognised distribution in each batch, for one example or many."""
    loss, y, *activation = (KNOWN | UNKNOWN)[name]
    model = linear(*activation)
    model.compile(tfkfac.KFAC(step="natural"), loss, run_eagerly=True)
    data = tf.data.Dataset.from_tensor_slices((X, y)).batch(ROWS - 1)
    model.fit(data, verbose=0)
    line = lines_of(model.optimizer)
    if name in UNKNOWN:
        assert "no likelihood in 2 steps; unit 1 in the last" in line
        assert sum(model.optimizer.events().values()) == 2
    else:
        distribution = name.partition(",")[0]
        assert f"taken for: {distribution} in 2 steps" in line
        assert model.optimizer.events() == {}


def test_labels_of_other_shapes_than_outputs() -> None:
    """Labels whose shapes do not match the outputs, varying by batch."""

    def loss(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.square(p)) + 0 * tf.reduce_sum(y)

    model = keras.Sequential(
        [keras.Input((None, 4)), layers.Dense(FEATURES, name="d")]
    )
    model.compile(tfkfac.KFAC(step="natural"), loss)

    def batches() -> Any:
        for n, m in ((2, 3), (3, 2)):
            yield np.ones((2, n, 4)), np.ones((2, m, FEATURES))

    spec = tuple(
        tf.TensorSpec((None, None, n), "float32") for n in (4, FEATURES)
    )
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model.fit(data, verbose=0)
    # Keras 3.16 traces a batch whose shapes do not match.
    assert "no likelihood in " in lines_of(model.optimizer)


def test_masked_labels_are_ignored() -> None:
    """Masked labels do not count in the comparison."""
    x = RNG.normal(size=(ROWS, 5, 4)).astype("float32")
    x[:, 3:] = 0
    y = RNG.normal(size=(ROWS, 5, FEATURES)).astype("float32")
    y[:, 3:] = 1e3

    def loss(y: Any, p: Any) -> Any:
        return 5 * tf.minimum(squares(y, p), 1e3)

    model = keras.Sequential(
        [keras.Input((5, 4)), layers.Masking(), layers.Dense(FEATURES)]
    )
    model.compile(tfkfac.KFAC(step="natural"), loss, run_eagerly=True)
    model.train_on_batch(x, y)
    line = lines_of(model.optimizer)
    assert "normal in 1 steps; unit 10 in the last" in line


def test_gauss_newton_with_an_unknown_loss() -> None:
    """GaussNewton warns of an unknown loss and still decreases it."""
    model = linear()
    model.compile(tfkfac.GaussNewton(), root)
    losses = model.fit(X, REAL, epochs=10, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert sum(model.optimizer.events().values()) >= 10


# -------------------------------------------------------------- sample weights
def test_mean_with_sample_weight() -> None:
    """The step does not depend on the scale of the weights."""
    weights = RNG.uniform(0.5, 2, ROWS)
    a = append_one(X.astype(np.float64))
    for scale in (1.0, 100.0):
        model = linear()
        model.compile(
            tfkfac.KFAC(step="natural", fisher="type2"),
            LOSSES.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            run_eagerly=True,
        )
        p = softmax(a @ matrix(model))
        model.train_on_batch(X, CLASSES, sample_weight=scale * weights)
        w = weights[:, None]
        G = (np.diag((w * p).sum(0)) - (w * p).T @ p) / w.sum()
        check_factors(find(model.optimizer.factors(), "d"), a.T @ a / ROWS, G)


def test_sample_weights_weigh_rows_of_a_large_loss() -> None:
    """G has the rows `w (p - y)`, also for losses of thousands of nats."""
    w = np.where(CLASSES == 1, 1000.0, 1.0)
    model = linear()
    model.compile(
        tfkfac.KFAC(step="natural"),
        LOSSES.SparseCategoricalCrossentropy(from_logits=True),
        run_eagerly=True,
    )
    a = append_one(1000 * X.astype(np.float64))
    p = softmax(a @ matrix(model))
    model.train_on_batch(1000 * X, CLASSES, sample_weight=w)
    want = factors(a[:, None], (w[:, None] * (p - HOT))[:, None])
    check_factors(find(model.optimizer.factors(), "d"), *want)


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


OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "KFAC": (tfkfac.KFAC, "plain"),
    "FOSI": (
        lambda: tfkfac.FOSI(
            "sgd", num_largest=1, warmup_steps=1, lanczos_steps=4
        ),
        "in a function",
    ),
    "GaussNewton": (tfkfac.GaussNewton, "eager"),
}


@pytest.mark.parametrize("name", with_slow(OPTIMIZERS, "FOSI", "GaussNewton"))
def test_state_of_a_loss_equals_that_with_sgd(name: str) -> None:
    """The loss is called once per step."""
    states = []
    make, way = OPTIMIZERS[name]
    for optimizer in ("sgd", make()):
        loss = Stateful(way == "in a function")
        model = linear()
        model.compile(optimizer, loss, run_eagerly=way == "eager")
        for _ in range(3):
            model.train_on_batch(X, REAL)
        states.append(loss.state())
    assert states[0][0] == 3
    for want, got in zip(*states, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_loss_may_call_the_model() -> None:
    """A loss may call the model; moving averages equal SGD's."""
    averages = []
    for make in (keras.optimizers.SGD, tfkfac.KFAC):
        keras.utils.set_random_seed(0)
        norm = layers.Dense(5, "tanh"), layers.BatchNormalization()
        model = sequential(*norm, layers.Dense(FEATURES), shape=(4,))

        def loss(y: Any, p: Any, model: Any = model) -> Any:
            more = model(2 * X[::-1], training=True)
            return squares(y, p) + 0.1 * tf.reduce_mean(tf.square(more))

        model.compile(make(0.0), loss)
        for _ in range(2):
            model.train_on_batch(X, REAL)
        averages.append([v.numpy() for v in model.non_trainable_variables])
    for want, got in zip(*averages, strict=True):
        assert_close(got, want, 1e-6)
