"""Unsupported models raise errors that name the layer, loss or argument."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.small import summary_text
from tfkfac.gauss_newton.support import Limits, choose_solve_spaces

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X[:, :1] - X[:, 1:2] ** 2


def model(*middle: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    last = layers.Dense(1, name="last", **options)
    return keras.Sequential([keras.Input((3,)), *middle, last], name="net")


class Penalty(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.mean(x**2))
        return x


class Overriding(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) + 1.0


# ------------------------------------------------------------------ models
COMPILED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: model(layers.Dense(2, dtype="mixed_bfloat16", name="half")),
        "Layer 'half' computes in bfloat16",
    ),
    (
        lambda: model(kernel_regularizer="l1"),
        "/last/kernel' has the regulariser L1\\.",
    ),
    (
        lambda: model(kernel_constraint="non_neg"),
        "/last/kernel' has a constraint",
    ),
    (
        lambda: Overriding([keras.Input((3,)), layers.Dense(1)], name="net"),
        "Model 'net' overrides `compute_loss`",
    ),
]
CHANGES = "Layer 'h' of model 'net' changes its state"
TRAINED: list[tuple[Any, str, str]] = [
    (layers.BatchNormalization, "mse", CHANGES),
    (functools.partial(layers.Dropout, 0.5), "mse", CHANGES),
    (Penalty, "mse", "Layer 'h' of model 'net' adds a loss"),
    (
        functools.partial(layers.Dense, 2, activity_regularizer="l2"),
        "mse",
        "Layer 'h' of model 'net' adds a loss",
    ),
    (layers.Flatten, "mae", "loss 'mae' is not known"),
    (layers.Flatten, "huber", "loss 'huber' is not known"),
]


@pytest.mark.parametrize(("make", "message"), COMPILED)
def test_errors_in_compile(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().compile(tfkfac.GaussNewton(), "mse")


@pytest.mark.parametrize(("layer", "loss", "message"), TRAINED)
def test_errors_in_the_first_step(layer: Any, loss: str, message: str) -> None:
    """In eager mode, where nothing is traced before."""
    network = model(layer(name="h"))
    network.compile(tfkfac.GaussNewton(), loss, run_eagerly=True)
    with pytest.raises(ValueError, match=message):
        network.train_on_batch(X, Y)


def test_warning_for_a_loss_of_lower_precision() -> None:
    network = model(dtype="float64")
    network.compile(tfkfac.GaussNewton(), "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="computed in float32"):
        network.train_on_batch(X.astype("float64"), Y)


def test_errors_for_the_space_of_residuals() -> None:
    penalised = model(kernel_regularizer="l2")
    with pytest.raises(ValueError, match=r"regulariser.*/last/kernel"):
        penalised.compile(tfkfac.GaussNewton(solve="residuals"), "mse")
    network = model(layers.Dense(3), layers.Softmax())
    network.compile(
        tfkfac.GaussNewton(solve="residuals"), "kl_divergence", run_eagerly=True
    )
    with pytest.raises(ValueError, match="Kullback-Leibler"):
        network.train_on_batch(X, Y)
    with pytest.raises(ValueError, match='"auto" or "parameters" with'):
        limits = Limits(10, np.float32, 2**31)  # type: ignore[arg-type]
        choose_solve_spaces(limits, "residuals", None, "with several replicas")


def test_no_loss_scale() -> None:
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        model().compile(
            keras.optimizers.LossScaleOptimizer(tfkfac.GaussNewton()), "mse"
        )


# ------------------------------------------------------------------ limits
def test_memory_of_a_step() -> None:
    """n weights, m residuals: 3 n^2 + 2 m n, or 3 m^2 + 3 m n scalars."""
    network = model(kernel_initializer="zeros")
    network.compile(tfkfac.GaussNewton(), "mse")
    optimizer = network.optimizer
    assert "4 weights n in float32" in summary_text(optimizer)
    assert optimizer.state_bytes()["previous_step"] == 16
    limits = optimizer.method.limits
    assert limits.peak_bytes("parameters", 100) == 4 * (3 * 16 + 2 * 100 * 4)
    assert limits.peak_bytes("residuals", 3) == 4 * (3 * 9 + 3 * 3 * 4)
    assert limits.space("auto", 3) == "residuals"
    assert limits.space("auto", 4) == "parameters"
    network.train_on_batch(X, Y)
    lines = summary_text(optimizer).splitlines()
    (row,) = [li for li in lines if li.startswith("8 ")]
    assert "parameters" in row
