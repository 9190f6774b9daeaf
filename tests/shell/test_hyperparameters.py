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
LATE = 2**31 + 1  # float32 is exact up to 2^24
# Value, iteration, expected value, rules.
VALUES: list[tuple[Any, int, float, dict[str, Any]]] = [
    (DAMPING, 3, DAMPING, {}),
    (Formula(lambda step: np.float64(DAMPING)), 3, DAMPING, {}),
    (Formula(lambda step: DAMPING * step / 2), 10, DAMPING * 5, {}),
    *(
        (PiecewiseConstantDecay([LATE], [3, 5]), step, want, {"integer": True})
        for step, want in ((LATE - 1, 3), (LATE, 3), (LATE + 1, 5))
    ),
]


def test_values_are_exact() -> None:
    for value, iteration, want, rules in VALUES:
        parameter = Hyperparameter("x", value, **rules)
        parameter.build()
        assert parameter.at(tf.constant(iteration, tf.int64)).numpy() == want
    parameter = Hyperparameter("x", 1)
    parameter.build()
    parameter.set(DAMPING)
    assert parameter.at(tf.constant(0)).numpy() == DAMPING


@pytest.fixture
def double() -> Iterator[None]:
    with floats("float64"):
        yield


@pytest.mark.parametrize(
    ("solver", "damping"),
    [("eigen", DAMPING), ("inverse", Formula(lambda iteration: DAMPING))],
)
def test_a_step_in_float64(solver: str, damping: Any, double: None) -> None:
    """One damped and clipped step of K-FAC against NumPy."""
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(
        tfkfac.KFAC(
            keras.optimizers.SGD(0.5),
            solver=solver,
            damping=damping,
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
