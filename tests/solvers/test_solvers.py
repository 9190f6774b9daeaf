"""Solvers against a linear system with the dense matrix of the block."""

import itertools
import math
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tests.support.printed  # noqa: F401
import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.blocks import Block, MatrixGradient
from tfkfac.blocks.registry import build_registry
from tfkfac.saving.entries import FORMAT_SECTION, SHARE, STATE
from tfkfac.solvers import InverseSolver, Solver
from tfkfac.solvers.registry import SOLVERS as CLASSES

SOLVERS = ["inverse", "eigen"]
# Cases for the solvers of `tests.support.printed`.
PRINTED_CASES = ["groups", "diagonal", "missing A"]
CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "dense": (lambda: layers.Dense(3), (4,)),
    "one number": (lambda: layers.Dense(1, use_bias=False), (1,)),
    "groups": (
        lambda: layers.EinsumDense("nsi,sio->nso", (2, 3), bias_axes="so"),
        (2, 4),
    ),
    "diagonal": (lambda: layers.Embedding(5, 3), (2,)),
    "missing A": (lambda: layers.LayerNormalization(), (4,)),
}


def second_moments(shape: tuple[int, ...], rng: Any, count: int) -> Array:
    """Second moments of `count` random rows; a vector for a 1-D shape."""
    rows = rng.normal(size=(count, *(shape[:-1] or shape)))
    if len(shape) == 1:
        return np.asarray((rows**2).mean(0))
    return np.asarray(np.einsum("b...i,b...j->...ij", rows, rows) / count)


class Bench:
    """The block of one layer with random factors and a random gradient W."""

    def __init__(self, case: str, solver: str) -> None:
        make, shape = CASES[case]
        dtype = "int32" if case == "diagonal" else "float32"
        model = keras.Sequential([keras.Input(shape, dtype=dtype), make()])
        (self.block,) = build_registry(model, ()).blocks
        self.specs = self.block.factors
        self.solver = solver
        self.rng = np.random.default_rng(0)
        self.W = self.rng.normal(size=self.block.gradient_shape)

    def random_factors(
        self, scales: dict[str, float], rows: int = 20
    ) -> dict[str, Array]:
        return {
            name: scales.get(name, 1.0) * second_moments(shape, self.rng, rows)
            for name, shape in self.block.factor_shapes.items()
        }

    def solve(
        self, factors: dict[str, Array], damping: float, dtype: str = "float64"
    ) -> Array:
        """Precondition W."""
        solver = CLASSES[self.solver](self.solver)
        parts = self.decompose(solver, factors, damping, dtype)
        gradient = MatrixGradient(tf.constant(self.W, dtype))
        return np.asarray(solver.apply(self.specs, parts, gradient).matrix)

    def whiten(
        self, factors: dict[str, Array], damping: float
    ) -> tuple[Array, Array]:
        """Return `X = R^T W` and `R X` of the root R."""
        solver = CLASSES[self.solver](self.solver, by_roots=True)
        parts = self.decompose(solver, factors, damping, "float64")
        gradient = MatrixGradient(tf.constant(self.W))
        X = solver.apply(self.specs, parts, gradient).matrix
        back = solver.apply_back(self.specs, parts, X)
        return np.asarray(X), np.asarray(back)

    def whiten_anew(self, factors: dict[str, Array], damping: float) -> Array:
        """Return `R^T W`, given that of the root of other factors."""
        solver = CLASSES[self.solver](self.solver, by_roots=True)
        gradient = MatrixGradient(tf.constant(self.W))
        old, new = (
            self.decompose(solver, values, damping, "float64")
            for values in (self.random_factors({}), factors)
        )
        X = solver.apply(self.specs, old, gradient).matrix
        return np.asarray(solver.change_root(self.specs, old, new, X))

    def decompose(
        self,
        solver: Solver,
        factors: dict[str, Array],
        value: float,
        dtype: str,
    ) -> Any:
        tensors = {k: tf.constant(v, dtype) for k, v in factors.items()}
        means = {
            k: self.specs[k].mean_eigenvalue(t) for k, t in tensors.items()
        }
        damping = tf.constant(value, tf.float64)
        parts = solver.decompose(self.specs, tensors, means, damping)
        parts = solver.combine(parts, damping)
        assert {k: part.shape for k, part in parts.items()} == {
            k: part.shape for k, part in solver.kept(self.specs).items()
        }
        return parts

    def assert_descent(self, P: Array) -> None:
        assert np.isfinite(P).all()
        assert (np.sum(P * self.W, (-2, -1)) > 0).all()


def dense_block(block: Block, factors: dict[str, Array]) -> Array:
    """Kronecker product of A and G, or G alone, in float64."""
    a, g = (
        block.factors[name].as_matrix(tf.constant(factors[name], tf.float64))
        if name in factors
        else None
        for name in "AG"
    )
    if a is None:
        return np.asarray(g)
    product = np.einsum("...ij,...kl->...ikjl", a, g)
    size = a.shape[-1] * g.shape[-1]
    return product.reshape(*g.shape[:-2], size, size)


def solve(matrix: Array, W: Array) -> Array:
    """Solve for row-major flattened matrices."""
    flat = W.reshape(*matrix.shape[:-1], 1)
    return np.asarray(np.linalg.solve(matrix, flat).reshape(W.shape))


def mean_eigenvalue(factor: Array) -> Array:
    if factor.ndim == 1:
        return np.asarray(factor.mean())
    return np.asarray(np.linalg.eigvalsh(factor).mean(-1))


def damped(
    block: Block, factors: dict[str, Array], solver: str, damping: float
) -> Array:
    """Return the dense matrix of the block with the solver's damping."""
    dense = dense_block(block, factors)
    if solver.startswith("eigen") or "A" not in factors:
        return np.asarray(dense + damping * np.eye(dense.shape[-1]))
    if solver == "plain_inverse":  # Distributed K-FAC, eq. 9 and 10
        shares = dict.fromkeys("AG", np.float64(damping))
    else:
        means = {k: mean_eigenvalue(factor) for k, factor in factors.items()}
        pi = np.clip(np.sqrt(means["A"] / means["G"]), 1e-6, 1e6)
        root = math.sqrt(damping)
        shares = {"A": pi * root, "G": root / pi}
    return dense_block(
        block,
        {
            name: factor + shares[name]
            if factor.ndim == 1
            else factor + shares[name][..., None, None] * np.eye(len(factor.T))
            for name, factor in factors.items()
        },
    )


# Damping, and scales of factors.
SETTINGS: list[tuple[float, dict[str, float]]] = [
    (10.0, {}),
    (0.05, {"A": 20.0, "G": 1e-3}),
    (1e-3, {"A": 1e-2, "G": 5.0}),
    (1e-3, {"A": 1e8, "G": 1e-8}),  # pi without a bound is 1e8
]


@pytest.mark.parametrize(
    ("case", "solver"),
    [
        *itertools.product(CASES, SOLVERS),
        *itertools.product(PRINTED_CASES, ["plain_inverse", "eigen_outer"]),
    ],
)
def test_solution_of_the_damped_block(case: str, solver: str) -> None:
    """For factors of all scales and for small, large and no damping."""
    bench = Bench(case, solver)
    shapes = bench.block.factor_shapes
    zeros = {name: np.zeros(shape) for name, shape in shapes.items()}
    # Zero factors: P = W / damping, and P = W for damping 0.
    for damping in (0.25, 0.0):
        both = solver == "plain_inverse" and "A" in shapes
        want = bench.W / (damping or 1.0) ** (2 if both else 1)
        assert_close(bench.solve(zeros, damping), want, 1e-9)
    for damping, scales in SETTINGS:
        factors = bench.random_factors(scales)
        want = solve(damped(bench.block, factors, solver, damping), bench.W)
        assert_close(bench.solve(factors, damping), want, 1e-9)
        # The root R: `R R^T` is the inverse, and W^T R R^T W = |R^T W|^2.
        X, P = bench.whiten(factors, damping)
        assert_close(P, want, 1e-9)
        # From `R^T W` of one root to that of another.
        assert_close(bench.whiten_anew(factors, damping), X, 1e-9)
        products = np.sum(bench.W * want, (-2, -1))
        assert_close(np.sum(X**2, (-2, -1)), products, 1e-9)
    # Factors of rank 1 without damping: the step is a descent direction.
    rank_1 = bench.random_factors({}, rows=1)
    bench.assert_descent(bench.solve(rank_1, 0.0, "float32"))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("empty", ["A", "G"])
def test_one_group_of_zeros(empty: str, solver: str) -> None:
    """A group with a zero factor does not change the other groups."""
    bench = Bench("groups", solver)
    factors = bench.random_factors({})
    factors[empty][1] = 0.0
    P = bench.solve(factors, 0.05)
    bench.assert_descent(P)
    nonzero = {name: factor[:1] for name, factor in factors.items()}
    matrix = damped(bench.block, nonzero, solver, 0.05)
    assert_close(P[:1], solve(matrix, bench.W[:1]), 1e-9)
    if solver == "eigen":
        assert_close(P[1], bench.W[1] / 0.05, 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_factors_of_very_different_scales(solver: str) -> None:
    """The direction is finite and a direction of descent."""
    for tiny, huge in (("A", "G"), ("G", "A")):
        bench = Bench("dense", solver)
        factors = bench.random_factors({tiny: 1e-20, huge: 1e12})
        bench.assert_descent(bench.solve(factors, 0.01, "float32"))


# ------------------------------------------------------------ register_solver
SECTIONS = STATE, SHARE, FORMAT_SECTION  # of saved state


@pytest.mark.parametrize(
    ("name", "solver_class", "error"),
    [
        ("inverse", InverseSolver, ValueError),
        *((name, InverseSolver, ValueError) for name in SECTIONS),
        ("not a name", InverseSolver, ValueError),
        ("custom", Solver, TypeError),
        ("custom", InverseSolver("custom"), TypeError),
        ("custom", dict, TypeError),
    ],
)
def test_invalid_registrations(
    name: str, solver_class: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"Argument `(name|solver_class)` must"):
        tfkfac.register_solver(name, solver_class)
    with pytest.raises(ValueError, match="Argument `solver` must be one of"):
        tfkfac.KFAC(step="natural", solver="custom")
