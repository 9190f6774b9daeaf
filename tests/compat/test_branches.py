"""Internals used by `when`: conditions without a result."""

import gc
import weakref
from typing import Any

import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import state_variable

CONTRACT = "compat.functions.when"


@contract(CONTRACT, "A branch runs only if the predicate is true.")
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


@contract(CONTRACT, "Nested branches, and calls in branches, run in order.")
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


@contract(CONTRACT, "Errors in a branch end the step.")
def test_errors_in_a_branch() -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        when(x > 0, lambda: tf.debugging.assert_less(x, 2.0, "too large"))
        return x

    step(tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        step(tf.constant(3.0))


@contract(CONTRACT, "Branches are freed with the function that contains them.")
def test_branches_are_freed() -> None:
    count = state_variable(0, "int64", "count")

    def make() -> tuple[Any, Any]:
        def add() -> None:
            count.assign_add(1)

        @tf.function(autograph=False)
        def traced(wanted: Any) -> None:
            when(wanted, add)

        traced(tf.constant(True))
        return traced, weakref.ref(add)

    traced, alive = make()
    assert alive() is not None
    del traced
    gc.collect()
    assert alive() is None
    assert int(count.numpy()) == 1
