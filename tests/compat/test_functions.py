"""Internals of `when`, `shared_call` and `shared`: functions in a graph."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from typing_extensions import override

from tests.compat.contracts import contract
from tests.support.graphs import called
from tfkfac.compat import functions
from tfkfac.compat.functions import (
    Member,
    TraceKey,
    shared,
    shared_call,
    when,
)
from tfkfac.compat.graphs import state_variable

WHEN = "compat.functions.when"
SHARED = "compat.functions.shared_call"


# --------------------------------------------------------------- conditions
@contract(WHEN, "A branch runs only if the predicate is true.")
@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_branches_run_if_the_predicate_is_true(how: str) -> None:
    count = state_variable(0.0, "float32", "count")

    def step(x: Any, wanted: Any) -> Any:
        doubled = 2 * x
        when(wanted, lambda: count.assign_add(doubled))
        return count + 0.0

    if how != "eager":
        step = tf.function(step, autograph=False, jit_compile=how == "xla")
    seen = [
        float(step(tf.constant(x), tf.constant(wanted)))
        for x, wanted in ((1.0, True), (2.0, False), (3.0, True))
    ]
    assert seen == [2, 2, 8]


@contract(WHEN, "Nested branches, and calls in branches, run in order.")
def test_branches_in_branches() -> None:
    trail = state_variable(0, "int64", "trail")

    def append(digit: int) -> None:
        trail.assign(10 * trail + digit)

    @tf.function(autograph=False)
    def step(outer: Any, inner: Any) -> None:
        def do() -> None:
            append(1)
            when(inner, lambda: append(2))
            append(3)

        when(outer, do)
        append(4)

    for outer, inner in ((True, True), (True, False), (False, True)):
        step(tf.constant(outer), tf.constant(inner))
    assert int(trail.numpy()) == 1234_134_4


# -------------------------------------------------------------- shared calls


@pytest.mark.parametrize("alone", [True, False])
def test_shared_calls_are_traced_once_per_key(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per signature and shape, also in branches."""
    monkeypatch.setattr(functions, "_on_one_device", lambda: alone)
    traces: list[Any] = []
    variables = [state_variable(0.0, "float32", "v") for _ in range(6)]
    wide = state_variable([0.0, 0.0], "float32", "wide")

    def double(pair: Any, variable: Any) -> Any:
        traces.append(pair["x"].shape)
        return variable.assign(2 * pair["x"] + pair["y"])

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        def call(key: str, variable: Any, x: Any) -> Any:
            pair = {"x": x, "y": tf.ones_like(x)}
            return shared_call(key, double, pair, variable)

        def branch() -> Any:
            return tf.add_n([call("one", v, x) for v in variables[2:5]])

        first = [call("one", v, x + 1) for v in variables[:2]]
        call("one", wide, tf.stack([x, x]))
        other = call("other", variables[5], x)
        return tf.add_n(first) + tf.cond(x > 0, branch, lambda: x) + other

    assert float(step(tf.constant(3.0))) == 2 * 9 + 3 * 7 + 7
    assert [float(v) for v in variables] == [9, 9, 7, 7, 7, 7]
    assert traces == [[], [2], []]


@contract(
    SHARED,
    "A function with an `input_signature` is traced once for all sizes; a "
    "`ResourceVariable` built from a handle has values of any size.",
)
def test_calls_of_any_size_are_traced_once_per_rank() -> None:
    shapes: list[Any] = []
    variables = [state_variable(np.ones(n), "float64", "v") for n in (1, 2, 3)]

    def double(named: Any) -> Any:
        variable = named["variable"]
        shapes.append(named["tensor"].shape.as_list())
        variable.assign(2 * variable)
        return variable + named["tensor"]

    def call(variable: Any, *shape: int) -> Any:
        tensor = tf.ones(shape or [1], tf.float64)
        pair = {"variable": variable, "tensor": tensor}
        return shared_call("double", double, pair, any_size=True)

    @tf.function(autograph=False)
    def step(flag: Any) -> Any:
        first = call(variables[0])

        def branch() -> Any:
            return tf.concat([call(v) for v in variables], 0)

        both = tf.cond(flag, branch, lambda: tf.ones(6, tf.float64))
        # Reads come after the calls, by automatic control dependencies.
        rows = tf.concat([first, both, *variables], 0)
        return rows, call(variables[2], 1, 1)

    rows, matrix = step(tf.constant(True))
    assert list(rows) == [3, 5, 3, 3, 3, 3, 3, 4, 2, 2, 2, 2, 2]
    assert matrix.numpy().tolist() == [[5, 5, 5]]
    assert shapes == [[None], [None, None]]
    assert list(call(variables[1])) == [5, 5]


@contract(SHARED, "A function that is an operation changes variables in order.")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_functions_are_operations(jit_compile: bool) -> None:
    """Calls that read wait for calls that write, also in branches.

    XLA does not support such operations.
    """
    total = state_variable(1.0, "float32", "total")

    def add(variable: Any, x: Any) -> Any:
        return tf.identity(variable.assign_add(x))

    def read(variable: Any) -> Any:
        return 10 * variable

    @tf.function(autograph=False, jit_compile=jit_compile)
    def step(x: Any) -> Any:
        first = shared_call("read", read, total)
        when(x > 0, lambda: shared_call("add", add, total, x))
        second = shared_call("read", read, total)
        third = shared_call("add", add, total, x)
        types = [o.type for o in x.graph.get_operations()]
        calls = sum("Partitioned" in op_type for op_type in types)
        assert calls == (3 if jit_compile else 0)
        return first, second, third, shared_call("read", read, total)

    result = step(tf.constant(2.0))
    assert [float(x) for x in result] == [10, 30, 5, 50]


@contract(
    SHARED,
    "An error in a called function names the operation that calls it.",
)
def test_errors_in_shared_calls_name_the_call() -> None:
    def checked(x: Any) -> Any:
        return tf.debugging.check_numerics(tf.sqrt(x), "a root")

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.name_scope("first"):
            root = shared_call("checked", checked, x)
        with tf.name_scope("second"):
            return root + shared_call("checked", checked, -x)

    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        step(tf.constant(3.0))
    assert "second/Call" in str(error.value)
    assert "first/" not in str(error.value)


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


def test_methods_of_members_write_their_variables() -> None:
    """Two keys and two constants: four traces for 32 objects."""
    states = [Total(float(i), float(i % 2)) for i in range(32)]

    @tf.function(autograph=False)
    def step() -> Any:
        return [
            s.add(tf.constant(5.0), 2 + i % 4 // 2)
            for i, s in enumerate(states)
        ]

    want = [i + 5.0 * (2 + i % 4 // 2) + i % 2 for i in range(32)]
    results = step()
    assert [float(new) for new, _ in results] == want
    assert [float(state.total) for state in states] == want
    assert [bool(large) for _, large in results] == [x > 20 for x in want]
    graph = step.get_concrete_function().graph.as_graph_def()
    assert sum(called(node) is not None for node in graph.node) == 32
    assert len(graph.library.function) == 4
