"""Gradients of one's own, second derivatives, private modules that moved."""

import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.framework import ops

from tests.compat.contracts import contract
from tfkfac.compat.graphs import (
    KERAS_NN,
    exact_second_derivatives,
    keras_nn,
    module_at,
    plain_moments,
    synchronized_moments,
    with_gradient,
)
from tfkfac.compat.overrides import override


def cube(x: tf.Tensor) -> tf.Tensor:
    """With 5 x^3 in the place of its gradient 3 x^2."""
    return with_gradient(lambda t: t**3, x, lambda g: 5 * g * x**3)


def derivatives(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            value = cube(x)
        first = inner.gradient(value, x)
    return value, first, outer.gradient(first, x)


@pytest.mark.parametrize("graph", [False, True])
def test_tapes_take_the_gradient_that_was_given(graph: bool) -> None:
    function = tf.function(derivatives) if graph else derivatives
    values = function(tf.constant(2.0))
    np.testing.assert_allclose(values, [8, 40, 60])


@pytest.mark.parametrize("graph", [False, True])
def test_a_function_may_return_its_argument(graph: bool) -> None:
    def slope(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = 3 * with_gradient(lambda t: t, 2 * x, lambda g: 5 * g)
        return tape.gradient(value, x)

    function = tf.function(slope) if graph else slope
    assert float(function(tf.constant(1.0))) == 30


def test_forward_mode() -> None:
    x = tf.constant(2.0)
    with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
        value = cube(x)
    assert float(accumulator.jvp(value)) == 40


def test_the_registry_stays_as_it_is() -> None:
    before = set(ops.gradient_registry.list())
    tf.function(derivatives)(tf.constant(2.0))
    assert set(ops.gradient_registry.list()) == before


EXACT = "compat.graphs.exact_second_derivatives"
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


def test_another_thread_is_untouched() -> None:
    seen: list[bool] = []
    with exactly():
        other = threading.Thread(target=lambda: seen.append(is_exact()))
        other.start()
        other.join()
    assert seen == [False]
    assert attributes() == BEFORE


# Keras 3.16 has the module elsewhere.
AS_LATER = """
import sys
import keras
import keras.src.backend.tensorflow as tensorflow

old, new = "keras.src.backend.tensorflow.nn", "keras.src.backend.tensorflow.ops"
if old in sys.modules:
    package = type(sys)(new)
    package.__path__ = []
    package.nn = sys.modules.pop(old)
    sys.modules |= {new: package, new + ".nn": package.nn, old: None}
    del tensorflow.nn

import numpy as np
import tfkfac

for optimizer in (tfkfac.KFAC(), tfkfac.FOSI(warmup_steps=1)):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2, "softmax"),
        ]
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(32, 3))
    y = (x[:, 0] > 0).astype(int)
    fit = model.fit(x, y, batch_size=8, epochs=4, verbose=0)
    assert fit.history["loss"][-1] < fit.history["loss"][0]
print("trained")
"""


def test_the_places_of_later_versions() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AS_LATER],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.strip() == "trained", done.stderr


def test_moments_of_all_replicas() -> None:
    promise = "`_compute_moments_sync` is in a module at one of these places."
    with contract("compat.graphs.KERAS_NN", promise):
        assert hasattr(module_at(*KERAS_NN), "_compute_moments_sync")


def test_the_first_place_that_there_is() -> None:
    assert module_at("json", "os") is json
    assert module_at("nowhere", "json.nowhere.deeper", "os") is os
    with pytest.raises(ImportError, match=r"none of .*'json\.nowhere'"):
        module_at("json.nowhere", "nowhere")


def test_what_a_module_misses_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no other place."""
    (tmp_path / "half_a_module.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        module_at("half_a_module", "json")
