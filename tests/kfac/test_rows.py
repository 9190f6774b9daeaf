"""Dense layers whose gradients are preconditioned as rows (a, g).

Rows and the dense gradient give the same step. The choice shows in the
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
from tests.support import definition
from tests.support.dtypes import floats
from tests.support.graphs import optimized_nodes
from tests.support.harness import randomize
from tests.support.marks import with_slow
from tests.support.reference import (
    Array,
    append_one,
    clip_factor,
    inverse_root,
    inverse_solve,
)
from tests.support.small import gradients_of
from tests.support.training import exact_polar_factors

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


Blocks = list[tuple[Array, Array, Array]]


def numpy_blocks(
    weights: list[Array], x: Array, y: Array
) -> tuple[Blocks, float]:
    """Gradient and factors of each layer of the network, and the loss."""
    kernels, biases = weights[::2], weights[1::2]
    inputs, outputs = [x], []
    for W, b in zip(kernels, biases, strict=True):
        outputs.append(inputs[-1] @ W + b)
        inputs.append(np.tanh(outputs[-1]))
    g, n = outputs[-1] - y, len(x)
    nats = np.sum(g**2) / 2 / n
    blocks: Blocks = []
    for i in (2, 1, 0):
        a = append_one(inputs[i])
        blocks.insert(0, (a.T @ g / n, a.T @ a / n, g.T @ g / n))
        g = (g @ kernels[i].T) * (1 - inputs[i] ** 2)
    return blocks, nats


def curvature(weights: list[Array], D: list[Array], x: Array) -> float:
    """`D^T F D` of the network; the Hessian of the loss of a row is I."""
    kernels, biases = weights[::2], weights[1::2]
    t = np.zeros_like(x)
    for W, b, d in zip(kernels, biases, D, strict=True):
        z, t = x @ W + b, t @ W + append_one(x) @ d
        x = np.tanh(z)
        last, t = t, t * (1 - x**2)
    return float(np.sum(last**2) / len(x))


def moved(weights: list[Array], changes: Any) -> list[Array]:
    """Add matrices to the weights; the last row is for the bias."""
    parts = [part for d in changes for part in (d[:-1], d[-1])]
    return [w + part for w, part in zip(weights, parts, strict=True)]


def numpy_step(weights: list[Array], x: Array, y: Array) -> list[Array]:
    """A step of K-FAC on the network."""
    pairs = [
        (inverse_solve(W, A, G, DAMPING), W)
        for W, A, G in numpy_blocks(weights, x, y)[0]
    ]
    nu = clip_factor(pairs, RATE, CLIP)
    assert nu < 0.5
    return moved(weights, [-RATE * nu * P for P, _ in pairs])


# --------------------------------------------------------------- exactness
def test_a_ragged_last_batch() -> None:
    """A trace of unknown batch size handles few and many rows."""
    with floats("float64"):
        model = network()
        x, y = batch(70)
        want = numpy_step(model.get_weights(), x[:64], y[:64])
        model.compile(
            optimizer(factor_decay=0.0, inverse_update_interval=1), loss
        )
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        assert data.element_spec[0].shape[0] is None
        want = numpy_step(want, x[64:], y[64:])
        model.fit(data, verbose=0)
    for got, exact in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-11)


def test_spectral_steps() -> None:
    """Momenta are updated by rows, matrices and new decompositions."""
    mu, block, every = 0.75, 4, 2
    sizes = [6, 64, 6, 64, 6]
    data = [batch(rows) for rows in sizes]
    rule = definition.Spectral(inverse_root)
    with floats("float64"), exact_polar_factors(block):
        model = network()
        want = model.get_weights()
        factors: Any = None
        for k, (x, y) in enumerate(data):
            blocks, nats = numpy_blocks(want, x, y)
            factors = blocks if k % every == 0 else factors
            pairs = [
                rule.direction(i, W, (A, G), DAMPING)
                for i, ((W, *_), (_, A, G)) in enumerate(
                    zip(blocks, factors, strict=True)
                )
            ]
            D = [d for d, _ in pairs]
            rows = definition.quarter(range(len(x)), k)
            r = rule.multiplier(
                sum(square for _, square in pairs),
                curvature(want, D, x[rows]),
                nats,
                k + 1,
                OUTPUTS,
            )
            want = moved(want, [-r * d for d in D])
        kfac = tfkfac.KFAC(
            damping=DAMPING,
            fisher="empirical",
            step="spectral",
            momentum=mu,
            factor_decay=0.0,
            factor_update_interval=1,
            inverse_update_interval=every,
        )
        model.compile(kfac, loss)
        signature = [
            tf.TensorSpec((None, n), "float64") for n in (INPUTS, OUTPUTS)
        ]
        dataset = tf.data.Dataset.from_generator(
            lambda: iter(data), output_signature=tuple(signature)
        )
        model.fit(dataset, verbose=0)
    for got, exact in zip(model.get_weights(), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-7, atol=1e-9)


# ------------------------------------------------------ use of row gradients
def ordinary(model: Any, **options: Any) -> Any:
    """The model's training step."""
    model.compile(optimizer(**options), loss)
    return model.train_on_batch


def clipped(model: Any) -> Any:
    """A custom loop that clips the gradients."""
    kfac = optimizer().attach(model)

    @tf.function(autograph=False)
    def train(x: Any, y: Any) -> None:
        gradients = gradients_of(model, x, y, mean_loss)
        clipped = [tf.clip_by_norm(g, 0.1) for g in gradients]
        kfac.apply(clipped, model.trainable_variables)

    return lambda x, y: train(tf.constant(x), tf.constant(y))


def accumulated(model: Any) -> Any:
    return ordinary(model, gradient_accumulation_steps=2)


def spectral(model: Any) -> Any:
    return ordinary(model, step="spectral")


def shared() -> Any:
    layer = layers.Dense(INPUTS, "tanh", name="first")
    i = keras.Input((INPUTS,))
    model = keras.Model(i, layers.Dense(OUTPUTS, name="third")(layer(layer(i))))
    randomize(model)
    return model


CASES: dict[str, tuple[Any, Any, set[str]]] = {
    "sequences": (sequences, ordinary, {"first", "second"}),
    "clipped by the user": (network, clipped, set()),
    "a shared layer": (shared, ordinary, set()),
    "accumulation": (network, accumulated, set()),
    "spectral steps": (network, spectral, {"first", "second"}),
}


@pytest.mark.parametrize("case", with_slow(CASES, *[*CASES][1:-1]))
def test_pruned_products(case: str) -> None:
    """The tape's product is pruned where rows are used; steps are equal."""
    make, prepare, pruned = CASES[case]
    shape = (2, INPUTS) if make is sequences else ()
    x, y = batch(4, *shape)
    with floats("float64"):
        model = make()
        start = model.get_weights()
        step = prepare(model)
        nodes = optimized_nodes(lambda: step(x, y))
        step(x, y)
        # Eager steps use dense gradients.
        other = make()
        other.set_weights(start)
        tf.config.run_functions_eagerly(True)
        try:
            step = prepare(other)
            step(x, y)
            step(x, y)
        finally:
            tf.config.run_functions_eagerly(False)
    products = {
        layer.name
        for layer in model.layers
        for node in nodes
        if node.op in ("MatMul", "BatchMatMulV2", "BatchMatMulV3")
        and node.name.startswith("gradient_tape/")
        and re.search(rf"/{layer.name}(_\d+)?/", node.name)
        and (node.attr["transpose_a"].b or node.attr["adj_x"].b)
    }
    dense = {layer.name for layer in model.layers if layer.weights}
    assert products == dense - pruned
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
