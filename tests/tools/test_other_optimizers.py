"""Baselines of the studies against another implementation."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

import other_optimizers


def test_soap() -> None:
    """25 steps of SOAP of the package pytorch_optimizer 4.1.0, in float32.

    The matrix is square: null spaces of Shampoo's matrices have no unique
    bases.
    """
    path = pathlib.Path(__file__).parents[1] / "data" / "soap.npz"
    with np.load(path) as data:
        weights = [keras.Variable(data["w"]), keras.Variable(data["b"])]
        optimizer = other_optimizers.soap(0.01, None)
        for gradients in zip(data["gw"], data["gb"], strict=True):
            optimizer.apply([*map(tf.constant, gradients)], weights)
        for weight, name in zip(weights, "wb", strict=True):
            np.testing.assert_allclose(weight, data[f"{name}_end"], atol=1e-6)


def test_muon_of_a_kernel_is_that_of_its_matrix() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 2, 4, 5)).astype("float32")
    gradient = rng.normal(size=start.shape).astype("float32")
    ends = []
    for shape in (start.shape, (24, 5)):
        weight = keras.Variable(start.reshape(shape))
        optimizer = other_optimizers.reshaped_muon(0.1, None)
        optimizer.apply([tf.constant(gradient.reshape(shape))], [weight])
        ends.append(weight.numpy().reshape(start.shape))
    np.testing.assert_allclose(*ends, atol=1e-6)
    assert np.abs(ends[0] - start).max() > 0.01
