"""How often Keras traces the training step."""

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
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
STEPS = 3


class Counter(layers.Layer):
    """Counts how often it is called by Python: once per trace."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


def counting_mlp(optimizer: Any) -> tuple[Any, Counter]:
    counter = Counter()
    model = keras.Sequential([*mlp().layers, counter])
    model.build((None, FEATURES))
    model.compile(optimizer, loss())
    counter.calls = 0
    return model, counter


def traces_of(model: Any) -> int:
    """Traces of the function that `fit` runs."""
    (function,) = (
        cell.cell_contents
        for cell in model.train_function.__closure__
        if hasattr(cell.cell_contents, "experimental_get_tracing_count")
    )
    return int(function.experimental_get_tracing_count())


def slower(iteration: Any) -> Any:
    return 1 if iteration < 2 else 3


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"factor_update_interval": 2, "inverse_update_interval": 3},
        {
            "factor_update_interval": slower,
            "inverse_update_interval": ExponentialDecay(2.0, 2, 1.5),
            "damping": ExponentialDecay(0.1, 2, 0.5),
        },
    ],
    ids=["defaults", "integers", "functions"],
)
def test_one_trace_whatever_the_intervals(arguments: dict[str, Any]) -> None:
    """Two fits and validation between, 21 steps and all kinds of them."""
    model, counter = counting_mlp(tfkfac.KFAC(**arguments))
    x, y = data(12)
    model.fit(x, y, batch_size=4, epochs=4, verbose=0)
    assert (counter.calls, traces_of(model)) == (1, 1)
    model.fit(x, y, batch_size=4, epochs=3, verbose=0)
    assert (counter.calls, traces_of(model)) == (1, 1)
    optimizer = kfac_of(model)
    assert int(optimizer.iterations) == 21
    assert 0 < int(optimizer.inverse_updates) <= 21


def test_one_more_trace_for_a_partial_batch() -> None:
    """Batches of two sizes, as many traces."""
    model, counter = counting_mlp(tfkfac.KFAC())
    for rows in (4, 4, 2, 4, 2, 4):
        model.train_on_batch(X[:rows], Y[:rows])
    assert counter.calls == 2
    assert int(kfac_of(model).iterations) == 6


def test_one_trace_of_a_custom_step() -> None:
    """An optimizer that is not built yet costs no further trace."""
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
    assert traces == 1
    assert int(optimizer.iterations) == 4


def test_unbuilt_model_costs_no_more_traces_than_plain_sgd() -> None:
    """Its variables come with the first trace, the last batch is partial."""
    counts = []
    for optimizer in (keras.optimizers.SGD(), tfkfac.KFAC()):
        counter = Counter()
        model = keras.Sequential([*unbuilt_sequential().layers, counter])
        model.compile(optimizer, loss())
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        counts.append((counter.calls, traces_of(model)))
    assert counts[1] == counts[0]
