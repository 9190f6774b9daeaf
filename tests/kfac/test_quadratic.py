"""Steps by the quadratic model, against dense matrices in NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.harness import randomize
from tests.support.marks import with_slow
from tests.support.options import kfac as options_kfac
from tests.support.reference import Array, inverse_solve
from tests.support.small import summary_text
from tfkfac.kfac.length import AdaptiveDamping

ROWS, FEATURES, OUTPUTS, DAMPING = 6, 4, 3, 0.05
RNG = np.random.default_rng(0)


# ------------------------------------------------------------ a dense model
@dataclasses.dataclass(frozen=True)
class Kind:
    """A loss: its last activation, labels, Hessian and unit.

    Attributes:
        loss: For `compile`.
        activation: Of the last layer.
        labels: Of some rows.
        hessian: With respect to what the loss reads, of one row: a function
            of the outputs and the labels, before the mean over the rows.
        unit: What it is of a negative log-likelihood.
        reads_logits: Whether that is the input of the activation.
    """

    loss: Any
    activation: str | None
    labels: Callable[[int], Array]
    hessian: Callable[[Array, Array], Array]
    unit: float
    reads_logits: bool = False


def real(rows: int) -> Array:
    return RNG.normal(size=(rows, OUTPUTS))


def binary(rows: int) -> Array:
    return RNG.integers(0, 2, (rows, OUTPUTS)).astype(float)


def classes(rows: int) -> Array:
    return RNG.integers(0, OUTPUTS, rows)


def hot(rows: int) -> Array:
    return np.eye(OUTPUTS)[classes(rows)]


def counts(rows: int) -> Array:
    return RNG.poisson(2.0, (rows, OUTPUTS)).astype(float)


def multinomial(p: Array, _: Array) -> Array:
    return np.diag(p) - np.outer(p, p)


def softmax(z: Array, _: Array) -> Array:
    p = np.exp(z - z.max())
    return multinomial(p / p.sum(), _)


def logistic(z: Array, _: Array) -> Array:
    p = 1 / (1 + np.exp(-z))
    return np.diag(p * (1 - p)) / OUTPUTS


def square(_: Array, __: Array) -> Array:
    return 2 / OUTPUTS * np.eye(OUTPUTS)


BCE = keras.losses.BinaryCrossentropy
CCE = keras.losses.CategoricalCrossentropy
SCCE = keras.losses.SparseCategoricalCrossentropy
KINDS = {
    "mse": Kind("mse", None, real, square, 2 / OUTPUTS),
    "mse of sigmoid": Kind("mse", "sigmoid", real, square, 2 / OUTPUTS),
    "bce, logits": Kind(
        BCE(from_logits=True, dtype="float64"),
        None,
        binary,
        logistic,
        1 / OUTPUTS,
    ),
    "bce": Kind(
        "binary_crossentropy",
        "sigmoid",
        binary,
        lambda p, _: np.diag(p * (1 - p)) / OUTPUTS,
        1 / OUTPUTS,
        True,
    ),
    "cce, logits": Kind(
        CCE(from_logits=True, dtype="float64"), None, hot, softmax, 1.0
    ),
    "cce": Kind(
        CCE(label_smoothing=0.1, dtype="float64"),
        "softmax",
        hot,
        multinomial,
        1.0,
        True,
    ),
    "scce, logits": Kind(
        SCCE(from_logits=True, dtype="float64"), None, classes, softmax, 1.0
    ),
    "scce": Kind(
        "sparse_categorical_crossentropy",
        "softmax",
        classes,
        multinomial,
        1.0,
        True,
    ),
    "poisson": Kind(
        "poisson",
        "softplus",
        counts,
        lambda p, y: np.diag(y / (p + 1e-7) ** 2) / OUTPUTS,  # as in Keras
        1 / OUTPUTS,
    ),
}


def network(activation: str | None = None, **kwargs: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5, activation="tanh", name="hidden", **kwargs),
            layers.Dense(OUTPUTS, activation=activation, name="out"),
        ]
    )
    randomize(model)
    return model


def kfac(**kwargs: Any) -> tfkfac.KFAC:
    """Factors and inverses of every step, on the whole batch."""
    options = {
        "step": "quadratic",
        "damping": DAMPING,
        "quadratic_batch_fraction": 1.0,
        "factor_update_interval": 1,
        "inverse_update_interval": 1,
    }
    return options_kfac(**(options | kwargs))


def flat(parts: Any) -> Array:
    return np.concatenate([np.ravel(np.asarray(p)) for p in parts])


def loss_of(model: Any, x: Array, y: Array) -> float:
    return float(model.compute_loss(x, y, model(x, training=True)))


def gradient_of(model: Any, x: Array, y: Array) -> Array:
    """That of the compiled loss, regularisers included."""
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = model.compute_loss(x=x, y=y, y_pred=outputs)
    return flat(
        tape.gradient(loss, [v.value for v in model.trainable_variables])
    )


# Derivatives of the last activation where the loss reads what it returns.
SLOPES: dict[Any, Callable[[Array], Array]] = {
    None: np.ones_like,
    "sigmoid": lambda z: np.exp(-z) / (1 + np.exp(-z)) ** 2,
    "softplus": lambda z: 1 / (1 + np.exp(-z)),
}


def gauss_newton(model: Any, kind: Kind, x: Array, y: Array) -> Array:
    """The dense matrix, of the mean over the rows."""
    first, bias, second, shift = model.get_weights()
    total = np.zeros([model.count_params()] * 2)
    outputs = np.asarray(model(x))
    for row, p, label in zip(x, outputs, y, strict=True):
        h = np.tanh(row @ first + bias)
        inner = second.T * (1 - h**2)  # d logits / d pre-activations
        identity = np.eye(OUTPUTS)
        J = np.concatenate(
            [
                np.einsum("oj,i->oij", inner, row).reshape(OUTPUTS, -1),
                inner,
                np.einsum("ok,j->ojk", identity, h).reshape(OUTPUTS, -1),
                identity,
            ],
            1,
        )
        if not kind.reads_logits:
            J *= SLOPES[kind.activation](h @ second + shift)[:, None]
        total += J.T @ kind.hessian(p, label) @ J
    return total / len(x)


def preconditioned(
    optimizer: Any, gradient: Array, unit: float, damping: float
) -> Array:
    """The negative gradient by the factors that the optimizer has."""
    parts, place = [], 0
    sizes = {"hidden": (FEATURES, 5), "out": (5, OUTPUTS)}
    for path, found in optimizer.factors().items():
        inputs, outputs = sizes[path.rpartition("/")[2]]
        size = (inputs + 1) * outputs
        W = gradient[place : place + size].reshape(inputs + 1, outputs) / unit
        parts.append(-inverse_solve(W, found["A"], found["G"], damping))
        place += size
    return flat(parts)


def assert_weights(model: Any, want: Array) -> None:
    np.testing.assert_allclose(
        flat(model.get_weights()), want, rtol=1e-6, atol=1e-7
    )


# ------------------------------------------------------------ the exact step
@pytest.mark.parametrize(
    "name",
    with_slow(KINDS, *(k for k in KINDS if k not in ("mse", "bce"))),
)
def test_against_dense_matrices(name: str) -> None:
    """Several steps: alpha, mu, predicted reduction and the weights."""
    kind = KINDS[name]
    rate = 0.5 if name == "mse" else 1.0
    with floats("float64"):
        model = network(kind.activation)
        optimizer = kfac(learning_rate=rate)
        # The step is the same in a graph, which takes longer to trace.
        model.compile(optimizer, kind.loss, run_eagerly=name != "mse")
        before = np.zeros(model.count_params())
        for step in range(3):
            x, y = RNG.normal(size=(ROWS, FEATURES)), kind.labels(ROWS)
            start, W = flat(model.get_weights()), gradient_of(model, x, y)
            F = gauss_newton(model, kind, x, y) / kind.unit
            F += DAMPING * np.eye(len(F))
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit, DAMPING)
            D = np.stack([delta, before][: 1 + (step > 0)], 1)
            found = -np.linalg.solve(D.T @ F @ D, D.T @ W / kind.unit)
            before = D @ found
            got = optimizer.last_step
            assert got["alpha"] == pytest.approx(found[0], rel=1e-6)
            mu = found[1] if step else 0
            assert got["mu"] == pytest.approx(mu, rel=1e-5)
            d = rate * before
            predicted = -(W @ d + kind.unit * d @ F @ d / 2)
            assert got["predicted_reduction"] == pytest.approx(predicted, 1e-6)
            assert got["damping"] == DAMPING
            assert "actual_reduction" not in got
            assert_weights(model, start + d)


def test_a_quadratic_problem_is_solved_along_the_direction() -> None:
    """A linear model: nothing smaller lies in the directions of a step."""
    x, y = RNG.normal(size=(12, FEATURES)), RNG.normal(size=(12, 2))
    with floats("float64"):
        model = keras.Sequential(
            [keras.Input((FEATURES,)), layers.Dense(2, name="out")]
        )
        randomize(model)
        optimizer = kfac(damping=0.0, solver="eigen")
        model.compile(optimizer, "mse", run_eagerly=True)
        last: Array | None = None
        for _ in range(3):
            before, loss = (
                flat(model.get_weights()),
                loss_of(model, x, y),
            )
            model.train_on_batch(x, y)
            change = flat(model.get_weights()) - before
            slope = gradient_of(model, x, y)
            scale = np.linalg.norm(change)
            assert abs(slope @ change) < 1e-9 * scale
            if last is not None:
                assert abs(slope @ last) < 1e-9 * scale
            last = change
            fallen = loss - loss_of(model, x, y)
            got = optimizer.last_step["predicted_reduction"]
            assert got == pytest.approx(fallen, rel=1e-6)


def test_regularisers_are_part_of_the_model() -> None:
    """A penalty of l2 |w|^2 has the Hessian 2 l2 I."""
    x, y = RNG.normal(size=(ROWS, FEATURES)), real(ROWS)
    kind, l2 = KINDS["mse"], 0.3
    with floats("float64"):
        model = network(kernel_regularizer=keras.regularizers.L2(l2))
        optimizer = kfac()
        model.compile(optimizer, kind.loss, run_eagerly=True)
        W = gradient_of(model, x, y)
        F = gauss_newton(model, kind, x, y)
        kernel = FEATURES * 5
        F[range(kernel), range(kernel)] += 2 * l2
        F = F / kind.unit + DAMPING * np.eye(len(F))
        model.train_on_batch(x, y)
        delta = preconditioned(optimizer, W, kind.unit, DAMPING)
    alpha = -delta @ W / kind.unit / (delta @ F @ delta)
    assert optimizer.last_step["alpha"] == pytest.approx(alpha, rel=1e-6)


def test_weights_without_a_block_have_their_own_step_size() -> None:
    kind = KINDS["mse"]
    with floats("float64"):
        model = network()
        optimizer = kfac(skip_layers=["out"])
        model.compile(optimizer, kind.loss, run_eagerly=True)
        before = np.zeros(model.count_params())
        cut = (FEATURES + 1) * 5
        for step in range(3):
            x, y = RNG.normal(size=(ROWS, FEATURES)), real(ROWS)
            start, W = flat(model.get_weights()), gradient_of(model, x, y)
            F = gauss_newton(model, kind, x, y) / kind.unit
            F += DAMPING * np.eye(len(F))
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit, DAMPING)
            delta = np.append(delta, np.zeros(len(W) - cut))
            plain = np.append(np.zeros(cut), -W[cut:] / kind.unit)
            D = np.stack([delta, plain, before][: 2 + (step > 0)], 1)
            found = -np.linalg.solve(D.T @ F @ D, D.T @ W / kind.unit)
            before = D @ found
            names = ["alpha", "alpha_plain", "mu"][: len(found)]
            got = [optimizer.last_step[name] for name in names]
            np.testing.assert_allclose(got, found, rtol=1e-5)
            assert_weights(model, start + before)
    assert "Moved along their gradients" in summary_text(optimizer)
    assert "Left to the inner optimizer" not in summary_text(optimizer)


def test_part_of_the_batch() -> None:
    """A quarter of twelve rows: three, evenly spaced, others in each step."""
    kind = KINDS["scce"]
    with floats("float64"):
        model = network(kind.activation)
        optimizer = kfac(quadratic_batch_fraction=0.25)
        model.compile(optimizer, kind.loss, run_eagerly=True)
        for step in range(2):
            x, y = RNG.normal(size=(12, FEATURES)), kind.labels(12)
            before = flat(optimizer.method.states[0].previous.changes)
            W = gradient_of(model, x, y)
            rows = (3 * step + np.arange(3) * 12) // 3
            F = gauss_newton(model, kind, x[rows], y[rows])
            F += DAMPING * np.eye(len(F))
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit, DAMPING)
            D = np.stack([delta, before][: 1 + (step > 0)], 1)
            found = -np.linalg.solve(D.T @ F @ D, D.T @ W)
            got = optimizer.last_step
            assert got["alpha"] == pytest.approx(found[0], rel=1e-6)
            if step:
                assert got["mu"] == pytest.approx(found[1], rel=1e-5)


def test_small_batches_are_taken_whole() -> None:
    """The default is a quarter, but at least 64 examples."""
    x, y = RNG.normal(size=(12, FEATURES)), KINDS["scce"].labels(12)
    found = []
    for options in ({}, {"quadratic_batch_fraction": 1.0}):
        with floats("float64"):
            model = network()
            optimizer = options_kfac(step="quadratic", **options)
            loss = KINDS["scce"].loss
            model.compile(optimizer, loss, run_eagerly=True)
            model.train_on_batch(x, y)
        found.append(optimizer.last_step["alpha"])
    assert found[0] == found[1]


@pytest.mark.slow
def test_sums_and_means_make_the_same_steps() -> None:
    """Also where a part of the batch stands for all of a sum."""
    weights = []
    for reduction in ("sum_over_batch_size", "sum"):
        with floats("float64"):
            model = network()
            optimizer = kfac(quadratic_batch_fraction=0.5)
            loss = keras.losses.MeanSquaredError(reduction, dtype="float64")
            model.compile(optimizer, loss, run_eagerly=True)
            rng = np.random.default_rng(5)
            for _ in range(3):
                x = rng.normal(size=(ROWS, FEATURES))
                y = rng.normal(size=(ROWS, OUTPUTS))
                model.train_on_batch(x, y)
        weights.append(flat(model.get_weights()))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-9)


# -------------------------------------------------------- Levenberg-Marquardt
def test_rule_by_hand() -> None:
    """Ratios 1, 1/2, 1/8, -1, not finite, and those that leave the limits."""
    rule = tfkfac.LevenbergMarquardt(1.0, 2, 0.5, minimum=0.1, maximum=20.0)
    damping = AdaptiveDamping(rule)

    def judge(after: float, predicted: float = 1.0) -> tuple[bool, float]:
        ends = [tf.constant(v, tf.float64) for v in (10.0, after, predicted)]
        accepted = bool(damping.judge(*ends, "test"))
        return accepted, float(damping.value)

    def is_due(clock: int, predicted: float = 1.0) -> bool:
        promise = tf.constant(predicted, tf.float64)
        return bool(damping.is_due(tf.constant(clock), promise))

    assert [is_due(i) for i in range(4)] == [False, True, False, True]
    assert judge(9.0) == (True, 0.25)
    assert judge(9.5) == (True, 0.25)
    assert judge(9.875) == (True, 1.0)
    assert judge(11.0) == (False, 4.0)
    assert is_due(0)
    assert judge(float("nan")) == (False, 16.0)
    assert judge(float("inf")) == (False, 20.0)
    assert judge(9.0) == (True, 5.0)
    assert not is_due(0)
    for _ in range(4):
        judge(9.0)
    assert float(damping.value) == 0.1
    # A change within rounding, and none that was predicted.
    assert judge(10.0 + 1e-7, 1e-9)[0]
    assert not judge(11.0, -1.0)[0]
    assert int(damping.rejected) == 4


def test_promises_that_nobody_has_seen_kept() -> None:
    """Over four times that of the last accepted look, whatever came since."""
    damping = AdaptiveDamping(tfkfac.LevenbergMarquardt(1.0, 2))

    def is_due(predicted: float) -> bool:
        promise = tf.constant(predicted, tf.float64)
        return bool(damping.is_due(tf.constant(0), promise))

    def judge(after: float, predicted: float) -> None:
        ends = [tf.constant(v, tf.float64) for v in (10.0, after, predicted)]
        damping.judge(*ends, "test")

    assert not is_due(1e9)  # before the first look
    judge(9.0, 0.5)
    assert not is_due(2.0)
    assert is_due(2.01)
    judge(11.0, 3.0)  # rejected
    judge(9.9, 0.1)
    assert not is_due(0.4)
    assert is_due(0.41)


def test_a_step_that_promises_much_is_looked_at() -> None:
    """Between two looks: a batch of outputs a hundred times as large."""
    model = network()
    optimizer = kfac(damping=tfkfac.LevenbergMarquardt(0.1, 2))
    model.compile(optimizer, "mse", run_eagerly=True)
    x = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
    y = real(ROWS)
    looks = []
    for size in (1, 1, 1, 1, 100):
        model.train_on_batch(x, size * y)
        looks.append("actual_reduction" in optimizer.last_step)
    assert looks == [False, True, False, True, True]


def test_damping_follows_the_loss() -> None:
    """Every second step: the ratio from losses that Keras computes."""
    kind, rule = KINDS["scce"], tfkfac.LevenbergMarquardt(0.1, 2, 0.5)
    with floats("float64"):
        model = network(kind.activation)
        optimizer = kfac(damping=rule)
        model.compile(optimizer, kind.loss, run_eagerly=True)
        damping, x, y = 0.1, RNG.normal(size=(ROWS, FEATURES)), classes(ROWS)
        seen = []
        for step in range(8):
            before = loss_of(model, x, y)
            model.train_on_batch(x, y)
            reduction, got = before - loss_of(model, x, y), optimizer.last_step
            assert got["damping"] == pytest.approx(damping, rel=1e-12)
            assert ("actual_reduction" in got) == (step % 2 == 1)
            if step % 2:
                actual = got["actual_reduction"]
                assert actual == pytest.approx(reduction, rel=1e-6)
                ratio = reduction / got["predicted_reduction"]
                seen.append(ratio)
                damping *= 0.25 if ratio > 0.75 else 4 if ratio < 0.25 else 1
    assert min(seen) > 0
    assert max(seen) > 0.75
    assert f"Damping now {damping:.4g}" in summary_text(optimizer)


@pytest.mark.parametrize(
    "eager", [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_a_step_that_raises_the_loss_is_rejected(
    eager: bool, capfd: Any
) -> None:
    """Ten times the step is too far: nothing moves but the damping."""
    rule = tfkfac.LevenbergMarquardt(0.1, 3)
    model = network()
    optimizer = kfac(damping=rule, learning_rate=0.5)
    model.compile(optimizer, "mse", run_eagerly=eager)
    x = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
    y = real(ROWS)
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    optimizer.learning_rate = 10.0
    weights = model.get_weights()
    previous = [
        np.array(v) for v in optimizer.method.states[0].previous.changes
    ]
    inverses = int(optimizer.inverse_updates)
    for rejected in (1, 2):
        model.train_on_batch(x, y)
        for new, old in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(new, old)
        kept = optimizer.method.states[0].previous.changes
        for new, old in zip(kept, previous, strict=True):
            np.testing.assert_array_equal(np.array(new), old)
        assert optimizer.last_step["actual_reduction"] < 0
        assert float(optimizer.method.states[0].damping.value) == pytest.approx(
            0.1 * 4**rejected
        )
        assert f"steps rejected: {rejected}" in summary_text(optimizer)
    assert int(optimizer.inverse_updates) == inverses + 2
    assert capfd.readouterr().err.count("a step is rejected") == 1
    optimizer.learning_rate = 0.5
    model.train_on_batch(x, y)  # looked at as well, after a rejection
    assert optimizer.last_step["actual_reduction"] > 0
    model.train_on_batch(x, y)  # its turn
    model.train_on_batch(x, y)
    assert "actual_reduction" not in optimizer.last_step
