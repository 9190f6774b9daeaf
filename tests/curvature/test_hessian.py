"""`hessian_vector_product`: values, forms and errors."""

import functools
import gc
import pathlib
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.curvature_models import (
    IMAGE,
    ROWS,
    ZOO,
    difference_products,
    flat,
    inputs,
    network,
    noise,
    ready,
    split,
    weight_count,
)
from tests.support.harness import assert_close, randomize
from tests.support.reference import Array
from tests.support.small import loss
from tests.support.summaries import sequential
from tfkfac.curvature import hessian_vector_product

DATA = pathlib.Path(__file__).parents[1] / "data" / "fosi_mlp.npz"


# ---------------------------------------------------------------------- oracle
def test_oracle() -> None:
    """Products with the model's Hessian, stored by an independent program."""
    with np.load(DATA) as file:
        want = {k: file[k] for k in file.files}
    model = sequential(
        layers.Dense(16, activation="tanh", name="dense_1"),
        layers.Dense(3, name="dense_2"),
        shape=(10,),
    )
    for layer in model.layers:
        keys = [f"weights0/{layer.name}/{k}" for k in ("kernel", "bias")]
        layer.set_weights([want[key] for key in keys])
    model.compile("sgd", loss())

    for vectors, products in (
        (want["probe"], want["hessian_times_probe"]),
        (np.eye(227)[:, ::9], want["hessian"][:, ::9]),
    ):
        got = hessian_vector_product(model, want["x"], want["y"], vectors)
        tolerance = 2e-6 * np.abs(products).max()
        np.testing.assert_allclose(got, products, rtol=0, atol=tolerance)


# ----------------------------------------------------------------------- forms
def test_forms() -> None:
    """All forms of vectors; the model is garbage collected afterwards."""
    gc.freeze()  # so that garbage of other tests is not collected here
    model, x, y = ready()
    columns = noise(weight_count(model), 3)
    products = hessian_vector_product(model, x, y, columns)
    assert products.shape == columns.shape
    column = columns[:, 0]
    product = hessian_vector_product(model, x, y, column)
    assert product.shape == column.shape
    np.testing.assert_allclose(products[:, 0], product, rtol=1e-4, atol=1e-5)
    single = hessian_vector_product(model, x, y, column.astype(float)[:, None])
    assert single.dtype == tf.float32
    np.testing.assert_array_equal(single[:, 0], product)
    arrays = split(model, column)
    for form in (list, tuple):
        images = hessian_vector_product(model, x, y, form(arrays))
        assert [t.shape for t in images] == [a.shape for a in arrays]
        np.testing.assert_array_equal(flat(images), product)
    reference = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert reference() is None


def test_function_with_dynamic_batch_size() -> None:
    model, x, y = ready("tanh")
    vectors = noise(weight_count(model), 2)
    specs = [tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])]

    @tf.function(input_signature=specs)
    def product(x: Any, y: Any) -> Any:
        return hessian_vector_product(model, x, y, vectors)

    want = hessian_vector_product(model, x, y, vectors)
    np.testing.assert_allclose(product(x, y), want, rtol=1e-4, atol=1e-5)
    # The Hessian of the mean is the mean over the rows.
    first, second = product(x[:3], y[:3]), product(x[3:], y[3:])
    got = (3 * first + (ROWS - 3) * second) / ROWS
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert product.experimental_get_tracing_count() == 1


# --------------------------------------------------------------- model changes
def test_changed_weights_loss_and_trainable() -> None:
    model, x, y = ready()
    unit = np.eye(weight_count(model))

    def hessian(size: int = len(unit)) -> Array:
        columns = unit[:size, :size]
        return hessian_vector_product(model, x, y, columns).numpy()

    first = hessian()
    weights = model.get_weights()
    model.set_weights([2 * w for w in weights])
    assert abs(hessian() - first).max() > 0.1
    model.set_weights(weights)
    model.layers[1].trainable = False
    last = weight_count(model)
    frozen = hessian(last)
    np.testing.assert_allclose(frozen, first[-last:, -last:], atol=1e-6)
    model.layers[1].trainable = True
    np.testing.assert_array_equal(hessian(), first)
    model.compile("sgd", "huber")
    assert abs(hessian() - first).max() > 0.1


def test_mixed_precision() -> None:
    """The product is float32 and close to the product in float32."""

    def product(dtype: str) -> Any:
        stack = [
            layers.Dense(3, activation="tanh", dtype=dtype),
            layers.LayerNormalization(dtype=dtype),
            layers.Dense(2),
        ]
        model = keras.Sequential([keras.Input((3,)), *stack])
        randomize(model)
        model.compile("sgd", "mse")
        x, y = inputs((3,)), noise(ROWS, 2)
        vectors = noise(weight_count(model), 2)
        return hessian_vector_product(model, x, y, vectors).numpy()

    got = product("mixed_float16")
    assert got.dtype == np.float32
    assert_close(got, product("float32"), 0.05)


# ---------------------------------------------------------------------- errors
class NoSecond(layers.Layer):
    """Layer whose operation has no second derivative."""

    def call(self, x: Any) -> Any:
        return tf.nn.local_response_normalization(x)


@pytest.mark.parametrize(
    ("layer", "columns"),
    [
        (functools.partial(NoSecond, name="unusual_1"), 2),
        (functools.partial(layers.Dense, 3, activation="softsign"), 1),
    ],
)
def test_no_second_derivative(layer: Any, columns: int) -> None:
    """The message names the layer, even if other names are similar."""
    before, bad, after = layers.Dense(3), layer(), layers.Dense(3)
    model = network(lambda x: after(bad(before(x))), IMAGE)
    model.compile("sgd", "mse")
    x, y, n = inputs(IMAGE), noise(ROWS, 2), weight_count(model)
    with pytest.raises(NotImplementedError, match=f"'{bad.name}'"):
        hessian_vector_product(model, x, y, noise(n, columns))
    # A strategy can still enter the variable scope.
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert tf.Variable(1.0).numpy() == 1.0
    model.train_on_batch(x, y)


def test_second_derivative_of_bilinear_resizing() -> None:
    """TensorFlow treats it as 0: it must be correct or raise an error."""
    resize = layers.UpSampling2D(2, interpolation="bilinear")
    model = network(lambda x: resize(layers.Dense(3)(x)), IMAGE)
    model.compile("sgd", "mse")
    x, y, vectors = inputs(IMAGE), noise(ROWS, 2), noise(weight_count(model), 2)
    want = difference_products(model, vectors, x, y, step=3e-3)
    try:
        got = hessian_vector_product(model, x, y, vectors)
    except NotImplementedError as error:
        assert "up_sampling2d" in str(error)
    else:
        assert_close(got, want, 1e-3)


def test_scope_of_several_replicas() -> None:
    """Keras would divide the loss by the number of replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model, x, y = ready()
        vector = noise(weight_count(model))
        with pytest.raises(ValueError, match=r"outside of `strategy\.scope"):
            hessian_vector_product(model, x, y, vector)


def test_one_trace() -> None:
    calls = []

    def counted(y: Any, p: Any) -> Any:
        calls.append(1)
        return tf.reduce_mean((y - p) ** 2)

    model = sequential(layers.Dense(2), shape=(3,))
    model.compile("sgd", counted)
    x, y, vector = noise(4, 3), noise(4, 2), noise(8)
    hessian_vector_product(model, x, y, vector)
    traced = len(calls)
    hessian_vector_product(model, x, y, vector)
    assert len(calls) == traced > 0


def test_wrong_models() -> None:
    x, y = inputs((3,)), noise(ROWS, 2)
    model = network(*ZOO["tanh"])
    vector = noise(weight_count(model))
    with pytest.raises(ValueError, match=r"`model`.*is not compiled"):
        hessian_vector_product(model, x, y, vector)
    late = keras.Sequential([layers.Dense(2, name="late")])
    late.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"`model`.*is not built"):
        hessian_vector_product(late, x, y, vector)
    for other in (None, model.layers[1], lambda x: x):
        with pytest.raises(TypeError, match="`model`"):
            hessian_vector_product(other, x, y, vector)


def test_wrong_vectors() -> None:
    model, x, y = ready()
    for vectors in (
        noise(25),
        noise(1, 26),
        noise(26, 1, 1),
        1.0,
        [noise(3, 4)],
        [noise(4, 3), noise(4), noise(4, 2), noise(2)],
        [1.0] * 26,
    ):
        with pytest.raises(ValueError, match="`vectors`"):
            hessian_vector_product(model, x, y, vectors)


class NamelessLoss(keras.Sequential):
    """`compute_loss` without names of arguments."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2.0 * super().compute_loss(*args, **kwargs)


def test_loss_without_names() -> None:
    """Twice Keras' mean squared error of a linear model: H = 4 x^T x / n."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    dense = keras.layers.Dense(1, use_bias=False)
    model = NamelessLoss([keras.Input((3,)), dense])
    model.compile("sgd", "mse")
    product = hessian_vector_product(model, x, x[:, :1], np.ones([3, 1]))
    expected = 4 / len(x) * x.T @ x @ np.ones([3, 1])
    np.testing.assert_allclose(product, expected, rtol=1e-5)
