"""Where steps by the quadratic model can be used, and where they are refused.

Of a model that is linear in its weights the mean squared error is quadratic:
without damping the predicted reduction is the actual one.
"""

import contextlib
from collections.abc import Iterator
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
from tests.support.reference import Array
from tests.support.small import data, loss, mlp, summary_text
from tfkfac.blocks.statistics import Subsample
from tfkfac.capture.model_taps import ForwardCall
from tfkfac.kfac.quadratic import Sample

RNG = np.random.default_rng(0)


def flat(parts: Any) -> Array:
    return np.concatenate([np.ravel(np.asarray(p)) for p in parts])


def kfac(inner: Any = None, **kwargs: Any) -> tfkfac.KFAC:
    options = {"step": "quadratic", "quadratic_batch_fraction": 1.0}
    return options_kfac(inner, **(options | kwargs))


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


EXACT = {f.__name__: f for f in (two_outputs, tokens, summed, penalised)}


@pytest.mark.parametrize(
    ("name", "weighted"),
    [
        pytest.param(
            name,
            weighted,
            marks=[]
            if weighted and name in ("two_outputs", "tokens")
            else pytest.mark.slow,
        )
        for name in EXACT
        for weighted in (False, True)
    ],
)
def test_quadratic_losses_fall_as_predicted(name: str, weighted: bool) -> None:
    """Several outputs, masks, sample weights, sums and regularisers."""
    with floats("float64"):
        model, compiled = EXACT[name]()
        randomize(model)
        optimizer = kfac(damping=0.0, solver="eigen")
        model.compile(optimizer, run_eagerly=True, **compiled)
        x = RNG.normal(size=(7, *model.inputs[0].shape[1:]))
        if x.ndim == 3:
            x[1, 1:] = x[4, 0] = 0
        y = [RNG.normal(size=(7, *z.shape[1:])) for z in model.outputs]
        y = y if len(y) > 1 else y[0]
        weights: Any = None
        if weighted:
            weights = RNG.integers(0, 3, x.shape[:-1]).astype(float)
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
@pytest.mark.slow
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


@contextlib.contextmanager
def policy_of(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy: str) -> None:
    """The numbers of single precision, as far as half has them."""
    x, y = data(32)
    last = []
    for name in ("float32", policy):
        with policy_of(name):
            model = mlp()
            optimizer: Any = kfac(damping=tfkfac.LevenbergMarquardt(0.1, 1))
            outer = optimizer
            if name == "mixed_float16":
                outer = keras.optimizers.LossScaleOptimizer(optimizer)
            model.compile(outer, loss(), run_eagerly=True)
            model.train_on_batch(x, y)
            last.append(optimizer.last_step)
    tolerance = {"mixed_float16": 5e-3, "mixed_bfloat16": 5e-2}[policy]
    assert last[1] == pytest.approx(last[0], rel=tolerance)
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
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)
    assert "quadratic models not finite: 1" in summary_text(optimizer)
    assert "is not finite" in capfd.readouterr().err
    model.train_on_batch(x, y + 1)
    assert np.isfinite(flat(model.get_weights())).all()
    assert not np.array_equal(flat(model.get_weights()), flat(before))


@pytest.mark.slow
def test_no_state_changes() -> None:
    """Moving averages and seeds are those of the one forward pass."""
    states = []
    x, y = data(8)
    for optimizer in (kfac(), keras.optimizers.SGD(0.0)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(5, name="one"),
                layers.BatchNormalization(),
                layers.Dropout(0.5, seed=1),
                layers.Dense(3, name="two"),
            ]
        )
        model.compile(optimizer, loss(), metrics=["accuracy"])
        logs = model.train_on_batch(x, y, return_dict=True)
        states.append([np.array(v) for v in model.non_trainable_variables])
        states[-1].append(np.array(list(logs.values())))
    for got, want in zip(*states, strict=True):
        np.testing.assert_array_equal(got, want)


# ------------------------------------------------------------------ refusals
SGD = keras.optimizers.SGD


def test_sparse_batches_are_not_divided() -> None:
    sample = Sample(
        ForwardCall((tf.sparse.eye(4),), {}, None), {}, (), (), tf.constant(1)
    )
    assert sample.part(None, "m") is sample
    with pytest.raises(ValueError, match=r"must be 1.0.*sparse.*'m'"):
        sample.part(Subsample(0.25, tf.constant(0)), "m")


@pytest.mark.filterwarnings("error")
def test_defaults_and_config() -> None:
    optimizer = tfkfac.KFAC(step="quadratic")
    assert float(optimizer.learning_rate) == 1.0
    assert optimizer.inner_optimizer.momentum == 0.0
    assert optimizer.step == "quadratic"
    assert tfkfac.KFAC().step == "inner"
    rule = tfkfac.LevenbergMarquardt(2.0, 3, 0.9, 1e-3, 5.0)
    config = tfkfac.KFAC(0.5, step="quadratic", damping=rule).get_config()
    other = tfkfac.KFAC.from_config(config)
    assert other.damping.get_config() == rule.get_config()
    assert other.step == "quadratic"
    assert other.learning_rate == 0.5
