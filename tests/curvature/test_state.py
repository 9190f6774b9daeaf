"""`hessian_vector_product` leaves model, optimizer and taps as they were."""

import gc
import weakref
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.support.curvature_models import (
    ROWS,
    difference_products,
    inputs,
    noise,
    ready,
    weight_count,
)
from tests.support.harness import randomize
from tests.support.reference import Array
from tests.support.small import (
    assert_same,
    compiled_mlp,
    data,
    everything,
    loss,
)
from tfkfac.curvature import hessian_vector_product


def stateful() -> tuple[Any, Any, Any]:
    """Moving averages, seeds, trackers and slots; no step taken yet."""
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    h = layers.Dense(4, activity_regularizer="l2")(x)
    h = layers.Dropout(0.3)(layers.BatchNormalization()(h))
    outputs = {n: layers.Dense(3, name=n)(h) for n in ("a", "b")}
    model = keras.Model(x, outputs)
    model.compile(
        keras.optimizers.Adam(0.1),
        {"a": "mse", "b": loss()},
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"b": ["accuracy"]},
    )
    y = {"a": noise(ROWS, 3), "b": np.arange(ROWS) % 3}
    return model, inputs((3,)), y


def state(model: Any) -> dict[str, Array]:
    variables = [*model.variables, *model.metrics_variables]
    variables += model.optimizer.variables
    return {f"{i} {v.path}": np.array(v) for i, v in enumerate(variables)}


def test_training_does_not_notice() -> None:
    """Not even when the products come before the first step."""
    ends = []
    for with_products in (False, True):
        model, x, y = stateful()
        logs = []
        for _ in range(3):
            if with_products:
                vectors = noise(weight_count(model), 2)
                before = state(model)
                hessian_vector_product(model, x, y, vectors)
                if logs:  # the first step has made all variables
                    assert_same(state(model), before)
            logs.append(model.train_on_batch(x, y, return_dict=True))
        ends.append((logs, state(model)))
    for kind in ("seed_generator", "moving_mean", "accuracy", "a_loss", "adam"):
        assert any(kind in name for name in before), kind
    assert ends[0][0] == ends[1][0]
    plain, same = (list(values.values()) for _, values in ends)
    for one, other in zip(plain, same, strict=True):
        np.testing.assert_array_equal(one, other)


def test_taps_of_kfac_are_not_disturbed() -> None:
    x, y = data()
    ends = []
    for with_products in (False, True):
        model = compiled_mlp(eager=True)
        for _ in range(3):
            if with_products:
                vector = noise(weight_count(model))
                hessian_vector_product(model, x, y, vector)
            model.train_on_batch(x, y)
        ends.append(everything(model))
    assert_same(ends[1], ends[0])


def test_added_losses_stay() -> None:
    model, x, y = ready("activity_regularizer")
    model(x, training=True)
    before = [float(value) for value in model.losses]
    hessian_vector_product(model, x, y, noise(weight_count(model)))
    assert [float(value) for value in model.losses] == before != []


def test_model_can_be_collected() -> None:
    model, x, y = ready()
    hessian_vector_product(model, x, y, noise(weight_count(model)))
    reference = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reference() is None


class Custom(keras.Model):
    """Its own layers, call, added loss, tracker and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.outer = layers.Dense(2)
        self.tracker = keras.metrics.Mean("own")

    def call(self, x: Any) -> Any:
        h = self.hidden(x)
        self.add_loss(ops.mean(h**4))
        return self.outer(h)

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        value = ops.mean((y - y_pred) ** 4) * ops.mean(x**2) + sum(self.losses)
        self.tracker.update_state(value)
        return value


def test_subclassed_model() -> None:
    model = Custom()
    model.compile("sgd")
    x, y = inputs((3,)), noise(ROWS, 2)
    model(x)
    randomize(model)
    before = state(model)
    vectors = noise(weight_count(model), 2)
    got = hessian_vector_product(model, x, y, vectors)
    assert_same(state(model), before)
    want = difference_products(model, vectors, x, y, step=3e-3)
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-3)
