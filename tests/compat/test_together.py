"""Tests of `compat.together`: equal calls, some of them made as one."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.graphs import called
from tests.support.harness import assert_close
from tfkfac.compat.together import Call, group_size, together


def squares_plus(x: Any, y: Any) -> dict[str, Any]:
    return {"sum": tf.reduce_sum(x * x) + y, "x": 2 * x}


def run(calls: list[Call[Any]]) -> tuple[list[Any], Any]:
    """What some calls return in a graph, and the graph."""
    step = tf.function(lambda: together(calls), autograph=False)
    return step(), step.get_concrete_function().graph.as_graph_def()


def calls_in(graph: Any) -> int:
    return sum(called(node) is not None for node in graph.node)


@pytest.mark.parametrize("any_size", [False, True])
def test_each_returns_its_own(any_size: bool) -> None:
    """Whatever is made of them: seven calls of three kinds."""
    sizes = [3, 3, 5, 3, 3, 3, 3]
    x = [np.arange(n) + 10.0 * i for i, n in enumerate(sizes)]
    signatures = ["one"] * 6 + ["another"]
    calls = [
        Call(
            s,
            squares_plus,
            (tf.constant(v), tf.constant(1.0 * i, tf.float64)),
            any_size,
        )
        for i, (s, v) in enumerate(zip(signatures, x, strict=True))
    ]
    for found in (run(calls)[0], together(calls)):
        for i, (one, v) in enumerate(zip(found, x, strict=True)):
            assert_close(one["sum"], (v * v).sum() + i, 1e-6)
            assert_close(one["x"], 2 * v, 1e-6)


def test_a_variable_is_written_by_its_own_call() -> None:
    variables = [tf.Variable(float(i)) for i in range(16)]

    def add(variable: Any, number: Any) -> Any:
        return tf.identity(variable.assign_add(number))

    found, _ = run(
        [Call("add", add, (v, tf.constant(10.0))) for v in variables]
    )
    assert [float(x) for x in found] == [10.0 + i for i in range(16)]
    assert [float(v) for v in variables] == [10.0 + i for i in range(16)]


def test_fewer_calls_than_there_are() -> None:
    """A hundred are 25 calls of one function; one alone is none."""
    x = [tf.constant([1.0 * i]) for i in range(100)]
    graph = run([Call("f", squares_plus, (v, v[0])) for v in x])[1]
    assert calls_in(graph) == 25
    assert len(graph.library.function) == 1
    graph = run([Call("f", squares_plus, (x[0], x[1][0]))])[1]
    assert calls_in(graph) == 0


def test_what_a_group_costs() -> None:
    """As many operations as members; six calls are worth those of one."""
    assert [group_size(n) for n in (1, 2, 5, 20, 52, 100)] == [1, 1, 1, 2, 4, 4]
