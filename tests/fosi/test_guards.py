"""FOSI and what cannot be used: batches, Hessians, layers, arguments."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD

import tfkfac
from tests.support.fosi_reference import FEATURES, data, flat, loss, mlp, small
from tests.support.small import assert_same, curvature, slots, summary_text

NAN, INF = float("nan"), float("inf")


# -------------------------------------------------------------- bad gradients
def test_bad_batch_changes_nothing(capfd: Any) -> None:
    """Not even when an estimation would be due; then it is done next."""
    x, y = data()
    model, twin = mlp(), mlp()
    for one in (model, twin):
        one.compile(small(), loss())
    for _ in range(3):
        model.train_on_batch(x, y)
        twin.train_on_batch(x, y)
    optimizer = model.optimizer
    weights, inner = flat(model), slots(optimizer)
    state = curvature(optimizer)
    capfd.readouterr()
    for count, value in ((1, NAN), (2, INF)):
        bad = x.copy()
        bad[3, 1] = value
        model.train_on_batch(bad, y)
        assert int(optimizer.skipped_steps) == count
    assert capfd.readouterr().err.count("not finite") == 1
    np.testing.assert_array_equal(flat(model), weights)
    assert_same(slots(optimizer), inner)
    now = curvature(optimizer)
    (counter,) = (k for k in now if "skipped_steps" in k)
    assert (now.pop(counter), state.pop(counter)) == (2, 0)
    assert_same(now, state)
    assert "gradients not finite: 2" in summary_text(optimizer)
    for _ in range(3):
        model.train_on_batch(x, y)
        twin.train_on_batch(x, y)
        np.testing.assert_array_equal(flat(model), flat(twin))


def test_empty_batch() -> None:
    """It says nothing of the curvature: what is known is kept."""
    x, y = data()
    model = mlp()
    model.compile(small(), loss())
    for _ in range(3):
        model.train_on_batch(x, y)
    before = model.optimizer.spectrum()
    assert before[0] > 0.01
    model.train_on_batch(x[:0], y[:0])
    assert np.isfinite(flat(model)).all()
    np.testing.assert_array_equal(model.optimizer.spectrum(), before)


# --------------------------------------------------------------- bad Hessians
@tf.custom_gradient
def kinked(x: Any) -> Any:
    """The identity; its second derivative is NaN above 100."""

    @tf.custom_gradient
    def slope(z: Any) -> Any:
        def curve(upstream: Any) -> Any:
            return upstream * tf.where(z > 100, NAN, 0.0)

        return tf.ones_like(z), curve

    return tf.identity(x), lambda upstream: upstream * slope(x)


def kinked_model() -> Any:
    """A linear model whose Hessian is not finite on a large input."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(2, name="first"),
            layers.Activation(kinked),
            layers.Dense(1, name="last"),
        ]
    )
    for v in model.trainable_variables:
        v.assign(np.linspace(0.1, 0.5, v.shape.num_elements()).reshape(v.shape))
    return model


def test_bad_hessian_leaves_the_directions(capfd: Any) -> None:
    """It is counted, and training goes on with what there was."""
    x, y = data()[0], np.ones((12, 1), "float32")
    large = x.copy()
    large[0] = 200.0
    tiny = np.full(12, 1e-3, "float32")  # keeps the steps small
    model = kinked_model()
    optimizer = small(SGD(1e-6), warmup_steps=0, alpha=1e-3)
    model.compile(optimizer, "mse")
    model.train_on_batch(x, y, sample_weight=tiny)
    model.train_on_batch(x, y, sample_weight=tiny)
    before, spectrum = curvature(optimizer), optimizer.spectrum()
    weights = flat(model)
    capfd.readouterr()
    model.train_on_batch(large, y, sample_weight=tiny)
    assert capfd.readouterr().err.count("estimation of curvature") == 1
    after = curvature(optimizer)
    for name, value in before.items():
        same = np.array_equal(after[name], value)
        moved = ("momentum", "square", "last_estimation", "failures")
        assert same is not any(k in name for k in moved), name
    np.testing.assert_array_equal(optimizer.spectrum(), spectrum)
    assert np.isfinite(flat(model)).all()
    assert not np.array_equal(flat(model), weights)
    assert int(optimizer.skipped_steps) == 0
    text = summary_text(optimizer)
    assert "estimations of curvature that were not finite: 1" in text
    model.train_on_batch(x, y, sample_weight=tiny)
    model.train_on_batch(x, y, sample_weight=tiny)
    assert not np.array_equal(optimizer.spectrum(), spectrum)


def test_bad_first_hessian_is_the_inner_optimizer() -> None:
    """Until the next estimation succeeds."""
    x, y = data()[0], np.ones((12, 1), "float32")
    large = x.copy()
    large[0] = 200.0
    model, twin = kinked_model(), kinked_model()
    model.compile(small(SGD(1e-6), warmup_steps=0), "mse")
    twin.compile(SGD(1e-6), "mse")
    for one in (model, twin):
        one.train_on_batch(large, y)
        one.train_on_batch(x, y)
    np.testing.assert_array_equal(flat(model), flat(twin))
    assert model.optimizer.spectrum().shape == (0,)
    model.train_on_batch(x, y)
    assert model.optimizer.spectrum().shape == (2,)


def test_no_second_derivative() -> None:
    """An error at the first trace that names the layer, not a wrong Hessian."""
    model = keras.Sequential(
        [
            keras.Input((2, 2, 1)),
            layers.Conv2D(1, 1),
            layers.UpSampling2D(2, interpolation="bilinear", name="enlarge"),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="images",
    )
    model.compile(small(warmup_steps=50), "mse")
    x, y = np.ones((2, 2, 2, 1), "float32"), np.ones((2, 1), "float32")
    message = "Layer 'enlarge' of model 'images' has no second derivative"
    with pytest.raises(NotImplementedError, match=message):
        model.train_on_batch(x, y)


# ----------------------------------------------------------- wrong arguments


def test_one_model_only() -> None:
    optimizer = tfkfac.FOSI()
    first, second = mlp(), mlp()
    with pytest.raises(TypeError, match=r"Argument `model`.*Received"):
        optimizer.attach("a model")
    optimizer.attach(first)
    with pytest.raises(ValueError, match="already belongs to model 'mlp'"):
        optimizer.attach(second)
    with pytest.raises(ValueError, match="does not know its model"):
        tfkfac.FOSI().summary()


def test_accelerators_need_replicas() -> None:
    """A fraction of one device is refused before any training."""
    with pytest.raises(ValueError, match="`accelerator_fraction`"):
        mlp().compile(tfkfac.FOSI(accelerator_fraction=0.5), loss())
