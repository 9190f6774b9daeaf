"""Tests of `compat.functions.each`: shared calls for rows of equal keys."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

from tests.support.graphs import called
from tests.support.harness import assert_close
from tfkfac.compat.functions import Kind, Member, each, fields, flags


def squares_plus(x: Any, y: Any) -> dict[str, Any]:
    return {"sum": tf.reduce_sum(x * x) + y, "x": 2 * x}


def run(*args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
    """The result of `each` in a graph, and the graph."""
    step = tf.function(lambda: each(*args, **kwargs), autograph=False)
    return step(), step.get_concrete_function().graph.as_graph_def()


def calls_in(graph: Any) -> int:
    return sum(called(node) is not None for node in graph.node)


@pytest.mark.parametrize("any_size", [False, True])
def test_each_returns_the_result_of_each_row(any_size: bool) -> None:
    """Eight rows with two keys or none; a row with None is skipped."""
    sizes = [3, 3, 5, 3, 3, 3, 3, 3]
    x = [np.arange(n) + 10.0 * i for i, n in enumerate(sizes)]
    keys = ["first"] * 6 + ["second"]
    column = [tf.constant(v) for v in x]
    numbers = [tf.constant(1.0 * i, tf.float64) for i in range(len(x))]
    args = ([squares_plus] * len(x), [*column, None], [*numbers, None])
    like = [*(Kind(key, any_size) for key in keys), None, None]
    for results in (run(*args, like=like)[0], each(*args, like=like)):
        assert results.pop() is None
        for i, (result, v) in enumerate(zip(results, x, strict=True)):
            assert_close(result["sum"], (v * v).sum() + i, 1e-6)
            assert_close(result["x"], 2 * v, 1e-6)


class Total(Member):
    """A sum to which `more` is added in each call."""

    held = ("total",)

    def __init__(self, start: float, more: float) -> None:
        super().__init__()
        self.total = tf.Variable(start)
        self.more = more

    @property
    @override
    def like(self) -> Kind:
        return Kind(self.more)

    def add(self, number: Any, times: int) -> Any:
        new = self.total.assign_add(times * number + self.more)
        return tf.identity(new), new > 20


def test_each_call_writes_its_state() -> None:
    states = [Total(float(i), float(i % 2)) for i in range(32)]
    rows, graph = run(Total.add, states, tf.constant(5.0), 2)
    want = [10.0 + i + i % 2 for i in range(32)]
    numbers, large = fields([*rows, None], 2)
    assert [float(x) for x in numbers[:-1]] == want
    assert [float(state.total) for state in states] == want
    expected = [*(x > 20 for x in want), True]
    assert flags(large, otherwise=True).numpy().tolist() == expected
    assert calls_in(graph) == 16


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


def test_dataclasses_are_nests() -> None:
    pairs = [Pair(tf.constant(2.0 * i), tf.constant(3.0)) for i in range(5)]
    result, graph = run(lambda pair: pair.x * pair.y, pairs, like=Kind())
    assert [float(x) for x in result] == [6.0 * i for i in range(5)]
    assert len(graph.library.function) == 1


def test_rows_are_grouped_in_calls() -> None:
    """100 rows are 25 calls of one function; a single row is inlined."""
    x = [tf.constant([1.0 * i]) for i in range(100)]
    graph = run(squares_plus, x, [v[0] for v in x], like=Kind())[1]
    assert calls_in(graph) == 25
    assert len(graph.library.function) == 1
    graph = run(squares_plus, x[:1], x[1][0], like=Kind())[1]
    assert calls_in(graph) == 0
