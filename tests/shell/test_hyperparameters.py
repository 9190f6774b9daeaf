"""Hyperparameters keep float64 precision in a float64 model."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import PiecewiseConstantDecay

import tfkfac
from tests.support.dtypes import floats
from tests.support.harness import half_squared_error
from tests.support.reference import SOLVES, append_one, clip_factor
from tests.support.schedules import Formula
from tfkfac.kfac.natural import clip_step
from tfkfac.shell.arguments import Hyperparameter

DAMPING, CLIP = 0.03, 0.007  # neither is exact in binary
FUNCTIONS: dict[str, Any] = {
    "number": DAMPING,
    "schedule": Formula(lambda iteration: DAMPING),
    "numpy": Formula(lambda iteration: np.float64(DAMPING)),
}


def value_of(value: Any, iteration: int, **rules: Any) -> Any:
    parameter = Hyperparameter("x", value, **rules)
    parameter.build()
    return parameter.at(tf.constant(iteration, tf.int64)).numpy()


@pytest.fixture
def double() -> Iterator[None]:
    with floats("float64"):
        yield


def test_values_are_exact() -> None:
    for value in FUNCTIONS.values():
        assert value_of(value, 3) == DAMPING
    parameter = Hyperparameter("x", 1)
    parameter.build()
    parameter.set(DAMPING)
    assert parameter.at(tf.constant(0)).numpy() == DAMPING


def test_a_schedule_in_float64() -> None:
    """Values equal Python's; float32 has errors of 1e-8."""
    schedule = Formula(lambda iteration: DAMPING * 0.9 ** (iteration / 7))
    want = DAMPING * 0.9 ** (10 / 7)
    assert value_of(schedule, 10) == pytest.approx(want, rel=1e-15, abs=0)


@pytest.mark.parametrize("iteration", [2**24 + 1, 2**31 + 1])
def test_a_schedule_counts_beyond_float32(iteration: int) -> None:
    schedule = PiecewiseConstantDecay([iteration], [3, 5])
    for step, want in ((iteration - 1, 3), (iteration, 3), (iteration + 1, 5)):
        assert value_of(schedule, step, integer=True) == want


@pytest.mark.parametrize(
    ("solver", "kind"), [("eigen", "number"), ("inverse", "schedule")]
)
def test_a_step_in_float64(solver: str, kind: str, double: None) -> None:
    """One damped and clipped step of K-FAC against NumPy."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(
        tfkfac.KFAC(
            keras.optimizers.SGD(0.5),
            solver=solver,
            damping=FUNCTIONS[kind],
            kl_clip=CLIP,
            fisher="empirical",
        ),
        half_squared_error,
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 3))
    start = np.vstack([layer.kernel.numpy(), layer.bias.numpy()])
    a = append_one(x)
    g = a @ start - y
    W = a.T @ g / len(x)
    P = SOLVES[solver](W, a.T @ a / len(x), g.T @ g / len(x), DAMPING)
    nu = clip_factor([(P, W)], 0.5, CLIP)
    assert nu < 0.5
    model.train_on_batch(x, y)
    end = np.vstack([layer.kernel.numpy(), layer.bias.numpy()])
    np.testing.assert_allclose(
        end, start - 0.5 * nu * P, rtol=1e-13, atol=1e-14
    )


def test_the_clip_beside_a_layer_in_float32() -> None:
    rng = np.random.default_rng(0)
    wide, narrow = rng.uniform(size=(2, 2, 5))
    narrow = narrow.astype("float32")
    products = [tf.reduce_sum(p * w) for p, w in (wide, narrow)]
    got = clip_step(products, tf.constant(CLIP, tf.float64), 0.7).factor
    pairs = [(p, w) for p, w in (wide, narrow.astype("float64"))]
    want = clip_factor(pairs, 0.7, CLIP)
    assert got.numpy() == pytest.approx(want, rel=1e-7)
