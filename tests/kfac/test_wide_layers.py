"""Layers whose factors are large."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.small import compiled_mlp, data, gradients_of
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential
from tfkfac.blocks.registry import build_registry
from tfkfac.factors import Dense, Diagonal, Stack
from tfkfac.kfac.state import Preconditioner
from tfkfac.solvers import SOLVERS


def wide() -> Any:
    """A has 11, 5, 3 (twice) and 4 rows, G has 4, 4, 3 (twice) and 30."""
    return sequential(
        layers.Dense(4, name="inputs"),
        layers.Reshape((1, 4)),
        layers.Dense(4, use_bias=False, name="fits"),
        layers.Conv1D(6, 1, groups=2, name="groups"),
        layers.SeparableConv1D(30, 1, name="outputs"),
        shape=(10,),
    )


@pytest.mark.filterwarnings("ignore:K-FAC preconditions")
def test_wide_layers_are_left_and_listed() -> None:
    """A matrix may be as wide as the limit; of a stack, each may."""
    optimizer = bind(wide(), max_factor_dim=10)
    kept = ["fits", "groups", "depthwise/outputs"]
    assert list(blocks_of(optimizer)) == kept
    a = "factor A of 11 x 11 exceeds max_factor_dim=10"
    g = "factor G of 30 x 30 exceeds max_factor_dim=10"
    assert leftovers_of(optimizer) == {
        "inputs:kernel": a,
        "inputs:bias": a,
        "outputs:pointwise_kernel": g,
        "outputs:bias": g,
    }


@pytest.mark.parametrize("limit", [30, None])
def test_limit_that_nothing_exceeds(limit: int | None) -> None:
    optimizer = bind(wide(), max_factor_dim=limit)
    assert leftovers_of(optimizer) == {}


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
def test_default_limit() -> None:
    """16,384 with the bias' row; nothing is allocated for a wider one."""
    for inputs, left in ((16383, False), (16384, True)):
        model = sequential(layers.Dense(1, name="wide"), shape=(inputs,))
        registry = build_registry(model, (), tfkfac.KFAC().max_factor_dim)
        assert bool(registry.leftovers) is left
    optimizer = bind(sequential(layers.Dense(2, name="wide"), shape=(30000,)))
    assert set(leftovers_of(optimizer).values()) == {
        "factor A of 30001 x 30001 exceeds max_factor_dim=16384"
    }
    assert optimizer.state_bytes()["total"] == 0


def test_a_vocabulary_is_no_matrix() -> None:
    """The A of an embedding is diagonal, whatever its size."""
    tokens = layers.Embedding(50, 3, name="tokens")
    optimizer = bind(sequential(tokens, shape=(4,)), max_factor_dim=5)
    assert list(blocks_of(optimizer)) == ["tokens"]


def test_sizes_of_whole_matrices() -> None:
    kinds = (Dense(7), Stack(9, 3), Diagonal(100))
    assert [kind.whole_size for kind in kinds] == [7, 3, 0]


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [None, tf.bfloat16])
def test_state_is_made_where_it_is_kept(
    solver: str, dtype: tf.DType | None
) -> None:
    """Not as an array first: NumPy's memory is traced, TensorFlow's not."""
    model = sequential(layers.Dense(3), shape=(999,))
    (block,) = build_registry(model, ()).blocks
    tracemalloc.start()
    state = Preconditioner(block, SOLVERS[solver](), ["A", "G"], True, dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000**2
    assert state.factors is not None
    assert state.decomposition is not None
    a, b = state.factors.averages[0], state.decomposition.tensors[0]
    assert a.dtype == tf.float32
    assert b.dtype == (dtype or tf.float32)
    assert not np.asarray(tf.cast(a, tf.float32)).any()
    names = state.decomposition.names
    one = state.decomposition.tensors[names.index("A")]
    np.testing.assert_array_equal(tf.cast(one, tf.float32), np.eye(1000))


def test_error_of_a_layer_without_memory() -> None:
    """Its first factor would take more than the address space."""
    model = sequential(layers.Dense(1, name="huge"), shape=(7_000_000,))
    message = r"No memory for .* layer 'huge' .*max_factor_dim"
    with pytest.raises(MemoryError, match=message):
        model.compile(tfkfac.KFAC(max_factor_dim=None), "mse")


def test_decompositions_bear_the_name_of_their_layer() -> None:
    """TensorFlow says the operation that found no memory and who called it."""
    model = compiled_mlp()
    x, y = data()

    @tf.function
    def step() -> None:
        gradients = gradients_of(model, x, y)
        model.optimizer.apply(gradients, model.trainable_variables)

    library = step.get_concrete_function().graph.as_graph_def().library
    decompose = {
        function.signature.name
        for function in library.function
        if any(node.op == "Cholesky" for node in function.node_def)
    }
    names = [
        node.name
        for function in library.function
        for node in function.node_def
        if node.attr["f"].func.name in decompose
    ]
    assert sorted(name.split("/")[-2] for name in names) == ["hidden", "logits"]
