"""How much a layer adds to the graph of a training step.

Tracing and optimising the graph take about 1 ms for each operation, so this is
what the first step costs. The bounds are what was measured and a little more.
"""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfkfac

WIDTH = 4
LAYERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: layers.Dense(WIDTH, "relu"),
    "conv": lambda: layers.Conv2D(WIDTH, 3, padding="same"),
    "norm": lambda: layers.BatchNormalization(),
}


def graph_of(optimizer: Any, kind: str, count: int) -> Any:
    """The graph of a training step, with that of its functions."""
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
    ("kind", "solver", "bound"),
    [
        ("dense", "inverse", 12),
        ("conv", "inverse", 24),
        pytest.param("dense", "eigen", 13, marks=pytest.mark.slow),
        pytest.param("norm", "inverse", 18, marks=pytest.mark.slow),
    ],
)
def test_operations_of_one_more_layer(
    kind: str, solver: str, bound: int
) -> None:
    """Besides those of SGD, for a layer like those before.

    Before equal layers shared functions it was 342 for a dense layer and 630
    for a convolution.
    """
    plain = operations_a_layer(keras.optimizers.SGD, kind)
    whole = operations_a_layer(
        lambda: tfkfac.KFAC(
            keras.optimizers.SGD(), solver=solver, fisher="empirical"
        ),
        kind,
    )
    assert whole - plain <= bound


def test_what_one_more_layer_passes_to_branches() -> None:
    """The conditions are side by side, each with what it needs alone."""
    counts = []
    for count in (2, 5):
        optimizer = tfkfac.KFAC(keras.optimizers.SGD(), fisher="empirical")
        graph = graph_of(optimizer, "dense", count)
        bodies = [graph.node, *(f.node_def for f in graph.library.function)]
        counts.append(
            sum(
                len(node.input) - 1
                for body in bodies
                for node in body
                if node.op in ("If", "StatelessIf")
            )
        )
    assert (counts[1] - counts[0]) / 3 <= 18


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_all_matrices_are_decomposed_by_one_function(solver: str) -> None:
    """One for A and G, whatever their sizes."""
    kernel = {"inverse": "Cholesky", "eigen": "SelfAdjointEigV2"}[solver]
    graph = graph_of(tfkfac.KFAC(solver=solver), "dense", 6)
    found = [
        sum(node.op == kernel for node in function.node_def)
        for function in graph.library.function
    ]
    assert sorted(found)[-2:] == [0, 1]


def test_layers_of_all_sizes_have_the_same_functions() -> None:
    """Statistics, averages and decompositions are traced once for all.

    No two layers are equal: those have more functions in common.
    """
    counts = []
    for widths in ([5, 2, 3], [5, 2, 4, 7, 3]):
        model = keras.Sequential(
            [keras.Input((3,)), *(layers.Dense(n) for n in widths)]
        )
        model.compile(tfkfac.KFAC(), "mse")
        model.optimizer.build(model.trainable_variables)
        step = tf.function(model.train_step, autograph=False)
        batch = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 3)))
        graph = step.get_concrete_function(batch).graph.as_graph_def()
        counts.append(len(graph.library.function))
    assert counts[0] == counts[1]
