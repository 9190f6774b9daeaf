"""Traces and work of a training step; graphs end with their model."""

import gc
import weakref
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers.schedules import ExponentialDecay
from tensorflow.python.framework.func_graph import FuncGraph

import tfkfac
from tests.support.graphs import walk
from tests.support.schedules import Formula
from tests.support.small import (
    CLASSES,
    FEATURES,
    data,
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
    """As many as with SGD, of which the first builds the model.

    Two fits with all types of steps and batches of two sizes.
    """
    optimizer = tfkfac.KFAC(
        step="natural",
        only_layers="hidden",
        factor_update_interval=Formula(lambda i: 1 if i < 2 else 3),
        inverse_update_interval=ExponentialDecay(2.0, 2, 1.5),
        damping=ExponentialDecay(0.1, 2, 0.5),
    )
    calls = []
    for each in (keras.optimizers.SGD(), optimizer):
        counter = CountTraces()
        model = keras.Sequential([*unbuilt_sequential().layers, counter])
        model.compile(each, loss())
        for _ in range(2):
            model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
            calls.append(counter.calls)
    assert calls == [calls[0]] * 4
    assert int(optimizer.iterations) == 16
    assert 0 < int(optimizer.inverse_updates) < 16


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


# --------------------------------- memory after the deletion of a trained model
@pytest.mark.parametrize(
    "make",
    [
        tfkfac.KFAC,
        pytest.param(tfkfac.FOSI, marks=pytest.mark.slow),
        pytest.param(tfkfac.GaussNewton, marks=pytest.mark.slow),
    ],
)
def test_no_graph_outlives_its_model(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: weakref.WeakSet[FuncGraph] = weakref.WeakSet()
    original_init = FuncGraph.__init__

    def initialize(self: FuncGraph, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        graphs.add(self)

    monkeypatch.setattr(FuncGraph, "__init__", initialize)

    def train() -> None:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile(make(), "mse")
        model.fit(np.ones((8, 3)), np.eye(8, 2), batch_size=8, verbose=0)
        assert graphs

    gc.freeze()  # so that garbage of other tests is not collected here
    train()
    gc.collect()
    assert [graph.name for graph in graphs] == []


# ----------------------------------- `tf.debugging.enable_check_numerics()`
def custom_loss(y: Any, p: Any) -> Any:
    """Cross-entropy of probabilities, which does not read the logits."""
    return -tf.reduce_sum(y * tf.math.log(p), -1)


CHECKED: dict[str, Any] = {
    "spectral": lambda: tfkfac.KFAC(),
    "sketches": lambda: tfkfac.KFAC(0.1, solver="eigen", max_factor_dim=4),
    "FOSI": lambda: tfkfac.FOSI(
        num_largest=2, update_interval=2, warmup_steps=1, lanczos_steps=4
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_numerics(name: str) -> None:
    """No constant of a healthy step is NaN or infinite."""
    probabilities = layers.Dense(CLASSES, "softmax")
    model = keras.Sequential([keras.Input((FEATURES,)), probabilities])
    y = np.eye(CLASSES, dtype="float32")[Y]
    tf.debugging.enable_check_numerics()
    try:
        model.compile(CHECKED[name](), custom_loss)
        model.fit(X, y, batch_size=4, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()
