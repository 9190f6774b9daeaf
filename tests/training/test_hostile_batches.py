"""Invalid batches raise an error or leave finite weights."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras.optimizers import SGD

import tfkfac
from tests.support.marks import with_slow
from tests.support.small import CLASSES, FEATURES, data, loss, mlp

GOOD = 8, FEATURES
BAD = [
    (1, FEATURES),
    (0, FEATURES),
    (3, FEATURES - 1),
    (FEATURES,),
    (),
    (2, 2, FEATURES),
]
SHAPES = st.sampled_from([GOOD, GOOD, *BAD])
DTYPES = st.sampled_from(
    ["float32", "float64", "float16", "uint8", "int64", "bool"]
)
NUMBERS = st.sampled_from(
    [0.0, 1.0, -1.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 255.0]
)
LABELS = st.sampled_from([0, 1, CLASSES - 1])
WEIGHTS = st.sampled_from([None, 0.0, 1.0, -1.0, np.nan, np.inf, 1e30])
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "kfac": lambda: tfkfac.KFAC(step="natural", factor_update_interval=1),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    # Adam by itself turns into NaN where a gradient's square overflows.
    "fosi": lambda: tfkfac.FOSI(SGD(0.01), warmup_steps=1),
    "gauss_newton": tfkfac.GaussNewton,
}


@functools.cache
def trained(name: str) -> tuple[Any, list[Any]]:
    """A model after three valid steps, and its weights."""
    model = mlp()
    model.compile(OPTIMIZERS[name](), loss(), run_eagerly=True)
    for _ in range(3):
        model.train_on_batch(*data())
    return model, model.get_weights()


@pytest.mark.parametrize(
    "name",
    with_slow(OPTIMIZERS, "spectral", "fosi", "gauss_newton"),
)
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
@given(chosen=st.data())
def test_batches(name: str, chosen: Any) -> None:
    model, weights = trained(name)
    model.set_weights(weights)
    shape, dtype = chosen.draw(SHAPES), chosen.draw(DTYPES)
    x = np.random.default_rng(0).normal(size=shape)
    if x.size:
        x.flat[0] = chosen.draw(NUMBERS)
    with np.errstate(all="ignore"):
        x = x.astype(dtype)
    rows = shape[0] if shape else 1
    y = np.full(rows, chosen.draw(LABELS))
    number = chosen.draw(WEIGHTS)
    weight = None if number is None else np.full(rows, number, "float32")
    try:
        model.train_on_batch(x, y, sample_weight=weight)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        assert str(error)
    assert all(np.isfinite(value).all() for value in model.get_weights())
    model.train_on_batch(*data())
    assert all(np.isfinite(value).all() for value in model.get_weights())


def test_labels_that_are_no_classes() -> None:
    """Invalid labels raise a one-line error."""
    model = mlp()
    model.compile(tfkfac.KFAC(0.1, only_layers="logits"), loss())
    x, y = data()
    words = rf"classes in \[0, {CLASSES}\).*Received: a label {CLASSES}$"
    for train in (model.train_on_batch, lambda *xy: model.fit(*xy, verbose=0)):
        with pytest.raises(ValueError, match=words):
            train(x, np.full_like(y, CLASSES))


@pytest.mark.parametrize("eager", [False, True])
def test_classes_for_a_loss_of_numbers(eager: bool) -> None:
    model = mlp()
    model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=eager)
    words = r"Loss 'mse'.*labels of shape \(.*,\) and outputs.*, 3\).*Classes"
    with pytest.raises(ValueError, match=words):
        model.fit(*data(), batch_size=5, verbose=0)
