"""Updates of an inner optimizer by calls of one function."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support.graphs import called
from tfkfac.compat.inner_update import updates_in_replica

SHAPES = [(3,), (2, 3), (5,), (3, 2), (4,), (1,)]
STEPS = 3


def trained(inner: Any) -> tuple[list[keras.Variable], tf.Graph]:
    """Variables after some updates in a graph, and the graph."""
    variables = [keras.Variable(np.ones(shape)) for shape in SHAPES]
    inner.build(variables)

    @tf.function(autograph=False)
    def step(*gradients: tf.Tensor) -> None:
        with updates_in_replica(inner):
            inner.apply(list(gradients), variables)

    for number in range(STEPS):
        step(*gradients_of(number))
    graph = step.get_concrete_function(*gradients_of(0)).graph
    return variables, graph


def gradients_of(number: int) -> list[tf.Tensor]:
    return [
        tf.random.stateless_normal(shape, [number, i])
        for i, shape in enumerate(SHAPES)
    ]


def expected(place: int, momentum: float, nesterov: bool) -> np.ndarray:
    """Sutskever et al. (2013), eq. 3 and 4, as Keras writes them."""
    x, velocity = np.ones(SHAPES[place]), np.zeros(SHAPES[place])
    for number in range(STEPS):
        change = -0.1 * gradients_of(number)[place].numpy()
        velocity = momentum * velocity + change
        x = x + (momentum * velocity + change if nesterov else velocity)
    return x


def calls_in(graph: tf.Graph) -> int:
    nodes: Sequence[Any] = graph.as_graph_def().node
    return sum(called(node) is not None for node in nodes)


@contract(
    "compat.shared_update.update_steps",
    "`SGD.update_step` asks for momentums, their index and `assign` alone.",
)
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)]
)
def test_sgd_updates_by_calls(momentum: float, nesterov: bool) -> None:
    """Each variable by its own gradient and momentum, as in the formula."""
    inner = keras.optimizers.SGD(0.1, momentum=momentum, nesterov=nesterov)
    variables, graph = trained(inner)
    assert calls_in(graph) > 0
    for i, variable in enumerate(variables):
        np.testing.assert_allclose(
            variable.numpy(), expected(i, momentum, nesterov), rtol=1e-5
        )


def test_the_learning_rate_is_read_once() -> None:
    """It is a variable of Keras, which every look at it would read."""
    _, graph = trained(keras.optimizers.SGD(0.1, momentum=0.9))
    kinds = [node.op for node in graph.as_graph_def().node]
    assert kinds.count("ReadVariableOp") == 1


def test_other_optimizers_update_for_themselves() -> None:
    """A subclass may do anything in its `update_step`."""

    class Signs(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            self.assign_sub(variable, rate * tf.sign(gradient))

    variables, graph = trained(Signs(0.1))
    assert calls_in(graph) == 0
    signs = sum(np.sign(gradients_of(i)[1]) for i in range(STEPS))
    np.testing.assert_allclose(variables[1], 1 - 0.1 * signs, rtol=1e-5)
