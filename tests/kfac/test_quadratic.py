"""Steps by the quadratic model, against dense matrices in NumPy.

Of a model that is linear in its weights the mean squared error is quadratic:
without damping the predicted reduction is the actual one.
"""

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
from tests.support.options import kfac as options_kfac
from tests.support.reference import Array, inverse_solve
from tests.support.small import data, loss, mlp, summary_text
from tests.support.summaries import sequential
from tfkfac.blocks.statistics import Subsample
from tfkfac.capture.model_taps import ForwardCall
from tfkfac.kfac.quadratic import AdaptiveDamping, Previous, Sample

ROWS, FEATURES, OUTPUTS, DAMPING = 6, 4, 3, 0.05
RNG = np.random.default_rng(0)


# ------------------------------------------------------------ a dense model
@dataclasses.dataclass(frozen=True)
class Kind:
    """A loss: its last activation, labels of some rows, Hessian and unit.

    The Hessian is a function of the outputs and labels of one row, with
    respect to what the loss reads: perhaps the input of the activation.
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


def counts(rows: int) -> Array:
    return RNG.poisson(2.0, (rows, OUTPUTS)).astype(float)


def multinomial(p: Array, _: Array) -> Array:
    return np.diag(p) - np.outer(p, p)


def softmax(z: Array, _: Array) -> Array:
    p = np.exp(z - z.max())
    return multinomial(p / p.sum(), _)


def square(_: Array, __: Array) -> Array:
    return 2 / OUTPUTS * np.eye(OUTPUTS)


KINDS = {
    "mse": Kind("mse", None, real, square, 2 / OUTPUTS),
    "bce": Kind(
        "binary_crossentropy",
        "sigmoid",
        binary,
        lambda p, _: np.diag(p * (1 - p)) / OUTPUTS,
        1 / OUTPUTS,
        True,
    ),
    "cce": Kind(
        keras.losses.CategoricalCrossentropy(
            label_smoothing=0.1, dtype="float64"
        ),
        "softmax",
        lambda rows: np.eye(OUTPUTS)[classes(rows)],
        multinomial,
        1.0,
        True,
    ),
    "scce, logits": Kind(
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, dtype="float64"
        ),
        None,
        classes,
        softmax,
        1.0,
    ),
    "poisson": Kind(
        "poisson",
        "softplus",
        counts,
        lambda p, y: np.diag(y / (p + 1e-7) ** 2) / OUTPUTS,  # as in Keras
        1 / OUTPUTS,
    ),
}


def network(activation: str | None = None) -> Any:
    model = sequential(
        layers.Dense(5, activation="tanh", name="hidden"),
        layers.Dense(OUTPUTS, activation=activation, name="out"),
        shape=(FEATURES,),
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


def preconditioned(optimizer: Any, gradient: Array, unit: float) -> Array:
    """The negative gradient by the factors that the optimizer has."""
    parts, place = [], 0
    sizes = {"hidden": (FEATURES, 5), "out": (5, OUTPUTS)}
    for path, found in optimizer.factors().items():
        inputs, outputs = sizes[path.rpartition("/")[2]]
        size = (inputs + 1) * outputs
        W = gradient[place : place + size].reshape(inputs + 1, outputs) / unit
        parts.append(-inverse_solve(W, found["A"], found["G"], DAMPING))
        place += size
    return flat(parts)


def damped(matrix: Array) -> Array:
    return matrix + DAMPING * np.eye(len(matrix))


def minimum(directions: list[Array], F: Array, W: Array) -> tuple[Array, Array]:
    """Of the quadratic model: coefficients of the directions, and the step."""
    D = np.stack(directions, 1)
    found = -np.linalg.solve(D.T @ F @ D, D.T @ W)
    return found, D @ found


def assert_weights(model: Any, want: Array) -> None:
    np.testing.assert_allclose(
        flat(model.get_weights()), want, rtol=1e-6, atol=1e-7
    )


# ------------------------------------------------------------ the exact step
@pytest.mark.parametrize("name", KINDS)
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
            F = damped(gauss_newton(model, kind, x, y) / kind.unit)
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit)
            directions = [delta, before][: 1 + (step > 0)]
            found, before = minimum(directions, F, W / kind.unit)
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
            F = damped(gauss_newton(model, kind, x, y) / kind.unit)
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit)
            delta = np.append(delta, np.zeros(len(W) - cut))
            plain = np.append(np.zeros(cut), -W[cut:] / kind.unit)
            directions = [delta, plain, before][: 2 + (step > 0)]
            found, before = minimum(directions, F, W / kind.unit)
            names = ["alpha", "alpha_plain", "mu"][: len(found)]
            got = [optimizer.last_step[name] for name in names]
            np.testing.assert_allclose(got, found, rtol=1e-5)
            assert_weights(model, start + before)
    assert "Moved along their gradients" in summary_text(optimizer)
    assert "Left to the inner optimizer" not in summary_text(optimizer)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_part_of_the_batch(reduction: str) -> None:
    """A quarter of twelve rows: three, evenly spaced, others in each step.

    They stand for all of a sum.
    """
    kind = KINDS["scce, logits"]
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, dtype="float64"
    )
    with floats("float64"):
        model = network(kind.activation)
        optimizer = kfac(quadratic_batch_fraction=0.25)
        model.compile(optimizer, loss, run_eagerly=True)
        for step in range(2):
            x, y = RNG.normal(size=(12, FEATURES)), kind.labels(12)
            before = flat(optimizer.method.states[0].section(Previous).changes)
            W = gradient_of(model, x, y) / (12 if reduction == "sum" else 1)
            rows = (3 * step + np.arange(3) * 12) // 3
            F = damped(gauss_newton(model, kind, x[rows], y[rows]))
            model.train_on_batch(x, y)
            delta = preconditioned(optimizer, W, kind.unit)
            found, _ = minimum([delta, before][: 1 + (step > 0)], F, W)
            got = optimizer.last_step
            assert got["alpha"] == pytest.approx(found[0], rel=1e-6)
            if step:
                assert got["mu"] == pytest.approx(found[1], rel=1e-5)


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
    kind, rule = KINDS["scce, logits"], tfkfac.LevenbergMarquardt(0.1, 2, 0.5)
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


def test_a_step_that_raises_the_loss_is_rejected(capfd: Any) -> None:
    """Ten times the step is too far: nothing moves but the damping."""
    rule = tfkfac.LevenbergMarquardt(0.1, 3)
    model = network()
    optimizer = kfac(damping=rule, learning_rate=0.5)
    model.compile(optimizer, "mse", run_eagerly=True)
    x = RNG.normal(size=(ROWS, FEATURES)).astype("float32")
    y = real(ROWS)
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    optimizer.learning_rate = 10.0
    weights = model.get_weights()
    (state,) = optimizer.method.states
    previous = list(map(np.array, state.section(Previous).changes))
    inverses = int(optimizer.inverse_updates)
    for rejected in (1, 2):
        model.train_on_batch(x, y)
        np.testing.assert_equal(model.get_weights(), weights)
        kept = list(map(np.array, state.section(Previous).changes))
        np.testing.assert_equal(kept, previous)
        assert optimizer.last_step["actual_reduction"] < 0
        damping = float(state.section(AdaptiveDamping).value)
        assert damping == pytest.approx(0.1 * 4**rejected)
        assert f"steps rejected: {rejected}" in summary_text(optimizer)
    assert int(optimizer.inverse_updates) == inverses + 2
    assert capfd.readouterr().err.count("a step is rejected") == 1
    optimizer.learning_rate = 0.5
    model.train_on_batch(x, y)  # looked at as well, after a rejection
    assert optimizer.last_step["actual_reduction"] > 0
    model.train_on_batch(x, y)  # its turn
    model.train_on_batch(x, y)
    assert "actual_reduction" not in optimizer.last_step


# ------------------------------------------------------------- exact models
def two_outputs() -> tuple[Any, dict[str, Any]]:
    inputs = keras.Input((4,))
    heads = [layers.Dense(2, name="a")(inputs), layers.Dense(3)(inputs)]
    compiled = {"loss": ["mse", "mse"], "loss_weights": [0.3, 2.0]}
    return keras.Model(inputs, heads), compiled


def tokens(**kwargs: Any) -> tuple[Any, dict[str, Any]]:
    inputs = keras.Input((3, 4))
    return keras.Model(
        inputs, layers.Dense(2, **kwargs)(layers.Masking()(inputs))
    ), {"loss": keras.losses.MeanSquaredError(dtype="float64")}


def summed() -> tuple[Any, dict[str, Any]]:
    model, _ = tokens()
    loss = keras.losses.MeanSquaredError(reduction="sum", dtype="float64")
    return model, {"loss": loss}


def penalised() -> tuple[Any, dict[str, Any]]:
    return tokens(
        kernel_regularizer=keras.regularizers.L2(0.2),
        bias_regularizer=keras.regularizers.L2(0.1),
    )


@pytest.mark.parametrize("make", [two_outputs, tokens, summed, penalised])
def test_quadratic_losses_fall_as_predicted(make: Any) -> None:
    """Several outputs, masks, sample weights, sums and regularisers."""
    with floats("float64"):
        model, compiled = make()
        randomize(model)
        optimizer = kfac(damping=0.0, solver="eigen")
        model.compile(optimizer, run_eagerly=True, **compiled)
        x = RNG.normal(size=(7, *model.inputs[0].shape[1:]))
        if x.ndim == 3:
            x[1, 1:] = x[4, 0] = 0
        y = [RNG.normal(size=(7, *z.shape[1:])) for z in model.outputs]
        y = y if len(y) > 1 else y[0]
        weights: Any = RNG.integers(0, 3, x.shape[:-1]).astype(float)
        if isinstance(y, list):
            weights = [weights, weights[::-1]]

        def now() -> float:
            return float(
                model.compute_loss(
                    x, y, model(x, training=True), sample_weight=weights
                )
            )

        for _ in range(2):
            before = now()
            model.train_on_batch(x, y, sample_weight=weights)
            got = optimizer.last_step["predicted_reduction"]
            assert got == pytest.approx(before - now(), rel=1e-6, abs=1e-9)
            assert got > 0


# ------------------------------------------------------------ ways of training
def test_micro_batches() -> None:
    """Two that are the same make the step of one of them."""
    x, y = data(8)
    weights, last = [], []
    for steps in (None, 2):
        model = mlp()
        optimizer = kfac(gradient_accumulation_steps=steps)
        model.compile(optimizer, loss(), run_eagerly=True)
        for _ in range(3 * (steps or 1)):
            model.train_on_batch(x, y)
        weights.append(flat(model.get_weights()))
        last.append(optimizer.last_step)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-4, atol=1e-5)
    assert last[0] == pytest.approx(last[1], rel=1e-3)
    assert optimizer.state_bytes()["previous_update"] == 4 * len(weights[0])


def test_mixed_precision() -> None:
    """The numbers of single precision, as far as half has them."""
    x, y = data(32)
    last = []
    before = keras.config.dtype_policy()
    for name in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(name)
        try:
            model = mlp()
            optimizer: Any = kfac(damping=tfkfac.LevenbergMarquardt(0.1, 1))
            outer = optimizer
            if name == "mixed_float16":
                outer = keras.optimizers.LossScaleOptimizer(optimizer)
            model.compile(outer, loss(), run_eagerly=True)
            model.train_on_batch(x, y)
        finally:
            keras.config.set_dtype_policy(before)
        last.append(optimizer.last_step)
    assert last[1] == pytest.approx(last[0], rel=5e-3)
    assert last[1]["alpha"] != last[0]["alpha"]


class Kink(keras.losses.Loss):
    """Its second derivative is not finite where the error is zero."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.abs(y_pred - y_true) ** 1.5, -1)


def test_a_model_that_is_not_finite_costs_one_step(capfd: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="d")])
    optimizer = kfac(damping=tfkfac.LevenbergMarquardt(0.1, 1))
    model.compile(optimizer, Kink(), run_eagerly=True)
    x = RNG.normal(size=(4, 2)).astype("float32")
    y = np.array(model(x))
    y[0] += 1
    before = model.get_weights()
    model.train_on_batch(x, y)
    np.testing.assert_equal(model.get_weights(), before)
    assert "quadratic models not finite: 1" in summary_text(optimizer)
    assert "is not finite" in capfd.readouterr().err
    model.train_on_batch(x, y + 1)
    assert np.isfinite(flat(model.get_weights())).all()
    assert not np.array_equal(flat(model.get_weights()), flat(before))


def test_no_state_changes() -> None:
    """Moving averages and seeds are those of the one forward pass."""
    states = []
    x, y = data(8)
    for optimizer in (kfac(), keras.optimizers.SGD(0.0)):
        keras.utils.set_random_seed(0)
        norm = [layers.BatchNormalization(), layers.Dropout(0.5, seed=1)]
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), *norm, layers.Dense(3)]
        )
        model.compile(optimizer, loss(), metrics=["accuracy"], run_eagerly=True)
        logs = model.train_on_batch(x, y, return_dict=True)
        states.append([np.array(v) for v in model.non_trainable_variables])
        states[-1].append(np.array(list(logs.values())))
    np.testing.assert_equal(*states)


# ------------------------------------------------------------------ refusals
def test_sparse_batches_are_not_divided() -> None:
    sample = Sample(
        ForwardCall((tf.sparse.eye(4),), {}, None), {}, (), (), tf.constant(1)
    )
    assert sample.part(None, "m") is sample
    with pytest.raises(ValueError, match=r"must be 1.0.*sparse.*'m'"):
        sample.part(Subsample(0.25, tf.constant(0)), "m")
