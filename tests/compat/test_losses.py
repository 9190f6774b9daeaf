"""The losses inside of `compute_loss`."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat.losses import (
    loss_arguments,
    loss_function,
    loss_weights,
    observed_losses,
)

OBSERVED = "compat.losses.observed_losses"
X = np.ones((3, 2, 4), "float32")


def network() -> Any:
    inputs = keras.Input((2, 4))
    h = layers.Masking()(inputs)
    return keras.Model(inputs, [layers.Dense(2)(h), layers.Dense(1)(h)])


@contract(
    OBSERVED,
    "a loss is called by `Loss.__call__`, which calls "
    "`reduce_weighted_values` of its module.",
)
def test_every_loss_is_seen() -> None:
    model = network()
    model.compile("sgd", ["mse", keras.losses.Huber(reduction="sum")])
    outputs = model(X)
    labels = [tf.zeros_like(output) for output in outputs]
    with observed_losses() as calls:
        total = model.compute_loss(
            x=X, y=labels, y_pred=outputs, sample_weight=[np.ones((3, 2)), None]
        )
    first, second = calls
    assert first.reduction is not None
    assert second.reduction is not None
    assert first.reduction.values.shape == (3, 2)
    assert first.reduction.mask is not None
    assert first.reduction.weights is not None
    assert first.reduction.kind == "sum_over_batch_size"
    assert second.reduction.weights is None
    assert second.reduction.kind == "sum"
    np.testing.assert_allclose(total, first.result + second.result)
    assert second.y_pred is outputs[1]
    # Nothing is left behind, and nothing is seen outside.
    assert "observed" not in repr(keras.losses.Loss.__call__)
    model.compute_loss(x=X, y=labels, y_pred=outputs)
    assert len(calls) == 2


@contract(OBSERVED, "a loss calls another one like any function.")
def test_a_loss_inside_of_a_loss_is_not_seen() -> None:
    class Twice(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            inner = keras.losses.MeanSquaredError(reduction="none")
            return 2 * inner(y_true, y_pred)

    loss = Twice()
    with observed_losses() as calls:
        loss(tf.zeros([5, 2]), tf.ones([5, 2]))
    (call,) = calls
    assert call.loss is loss
    assert call.reduction is not None
    np.testing.assert_allclose(call.reduction.values, np.full(5, 2.0))


@contract(
    "compat.losses.loss_weights",
    "a compiled loss has `_flat_losses` with `loss` and `loss_weights`.",
)
def test_weights_are_in_the_order_of_the_calls() -> None:
    model = network()
    assert loss_weights(model) == []
    model.compile("sgd", ["mse", "mae"], loss_weights=[0.25, 3.0])
    outputs = model(X)
    with observed_losses() as calls:
        model.compute_loss(x=X, y=outputs, y_pred=outputs)
    found = loss_weights(model)
    assert [loss for loss, _ in found] == [call.loss for call in calls]
    assert [weight for _, weight in found] == [0.25, 3.0]


@contract(
    "compat.losses.loss_function",
    "`LossFunctionWrapper` has its function `fn`.",
)
def test_function_of_a_loss() -> None:
    losses = keras.losses
    for loss, function in [
        (losses.MeanSquaredError(), losses.mean_squared_error),
        (losses.BinaryCrossentropy(), losses.binary_crossentropy),
        (losses.CategoricalCrossentropy(), losses.categorical_crossentropy),
    ]:
        assert loss_function(loss) is function


@contract(
    "compat.losses.loss_arguments",
    "a loss of Keras' own has what it passes to its function in `_fn_kwargs`.",
)
def test_arguments_of_a_loss() -> None:
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1
    )
    assert loss_arguments(loss) == {
        "from_logits": True,
        "label_smoothing": 0.1,
        "axis": -1,
    }
    assert loss_arguments(keras.losses.get("mse")) == {}
