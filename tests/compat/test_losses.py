"""Internals of losses and of the outputs that they use."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat.losses import (
    in_place_of,
    is_of_keras,
    logits_of,
    loss_arguments,
    loss_function,
    loss_weights,
    observed_losses,
)

OBSERVED = "compat.losses.observed_losses"
X = np.ones((3, 2, 4), "float32")


class Twice(keras.losses.Loss):
    """A loss that calls another loss."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        inner = keras.losses.MeanSquaredError(reduction="none")
        return 2 * inner(y_true, y_pred)


def network() -> Any:
    inputs = keras.Input((2, 4))
    h = layers.Masking()(inputs)
    return keras.Model(inputs, [layers.Dense(2)(h), layers.Dense(1)(h)])


@contract(
    OBSERVED,
    "`Loss.__call__` calls `reduce_weighted_values` of its module.",
)
def test_every_loss_is_recorded() -> None:
    """Except for losses that are called by another loss."""
    model = network()
    model.compile("sgd", ["mse", Twice(reduction="sum")])
    outputs = model(X)
    labels = [tf.zeros_like(output) for output in outputs]
    with observed_losses() as calls:
        total = model.compute_loss(
            x=X, y=labels, y_pred=outputs, sample_weight=[np.ones((3, 2)), None]
        )
    first, second = calls
    assert first.reduction is not None and second.reduction is not None
    assert first.reduction.values.shape == (3, 2)
    assert first.reduction.mask is not None
    assert first.reduction.weights is not None
    assert first.reduction.kind == "sum_over_batch_size"
    assert (second.reduction.weights, second.reduction.kind) == (None, "sum")
    np.testing.assert_allclose(total, first.result + second.result)
    assert second.y_pred is outputs[1]
    model.compute_loss(x=X, y=labels, y_pred=outputs)
    assert len(calls) == 2, "only inside of the context"


@contract(
    "compat.losses.loss_weights",
    "A compiled loss has `_flat_losses` with `loss` and `loss_weights`.",
)
def test_weights_are_in_the_order_of_the_calls() -> None:
    model = network()
    assert loss_weights(model) == []
    model.compile("sgd", ["mse", "mae"], loss_weights=[0.25, 3.0])
    outputs = model(X)
    with observed_losses() as calls:
        model.compute_loss(x=X, y=outputs, y_pred=outputs)
    result = loss_weights(model)
    assert [loss for loss, _ in result] == [call.loss for call in calls]
    assert [weight for _, weight in result] == [0.25, 3.0]


@contract(
    "compat.losses.loss_function",
    "A Keras loss has the attributes `fn` and `_fn_kwargs`.",
)
def test_function_of_a_loss() -> None:
    loss = keras.losses.CategoricalCrossentropy(True, 0.1)
    assert loss_function(loss) is keras.losses.categorical_crossentropy
    expected = {"from_logits": True, "label_smoothing": 0.1, "axis": -1}
    assert loss_arguments(loss) == expected
    assert loss_arguments(keras.losses.get("mse")) == {}


LOGITS = tf.constant([[0.5, -1.0, 2.0]])


@contract(
    "compat.losses.logits_of",
    "Softmax and sigmoid store their input on the result; losses use this "
    "input instead of the result.",
)
@pytest.mark.parametrize(
    ("name", "loss", "labels"),
    [
        ("softmax", keras.losses.SparseCategoricalCrossentropy(), [1]),
        ("sigmoid", keras.losses.BinaryCrossentropy(), [[0.0, 1.0, 0.0]]),
    ],
)
def test_logits(name: str, loss: keras.Loss, labels: Any) -> None:
    assert logits_of(layers.Activation("tanh")(LOGITS)) is None
    output = layers.Activation(name)(LOGITS)
    np.testing.assert_array_equal(logits_of(output), LOGITS)
    with tf.GradientTape() as tape:
        values, logits = tf.identity(output), tf.identity(LOGITS)
        tape.watch([values, logits])
        other = in_place_of(output, values, logits)
        result = loss(np.array(labels), other)
    of_values, of_logits = tape.gradient(result, [values, logits])
    assert of_values is None
    assert np.abs(of_logits).max() > 0
    np.testing.assert_allclose(result, loss(np.array(labels), output))


@contract("compat.losses.in_place_of", "Losses read the mask of a tensor.")
def test_mask_is_read_in_place_of() -> None:
    x = tf.constant([[[1.0], [2.0], [0.0]]])
    output = layers.Masking()(x)
    other = in_place_of(output, output + 1, None)
    masked = tf.constant([[[0.0], [0.0], [9.0]]])  # ignored by the loss
    loss = keras.losses.MeanSquaredError()
    assert float(loss(x, other)) == 1.0
    assert float(loss(x, in_place_of(output, x + masked, None))) == 0.0


@contract(
    "compat.losses.is_of_keras",
    "The modules of Keras' loss functions and classes are in `keras`.",
)
@pytest.mark.parametrize(
    ("loss", "of_keras"),
    [
        ("mse", True),
        (keras.losses.Huber(), True),
        (lambda y, p: (y - p) ** 2, False),
        (Twice(), False),
    ],
)
def test_losses_of_keras(loss: Any, of_keras: bool) -> None:
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", loss)
    model.compute_loss(y=np.ones((2, 1)), y_pred=tf.ones((2, 1)))
    ((result, _),) = loss_weights(model)
    assert is_of_keras(result) == of_keras
