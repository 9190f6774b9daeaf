"""A kind of factor that is not ours: one class, nothing else.

Nothing of it is like the others: it keeps a sketch `F Omega`, its eigenbasis
is not square, and its inverse has three parts.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.blocks.dense import DenseBlock
from tfkfac.factors import (
    VALUES,
    Dense,
    Factor,
    MatrixPart,
    Part,
    Side,
    Tensors,
)

INPUTS, RANK, BATCH = 12, 4, 16


@dataclasses.dataclass(frozen=True)
class Sketch(Factor):
    """A matrix of low rank, by Nystroem from its product with `rank` probes.

    Its eigenbasis has `rank` coordinates within its range and `size` for what
    is left of a vector outside of it.
    """

    size: int
    rank: int

    @property
    def probes(self) -> Array:
        rng = np.random.default_rng(0)
        return np.asarray(rng.normal(size=(self.size, self.rank)))

    @property
    def storage(self) -> Part:
        return Part((self.size, self.rank))

    @property
    def operations(self) -> int:
        return self.size * self.rank**2

    @property
    def text(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(rows, [-1, self.size])
        return tf.matmul(rows, rows @ self.probes, transpose_a=True)

    def spectrum(self, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The eigenvalues that are not zero, and their vectors."""
        root = tf.linalg.cholesky(tf.transpose(self.probes) @ value)
        half = tf.linalg.triangular_solve(root, tf.transpose(value))
        values, vectors, _ = tf.linalg.svd(tf.transpose(half))
        return tf.square(values), vectors

    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.spectrum(value)[0]) / self.size

    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        values, vectors = self.spectrum(value)
        return tf.matmul(vectors * values, vectors, transpose_b=True)

    def inverse_parts(self) -> dict[str, Part]:
        return {
            "": MatrixPart((self.size, self.rank)),
            VALUES: Part((self.rank,)),
            "_rest": Part(()),
        }

    def inverse(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        values, vectors = self.spectrum(value)
        return {
            "": vectors,
            VALUES: 1 / (values + damping),
            "_rest": 1 / damping,
        }

    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        split = self.rotate(inverse, matrix, side)
        rest = tf.fill([self.size], inverse["_rest"])
        scale = tf.concat([inverse[VALUES], rest], 0)
        return self.rotate(inverse, scale[:, None] * split, side, back=True)

    def eigen_parts(self) -> dict[str, Part]:
        return {
            "": MatrixPart((self.size, self.rank)),
            VALUES: Part((self.rank + self.size,)),
        }

    def eigen(self, value: tf.Tensor) -> dict[str, tf.Tensor]:
        values, vectors = self.spectrum(value)
        rest = tf.zeros([self.size], values.dtype)
        return {"": vectors, VALUES: tf.concat([values, rest], 0)}

    def rotate(
        self,
        eigen: Tensors,
        matrix: tf.Tensor,
        side: Side,
        back: bool = False,
    ) -> tf.Tensor:
        assert side == "left"
        basis = eigen[""]
        if back:
            return basis @ matrix[: self.rank] + matrix[self.rank :]
        inside = tf.matmul(basis, matrix, transpose_a=True)
        return tf.concat([inside, matrix - basis @ inside], 0)


def trained(solver: str, x: Array) -> tuple[Any, list[Array]]:
    """Weights after some steps with factors of every batch."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((INPUTS,), dtype="float64"),
            layers.Dense(5, "tanh", dtype="float64", name="first"),
            layers.Dense(2, dtype="float64"),
        ]
    )
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1),
        solver=solver,
        damping=0.05,
        factor_update_interval=1,
        inverse_update_interval=2,
    )
    model.compile(optimizer, "mse")
    y = np.sin(x[:, :2])
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return optimizer, model.get_weights()


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_sketch_of_factors_of_low_rank(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it loses nothing, training is that with whole matrices."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5 * BATCH, RANK - 1))
    x = np.asarray(x @ rng.normal(size=(RANK - 1, INPUTS)) / 2)
    plain, want = trained(solver, x)
    before = plain.state_bytes()

    declared = DenseBlock.factors

    def factors(block: DenseBlock) -> dict[str, Factor]:
        kinds = dict(declared.fget(block))
        if block.layer.name == "first":
            assert kinds["A"] == Dense(INPUTS + 1)
            kinds["A"] = Sketch(INPUTS + 1, RANK)
        return kinds

    monkeypatch.setattr(DenseBlock, "factors", property(factors))
    optimizer, got = trained(solver, x)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, 1e-7)

    lines: list[str] = []
    optimizer.summary(print_fn=lines.append)
    assert f"rank {RANK} of {INPUTS + 1}" in "\n".join(lines)
    saved = (INPUTS + 1) * (INPUTS + 1 - RANK) * 8
    assert optimizer.state_bytes()["factors"] == before["factors"] - saved
