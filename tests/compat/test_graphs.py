"""Internals of TensorFlow's graphs, tapes and variables."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.graphs import (
    in_current_graph,
    in_xla,
    is_constant_to_tapes,
    map_rows,
    open_graphs,
    operation_without_gradient,
    repeat,
    state_variable,
    under_tape,
)


# ---------------------------------------------------------------- variables
@contract(
    "compat.graphs.state_variable",
    "A `ResourceVariable` can be created in a trace and saved in a checkpoint;"
    " with a `shape` it takes values of other sizes.",
)
def test_state_variables(tmp_path: Any) -> None:
    result: list[tf.Variable] = []

    @tf.function(autograph=False)
    def step() -> Any:
        if not result:
            result.append(state_variable(3, "int64", "late"))
        return result[0].assign_add(1)

    assert [int(step()) for _ in range(2)] == [4, 5]
    path = tf.train.Checkpoint(v=result[0]).save(tmp_path / "checkpoint")
    result[0].assign(0)
    tf.train.Checkpoint(v=result[0]).read(path)
    assert int(result[0]) == 5
    text = state_variable([""], tf.string, "text", tf.TensorShape([None]))
    text.assign(["a", "b"])
    assert list(text.numpy()) == [b"a", b"b"]


# ------------------------------------------------------------------- graphs
@pytest.mark.parametrize("eager", [True, False])
def test_repeat(eager: bool) -> None:
    """The body is called with each index and the previous state."""

    def run(end: Any) -> Any:
        def body(index: Any, state: Any) -> Any:
            total, last = state
            return total * 10 + index, last + 1.0

        return repeat(body, (tf.constant(0), tf.constant(0.5)), 2, end)

    run = run if eager else tf.function(run, autograph=False)
    total, last = run(tf.constant(5))
    assert (int(total), float(last)) == (234, 3.5)


@contract(
    "compat.graphs.open_graphs",
    "The graph of a branch or function has the attribute `outer_graph`; "
    "`GraphOrParentsInXlaContext` (`in_xla`) is True for `jit_compile=True`.",
)
@pytest.mark.parametrize("jit", [True, False])
def test_graphs_of_branches(jit: bool) -> None:
    graphs: list[Any] = []
    flags: list[bool] = []

    @tf.function(autograph=False, jit_compile=jit)
    def step(x: Any) -> Any:
        def branch() -> Any:
            graphs.append(list(open_graphs()))
            flags.append(in_xla())
            return x + 1

        graphs.extend([x.graph, list(open_graphs())])
        return tf.cond(x > 0, branch, lambda: x)

    step(tf.constant(1.0))
    graph, outside, inside = graphs
    assert outside[0] is graph
    assert inside[1:] == outside
    assert flags == [jit]
    assert not in_xla() and not list(open_graphs())


# -------------------------------------------------------------------- tapes
@contract(
    "compat.graphs.under_tape",
    "`could_possibly_record` refers to the tapes of this thread.",
)
def test_under_tape() -> None:
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(under_tape()))

    @tf.function(autograph=False)
    def traced() -> None:
        assert not under_tape()
        with tf.GradientTape():
            assert under_tape()

    traced()
    with tf.GradientTape() as tape:
        assert under_tape()
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
    "`gradient_registry` has None for operations that are not differentiable.",
)
def test_constants_to_tapes() -> None:
    names = "ResizeBilinearGrad", "ZerosLike", "MatMul", "No such operation"
    assert [is_constant_to_tapes(x) for x in names] == [
        True,
        True,
        False,
        False,
    ]


def prevented(x: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.PreventGradient(input=x, message="not here: no")


@contract(
    "compat.graphs.operation_without_gradient",
    "The message of a missing gradient ends with the operation type; the "
    'message of `PreventGradient` contains "disabled".',
)
@pytest.mark.parametrize(
    ("function", "op_type"),
    [
        (tf.nn.local_response_normalization, "LRNGrad"),
        (prevented, "PreventGradient"),
    ],
)
def test_operation_without_gradient(
    function: Callable[[tf.Tensor], tf.Tensor], op_type: str
) -> None:
    """The first function has a first derivative only."""

    @tf.function(autograph=False)
    def second_derivative(x: tf.Tensor) -> None:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            slope = inner.gradient(y, x)
        outer.gradient(slope, x)

    with pytest.raises(LookupError) as error:
        second_derivative(tf.ones((1, 2, 2, 1)))
    assert operation_without_gradient(error.value) == op_type


# --------------------------------------------------------------------- maps
def test_a_failed_map_restores_the_variable_scope() -> None:
    """A strategy can still be entered."""

    def fail(row: tf.Tensor) -> tf.Tensor:
        raise NotImplementedError

    mapped = tf.function(lambda rows: map_rows(fail, rows), autograph=False)
    with pytest.raises(NotImplementedError):
        mapped(tf.ones([3, 2]))
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert tf.Variable(1.0).numpy() == 1.0


def test_tensors_of_outer_graphs() -> None:
    """Tensors of the current graph are not copied."""

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        inside = tf.constant(2.0)
        assert in_current_graph(inside) is inside

        def branch() -> Any:
            local = in_current_graph(x)
            assert local is not x
            assert local.graph is tf.compat.v1.get_default_graph()
            return local

        return tf.cond(x > 0, branch, lambda: inside)

    x = tf.constant(3.0)
    assert float(step(x)) == 3
    assert in_current_graph(x) is x
