"""Number of operations that a layer adds to a training step's graph.

Tracing and optimising take about 1 ms per operation of the graph, in the first
step. The bounds are slightly above the measured numbers.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.graphs import walk

WIDTH = 4
LAYERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: layers.Dense(WIDTH, "relu"),
    "conv": lambda: layers.Conv2D(WIDTH, 3, padding="same"),
    "norm": lambda: layers.BatchNormalization(),
}


def graph_of(optimizer: Any, kind: str, count: int) -> Any:
    """The operations of a training step, including its functions."""
    shape = (WIDTH,) if kind == "dense" else (5, 5, WIDTH)
    hidden = [LAYERS[kind]() for _ in range(count)]
    model = keras.Sequential([keras.Input(shape), *hidden, layers.Flatten()])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> Any:
        return model.train_step((x, y))

    x = tf.TensorSpec((None, *shape))
    y = tf.TensorSpec((None, *model.output_shape[1:]))
    return step.get_concrete_function(x, y).graph.as_graph_def()


def operations_a_layer(make: Callable[[], Any], kind: str) -> float:
    sizes = []
    for count in (2, 5):
        graph = graph_of(make(), kind, count)
        functions = [len(f.node_def) for f in graph.library.function]
        sizes.append(len(graph.node) + sum(functions))
    return (sizes[1] - sizes[0]) / 3


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("dense", 12),
        pytest.param("conv", 24, marks=pytest.mark.slow),
        pytest.param("norm", 18, marks=pytest.mark.slow),
    ],
)
def test_operations_of_one_more_layer(kind: str, bound: int) -> None:
    """Operations beyond SGD's for one more equal layer.

    Without shared functions: 342 for a dense layer, 630 for a convolution.
    """
    plain = operations_a_layer(keras.optimizers.SGD, kind)
    whole = operations_a_layer(
        lambda: tfkfac.KFAC(keras.optimizers.SGD(), fisher="empirical"), kind
    )
    assert whole - plain <= bound


def test_a_plain_step_does_no_factor_work() -> None:
    """Statistics and decompositions are in branches."""

    def outside(optimizer: Any) -> Counter[str]:
        graph = graph_of(optimizer, "dense", 2)
        return Counter(
            node.op for branches, node in walk(graph) if not branches
        )

    plain, ours = outside(keras.optimizers.SGD()), outside(tfkfac.KFAC())
    assert ours["Cholesky"] == 0
    assert ours["MatMul"] == plain["MatMul"]
