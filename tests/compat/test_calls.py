"""What compat relies on in functions that a graph calls."""

import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support.graphs import operations
from tfkfac.compat import functions
from tfkfac.compat.functions import (
    call_of_any_size,
    placed_call,
    shared_call,
    when,
)
from tfkfac.compat.graphs import state_variable


def doubling(traces: list[Any]) -> Callable[..., Any]:
    """A function of tensors and a variable that notes its traces."""

    def double(pair: Any, variable: Any) -> Any:
        traces.append(pair["x"].shape)
        return variable.assign(2 * pair["x"] + pair["y"])

    return double


def test_shared_calls_are_traced_once_for_each_kind() -> None:
    """Here: once for each signature and shape, in branches too."""
    traces: list[Any] = []
    variables = [state_variable(0.0, "float32", "v") for _ in range(6)]
    wide = state_variable([0.0, 0.0], "float32", "wide")

    @tf.function
    def step(x: Any) -> Any:
        def call(key: str, variable: Any, x: Any) -> Any:
            pair = {"x": x, "y": tf.ones_like(x)}
            return shared_call(key, doubling(traces), pair, variable)

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
    "compat.functions.call_of_any_size",
    "A function with an `input_signature` is traced once for all sizes.",
)
def test_calls_of_any_size_are_traced_once_for_each_rank() -> None:
    shapes: list[Any] = []

    def twice(x: Any) -> Any:
        shapes.append(x.shape.as_list())
        return x + x

    @tf.function
    def step(x: Any) -> Any:
        parts = [call_of_any_size("twice", twice, x[:n]) for n in (1, 2, 3)]
        parts.append(call_of_any_size("twice", twice, x[:2, None])[:, 0])
        return tf.concat(parts, 0)

    x = tf.constant([1.0, 2.0, 3.0])
    assert list(step(x)) == [2, 2, 4, 2, 4, 6, 2, 4]
    assert shapes == [[None], [None, None]]
    assert list(call_of_any_size("twice", twice, x)) == [2, 4, 6]


@contract(
    "compat.functions.call_of_any_size",
    "A `ResourceVariable` of a handle reads and writes values of any size.",
)
def test_calls_of_any_size_change_variables() -> None:
    shapes: list[Any] = []
    variables = [state_variable(np.ones(n), "float64", "v") for n in (1, 2, 3)]

    def double(named: Any) -> Any:
        variable = named["one"]
        shapes.append(variable.shape.as_list())
        variable.assign(2 * variable)
        return variable + named["two"]

    def call(variable: Any) -> Any:
        pair = {"one": variable, "two": tf.ones(1, tf.float64)}
        return call_of_any_size("double", double, pair)

    @tf.function
    def step(flag: Any) -> Any:
        first = call(variables[0])

        def branch() -> Any:
            return tf.concat([call(v) for v in variables], 0)

        both = tf.cond(flag, branch, lambda: tf.ones(6, tf.float64))
        # After what was called, though nothing else says so.
        return tf.concat([first, both, *variables], 0)

    found = step(tf.constant(True))
    assert list(found) == [3, 5, 3, 3, 3, 3, 3, 4, 2, 2, 2, 2, 2]
    assert shapes == [[None]]
    assert list(call(variables[1])) == [5, 5]


@contract(
    "compat.functions.shared_call",
    "A call gets the `config_proto` of its context's `function_call_options`.",
)
def test_shared_functions_are_not_optimised_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there are several devices, and they are placed on one of them."""
    monkeypatch.setattr(functions, "on_one_device", lambda: False)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        one = shared_call("one", lambda x: x + x, x)
        plain = tf.function(lambda x: x * x, autograph=False)
        return one + call_of_any_size("two", lambda x: x - 1, x) + plain(x)

    graph = step.get_concrete_function(tf.constant([1.0])).graph
    configs = [
        tf.compat.v1.ConfigProto.FromString(o.get_attr("config_proto"))
        for o in graph.get_operations()
        if "Partitioned" in o.type
    ]
    as_written = [
        c.graph_options.rewrite_options.disable_meta_optimizer for c in configs
    ]
    assert as_written == [True, True, False]
    assert list(step(tf.constant([3.0]))) == [6 + 2 + 9]


def test_shared_calls_run_eagerly() -> None:
    traces: list[Any] = []
    variable = state_variable(0.0, "float32", "v")
    for x in (1.0, 2.0):
        pair = {"x": tf.constant(x), "y": tf.constant(0.5)}
        shared_call("one", doubling(traces), pair, variable)
    assert float(variable) == 4.5
    assert len(traces) == 2


@contract(
    "compat.functions.shared_call",
    "With the attribute `_noinline` a function is called, not inlined.",
)
@pytest.mark.parametrize("alone", [True, False])
def test_shared_calls_are_not_inlined(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "on_one_device", lambda: alone)

    def square(x: Any) -> Any:
        return shared_call("square", lambda x: tf.raw_ops.Square(x=x), x)

    found = operations(tf.function(square, autograph=False))
    assert "Square" not in found
    assert ("PartitionedCall" in found) != alone


@contract(
    "compat.functions.placed_call",
    "What is called by a `PartitionedCall` gets oneDNN's kernels.",
)
def test_placed_calls_have_the_kernels_of_others(
    tmp_path: pathlib.Path,
) -> None:
    """Those of oneDNN, where TensorFlow has them on."""
    shape = [2, 9, 9, 8]

    def convolve(x: Any) -> Any:
        return tf.raw_ops.Conv2D(
            input=x,
            filter=tf.ones([3, 3, 8, 8]),
            strides=[1] * 4,
            padding="VALID",
        )

    @tf.function(autograph=False)
    def placed(x: Any) -> Any:
        return placed_call("convolve", convolve, x)

    @tf.function(autograph=False)
    def inlined(x: Any) -> Any:
        return convolve(x)

    there = kernels_of(lambda: inlined(tf.ones(shape)), tmp_path / "inlined")
    assert there
    found = kernels_of(lambda: placed(tf.ones(shape)), tmp_path / "placed")
    assert found == there


def kernels_of(run: Callable[[], Any], folder: pathlib.Path) -> set[str]:
    """The kernels of convolutions that ran."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    run()
    tf.profiler.experimental.start(str(folder))
    run()
    tf.profiler.experimental.stop()
    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    names = {
        plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    }
    return {name.split(":")[-1] for name in names if ":" in name} & {
        "Conv2D",
        "_MklConv2D",
        "_MklNativeConv2D",
    }


@contract(
    "compat.functions.shared_call",
    "A function that is an operation changes variables in its turn.",
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_functions_are_operations(jit_compile: bool) -> None:
    """One that reads waits for one that writes, in branches too.

    XLA does not know it.
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
        kinds = [o.type for o in x.graph.get_operations()]
        calls = sum("Partitioned" in kind for kind in kinds)
        assert calls == (3 if jit_compile else 0)
        return first, second, third, shared_call("read", read, total)

    found = step(tf.constant(2.0))
    assert [float(x) for x in found] == [10, 30, 5, 50]


@contract(
    "compat.functions.shared_call",
    "An error in a function that is called says the operation that calls it.",
)
def test_errors_in_shared_calls_say_who_called() -> None:
    def total(size: Any) -> Any:
        return tf.reduce_sum(tf.linalg.cholesky(tf.fill([size, size], 1.0)))

    @tf.function
    def step(size: Any) -> Any:
        with tf.name_scope("small"):
            one = shared_call("total", total, tf.constant(1))
        with tf.name_scope("large"):
            return one + shared_call("total", total, size)

    with pytest.raises(tf.errors.ResourceExhaustedError) as error:
        step(tf.constant(9_000_000))  # 324 TB
    assert "large/Call" in str(error.value)
    assert "small/" not in str(error.value)


@contract(
    "compat.functions.shared_call",
    "A function that a graph has called does not keep that graph alive.",
)
def test_shared_calls_end_with_their_graph() -> None:
    alive = []

    def use() -> None:
        def plus_one(x: Any) -> Any:
            return x + 1.0

        @tf.function
        def step(x: Any) -> Any:
            return tf.cond(
                x > 0, lambda: shared_call("one", plus_one, x), lambda: x
            )

        step(tf.constant(1.0))
        graph = step.get_concrete_function(tf.constant(1.0)).graph
        alive.extend([weakref.ref(graph), weakref.ref(plus_one)])

    use()
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
