"""FOSI with unusable batches, Hessians, layers and arguments."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD

from tests.support.fosi_reference import FEATURES, data, flat, loss, mlp, small
from tests.support.small import curvature, slots, summary_text

NAN, INF = float("nan"), float("inf")


# -------------------------------------------------------------- bad gradients
def test_bad_and_empty_batches(capfd: Any) -> None:
    """A bad batch changes nothing; a due estimation follows in the next step.

    An empty batch does not change the directions.
    """
    x, y = data()
    model, twin = mlp(), mlp()
    for network in (model, twin):
        network.compile(small(), loss())
        for _ in range(3):
            network.train_on_batch(x, y)
    optimizer = model.optimizer
    before = {**slots(optimizer), **curvature(optimizer)}
    capfd.readouterr()
    bad = x.copy()
    for count, value in ((1, NAN), (2, INF)):
        bad[3, 1] = value
        model.train_on_batch(bad, y)
        assert int(optimizer.skipped_steps) == count
    assert capfd.readouterr().err.count("not finite") == 1
    after = {**slots(optimizer), **curvature(optimizer)}
    changed = [k for k, v in after.items() if not np.array_equal(v, before[k])]
    assert [key.split(":")[1] for key in changed] == ["skipped_steps"]
    assert "gradients not finite: 2" in summary_text(optimizer)
    for _ in range(3):
        model.train_on_batch(x, y)
        twin.train_on_batch(x, y)
        np.testing.assert_array_equal(flat(model), flat(twin))
    spectrum = optimizer.spectrum()
    assert spectrum[0] > 0.01
    model.train_on_batch(x[:0], y[:0])
    assert np.isfinite(flat(model)).all()
    np.testing.assert_array_equal(optimizer.spectrum(), spectrum)


# --------------------------------------------------------------- bad Hessians
@tf.custom_gradient
def kinked(x: Any) -> Any:
    """The identity, with a second derivative of NaN above 100."""

    @tf.custom_gradient
    def slope(z: Any) -> Any:
        def curve(upstream: Any) -> Any:
            return upstream * tf.where(z > 100, NAN, 0.0)

        return tf.ones_like(z), curve

    return tf.identity(x), lambda upstream: upstream * slope(x)


def kinked_model() -> Any:
    """A linear model whose Hessian is not finite for a large input."""
    stack = [layers.Dense(2), layers.Activation(kinked), layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *stack])
    for v in model.trainable_variables:
        v.assign(np.linspace(0.1, 0.5, v.shape.num_elements()).reshape(v.shape))
    return model


def test_bad_hessians(capfd: Any) -> None:
    """Bad Hessians are counted; training keeps the last directions.

    Before the first valid estimation, the inner optimizer trains alone.
    """
    x, y = data()[0], np.ones((12, 1), "float32")
    large = x.copy()
    large[0] = 200.0
    model, twin = kinked_model(), kinked_model()
    optimizer = small(SGD(1e-6), warmup_steps=0, alpha=1e-3)
    model.compile(optimizer, "mse")
    twin.compile(SGD(1e-6), "mse")

    def train(network: Any, *batches: Any) -> None:
        weight = np.full(12, 1e-3)  # keeps the steps small
        for batch in batches:
            network.train_on_batch(batch, y, sample_weight=weight)

    capfd.readouterr()
    train(model, large, x)
    assert capfd.readouterr().err.count("estimation of curvature") == 1
    train(twin, large, x)
    np.testing.assert_array_equal(flat(model), flat(twin))
    assert optimizer.spectrum().shape == (0,)
    train(model, x, x)
    before, spectrum = curvature(optimizer), optimizer.spectrum()
    weights = flat(model)
    train(model, large)
    moved = ("momentum", "square", "last_estimation", "failures")
    for name, value in curvature(optimizer).items():
        same = np.array_equal(before[name], value)
        assert same is not any(k in name for k in moved), name
    np.testing.assert_array_equal(optimizer.spectrum(), spectrum)
    assert spectrum.shape == (2,)
    assert np.isfinite(flat(model)).all()
    assert not np.array_equal(flat(model), weights)
    assert int(optimizer.skipped_steps) == 0
    text = summary_text(optimizer)
    assert "estimations of curvature that were not finite: 2" in text
    train(model, x, x)
    assert not np.array_equal(optimizer.spectrum(), spectrum)
