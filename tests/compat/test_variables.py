"""Internals of checkpoints, copies of variables, and rows in place."""

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.compat.contracts import contract
from tfkfac.compat.graphs import (
    Tracked,
    copied_rows,
    has_effects,
    kept_variables,
    new_rows,
    repeat,
    replica_copy,
    set_row,
    state_variable,
    written_variables,
)

COUNT, LENGTH = 5, 3


def fill(start: Any) -> Any:
    """Write the rows 1, 2, ... one by one, and sum them."""

    def body(index: Any, state: Any) -> Any:
        matrix, total = state
        row = tf.fill([LENGTH], tf.cast(index + 1, tf.float32))
        matrix = set_row(matrix, index, row)
        return matrix, total + tf.reduce_sum(matrix[: index + 1])

    return repeat(body, (start(), tf.constant(0.0)), 0, COUNT)


@pytest.mark.parametrize("xla", [False, True])
@contract(
    "compat.graphs.set_row",
    "`Empty` returns new zeros in each run, and `InplaceUpdate` changes one"
    " row.",
)
def test_rows(xla: bool) -> None:
    def start() -> Any:
        return new_rows(COUNT, LENGTH, tf.float32)

    run = tf.function(lambda: fill(start), autograph=False, jit_compile=xla)
    want = np.repeat(np.arange(1.0, COUNT + 1)[:, None], LENGTH, 1)
    for _ in range(2):
        matrix, total = run()
        np.testing.assert_array_equal(matrix, want)
        assert float(total) == want.cumsum(0).sum()


@contract(
    "compat.graphs.copied_rows",
    "`DeepCopy` of a variable is independent of the variable.",
)
def test_copied_rows() -> None:
    kept = tf.Variable(tf.ones([COUNT, LENGTH]))
    run = tf.function(
        lambda: fill(lambda: copied_rows(kept.read_value())), autograph=False
    )
    matrix, _ = run()
    assert float(matrix[4, 0]) == COUNT
    np.testing.assert_array_equal(kept, np.ones([COUNT, LENGTH]))


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
    "compat.graphs.has_effects",
    "`OpDef.is_stateful` is True for operations with side effects.",
)
def test_graphs_with_effects() -> None:
    variable = tf.Variable(1.0)
    effects: list[Any] = [
        lambda x: [variable.assign(x), x][1],
        lambda x: [tf.print(x), x][1],
        lambda x: x + tf.random.uniform([]),
        lambda x: x * variable,
    ]
    graphs = [
        tf.function(effect, autograph=False)
        .get_concrete_function(tf.TensorSpec([]))
        .graph
        for effect in effects
    ]
    assert [has_effects(graph) for graph in graphs] == [True] * 3 + [False]
