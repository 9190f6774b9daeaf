"""Gradient accumulation: micro-batches give the step of one large batch."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.reference import Array
from tfkfac.kfac.length import SpectralLength

SIZES = (4, 8)  # rows of the micro-batches of a step
STEPS = 3
ROWS = sum(SIZES)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with floats("float64"):
        yield


def data() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * ROWS, 5))
    return x, rng.normal(size=(STEPS * ROWS, 2))


def model_of(optimizer: Any, loss: Any = "mse", eager: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4, activation="tanh", name="first"),
            layers.PReLU(name="slopes"),
            layers.Dense(2, name="second"),
        ]
    )
    model.compile(optimizer, loss, run_eagerly=eager)
    return model


def kfac(inner: Any = None, **options: Any) -> Any:
    inner = inner() if inner else keras.optimizers.SGD(0.1, momentum=0.5)
    intervals = {"factor_update_interval": 1, "inverse_update_interval": 2}
    return tfkfac.KFAC(inner, **(intervals | {"fisher": "empirical"} | options))


def train(model: Any, in_pieces: bool) -> Any:
    x, y = data()
    for step in range(STEPS):
        begin = step * ROWS
        for size in SIZES if in_pieces else (ROWS,):
            rows = slice(begin, begin + size)
            model.train_on_batch(x[rows], y[rows])
            begin += size
    return model


def assert_same(pieces: Any, whole: Any) -> None:
    for ours, theirs in zip(
        pieces.get_weights(), whole.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-13)
    ours, theirs = (m.optimizer for m in (pieces, whole))
    if isinstance(ours, keras.optimizers.LossScaleOptimizer):
        ours, theirs = ours.inner_optimizer, theirs.inner_optimizer
    for path, block in theirs.factors().items():
        for name, value in block.items():
            np.testing.assert_allclose(
                ours.factors()[path][name], value, rtol=1e-10, atol=1e-15
            )
    for count in ("iterations", "factor_updates", "inverse_updates"):
        assert int(getattr(ours, count)) == int(getattr(theirs, count))
    assert int(ours.iterations) == STEPS


SUM = keras.losses.MeanSquaredError(reduction="sum", dtype="float64")
ADAM = keras.optimizers.Adam
SCALER = keras.optimizers.LossScaleOptimizer
SPECTRAL = {"inner": lambda: keras.optimizers.SGD(1.0), "step": "spectral"}
# Arguments of `kfac`, the loss, and a loss scaler.
CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "graph": ({"solver": "eigen", "weight_sharing": "reduce"}, SUM, None),
    "scaled": ({"inner": ADAM, "kl_clip": None, "damping": 0.5}, "mse", SCALER),
    "spectral": (SPECTRAL | {"weight_decay": 0.5}, SUM, SCALER),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_equal_one_batch(case: str) -> None:
    options, loss, scaler = CASES[case]
    trained = []
    # The ratio rho is that of the last micro-batch: leave it at 1.
    with mock.patch.object(SpectralLength, "_update_ratio"):
        for steps in (2, None):
            optimizer = kfac(**options, gradient_accumulation_steps=steps)
            if scaler:
                optimizer = scaler(optimizer, initial_scale=1024.0)
            eager = case != "graph" or steps is None
            model = model_of(optimizer, loss, eager)
            trained.append(train(model, in_pieces=steps is not None))
    assert_same(*trained)


def test_curvature_of_as_many_examples_as_of_one_batch() -> None:
    """Rho is that of a quarter of the large batch, here 3 of 12 rows.

    The micro-batches of a step are equal, and a quarter of the large batch has
    each of the three rows once.
    """
    x, y = data()
    trained = []
    for steps in (4, None):
        optimizer = kfac(**SPECTRAL, gradient_accumulation_steps=steps)
        model = model_of(optimizer)
        for begin in range(0, 3 * STEPS, 3):
            rows = [*range(begin, begin + 3)] * (1 if steps else 4)
            for _ in range(steps or 1):
                model.train_on_batch(x[rows], y[rows])
        trained.append(model)
    assert_same(*trained)


def test_accumulation_moves_from_the_inner_optimizer() -> None:
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    optimizer = tfkfac.KFAC(inner)
    copy = tfkfac.KFAC.from_config(optimizer.get_config())
    assert optimizer.gradient_accumulation_steps == 3
    assert copy.gradient_accumulation_steps == 3
    assert copy.inner_optimizer.gradient_accumulation_steps is None
