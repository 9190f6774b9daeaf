"""Dense layers whose gradients are preconditioned as rows (a, g).

Rows and the dense gradient give the same step. Eager steps use the dense
gradient, so graphs are compared with eager steps. The choice shows in the
optimised graph, which has the tape's product of a layer or not.
"""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.graphs import optimized_nodes
from tests.support.harness import randomize
from tests.support.reference import Array, inverse_root
from tests.support.small import gradients_of

INPUTS, HIDDEN, OUTPUTS = 40, 32, 3
RATE, DAMPING, CLIP = 0.5, 0.05, 0.01


def network() -> Any:
    """The first two layers are wide, the third is not."""
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            layers.Dense(HIDDEN, "tanh", name="first"),
            layers.Dense(HIDDEN, "tanh", name="second"),
            layers.Dense(OUTPUTS, name="third"),
        ]
    )
    randomize(model)
    return model


def sequences() -> Any:
    """Dense and einsum layers at every position."""
    i = keras.Input((2, INPUTS))
    h = layers.Dense(HIDDEN, "tanh", name="first")(i)
    h = layers.EinsumDense(
        "abc,cde->abde", (2, 4, 8), bias_axes="de", name="second"
    )(h)
    model = keras.Model(
        i, layers.Dense(OUTPUTS, name="third")(layers.Reshape((64,))(h))
    )
    randomize(model)
    return model


def optimizer(**options: Any) -> Any:
    return tfkfac.KFAC(
        keras.optimizers.SGD(RATE),
        **{"damping": DAMPING, "kl_clip": CLIP, "fisher": "empirical"}
        | options,
    )


def batch(rows: int, *shape: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, *(shape or (INPUTS,))))
    return x, rng.normal(size=(rows, OUTPUTS))


def loss(y: Any, z: Any) -> Any:
    """Half the sum of squares: unit 1, gradient equal to the residual."""
    return tf.reduce_sum(tf.square(z - y), -1) / 2


def mean_loss(y: Any, z: Any) -> Any:
    return tf.reduce_mean(loss(y, z))


# --------------------------------------------------------------- exactness
@pytest.mark.parametrize("step", ["natural", "spectral"])
def test_batches_of_few_and_many_rows(step: str) -> None:
    """One trace of unknown batch size; momenta get rows and matrices."""
    batches = [batch(rows) for rows in (6, 64, 6)]
    signature = [tf.TensorSpec((None, n), "float64") for n in (INPUTS, OUTPUTS)]
    with floats("float64"):
        models = [network(), network()]
        for model, is_eager in zip(models, (False, True), strict=True):
            kfac = optimizer(
                step=step,
                factor_decay=0.0,
                factor_update_interval=1,
                inverse_update_interval=2,
            )
            model.compile(kfac, loss, run_eagerly=is_eager)
            data = tf.data.Dataset.from_generator(
                lambda: iter(batches), output_signature=tuple(signature)
            )
            model.fit(data, verbose=0)
    got, want = (model.get_weights() for model in models)
    for ours, theirs, start in zip(
        got, want, network().get_weights(), strict=True
    ):
        assert np.abs(theirs - start).max() > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)


def test_rounding_fills_no_singular_values() -> None:
    """A gradient of 8 rows has rank 8, also with products in half precision.

    The direction is that of the gradient in float64, orthogonalised by NumPy.
    """
    x, y = batch(8)
    y *= 10  # so that the outputs are not fitted first
    with floats("float64"):
        exact = network()
        kernel, bias, *_ = gradients_of(exact, x, y, mean_loss)
    with floats("mixed_bfloat16"):
        model = network()
    model.set_weights(exact.get_weights())
    start = model.get_weights()
    model.compile(tfkfac.KFAC(fisher="empirical"), loss)
    model.train_on_batch(x, y)
    block = model.optimizer.factors()["first"]
    roots = block["A"].astype(float), block["G"].astype(float), 0.01
    X = inverse_root(np.vstack([kernel, bias[None]]), *roots)
    U, sizes, V = np.linalg.svd(X, full_matrices=False)
    assert sizes[8] < 1e-12 * sizes[0]
    D = inverse_root(U[:, :8] @ V[:8], *roots, back=True)
    pairs = zip(start, model.get_weights(), strict=True)
    kernel, bias, *_ = (old - new for old, new in pairs)
    change = np.vstack([kernel, bias])
    cosine = np.sum(change * D) / np.linalg.norm(change) / np.linalg.norm(D)
    assert cosine > 0.98


# ------------------------------------------------------ use of row gradients
def test_pruned_products() -> None:
    """The tape's product is pruned where rows are used; steps are equal."""
    x, y = batch(4, 2, INPUTS)
    with floats("float64"):
        model, other = sequences(), sequences()
        model.compile(optimizer(step="spectral"), loss)
        nodes = optimized_nodes(lambda: model.train_on_batch(x, y))
        model.train_on_batch(x, y)
        other.compile(optimizer(step="spectral"), loss, run_eagerly=True)
        for _ in range(2):
            other.train_on_batch(x, y)
    products = {
        layer.name
        for layer in model.layers
        for node in nodes
        if node.op in ("MatMul", "BatchMatMulV2", "BatchMatMulV3")
        and node.name.startswith("gradient_tape/")
        and re.search(rf"/{layer.name}(_\d+)?/", node.name)
        and (node.attr["transpose_a"].b or node.attr["adj_x"].b)
    }
    assert products == {"third"}
    for got, want in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def test_row_products_that_are_not_finite() -> None:
    """A product that would not be finite skips the step."""
    model = network()
    # The feature enters the product only.
    kernel = model.layers[0].kernel
    kernel.assign(np.where(np.arange(INPUTS)[:, None] == 4, 0, kernel))
    model.compile(optimizer(), loss)
    x, y = batch(8)
    x[:, 4] = 0
    model.train_on_batch(x, y)
    before = model.get_weights()
    for count, poison in enumerate((np.nan, 1e30)):
        x[3, 4], y[3] = poison, poison
        model.train_on_batch(x.astype("float32"), y.astype("float32"))
        assert int(model.optimizer.skipped_steps) == count + 1
    np.testing.assert_equal(model.get_weights(), before)
