"""`hessian_vector_product` does not change model, optimizer and taps."""

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
    """A model with moving averages, seeds, metrics and slots, not trained."""
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


def test_training_is_unchanged() -> None:
    """The first product runs before the first step."""
    results = []
    for with_products in (False, True):
        model, x, y = stateful()
        logs = []
        for _ in range(2):
            if with_products:
                vectors = noise(weight_count(model))
                before = state(model)
                hessian_vector_product(model, x, y, vectors)
                if logs:  # The first step creates all variables.
                    assert_same(state(model), before)
            logs.append(model.train_on_batch(x, y, return_dict=True))
        results.append((logs, state(model)))
    for part in ("seed_generator", "moving_mean", "accuracy", "a_loss", "adam"):
        assert any(part in name for name in before), part
    assert results[0][0] == results[1][0]
    values = (after.values() for _, after in results)
    for got, want in zip(*values, strict=True):
        np.testing.assert_array_equal(got, want)


def test_kfac_training_is_unchanged() -> None:
    x, y = data()
    results = []
    for with_products in (False, True):
        model = compiled_mlp(eager=True)
        for _ in range(2):
            if with_products:
                vector = noise(weight_count(model))
                hessian_vector_product(model, x, y, vector)
            model.train_on_batch(x, y)
        results.append(everything(model))
    assert_same(results[1], results[0])


def test_model_is_garbage_collected() -> None:
    model, x, y = ready()
    hessian_vector_product(model, x, y, noise(weight_count(model)))
    reference = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reference() is None


class Custom(keras.Model):
    """Subclassed model with an added loss, a metric and `compute_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(4, activation="tanh")
        self.outer = layers.Dense(2)
        self.tracker = keras.metrics.Mean("value")

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
    model(x, training=True)
    randomize(model)
    before, added = state(model), [float(value) for value in model.losses]
    vectors = noise(weight_count(model), 2)
    got = hessian_vector_product(model, x, y, vectors)
    assert_same(state(model), before)
    assert [float(value) for value in model.losses] == added != []
    want = difference_products(model, vectors, x, y, step=3e-3)
    scale = np.abs(want).max()
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-3)
