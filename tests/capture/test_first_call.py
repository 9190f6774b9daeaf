"""What is done when a layer is called for the first time."""

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from tfkfac.capture.taps import Tap, before_first_call, forget_first_call

X = tf.ones((2, 3))


def ours(layer: Any) -> set[str]:
    """What we have put on a layer."""
    return {k for k in vars(layer) if k == "call" or "tfkfac" in k}


def test_once_after_the_layer_was_built() -> None:
    layer = layers.Dense(2)
    built: list[bool] = []
    before_first_call(layer, lambda: built.append(layer.built))
    before_first_call(layer, lambda: built.append(layer.built))
    for _ in range(2):
        assert layer(X).shape == (2, 2)
    assert built == [True]
    assert not ours(layer)


def test_forgotten() -> None:
    layer = layers.Dense(2)
    calls: list[int] = []
    before_first_call(layer, lambda: calls.append(1))
    forget_first_call(layer)
    forget_first_call(layer)
    layer(X)
    assert not calls
    assert not ours(layer)


@pytest.mark.parametrize("held", [False, True])
def test_the_first_call_sees_what_was_tapped(held: bool) -> None:
    """Keras may hold on to the layer's `call` and call it more than once."""
    layer = layers.Dense(2)
    layer.build(X.shape)
    owner = keras.optimizers.SGD()
    before_first_call(layer, lambda: Tap.open(layer, owner) and None)
    call = layer.call if held else layer
    for _ in range(2):
        with tf.GradientTape() as tape:
            y = call(X)
        tape.gradient(y, layer.kernel)
        assert len(Tap.calls(layer)) == 1
    Tap.close(layer, owner)
    assert not ours(layer)


@pytest.mark.parametrize("tap_first", [False, True])
def test_goes_from_below_and_from_above_a_tap(tap_first: bool) -> None:
    layer = layers.Dense(2)
    owner = keras.optimizers.SGD()
    steps = [
        lambda: Tap.open(layer, owner),
        lambda: before_first_call(layer, lambda: None),
    ]
    for step in steps if tap_first else steps[::-1]:
        step()
    Tap.close(layer, owner)
    forget_first_call(layer)
    assert not ours(layer)
    layer(X)


def test_an_action_that_raises_is_done_with() -> None:
    layer = layers.Dense(2)

    def action() -> None:
        raise RuntimeError("action")

    before_first_call(layer, action)
    with pytest.raises(RuntimeError, match="action"):
        layer(X)
    assert not ours(layer)
    layer(X)
