"""Steps of FOSI against a NumPy program with exact Hessians."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD, Adam
from keras.optimizers.schedules import PolynomialDecay

from tests.support.curvature_models import difference_products
from tests.support.fosi_reference import (
    BETAS,
    FEATURES,
    ROWS,
    Fosi,
    Network,
    Rule,
    adam,
    assert_follows,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    sgd,
    small,
)
from tests.support.reference import Array
from tests.support.schedules import Formula
from tests.support.small import curvature as saved_curvature


# --------------------------------------------------------------- trajectories
def slowing(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
    return sgd(0.1 * (1 - (t - 1) / 12), 0.9, True)(g, w, slots, t)


class Steps(keras.Sequential):
    """A custom `train_step` that calls `compute_loss` without the inputs."""

    traces = 0

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        self.traces += 1
        with tf.GradientTape() as tape:
            value = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(value, weights), weights)
        return {"loss": value}


class Case(NamedTuple):
    """An inner optimizer, and arguments of `FOSI` and of the NumPy program."""

    inner: Callable[[], Any]
    rule: Rule
    options: Any
    settings: Any
    estimated: list[int]
    weight: Array | None = None  # of the rows
    model_class: Any = keras.Sequential


def in_two(t: Any) -> Any:
    return 2 if t < 6 else 3


CASES = {
    # Newton steps go downhill where the curvature is negative. Sample weights
    # weigh the loss and its Hessian.
    "adam, formulas": Case(
        lambda: Adam(0.03, **BETAS),
        adam(0.03),
        {
            "num_smallest": 2,
            "alpha": Formula(lambda t: 0.2 / (1.0 + t)),
            "update_interval": Formula(in_two),
            "momentum": 0.5,
        },
        {
            "num_smallest": 2,
            "alpha": lambda t: 0.2 / (1 + t),
            "interval": in_two,
            "momentum": 0.5,
        },
        [2, 4, 8],
        np.linspace(0, 2, ROWS),
    ),
    # The rate is clipped for SGD alone. The number alpha follows its rate. The
    # training step is custom.
    "nesterov, rate": Case(
        lambda: SGD(PolynomialDecay(0.1, 12, 0.0), 0.9, True),
        slowing,
        {"learning_rate_clip": 2.5, "warmup_steps": 0},
        {"clip": 2.5, "warmup": 0, "alpha": lambda t: 0.5 * (1 - t / 12)},
        [0, 3, 6, 9],
        model_class=Steps,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_trajectory(name: str, double: None) -> None:
    case = CASES[name]
    program = Fosi(case.rule, **case.settings)
    optimizer = fosi(case.inner(), **case.options)
    model = assert_follows(
        optimizer, program, weight=case.weight, model_class=case.model_class
    )
    assert program.estimated == case.estimated
    assert int(optimizer.estimations) == len(case.estimated)
    values = optimizer.spectrum()
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, program.values, rtol=1e-7)
    assert (max(program.scales) > 1.5) == (name == "nesterov, rate")
    assert getattr(model, "traces", 1) == 1


def test_changed_numbers(double: None) -> None:
    """Changed arguments take effect in the next step without a new trace.

    Alpha scales with the rate over the largest rate so far, which is saved.
    """
    x, y = data()
    model, optimizer = mlp(), fosi(SGD(0.0, 0.9))
    model.compile(optimizer, loss())
    rates = [0.0, 0.05, 0.1, 0.1, 0.05, 0.025, 0.05, 0.0125, 0.0125]
    largest = np.maximum.accumulate(rates)

    def change(epoch: int, logs: Any) -> None:
        optimizer.learning_rate = rates[epoch]
        if epoch == 4:
            optimizer.alpha, optimizer.update_interval = 0.25, 2

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=change)
    got = fit(model, x, y, len(rates), callbacks=[callback])

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        return sgd(rates[t - 1], 0.9)(g, w, slots, t)

    program = Fosi(
        rule,
        alpha=lambda t: (0.5 if t < 4 else 0.25) * rates[t] / largest[t],
        interval=lambda t: 3 if t < 4 else 2,
    )
    network = Network(x, y)
    want = program.run(network.gradient, network.hessian, got[0], len(rates))
    assert program.estimated == [2, 4, 6, 8]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    saved = saved_curvature(optimizer)
    (largest_rate,) = (v for k, v in saved.items() if "largest_rate" in k)
    assert largest_rate == pytest.approx(0.1)


# ------------------------------------------------------------------ quadratic
@pytest.mark.parametrize(
    ("curvature", "options", "want"),
    [
        # A negative curvature among the largest: `s` is the limit.
        (
            [3.0, 1.0, -1.0, -2.0],
            {"num_largest": 3, "learning_rate_clip": 1.5},
            [0.25, 0.25, -0.25, -1.5 * 0.1 * 2],
        ),
        # Weak ones, below a thousandth of the largest, of either sign.
        (
            [1.0, -1.1e-3, 0.9e-3, -0.9e-3],
            {"num_largest": 0, "num_smallest": 4},
            [0.25, -0.25, 0.9e-4, -0.9e-4],
        ),
    ],
)
def test_diagonal_curvature(
    curvature: list[float], options: Any, want: list[float], double: None
) -> None:
    """One step on a diagonal quadratic loss, from weights of 1."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, use_bias=False)]
    )
    model.layers[0].set_weights([np.ones((4, 1))])
    defaults = {"lanczos_steps": 4, "warmup_steps": 0, "alpha": 0.25}
    model.compile(
        fosi(SGD(0.1), **defaults, **options), "mse", run_eagerly=True
    )
    x, y = np.eye(4) * np.sqrt(2), np.zeros((4, 1))
    model.train_on_batch(x, y, sample_weight=np.array(curvature))
    np.testing.assert_allclose(1 - flat(model), want, rtol=1e-7)


# ----------------------------------------------------------- Hessians of models


class Subclassed(keras.Model):
    """A model that is built by the first batch; one layer has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(2, "tanh")
        self.unused = layers.Dense(2)
        self.last = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        h = self.first(inputs)
        self.unused(h)
        return self.last(h)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_directions(double: None) -> None:
    """Ritz pairs are of the batch's Hessian, by finite differences.

    The rates are zero in the first step.
    """
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(ROWS, FEATURES)), rng.normal(size=(ROWS, 2))
    model = Subclassed()
    optimizer = small(SGD(0.0), alpha=0.0, warmup_steps=0, lanczos_steps=18)
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(x, y)
    (directions,) = (
        v for k, v in saved_curvature(optimizer).items() if "directions" in k
    )
    images = difference_products(
        model, directions.T, tf.constant(x), tf.constant(y)
    )
    want = directions.T * optimizer.spectrum()
    assert optimizer.spectrum()[0] > 0.1
    scale = np.abs(want).max()
    np.testing.assert_allclose(images / scale, want / scale, rtol=0, atol=1e-6)
    still = model.unused.get_weights()
    optimizer.learning_rate, optimizer.alpha = 0.1, 0.1
    model.train_on_batch(x, y)
    for got, before in zip(model.unused.get_weights(), still, strict=True):
        np.testing.assert_allclose(got, before, rtol=0, atol=1e-12)
