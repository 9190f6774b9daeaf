"""Tests of `compat.functions.shared`: methods whose objects share a trace."""

from typing import Any

import pytest
import tensorflow as tf
from typing_extensions import override

from tests.support.graphs import called
from tfkfac.compat.functions import Member, TraceKey, shared, shared_call


class Total(Member):
    """A sum to which `more` is added in each call."""

    held = ("total",)

    def __init__(self, start: float, more: float) -> None:
        super().__init__()
        self.total = tf.Variable(start)
        self.more = more

    @property
    @override
    def key(self) -> TraceKey:
        return TraceKey(self.more)

    @shared
    def add(self, number: Any, times: int) -> Any:
        new = self.total.assign_add(times * number + self.more)
        return tf.identity(new), new > 20


def calls_and_functions(step: Any) -> tuple[int, int]:
    graph = step.get_concrete_function().graph.as_graph_def()
    calls = sum(called(node) is not None for node in graph.node)
    return calls, len(graph.library.function)


@pytest.mark.parametrize("in_graph", [True, False])
def test_methods_of_members_write_their_variables(in_graph: bool) -> None:
    """Two keys and two constants: four traces for 32 objects."""
    states = [Total(float(i), float(i % 2)) for i in range(32)]

    def add_all() -> Any:
        return [
            s.add(tf.constant(5.0), 2 + i % 4 // 2)
            for i, s in enumerate(states)
        ]

    step = tf.function(add_all, autograph=False) if in_graph else add_all
    want = [i + 5.0 * (2 + i % 4 // 2) + i % 2 for i in range(32)]
    results = step()
    assert [float(new) for new, _ in results] == want
    assert [float(state.total) for state in states] == want
    assert [bool(large) for _, large in results] == [x > 20 for x in want]
    if in_graph:
        assert calls_and_functions(step) == (32, 4)


def test_calls_without_a_key_are_not_shared() -> None:
    x = [tf.constant([1.0 * i]) for i in range(3)]
    step = tf.function(
        lambda: [shared_call(None, tf.square, v) for v in x], autograph=False
    )
    assert [float(v[0]) for v in step()] == [0, 1, 4]
    assert calls_and_functions(step) == (0, 0)
