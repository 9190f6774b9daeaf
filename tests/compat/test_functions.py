"""Internals of `when` and `shared_call`: functions in a graph."""

from typing import Any

import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat import functions
from tfkfac.compat.functions import shared_call, when
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

    def double(pair: Any, more: Any) -> Any:
        traces.append(pair["x"].shape)
        return 2 * pair["x"] + pair["y"] + more

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        def call(key: str, x: Any) -> Any:
            return shared_call(key, double, {"x": x, "y": tf.ones_like(x)}, x)

        def branch() -> Any:
            return tf.add_n([call("one", x) for _ in range(3)])

        first = [call("one", x + 1) for _ in range(2)]
        call("one", tf.stack([x, x]))
        other = call("other", x)
        return tf.add_n(first) + tf.cond(x > 0, branch, lambda: x) + other

    assert float(step(tf.constant(3.0))) == 2 * 13 + 3 * 10 + 10
    assert traces == [[], [2], []]


@contract(
    SHARED,
    "A function with an `input_signature` is traced once for all sizes.",
)
def test_calls_of_any_size_are_traced_once_per_rank() -> None:
    shapes: list[Any] = []

    def double(named: Any) -> Any:
        shapes.append(named["tensor"].shape.as_list())
        return 2 * named["tensor"]

    def call(*shape: int) -> Any:
        named = {"tensor": tf.ones(shape, tf.float64)}
        return shared_call("double", double, named, any_size=True)

    @tf.function(autograph=False)
    def step(flag: Any) -> Any:
        def branch() -> Any:
            return tf.concat([call(n) for n in (1, 2, 3)], 0)

        both = tf.cond(flag, branch, lambda: tf.ones(6, tf.float64))
        return tf.concat([call(1), both], 0), call(1, 1)

    vector, matrix = step(tf.constant(True))
    assert list(vector) == [2] * 7
    assert matrix.numpy().tolist() == [[2]]
    assert shapes == [[None], [None, None]]
    assert list(call(2)) == [2, 2]
