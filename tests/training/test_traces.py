"""Number of traces of the training step."""

from typing import Any

import keras
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.schedules import Formula
from tests.support.small import (
    FEATURES,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    unbuilt_sequential,
)

X, Y = data()


class Counter(layers.Layer):
    """Count the calls from Python, one per trace."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


def slower(iteration: Any) -> Any:
    return 1 if iteration < 2 else 3


def test_one_trace_whatever_the_intervals() -> None:
    """Two fits with all types of steps and batches of two sizes."""
    counter = Counter()
    model = keras.Sequential([*mlp().layers, counter])
    model.build((None, FEATURES))
    optimizer = tfkfac.KFAC(
        factor_update_interval=Formula(slower),
        inverse_update_interval=ExponentialDecay(2.0, 2, 1.5),
        damping=ExponentialDecay(0.1, 2, 0.5),
    )
    calls = []
    for each in (keras.optimizers.SGD(), optimizer):
        model.compile(each, loss())
        counter.calls = 0
        for _ in range(2):
            model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
            calls.append(counter.calls)
    # One; since version 3.16 Keras also calls a model before it traces it.
    assert calls == [calls[0]] * 4 and calls[0] <= 2
    assert int(optimizer.iterations) == 16
    assert 0 < int(optimizer.inverse_updates) < 16


def test_one_trace_of_a_custom_step() -> None:
    model = mlp()
    optimizer = tfkfac.KFAC().attach(model)
    optimizer.build(model.trainable_variables)
    traces = 0

    @tf.function
    def step(x: Any, y: Any) -> None:
        nonlocal traces
        traces += 1
        gradients = gradients_of(model, x, y)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(4):
        step(X, Y)
    assert (traces, int(optimizer.iterations)) == (1, 4)


def test_unbuilt_model_costs_no_more_traces_than_plain_sgd() -> None:
    """The first trace builds the model; the last batch is partial."""
    counts = []
    for optimizer in (keras.optimizers.SGD(), tfkfac.KFAC()):
        counter = Counter()
        model = keras.Sequential([*unbuilt_sequential().layers, counter])
        model.compile(optimizer, loss())
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        counts.append(counter.calls)
    assert counts[1] == counts[0]
    assert int(kfac_of(model).iterations) == 8
