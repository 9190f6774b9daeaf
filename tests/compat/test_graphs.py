"""What compat relies on in TensorFlow's graphs, tapes and variables."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tests.support.graphs import operations
from tfkfac.compat.graphs import (
    in_xla,
    is_constant_to_tapes,
    map_rows,
    of_this_graph,
    open_graphs,
    operation_without_gradient,
    repeat,
    stamp_time,
    state_variable,
    under_tape,
)


# ---------------------------------------------------------------- variables
@contract(
    "compat.graphs.state_variable",
    "A `ResourceVariable` does not become a mirrored variable.",
)
def test_variables_are_not_mirrored() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        mirrored = tf.Variable(1.0)
        own = state_variable(1.0, "float64", "own")
    assert hasattr(mirrored, "_get_on_device_or_primary")
    assert not hasattr(own, "_get_on_device_or_primary")
    assert isinstance(own, tf.Variable)
    assert (own.dtype, own.trainable) == (tf.float64, False)
    assert own.name.startswith("own")


@contract(
    "compat.graphs.state_variable",
    "A `ResourceVariable` can be made in a trace, and saved in a checkpoint.",
)
def test_variables_made_in_a_trace(tmp_path: Any) -> None:
    made: list[tf.Variable] = []

    @tf.function
    def step() -> Any:
        if not made:
            made.append(state_variable(3, "int64", "late"))
        return made[0].assign_add(1)

    assert [int(step()) for _ in range(2)] == [4, 5]
    path = tf.train.Checkpoint(v=made[0]).save(tmp_path / "checkpoint")
    made[0].assign(0)
    tf.train.Checkpoint(v=made[0]).read(path)
    assert int(made[0]) == 5


@contract(
    "compat.graphs.state_variable",
    "A `ResourceVariable` with a `shape` takes values of other sizes.",
)
def test_variables_of_any_size() -> None:
    any_rows = state_variable(
        np.zeros((0, 2)), "float32", "held", tf.TensorShape([None, 2])
    )
    for rows in (3, 1):
        any_rows.assign(tf.ones((rows, 2)))
        assert any_rows.numpy().shape == (rows, 2)
    text = state_variable([""], tf.string, "text", tf.TensorShape([None]))
    text.assign(["a", "b"])
    assert list(text.numpy()) == [b"a", b"b"]


# ------------------------------------------------------------------- graphs
@contract(
    "compat.graphs.repeat",
    "With the attribute `_noinline` a function is called, not inlined.",
)
def test_loops_are_not_inlined() -> None:
    def square(x: Any) -> Any:
        return tf.raw_ops.Square(x=x)

    def repeated(x: Any) -> Any:
        return repeat(lambda index, x: square(x), x, 0, 1)

    assert "Square" in operations(tf.function(square, autograph=False))
    assert "Square" not in operations(repeated)


@contract(
    "compat.graphs.repeat",
    "The loop has the same name whatever scopes there are around.",
)
def test_names_of_loops() -> None:
    def body(index: Any, x: Any) -> Any:
        return x + 1.0

    @tf.function
    def step(x: Any) -> Any:
        with tf.name_scope("replica_1"):
            return repeat(body, repeat(body, x, 0, 2), 0, 2)

    names = {
        node.name
        for function in step.get_concrete_function(tf.constant(1.0))
        .graph.as_graph_def()
        .library.function
        for node in function.node_def
        if "While" in node.op
    }
    assert names == {"repeat"}


@pytest.mark.parametrize("eager", [True, False])
def test_repeat(eager: bool) -> None:
    """Calls with each index and the last state."""

    def run(end: Any) -> Any:
        def body(index: Any, state: Any) -> Any:
            total, last = state
            return total * 10 + index, last + 1.0

        return repeat(body, (tf.constant(0), tf.constant(0.5)), 2, end)

    run = run if eager else tf.function(run)
    total, last = run(tf.constant(5))
    assert (int(total), float(last)) == (234, 3.5)


@contract(
    "compat.graphs.stamp_time", "A call that is not inlined can be eager."
)
@pytest.mark.parametrize("eager", [True, False])
def test_time_is_stamped(eager: bool) -> None:
    clock = state_variable(0.0, "float64", "clock")

    def stamp() -> Any:
        return stamp_time(clock)

    before = float(tf.timestamp())
    got = (stamp if eager else tf.function(stamp))()
    assert before <= float(got) <= float(tf.timestamp())
    assert float(clock) == float(got)


@contract(
    "compat.graphs.open_graphs",
    "The graph of a branch or function has the one around it as `outer_graph`.",
)
def test_open_graphs() -> None:
    seen: list[list[Any]] = []

    @tf.function
    def outer(x: Any) -> Any:
        seen.append(list(open_graphs()))

        def branch() -> Any:
            seen.append(list(open_graphs()))
            return inner(x)

        return tf.cond(x > 0, branch, lambda: x)

    @tf.function
    def inner(x: Any) -> Any:
        seen.append(list(open_graphs()))
        return x + 1

    assert not list(open_graphs())
    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    assert [graphs[-len(seen[0]) :] for graphs in seen] == 3 * [seen[0]]
    assert seen[0][0] is graph
    assert [len(graphs) - len(seen[0]) for graphs in seen] == [0, 1, 2]
    assert seen[2][1] is seen[1][0]


@contract(
    "compat.graphs.in_xla",
    "`GraphOrParentsInXlaContext` knows what `jit_compile=True` traces.",
)
def test_in_xla() -> None:
    seen: list[bool] = []

    def step(x: Any) -> Any:
        def branch() -> Any:
            seen.append(in_xla())
            return x + 1

        return tf.cond(x > 0, branch, lambda: x)

    for jit in (True, False):
        tf.function(step, jit_compile=jit)(tf.constant(1.0))
    assert seen == [True, False]
    assert not in_xla()


# -------------------------------------------------------------------- tapes
@contract(
    "compat.graphs.under_tape",
    "`could_possibly_record` is about the tapes of this thread.",
)
def test_under_tape() -> None:
    elsewhere: list[bool] = []

    @tf.function
    def traced() -> Any:
        assert not under_tape()
        with tf.GradientTape():
            assert under_tape()
        return tf.constant(0)

    traced()
    assert not under_tape()
    with tf.GradientTape() as tape:
        assert under_tape()
        thread = threading.Thread(target=lambda: elsewhere.append(under_tape()))
        thread.start()
        thread.join()
        with tape.stop_recording():
            assert not under_tape()
    assert elsewhere == [False]
    assert not under_tape()
    with tf.autodiff.ForwardAccumulator(tf.zeros(1), tf.ones(1)):
        assert under_tape()


@contract(
    "compat.graphs.is_constant_to_tapes",
    "`gradient_registry` has None for what is not differentiable.",
)
def test_constants_to_tapes() -> None:
    assert is_constant_to_tapes("ResizeBilinearGrad")
    assert is_constant_to_tapes("ZerosLike")
    assert not is_constant_to_tapes("MatMul")
    assert not is_constant_to_tapes("There is no such operation")


def second_derivative(function: Callable[[Any], Any], x: Any) -> None:
    x = tf.constant(x)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = function(x)
        slope = inner.gradient(y, x)
    outer.gradient(slope, x)


@contract(
    "compat.graphs.operation_without_gradient",
    "The message of a missing gradient ends with the operation.",
)
def test_operation_without_gradient() -> None:
    @tf.function(autograph=False)
    def missing() -> None:
        second_derivative(
            tf.nn.local_response_normalization,
            np.ones((1, 2, 2, 1), "float32"),
        )

    with pytest.raises(LookupError) as error:
        missing()
    assert operation_without_gradient(error.value) == "LRNGrad"


@contract(
    "compat.graphs.operation_without_gradient",
    "The message of `PreventGradient` says that it is disabled.",
)
def test_gradient_that_is_prevented() -> None:
    x = tf.constant(1.0)

    @tf.function(autograph=False)
    def prevented() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.raw_ops.PreventGradient(input=x, message="not here: no")
        return tape.gradient(y, x)

    with pytest.raises(LookupError) as error:
        prevented()
    assert operation_without_gradient(error.value) == "PreventGradient"


# --------------------------------------------------------------------- maps
def test_a_map_that_raises_leaves_nothing_behind() -> None:
    """A strategy can still be entered."""

    def fail(row: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError("told to fail")

    @tf.function(autograph=False)
    def mapped(rows: tf.Tensor) -> tf.Tensor:
        return map_rows(fail, rows)

    with pytest.raises(NotImplementedError, match="told to fail"):
        mapped(tf.ones([3, 2]))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert tf.Variable(1.0).numpy() == 1.0


def test_map_of_rows() -> None:
    @tf.function(autograph=False)
    def mapped(rows: tf.Tensor) -> tf.Tensor:
        return map_rows(lambda row: 2 * row, rows)

    np.testing.assert_array_equal(mapped(tf.ones([3, 2])), 2 * np.ones([3, 2]))


def test_tensors_of_other_graphs_become_this_graph_s() -> None:
    """Those that are its own already are not copied."""

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        inside = tf.constant(2.0)
        assert of_this_graph(inside) is inside

        def branch() -> Any:
            own = of_this_graph(x)
            assert own is not x
            assert own.graph is tf.compat.v1.get_default_graph()
            return own

        return tf.cond(x > 0, branch, lambda: inside)

    x = tf.constant(3.0)
    assert float(step(x)) == 3
    assert of_this_graph(x) is x
