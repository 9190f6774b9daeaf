"""Custom gradients, and second derivatives of moments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import ops

from tests.compat.contracts import contract
from tfkfac.compat.graphs import exact_second_derivatives, with_gradient
from tfkfac.compat.overrides import overridden


def cube(x: tf.Tensor) -> tf.Tensor:
    """x^3 with the custom gradient 5 x^3."""
    return with_gradient(lambda t: t**3, x, lambda g: 5 * g * x**3)


def derivatives(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """The cube, its derivatives, and the derivative of an identity."""
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = cube(x)
        first = inner.gradient(value, x)
        same = 3 * with_gradient(lambda t: t, 2 * x, lambda g: 5 * g)
    return value, first, outer.gradient(first, x), outer.gradient(same, x)


@pytest.mark.parametrize("graph", [False, True])
def test_tapes_use_the_custom_gradient(graph: bool) -> None:
    """TensorFlow's registry of gradients does not grow."""
    before = set(ops.gradient_registry.list())
    run = tf.function(derivatives, autograph=False) if graph else derivatives
    np.testing.assert_allclose(run(tf.constant(2.0)), [8, 40, 60, 30])
    assert set(ops.gradient_registry.list()) == before
    x = tf.constant(2.0)
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
        value = cube(x)
    assert float(accumulator.jvp(value)) == 40


EXACT = "compat.graphs.exact_second_derivatives"
X = np.random.default_rng(0).normal(size=(4, 2))


def slope(x: Any) -> Any:
    """The gradient of the sum of the sines of normalised columns."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, variance = tf.nn.moments(x, [0])
        normalized = (x - mean) / tf.sqrt(variance + 0.1)
        y = tf.reduce_sum(tf.sin(3.0 * normalized))
    return tf.reshape(tape.gradient(y, x), [-1])


def hessian() -> Any:
    x = tf.constant(X)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        first = slope(x)
    columns = tape.jacobian(first, x, experimental_use_pfor=False)
    return tf.reshape(columns, [X.size] * 2).numpy()


@contract(
    EXACT,
    "The second derivative of `tf.nn.moments` is wrong before TensorFlow 2.22. "
    "(Delete the function with the support of 2.21.)",
)
def test_exact_second_derivatives() -> None:
    """Against finite differences of first derivatives, which are right."""
    unit = np.eye(X.size).reshape(-1, *X.shape) * 1e-5
    columns = [
        (slope(tf.constant(X + e)) - slope(tf.constant(X - e))) / 2e-5
        for e in unit
    ]
    want = np.array(columns).T
    largest = np.abs(want).max()
    with exact_second_derivatives(tf.identity):
        np.testing.assert_allclose(hessian(), want, atol=1e-7 * largest)
    is_wrong = np.abs(hessian() - want).max() > 1e-3 * largest
    version = tuple(map(int, tf.__version__.split(".")[:2]))
    assert is_wrong == (version < (2, 22))


@contract(EXACT, "Keras' normalisations call `tf.nn.moments`.")
@pytest.mark.parametrize(
    "layer", [layers.BatchNormalization(), layers.GroupNormalization(2)]
)
def test_layers_call_moments(layer: Any) -> None:
    layer(X)
    calls: list[Any] = []

    def moments(below: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return below(*args, **kwargs)

    with overridden(tf.nn, "moments", moments):
        layer(X, training=True)
    assert len(calls) == 1


@contract(EXACT, "`_compute_moments_sync` computes synchronised moments.")
def test_layers_call_synchronized_moments() -> None:
    """The inner context is used; the values are equal."""
    layer = layers.BatchNormalization(synchronized=True)
    x = tf.constant(X, "float32")
    layer(x)
    summed: list[int] = []

    def sum_of(replicas: int) -> Any:
        def total(value: Any) -> Any:
            summed.append(replicas)
            return replicas * value  # all replicas have the same rows

        return exact_second_derivatives(total)

    want = layer(x, training=True)
    with sum_of(1):
        with sum_of(2):
            np.testing.assert_allclose(layer(x, training=True), want, atol=1e-5)
        layer(x, training=True)
    assert summed == [2, 1]


@pytest.mark.parametrize(
    ("dtype", "axes", "keepdims"),
    [("float64", [0], False), ("float16", [0, 1], True)],
)
def test_values_of_moments(dtype: str, axes: Any, keepdims: bool) -> None:
    x = tf.constant(X, dtype)
    expected = tf.nn.moments(x, axes, keepdims=keepdims)
    with exact_second_derivatives(tf.identity):
        result = tf.nn.moments(x, axes, keepdims=keepdims)
    for value, want in zip(result, expected, strict=True):
        assert (value.dtype, value.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(value, want, atol=2e-3)
