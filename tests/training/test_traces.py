"""Number of traces of the training step, and work in each step."""

from collections import Counter
from typing import Any

import keras
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import ExponentialDecay

import tfkfac
from tests.support.graphs import walk
from tests.support.schedules import Formula
from tests.support.small import (
    FEATURES,
    data,
    kfac_of,
    loss,
    mlp,
    unbuilt_sequential,
)

X, Y = data()


class CountTraces(layers.Layer):
    """Count the calls from Python, one per trace."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x


def test_one_trace_for_all_intervals() -> None:
    """Two fits with all types of steps and batches of two sizes."""
    counter = CountTraces()
    model = keras.Sequential([*mlp().layers, counter])
    model.build((None, FEATURES))
    optimizer = tfkfac.KFAC(
        step="natural",
        factor_update_interval=Formula(lambda i: 1 if i < 2 else 3),
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
    # One trace; Keras 3.16 also calls a model before it traces it.
    assert calls == [calls[0]] * 4 and calls[0] <= 2
    assert int(optimizer.iterations) == 16
    assert 0 < int(optimizer.inverse_updates) < 16


def test_unbuilt_model_has_the_traces_of_sgd() -> None:
    """The first trace builds the model; the last batch is partial."""
    counts = []
    for optimizer in (keras.optimizers.SGD(), tfkfac.KFAC(step="natural")):
        counter = CountTraces()
        model = keras.Sequential([*unbuilt_sequential().layers, counter])
        model.compile(optimizer, loss())
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        counts.append(counter.calls)
    assert counts[1] == counts[0]
    assert int(kfac_of(model).iterations) == 8


def test_a_step_without_updates_does_no_factor_work() -> None:
    """Statistics and decompositions are in branches of the graph."""
    counts = []
    for optimizer in (keras.optimizers.SGD(), tfkfac.KFAC(step="natural")):
        model = mlp()
        model.compile(optimizer, loss())
        optimizer.build(model.trainable_variables)
        step = tf.function(model.train_step, autograph=False)
        graph = step.get_concrete_function((X, Y)).graph.as_graph_def()
        nodes = [node.op for branches, node in walk(graph) if not branches]
        counts.append(Counter(nodes))
    assert counts[1]["Cholesky"] == 0
    assert counts[1]["MatMul"] == counts[0]["MatMul"]
