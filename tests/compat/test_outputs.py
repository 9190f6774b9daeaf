"""What losses read of an output besides its values."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat.losses import in_place_of, logits_of

LOGITS = tf.constant([[0.5, -1.0, 2.0]])


@contract(
    "compat.losses.logits_of",
    "softmax and sigmoid leave their input on what they return.",
)
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_logits_of(name: str) -> None:
    output = layers.Activation(name)(LOGITS)
    np.testing.assert_array_equal(logits_of(output), LOGITS)
    assert logits_of(layers.Activation("tanh")(LOGITS)) is None


@contract(
    "compat.losses.in_place_of",
    "losses take logits from the attribute, and not the values.",
)
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("softmax", keras.losses.CategoricalCrossentropy()),
        ("softmax", keras.losses.SparseCategoricalCrossentropy()),
        ("sigmoid", keras.losses.BinaryCrossentropy()),
    ],
)
def test_logits_are_read_in_place_of(name: str, loss: keras.Loss) -> None:
    labels = tf.constant([[0.0, 1.0, 0.0]])
    if isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        labels = tf.constant([1])
    output = layers.Activation(name)(LOGITS)
    with tf.GradientTape() as tape:
        values, logits = tf.identity(output), tf.identity(LOGITS)
        tape.watch([values, logits])
        other = in_place_of(output, values, logits)
        found = loss(labels, other)
    slopes = tape.gradient(found, [values, logits])
    assert slopes[0] is None
    assert np.abs(slopes[1]).max() > 0
    np.testing.assert_allclose(found, loss(labels, output))


@contract("compat.losses.in_place_of", "losses find a mask on the tensor.")
def test_mask_is_read_in_place_of() -> None:
    x = tf.constant([[[1.0], [2.0], [0.0]]])
    output = layers.Masking()(x)
    other = in_place_of(output, output + 1, None)
    masked = tf.constant([[[0.0], [0.0], [9.0]]])  # what nobody looks at
    loss = keras.losses.MeanSquaredError()
    assert float(loss(x, other)) == 1.0
    assert float(loss(x, in_place_of(output, x + masked, None))) == 0.0
