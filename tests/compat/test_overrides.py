"""Overrides of attributes, and attribute lookups of Keras' layers."""

import contextlib
import functools
import itertools
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat.overrides import (
    drop_from,
    given_moments,
    keep_on,
    kept_on,
    overridden,
    override,
    override_moments,
    release_moments,
    replace_moments,
)


class Speaker:
    def say(self, text: str) -> str:
        return text


def adding(name: str) -> Callable[..., str]:
    def say(below: Callable[..., str], /, text: str) -> str:
        return f"{name}({below(text)})"

    return say


# --------------------------------------------------------------- for good
@pytest.mark.parametrize("order", itertools.permutations("abc"))
def test_overrides_are_removed_in_any_order(order: tuple[str, ...]) -> None:
    """The object gets back its method, or the function that a user has set."""
    speaker = Speaker()
    if order[0] == "a":
        speaker.say = lambda text: f"user {text}"  # type: ignore[method-assign]
    before = dict(vars(speaker))
    hello = speaker.say("hello")
    left = {name: override(speaker, "say", adding(name)) for name in "abc"}
    for name in order:
        want = hello
        for other in left:
            want = f"{other}({want})"
        assert speaker.say("hello") == want
        removed = left.pop(name)
        removed.remove()
        removed.remove()
    assert vars(speaker) == before


def test_later_user_overrides_stay() -> None:
    """A lower override can be removed, and a new override added on top."""
    speaker = Speaker()
    ours = override(speaker, "say", adding("ours"))
    below = speaker.say

    @functools.wraps(below)  # copies the marks of an override
    def theirs(text: str) -> str:
        return f"theirs({below(text)})"

    speaker.say = theirs  # type: ignore[method-assign]
    again = override(speaker, "say", adding("again"))
    assert speaker.say("hello") == "again(theirs(ours(hello)))"
    ours.remove()
    assert speaker.say("hello") == "again(theirs(hello))"
    again.remove()
    assert speaker.say is theirs
    assert speaker.say("hello") == "theirs(hello)"


def test_data_on_an_object() -> None:
    speaker = Speaker()
    assert kept_on(speaker, "thing") is None
    for value in (1, 2):
        assert keep_on(speaker, "thing", lambda value=value: value) == 1
    assert kept_on(speaker, "thing") == 1
    assert drop_from(speaker, "thing") == 1
    assert drop_from(speaker, "thing") is None
    assert not vars(speaker)


def test_many_threads_restore_the_object() -> None:
    """Threads leave their blocks in random order, some by an exception."""
    speaker = Speaker()

    def work(number: int) -> bool:
        rng = random.Random(number)
        is_right = True
        for step in range(300):
            with (
                contextlib.suppress(RuntimeError),
                contextlib.ExitStack() as blocks,
            ):
                want = "x"
                for depth in range(rng.randrange(4)):
                    name = f"{number} {step} {depth}"
                    wrapper = adding(name)
                    blocks.enter_context(overridden(speaker, "say", wrapper))
                    want = f"{name}({want})"
                is_right &= speaker.say("x") == want
                if step % 2:
                    raise RuntimeError
        return is_right

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    assert not vars(speaker)


def recorder(calls: list[Any], entry: Any = None) -> Callable[..., Any]:
    """A wrapper that records an entry, or the arguments, of each call."""

    def call(below: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        calls.append(entry or args)
        return below(*args, **kwargs)

    return call


OVERRIDE = "compat.overrides.override"
MOMENTS = "compat.overrides.override_moments"


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="norm"),
        ]
    )


X = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")


@contract(
    OVERRIDE,
    "`Layer.__call__` looks up `layer.call` in each call, and a training "
    "step looks up `model.compute_loss`.",
)
def test_layers_call_their_call() -> None:
    model = network()
    model.compile("sgd", "mse")
    calls: list[Any] = []
    for layer in (model, *model.layers):
        override(layer, "call", recorder(calls, layer.name))
    override(model, "compute_loss", recorder(calls, "loss"))
    model.train_on_batch(X, np.zeros((5, 4)))
    assert calls == [model.name, "hidden", "norm", "loss"]


@contract(OVERRIDE, "A layer looks up `layer.activation` in each call.")
def test_layers_call_their_activation() -> None:
    for layer, rank in (
        (layers.Dense(2, activation="tanh"), 2),
        (layers.EinsumDense("ab,bc->ac", 2, activation="tanh"), 2),
        (layers.Conv2D(2, 1, activation="tanh"), 4),
        (layers.Conv2DTranspose(2, 1, activation="tanh"), 4),
        (layers.DepthwiseConv2D(1, activation="tanh"), 4),
        (layers.SeparableConv2D(2, 1, activation="tanh"), 4),
    ):
        x = np.reshape(X, [*X.shape, 1, 1][:rank])
        want = layer(x)
        original = layer.activation
        calls: list[Any] = []
        with overridden(layer, "activation", recorder(calls)):
            np.testing.assert_array_equal(layer(x), want)
        ((inputs,),) = calls
        np.testing.assert_array_equal(original(inputs), want)
        assert layer.activation is original


@contract(OVERRIDE, "Entries of a layer's `__dict__` are not saved or cloned.")
def test_overrides_are_not_saved(tmp_path: Path) -> None:
    model = network()
    config, weights = model.get_config(), model.get_weights()
    norm = model.get_layer("norm")
    for layer in (model, *model.layers):
        override(layer, "call", lambda below, *args, **kwargs: 1 / 0)
        keep_on(layer, "_tfkfac_test", lambda: layers.Dense(1))
    override_moments(norm, lambda *_: 1 / 0)
    assert model.get_config() == config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for copy in (keras.models.clone_model(model), loaded):
        assert not any("tfkfac" in name for name in vars(copy.layers[0]))
        assert copy(X).shape == (5, 4)
    for value, want in zip(loaded.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(value, want)


# ------------------------------------------------------------------ moments
@contract(MOMENTS, "Training calls `_moments(inputs, mask)` once.")
def test_normalisation_calls_moments() -> None:
    """`replace_moments` replaces the previous override."""
    mask = np.arange(5) > 1
    layer = layers.BatchNormalization()
    layer.build(X.shape)
    before = set(vars(layer))
    calls: list[Any] = []
    replace_moments(layer, lambda *_: 1 / 0)
    replace_moments(layer, recorder(calls))
    layer(X, training=False, mask=mask)
    assert not calls
    layer(X, training=True, mask=mask)
    ((inputs, received),) = calls
    np.testing.assert_array_equal(inputs, X)
    np.testing.assert_array_equal(received, mask)
    layer.trainable = False
    layer(X, training=True)
    layer.trainable = True
    for _ in range(2):
        release_moments(layer)
    layer(X, training=True)
    assert len(calls) == 1
    assert set(vars(layer)) == before


@contract(MOMENTS, "`_moments` returns the mean and the variance.")
def test_given_moments() -> None:
    layer = layers.BatchNormalization(epsilon=0.0, momentum=0.0)
    layer.build(X.shape)
    before = dict(vars(layer))
    moments = tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 1.0, 0.25])
    with given_moments(layer, moments):
        result = layer(X, training=True)
    want = (X - [1.0, 2.0, 3.0]) / [2.0, 1.0, 0.5]
    np.testing.assert_allclose(result, want, rtol=1e-6)
    np.testing.assert_array_equal(layer.moving_variance, moments[1])
    assert vars(layer).keys() == before.keys()
    with given_moments(layer, None):
        result = layer(X, training=True)
    want = (X - X.mean(0)) / X.std(0)
    np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)
