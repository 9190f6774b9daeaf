"""Second derivatives of moments, and for whom they are right."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tests.compat.turns import in_turns
from tfkfac.compat.gradients import (
    exact_second_derivatives,
    keras_nn,
    plain_moments,
    synchronized_moments,
)
from tfkfac.compat.overrides import override

EXACT = "compat.gradients.exact_second_derivatives"
X = np.random.default_rng(0).normal(size=(6, 4))


def exactly() -> Any:
    return exact_second_derivatives(tf.identity)


def hessian(function: Callable[[Any], Any], x: Any) -> Any:
    """That of the sum of the sines of a function of a tensor."""
    x = tf.constant(x)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.sin(3.0 * function(x)))
        slope = tf.reshape(inner.gradient(y, x), [-1])
    columns = outer.jacobian(slope, x, experimental_use_pfor=False)
    return tf.reshape(columns, [x.shape.num_elements()] * 2).numpy()


def normalized(x: Any) -> Any:
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) / tf.sqrt(variance + 0.1)


def hessian_by_differences(x: Any, step: float = 1e-5) -> Any:
    """From first derivatives, which TensorFlow has right."""

    def gradient(values: Any) -> Any:
        values = tf.constant(values)
        with tf.GradientTape() as tape:
            tape.watch(values)
            y = tf.reduce_sum(tf.sin(3.0 * normalized(values)))
        return tape.gradient(y, values).numpy().ravel()

    unit = np.eye(x.size).reshape(-1, *x.shape) * step
    columns = [(gradient(x + e) - gradient(x - e)) / 2 / step for e in unit]
    return np.array(columns).T


def test_second_derivatives_are_right_inside() -> None:
    want = hessian_by_differences(X)
    with exactly():
        got = hessian(normalized, X)
    np.testing.assert_allclose(got, want, atol=1e-7 * np.abs(want).max())


@contract(
    EXACT,
    "The second derivative of `tf.nn.moments` is wrong (if it is right now, "
    "nobody needs it any more).",
)
def test_why() -> None:
    want = hessian_by_differences(X)
    off = np.abs(hessian(normalized, X) - want).max() / np.abs(want).max()
    assert off > 1e-3


@contract(EXACT, "Keras' normalisations call `tf.nn.moments`.")
@pytest.mark.parametrize(
    "kind", [layers.BatchNormalization, layers.GroupNormalization]
)
def test_layers_call_moments(kind: Any) -> None:
    layer = kind() if kind is layers.BatchNormalization else kind(2)
    x = tf.constant(X, "float32")
    layer(x)
    calls: list[Any] = []

    def moments(below: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return below(*args, **kwargs)

    listening = override(tf.nn, "moments", moments)
    try:
        layer(x, training=True)
    finally:
        listening.remove()
    assert len(calls) == 1


@contract(EXACT, "Synchronised moments are those of `_compute_moments_sync`.")
def test_layers_call_synchronized_moments() -> None:
    layer = layers.BatchNormalization(synchronized=True)
    x = tf.constant(X, "float32")
    layer(x)
    summed: list[Any] = []

    def total(value: Any) -> Any:
        summed.append(value)
        return 2 * value  # two replicas with the same rows

    with exact_second_derivatives(total):
        got = layer(x, training=True)
    assert len(summed) == 1
    np.testing.assert_allclose(got, layer(x, training=True), atol=1e-5)


@pytest.mark.parametrize("axes", [[0], [1], [0, 1]])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_values_of_moments(
    axes: Sequence[int], keepdims: bool, dtype: str
) -> None:
    x = tf.constant(X, dtype)
    want = tf.nn.moments(x, axes, keepdims=keepdims)
    every = [plain_moments(x, axes, keepdims=keepdims)]
    if dtype == "float64":  # Keras casts before it synchronises
        every.append(synchronized_moments(x, axes, keepdims, tf.identity))
    for got in every:
        for value, other in zip(got, want, strict=True):
            assert value.dtype == x.dtype
            assert value.shape == other.shape
            close = 1e-12 if dtype == "float64" else 2e-3
            np.testing.assert_allclose(value, other, atol=close)


# ------------------------------------------------------------- for whom it is
def attributes() -> tuple[Any, Any]:
    return tf.nn.moments, keras_nn._compute_moments_sync


BEFORE = attributes()


def is_exact() -> bool:
    """Whether moments are those without tricks, as this thread sees them."""
    with tf.Graph().as_default() as graph:
        tf.nn.moments(tf.zeros((2, 2)), [0])
    kinds = {operation.type for operation in graph.get_operations()}
    return "StopGradient" not in kinds


def test_what_tells_moments_apart() -> None:
    assert not is_exact()
    with exactly():
        assert is_exact()
    assert not is_exact()
    assert attributes() == BEFORE


def test_contexts_left_in_the_order_entered() -> None:
    first, second = exactly(), exactly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_exact()
    second.__exit__(None, None, None)
    assert attributes() == BEFORE
    assert not is_exact()


def test_the_inner_context_counts() -> None:
    totals: list[int] = []

    def total(number: int, value: Any) -> Any:
        totals.append(number)
        return value

    layer = layers.BatchNormalization(synchronized=True)
    layer.build(X.shape)
    with exact_second_derivatives(functools.partial(total, 1)):
        with exact_second_derivatives(functools.partial(total, 2)):
            layer(X, training=True)
        layer(X, training=True)
    assert totals == [2, 1]


def test_two_replicas_in_turns() -> None:
    """Entered and left in the same order, in two threads."""
    seen: list[tuple[int, bool]] = []

    def replica(number: int, switch: Callable[[], None]) -> None:
        seen.append((number, is_exact()))
        with exactly():
            switch()
            seen.append((number, is_exact()))
            switch()
        seen.append((number, is_exact()))
        switch()

    in_turns(*(functools.partial(replica, number) for number in range(2)))
    for number in range(2):
        mine = [exact for replica, exact in seen if replica == number]
        assert mine == [False, True, False]
    assert attributes() == BEFORE


def test_another_thread_is_untouched() -> None:
    seen: list[bool] = []
    with exactly():
        other = threading.Thread(target=lambda: seen.append(is_exact()))
        other.start()
        other.join()
    assert seen == [False]


def test_a_context_that_raises() -> None:
    with contextlib.suppress(RuntimeError), exactly():
        raise RuntimeError
    assert attributes() == BEFORE


def test_a_thread_that_nobody_orders() -> None:
    """A model is trained while products of another are computed."""
    exact: list[bool] = []
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            exact.append(is_exact())

    thread = threading.Thread(target=train)
    thread.start()
    while len(exact) < 50:
        with exactly():
            assert is_exact()
    done.set()
    thread.join()
    assert not any(exact)
    assert attributes() == BEFORE
