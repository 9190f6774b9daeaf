"""Layers with large factors."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close, compiled, randomize
from tests.support.reference import SOLVES, Array, append_one, factors, gradient
from tests.support.small import kfac_of
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential
from tfkfac.blocks import registry
from tfkfac.blocks.dense import DenseBlock
from tfkfac.factors import Dense, Factor
from tfkfac.factors.low_rank import probes
from tfkfac.kfac import method


def einsum(units: int) -> Any:
    return layers.EinsumDense("nsi,io->nso", (None, units), bias_axes="o")


def at_each_position(units: int) -> Any:
    return layers.TimeDistributed(layers.Dense(units))


def conv(units: int) -> Any:
    return layers.Conv1D(units, 1)


@pytest.mark.parametrize(
    ("arguments", "make", "rows"),
    [
        ({"step": "natural"}, layers.Dense, 640),
        ({"step": "spectral"}, layers.Dense, 127),
        ({"step": "spectral"}, einsum, 127),
        ({"step": "spectral"}, at_each_position, 127),
        ({"step": "spectral"}, conv, 640),
        ({"step": "spectral", "max_factor_dim": 640}, einsum, 640),
        ({"step": "natural", "max_factor_dim": 127}, conv, 127),
    ],
)
def test_limits(arguments: dict[str, Any], make: Any, rows: int) -> None:
    """Number of rows, including the bias row, and rank beyond it."""
    for size, suffix in ((rows, ""), (rows + 1, ", rank 64")):
        model = sequential(make(1), shape=(2, size - 1))
        (row,) = blocks_of(bind(model, **arguments)).values()
        assert row[1] == f"{size} x {size}{suffix}"


@pytest.mark.parametrize(
    ("layer", "shape", "limit", "want"),
    [
        (layers.Dense(1), (800,), None, ["801 x 801", "1 x 1"]),
        (layers.Embedding(50, 7), (4,), 5, ["diagonal 50", "7 x 7, rank 6"]),
        (
            layers.Conv1D(6, 1, groups=2),
            (1, 4),
            2,
            ["2 of 3 x 3, rank 2", "2 of 3 x 3, rank 2"],
        ),
    ],
)
def test_texts(layer: Any, shape: Any, limit: Any, want: list[str]) -> None:
    """No limit is None; a diagonal has none; each matrix of a stack has it."""
    model = sequential(layer, shape=shape)
    (row,) = blocks_of(bind(model, max_factor_dim=limit)).values()
    assert row[1:3] == want


def test_summary_shows_the_share_of_a_sketch() -> None:
    """A has rank 1 for equal inputs."""
    model = sequential(layers.Dense(2), shape=(200,))
    optimizer = bind(model, step="spectral")
    (row,) = blocks_of(optimizer).values()
    assert row[1] == "201 x 201, rank 64"
    model.train_on_batch(np.ones((4, 200)), np.ones((4, 2)))
    (row,) = blocks_of(optimizer).values()
    assert row[1] == "201 x 201, rank 64 (100% of trace)"


def test_bytes_of_a_sketch() -> None:
    model = sequential(layers.Dense(2, name="wide"), shape=(3000,))
    optimizer = bind(model, step="natural")
    model.train_on_batch(np.ones((4, 3000)), np.ones((4, 2)))
    sketch, basis, scale = 64 * 3002, 64 * 3001, 1
    size = 4 * (sketch + basis + scale + 2 * 2**2)
    assert optimizer.state_bytes()["total"] == size


class Unlimited(tfkfac.blocks.MatrixBlock):
    """A block that ignores the limit."""

    kind = "Unlimited"
    rows = DenseBlock.rows

    @property
    def factors(self) -> dict[str, Factor]:
        inputs, outputs = self.matrix_shape
        return {"A": Dense(inputs + 1), "G": Dense(outputs)}


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
def test_a_block_above_the_limit_is_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block with a matrix above the limit is excluded."""
    blocks = {layers.Dense: {"": Unlimited}}
    monkeypatch.setattr(registry, "_registered", blocks)
    model = sequential(layers.Dense(4, name="wide"), shape=(10,))
    reasons = leftovers_of(bind(model, max_factor_dim=10))
    text = "factor A of 11 x 11 exceeds max_factor_dim=10"
    assert reasons == {"wide:kernel": text, "wide:bias": text}
    assert leftovers_of(bind(model, max_factor_dim=11)) == {}


# ---------------------------------------------------------------- training
def nystroem(matrix: Array, rank: int) -> Array:
    """Low-rank approximation plus the remaining trace on the diagonal."""
    omega = probes(len(matrix), rank, tf.float64).numpy()
    product = matrix @ omega
    low_rank = product @ np.linalg.pinv(omega.T @ product) @ product.T
    rest = np.trace(matrix - low_rank) / len(matrix)
    return np.asarray(low_rank + rest * np.eye(len(matrix)))


def linear(solver: str, **kwargs: Any) -> Any:
    """One linear layer in float64 with half the squared error, rate 1."""
    model = keras.Sequential(
        [
            keras.Input((9,), dtype="float64"),
            layers.Dense(7, dtype="float64", name="wide"),
        ]
    )
    randomize(model)
    compiled(model, solver=solver, damping=0.1, **kwargs)
    return model


@pytest.mark.parametrize(
    ("solver", "limit"), [("inverse", 6), ("eigen", 6), ("inverse", 9)]
)
def test_step_by_its_definition(
    monkeypatch: pytest.MonkeyPatch, solver: str, limit: int
) -> None:
    """Steps with a low-rank A, or A and G, equal NumPy."""
    monkeypatch.setattr(method, "FACTOR_RANK", 4)
    model = linear(solver, max_factor_dim=limit)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 9)), rng.normal(size=(30, 7))
    kernel, bias = before = model.get_weights()
    a, g = append_one(x), x @ kernel + bias - y
    A, G = factors(a[:, None], g[:, None])
    A = nystroem(A, 4)
    if limit < 7:
        G = nystroem(G, 4)
    W = gradient(a[:, None], g[:, None])
    want = SOLVES[solver](W, A, G, 0.1)
    model.train_on_batch(x, y)
    after = model.get_weights()
    step = [b - a for b, a in zip(before, after, strict=True)]
    # The number of rows is in single precision.
    assert_close(np.concatenate([step[0], step[1][None]]), want, 1e-6)
    kept = kfac_of(model).factors()["wide"]
    assert_close(kept["A"], A, 1e-6)
    assert_close(kept["G"], G, 1e-6)


# ------------------------------------------------------------------ memory


@pytest.mark.slow
def test_out_of_memory_names_the_layer() -> None:
    """A factor larger than the address space: the error names the layer."""
    model = sequential(layers.Dense(1, name="huge"), shape=(7_000_000,))
    message = r"No memory for .* layer 'huge' .*max_factor_dim"
    with pytest.raises(MemoryError, match=message):
        model.compile(tfkfac.KFAC(step="natural", max_factor_dim=None), "mse")
