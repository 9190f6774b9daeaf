"""Internals of TensorFlow's graphs, tapes, checkpoints and variables."""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import function
from tensorflow.python.ops import functional_ops

from tests.compat.contracts import contract
from tfkfac.compat.graphs import (
    Tracked,
    before_relu,
    copied_rows,
    in_xla,
    is_constant_to_tapes,
    is_copy,
    is_legacy_gradient,
    kept_variables,
    new_rows,
    open_graphs,
    operation_without_gradient,
    repeat,
    replica_copy,
    set_row,
    state_variable,
    trace_place,
    under_tape,
    written_in,
    written_variables,
)


# ---------------------------------------------------------------- variables
@contract(
    "compat.graphs.state_variable",
    "A `ResourceVariable` can be created in a trace and saved in a checkpoint;"
    " with a `shape` it takes values of other sizes.",
)
def test_state_variables(tmp_path: pathlib.Path) -> None:
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


Operation = Callable[[Any], Any]
COPIES: list[Operation] = [
    lambda x: x[..., :1],
    lambda x: keras.ops.reshape(x, (-1,)),
    lambda x: keras.ops.expand_dims(x, 0),
    lambda x: keras.ops.squeeze(x[:, :1], -1),
    lambda x: keras.ops.cast(keras.ops.stop_gradient(x), "float64"),
]
OTHERS: list[Operation] = [keras.ops.relu, lambda x: 2 * x, tf.transpose]


@contract(
    "compat.graphs.is_copy",
    "A view, a slice and a cast of Keras are single operations of a graph.",
)
@contract(
    "compat.graphs.before_relu",
    "`relu` of Keras is the operation `Relu` of its argument.",
)
def test_copies_and_relu() -> None:
    def check(x: Any) -> Any:
        is_eager = tf.executing_eagerly()
        assert is_copy(x, x)
        for copy in COPIES:
            assert is_copy(copy(x), x) == (not is_eager)
        assert not any(is_copy(other(x), x) for other in OTHERS)
        y, z = keras.activations.relu(x), keras.activations.tanh(x)
        assert before_relu(y) is (y if is_eager else x)
        assert before_relu(z) is z
        return x

    check(tf.ones([3, 2]))
    tf.function(check, autograph=False)(tf.ones([3, 2]))


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
    "compat.graphs.trace_place",
    "`tf.vectorized_map` traces its function in the name scope `loop_body`.",
)
def test_trace_place() -> None:
    places: list[Any] = []

    def add_place(x: tf.Tensor) -> tf.Tensor:
        places.append(trace_place())
        return x

    @tf.function(autograph=False)
    def traced(x: tf.Tensor) -> None:
        for call in (lambda f, x: f(x), tf.vectorized_map, tf.map_fn):
            call(add_place, x)

    assert trace_place() == (None, 0)
    traced(tf.ones(3))
    assert [depth for _, depth in places] == [0, 1, 0]
    assert places[0][0] is places[1][0] is not places[2][0]


@contract(
    "compat.graphs.is_constant_to_tapes",
    "`gradient_registry` has None for operations that are not differentiable.",
)
def test_constants_to_tapes() -> None:
    names = "ResizeBilinearGrad", "ZerosLike", "MatMul", "No such operation"
    constant = [is_constant_to_tapes(name) for name in names]
    assert constant == [True, True, False, False]


def graph_of_second_derivative(
    function: Callable[[tf.Tensor], tf.Tensor], *shape: int
) -> tf.Graph:
    @tf.function(autograph=False)
    def second_derivative(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    return second_derivative.get_concrete_function(tf.TensorSpec(shape)).graph


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
    with pytest.raises(LookupError) as error:
        graph_of_second_derivative(function, 1, 2, 2, 1)
    assert operation_without_gradient(error.value) == op_type


@contract(
    "compat.graphs.is_legacy_gradient",
    "The gradient of a loop over a TensorFlow 1 function is a loop whose body, "
    "found by `_get_function`, contains `SymbolicGradient`.",
)
def test_gradients_of_legacy_loops() -> None:
    """An LSTM's loop has a usual gradient."""
    layer = keras.layers.LSTM(3)
    layer.build((2, 6, 4))

    def loop(x: tf.Tensor) -> tf.Tensor:
        types = tf.int32, tf.int32, tf.float32

        @function.Defun(*types)
        def condition(i: tf.Tensor, steps: tf.Tensor, y: tf.Tensor) -> Any:
            # TensorFlow names such functions by their operations. This number
            # is in no other test, so no other function has this name.
            del y
            return i < tf.minimum(steps, 20_261)

        @function.Defun(*types)
        def body(i: tf.Tensor, steps: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, steps, y * x  # with a captured tensor

        return functional_ops.While([0, 3, x], condition, body)[2]

    def has_legacy_gradient(call: Callable[[tf.Tensor], tf.Tensor]) -> bool:
        def gradient(x: tf.Tensor) -> Any:
            return tf.gradients(call(x), x)

        spec = tf.TensorSpec([2, 6, 4])
        graph = tf.function(gradient).get_concrete_function(spec).graph
        return any(map(is_legacy_gradient, graph.get_operations()))

    assert has_legacy_gradient(loop)
    assert not has_legacy_gradient(layer)


# ------------------------------------------------------ rows and variables
COUNT, LENGTH = 5, 3


@pytest.mark.parametrize("start", ["new", "copied", "xla"])
@contract(
    "compat.graphs.set_row",
    "`Empty` returns new zeros in each run, and `InplaceUpdate` changes one"
    " row.",
)
@contract(
    "compat.graphs.copied_rows",
    "`DeepCopy` of a variable is independent of the variable.",
)
def test_rows(start: str) -> None:
    """Write the rows 1, 2, ... one by one, and sum them."""
    kept = tf.Variable(tf.zeros([COUNT, LENGTH]))

    def body(index: Any, state: Any) -> Any:
        matrix, total = state
        row = tf.fill([LENGTH], tf.cast(index + 1, tf.float32))
        matrix = set_row(matrix, index, row)
        return matrix, total + tf.reduce_sum(matrix[: index + 1])

    @tf.function(autograph=False, jit_compile=start == "xla")
    def run() -> Any:
        rows = new_rows(COUNT, LENGTH, tf.float32)
        if start == "copied":
            rows = copied_rows(kept.read_value())
        return repeat(body, (rows, tf.constant(0.0)), 0, COUNT)

    want = np.repeat(np.arange(1.0, COUNT + 1)[:, None], LENGTH, 1)
    for _ in range(2):
        matrix, total = run()
        np.testing.assert_array_equal(matrix, want)
        assert float(total) == want.cumsum(0).sum()
    np.testing.assert_array_equal(kept, np.zeros([COUNT, LENGTH]))


class Part(Tracked):
    def __init__(self, value: float) -> None:
        super().__init__(name="part")
        self.alone = tf.Variable(value)
        self.listed = [tf.Variable(value), tf.Variable(value)]


class Holder(keras.optimizers.SGD):
    """Holds a tuple of states set after `__init__`, as the optimizers do."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.parts: tuple[Any, ...] = ()
        self.parts = (Part(value), Part(value))


@contract(
    "compat.graphs.Tracked",
    "A checkpoint of an optimizer contains the variables of tuples of modules.",
)
def test_checkpoints_follow_modules(tmp_path: pathlib.Path) -> None:
    path = tf.train.Checkpoint(optimizer=Holder(3.0)).save(tmp_path / "saved")
    other = Holder(0.0)
    tf.train.Checkpoint(optimizer=other).restore(path)
    for part in other.parts:
        assert [float(v) for v in (part.alone, *part.listed)] == [3.0] * 3


@contract(
    "compat.graphs.replica_copy",
    "Only mirrored variables have `_get_on_device_or_primary`, and a "
    "`ResourceVariable` is not mirrored.",
)
def test_replica_copy() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        mirrored = tf.Variable(1.0)
        local = state_variable(1.0, "float64", "local")
    (copy,) = strategy.experimental_local_results(mirrored)
    assert copy is not mirrored
    assert strategy.run(lambda: replica_copy(mirrored) is copy)
    assert replica_copy(local) is local
    assert (local.dtype, local.trainable) == (tf.float64, False)


WRITTEN = "compat.graphs.written_variables"


@contract(
    WRITTEN,
    "Variables are written by the methods `assign*` and `scatter*`; in a "
    "graph, `get_read_write_resource_inputs` finds the writes, also in "
    "functions.",
)
@pytest.mark.parametrize("graph", [False, True])
def test_written_variables(graph: bool) -> None:
    """Each written variable once; no read variables or other resources."""
    assigned, scattered, read, inner = (tf.Variable([1.0]) for _ in range(4))
    numbers = tf.random.Generator.from_seed(1)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    update = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))
    keys = tf.constant([1], tf.int64)
    result: list[tf.Tensor] = []

    @tf.function(autograph=False)
    def function() -> None:
        inner.assign_add(read)

    def write() -> Any:
        with written_variables() as handles:
            assigned.assign(read + 1.0)
            assigned.assign_sub(read)
            scattered.scatter_add(update)
            numbers.uniform([2])
            table.insert(keys, keys)
            if graph:
                function()
        result.extend(handles)

    (tf.function(write, autograph=False) if graph else write)()
    want = [assigned, scattered, numbers.state, *([inner] if graph else [])]
    assert len(result) == len(want)
    for variable in want:
        assert any(handle is variable.handle for handle in result)


@contract(WRITTEN, "The handle of a variable has its dtype.")
@pytest.mark.parametrize("graph", [False, True])
def test_kept_variables(graph: bool) -> None:
    variable, state = tf.Variable([1.0, 2.0]), tf.Variable(5, dtype=tf.int64)

    def change() -> None:
        with kept_variables([variable.handle, state.handle]):
            variable.assign([7.0, 8.0])
            state.assign_add(1)

    (tf.function(change, autograph=False) if graph else change)()
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert int(state) == 5


@contract(
    "compat.graphs.written_in",
    "`OpDef.is_stateful` is True for operations with side effects; "
    "`get_read_write_resource_inputs` and `_get_function` look into functions.",
)
@pytest.mark.parametrize("nested", [False, True])
def test_effects_of_graphs(nested: bool) -> None:
    variable = tf.Variable(1.0)

    def graph_of(effect: Any) -> Any:
        function = tf.function(effect, autograph=False)
        if nested:
            function = tf.function(lambda x: effect_of(x), autograph=False)
            effect_of = tf.function(effect, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([])).graph

    def checked(x: Any) -> Any:
        tf.debugging.assert_positive(x)
        return x * variable

    (handle,) = written_in(graph_of(lambda x: [variable.assign(x), x][1]))
    assert handle is variable.handle
    assert written_in(graph_of(checked)) == []
    effects: list[Any] = [
        lambda x: [tf.print(x), x][1],
        lambda x: x + tf.random.uniform([]),
    ]
    for effect in effects:
        with pytest.raises(ValueError, match="has effects"):
            written_in(graph_of(effect))
