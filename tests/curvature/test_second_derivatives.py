"""Hessians and Gauss-Newton forms of layers and losses.

They are compared with finite differences.
"""

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from tests.support.curvature_models import (
    ROWS,
    difference_products,
    differences,
    inputs,
    noise,
    ready,
    split,
    weight_count,
)
from tests.support.harness import randomize
from tests.support.reference import Array
from tfkfac.curvature import hessian_vector_product
from tfkfac.curvature.gauss_newton import gauss_newton_form
from tfkfac.loss.batch import training_call

pytestmark = pytest.mark.usefixtures("double")
LABELS = np.arange(ROWS) % 3
ONE_HOT = np.eye(3)[LABELS]


def assert_agrees(
    model: Any, x: Any, y: Any, sample_weight: Any = None
) -> None:
    """Compare two products with finite differences of the gradient.

    They do not change moving averages, seeds, metrics and slots.
    """
    vectors = noise(weight_count(model), 2)
    want = difference_products(model, vectors, x, y, sample_weight)
    variables = [*model.variables, *model.metrics_variables]
    variables += model.optimizer.variables
    before = [np.array(v) for v in variables]
    got = hessian_vector_product(model, x, y, vectors, sample_weight).numpy()
    np.testing.assert_equal([np.array(v) for v in variables], before)
    scale = np.abs(want).max()
    assert scale > 1e-3
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-6)


# Moments, loops and sparse gradients, seeds, `add_loss`, stopped gradients.
CASES = (
    "batch_synchronized",
    "masked_rnn",
    "dropout",
    "add_loss",
    "stop_gradient",
)


@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
@pytest.mark.parametrize("case", CASES)
def test_layers(case: str) -> None:
    model, x, y = ready(case)
    assert_agrees(model, x, y)
    if case == "add_loss":  # has no outputs, see `loss/terms.py`
        return
    vectors = noise(3, weight_count(model))
    before = [np.array(v) for v in model.variables]
    got = form(model, vectors, x, y)
    for v, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.asarray(v), old)
    # For the mean squared error: 2 / (B D) times products of tangents.
    tangents = differences(
        model, lambda: np.asarray(model(x, training=True)), vectors, 1e-6
    ).reshape(len(vectors), -1)
    want = 2 / tangents.shape[1] * tangents @ tangents.T
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def form(model: Any, vectors: Array, x: Any, y: Any) -> Array:
    """The matrix of `whole_form`."""
    return np.asarray(whole_form(model, vectors, x, y).matrix)


def whole_form(model: Any, vectors: Array, x: Any, y: Any) -> Any:
    """`gauss_newton_form` with the rows of a matrix as directions."""
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def compute() -> Any:
        return gauss_newton_form(
            model,
            training_call(model, x),
            {"x": x, "y": y},
            variables,
            [tf.identity(v.value) for v in variables],
            [[tf.constant(p) for p in split(model, v)] for v in vectors],
        )

    return compute()


# Factories: a loss has the dtype of the backend at its creation.
SPARSE = partial(losses.SparseCategoricalCrossentropy, from_logits=True)
NOISE = np.random.default_rng(5).normal(size=(ROWS, 2))
# name -> (loss, units, activation, targets)
LOSSES: dict[str, tuple[Any, int, Any, Any]] = {
    "huber": (losses.Huber, 2, None, 3 * NOISE),
    "sparse_ignored": (partial(SPARSE, ignore_class=1), 3, None, LABELS),
    "kl_divergence": (losses.KLDivergence, 3, "softmax", ONE_HOT),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses(case: str) -> None:
    loss, units, activation, y = LOSSES[case]
    weights = np.arange(ROWS) / 3.0 if case == "huber" else None
    hidden = layers.Dense(4, activation="tanh")
    last = layers.Dense(units, activation=activation)
    model = keras.Sequential([keras.Input((3,)), hidden, last])
    randomize(model)
    model.compile("sgd", loss())
    assert_agrees(model, inputs((3,)), y, weights)


def test_slopes_at_the_outputs() -> None:
    """Squares of the slopes; absolute errors have no second derivative."""
    start = keras.Input((3,))
    h = layers.Dense(4, "tanh")(start)
    model = keras.Model(start, [layers.Dense(2)(h), layers.Dense(3)(h)])
    randomize(model)
    model.compile("sgd", ["mae", SPARSE()], loss_weights=[2.0, 3.0])
    x, y = inputs((3,)), [noise(ROWS, 2), LABELS]
    model.compute_loss(x, y, model(x))  # builds the loss
    vectors = noise(2, weight_count(model))
    got = whole_form(model, vectors, x, y)

    def outputs() -> Array:
        return np.concatenate([np.asarray(z) for z in model(x)], 1)

    tangents = differences(model, outputs, vectors, 1e-6)
    tangents = tangents.reshape(2, ROWS, 5)
    z = outputs()
    p = np.exp(z[:, 2:]) / np.exp(z[:, 2:]).sum(1, keepdims=True)
    slopes = np.concatenate(
        [2 * np.sign(z[:, :2] - y[0]) / 2, 3 * (p - ONE_HOT)], 1
    )
    squares = np.sum((slopes / ROWS * tangents) ** 2, 1)
    want = np.stack([squares[:, :2].sum(1), squares[:, 2:].sum(1)], 1)
    np.testing.assert_allclose(got.squared_slopes, want, rtol=1e-6)
    np.testing.assert_array_equal(got.curvatures[:, 0], [0, 0])
    t = tangents[..., 2:]
    curved = 3 / ROWS * p * (t - np.sum(p * t, -1, keepdims=True))
    want = np.sum(np.abs(t * curved), (1, 2))
    np.testing.assert_allclose(got.curvatures[:, 1], want, rtol=1e-6)


def test_several_inputs_and_outputs() -> None:
    """With weights of losses and examples; a nested model is called twice."""
    first, second = keras.Input((3,), name="p"), keras.Input((3,), name="q")
    twice = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh")])
    h = layers.Concatenate()([twice(first), twice(second)])
    outputs = {n: layers.Dense(u, name=n)(h) for n, u in (("a", 2), ("b", 3))}
    model = keras.Model({"p": first, "q": second}, outputs)
    randomize(model)
    x = {"p": inputs((3,)), "q": noise(ROWS, 3, seed=4)}
    y = {"a": noise(ROWS, 2), "b": LABELS}
    objectives = {"a": "mse", "b": SPARSE()}
    model.compile(
        keras.optimizers.Adam(0.1),
        objectives,
        loss_weights={"a": 0.3, "b": 2.0},
        metrics={"b": ["accuracy"]},
        run_eagerly=True,
    )
    weights = {"a": np.arange(ROWS) / 3.0, "b": np.ones(ROWS)}
    model.train_on_batch(x, y)  # creates metrics and slots
    assert_agrees(model, x, y, weights)
