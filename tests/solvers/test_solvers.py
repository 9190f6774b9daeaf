"""Solvers against a linear system with the dense matrix of the block.

A test writes factors into the state of the optimizer and applies a random
gradient. The step must be the solution of the system with `Block.dense()`.
"""

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
from tests.support.small import curvature
from tfkfac.blocks import Block, MatrixGradient
from tfkfac.blocks.registry import build_registry
from tfkfac.saving.entries import FORMAT_SECTION, SHARE, STATE
from tfkfac.solvers import InverseSolver, Solver
from tfkfac.solvers.registry import make_solver

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
    """One layer trained by K-FAC and SGD of rate 1, with settable factors."""

    def __init__(self, case: str, solver: str, damping: float) -> None:
        make, shape = CASES[case]
        keras.utils.set_random_seed(0)
        dtype = "int32" if case == "diagonal" else "float32"
        self.rng = np.random.default_rng(0)
        self.model = keras.Sequential([keras.Input(shape, dtype=dtype), make()])
        self.x = self.rng.integers(0, 5, (6, *shape)).astype(dtype)
        self.optimizer = tfkfac.KFAC(
            keras.optimizers.SGD(1.0),
            solver=solver,
            damping=damping,
            kl_clip=None,
            factor_update_interval=1000,
            inverse_update_interval=1000,
        ).attach(self.model)
        self.optimizer.build(self.model.trainable_variables)
        # No update is due: the intervals are not over, and the decomposition
        # exists (the identity).
        self.optimizer.iterations.assign(1)
        (self.block,) = build_registry(self.model, ()).blocks
        self.put({}, decomposed=1)

    def put(self, factors: dict[str, Array], decomposed: int = 0) -> None:
        """Set the averaged factors, 0 by default; then decompose them."""
        state = curvature(self.optimizer)
        counts = {"weight": 1, "observed": 1, "decomposed": decomposed}
        for key in state:
            _, name, path = key.split(":")
            if name in counts:
                state[key] = np.full_like(state[key], counts[name])
            elif path and name.startswith("factor_"):
                value = factors.get(name.removeprefix("factor_"), 0.0)
                state[key] = np.full_like(state[key], value)
        self.optimizer.load_own_variables(state)
        self.optimizer.inverse_updates.assign(0)

    def random_factors(self, scales: dict[str, float]) -> dict[str, Array]:
        return {
            name: scales.get(name, 1.0) * second_moments(shape, self.rng, 20)
            for name, shape in self.block.factor_shapes.items()
        }

    def step(self) -> tuple[Array, Array]:
        """Apply a random gradient; return gradient and step as matrices."""
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(self.model(self.x)))
        tape.gradient(value, variables)
        gradients = [
            tf.constant(self.rng.normal(size=v.shape), tf.float32)
            for v in variables
        ]
        before = [v.numpy() for v in variables]
        self.optimizer.apply(gradients, variables)
        pairs = zip(before, variables, strict=True)
        change = [tf.constant(old - new.numpy()) for old, new in pairs]
        W, P = map(self.block.to_matrix, (gradients, change))
        return np.asarray(W, np.float64), np.asarray(P, np.float64)

    def descent_step(self) -> tuple[Array, Array]:
        """`step` that asserts a finite descent direction."""
        W, P = self.step()
        assert np.isfinite(P).all()
        assert (np.sum(P * W, (-2, -1)) > 0).all()
        return W, P


def dense_block(block: Block, factors: dict[str, Array]) -> Array:
    """`Block.dense` in float64."""
    tensors = {k: tf.constant(v, tf.float64) for k, v in factors.items()}
    return np.asarray(block.dense(tensors))


def solve(matrix: Array, W: Array) -> Array:
    """Solve for row-major flattened matrices, on which `dense` acts."""
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
        pi = np.sqrt(means["A"] / means["G"])
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


# Damping, and scales of factors, with the shortest steps first: small weights
# have small rounding errors.
SETTINGS: list[tuple[float, dict[str, float]]] = [
    (10.0, {}),
    (0.05, {"A": 20.0, "G": 1e-3}),
    (1e-3, {"A": 1e-2, "G": 5.0}),
]
of_all_solvers = pytest.mark.parametrize(
    ("case", "solver"),
    [
        *itertools.product(CASES, SOLVERS),
        *itertools.product(PRINTED_CASES, ["plain_inverse", "eigen_outer"]),
    ],
)


@of_all_solvers
def test_step_solves_the_damped_block(case: str, solver: str) -> None:
    """For factors of all scales and for small, large and no damping."""
    bench = Bench(case, solver, 1.0)
    W, P = bench.step()
    assert int(bench.optimizer.inverse_updates) == 0
    assert_close(P, W, 1e-5, "the first decomposition is the identity")
    # Zero factors: P = W / damping, and P = W for damping 0.
    for damping in (0.25, 0.0):
        bench.optimizer.damping = damping
        bench.put({})
        W, P = bench.step()
        both = solver == "plain_inverse" and "A" in bench.block.factors
        expected = W / (damping or 1.0) ** (2 if both else 1)
        assert_close(P, expected, 1e-5, f"zeros, damping {damping}")
    for damping, scales in SETTINGS:
        bench.optimizer.damping = damping
        factors = bench.random_factors(scales)
        bench.put(factors)
        matrix = damped(bench.block, factors, solver, damping)
        # The next step reuses the decomposition.
        for _ in range(2):
            W, P = bench.step()
            assert int(bench.optimizer.inverse_updates) == 1
            assert_close(P, solve(matrix, W), 3e-4, f"{damping} {scales}")
    # Factors of rank 1 without damping: the step is a descent direction.
    bench.optimizer.damping = 0.0
    shapes = bench.block.factor_shapes
    rank_1 = {k: second_moments(s, bench.rng, 1) for k, s in shapes.items()}
    bench.put(rank_1)
    bench.descent_step()


@of_all_solvers
def test_roots(case: str, solver: str) -> None:
    """`R R^T` is the inverse of the damped block, and `X = R^T W`."""
    bench, roots = Bench(case, solver, 1.0), make_solver(solver, by_roots=True)
    block = bench.block
    for value, scales in SETTINGS:
        factors = bench.random_factors(scales)
        tensors = {k: tf.constant(factor) for k, factor in factors.items()}
        means = {k: tf.constant(mean_eigenvalue(factors[k])) for k in factors}
        damping = tf.constant(value, tf.float64)
        parts = roots.decompose(block.factors, tensors, means, damping)
        parts = roots.combine(parts, damping)
        assert {k: part.shape for k, part in parts.items()} == {
            k: part.shape for k, part in roots.kept(block.factors).items()
        }
        W = bench.rng.normal(size=block.gradient_shape)
        gradient = MatrixGradient(tf.constant(W))
        X = roots.apply(block.factors, parts, gradient).matrix
        P = roots.apply_back(block.factors, parts, X)
        want = solve(damped(block, factors, solver, value), W)
        assert_close(P, want, 1e-9)
        # W^T R R^T W = |R^T W|^2
        products = np.sum(W * want, (-2, -1))
        assert_close(np.sum(X.numpy() ** 2, (-2, -1)), products, 1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("empty", ["A", "G"])
def test_one_group_of_zeros(empty: str, solver: str) -> None:
    """A group with a zero factor does not change the other groups."""
    bench = Bench("groups", solver, 0.05)
    factors = bench.random_factors({})
    factors[empty][1] = 0.0
    bench.put(factors)
    W, P = bench.descent_step()
    nonzero = {name: factor[:1] for name, factor in factors.items()}
    matrix = damped(bench.block, nonzero, solver, 0.05)
    assert_close(P[:1], solve(matrix, W[:1]), 3e-4)
    if solver == "eigen":
        assert_close(P[1], W[1] / 0.05, 1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_factors_of_very_different_scales(solver: str) -> None:
    """`pi` is clipped."""
    for tiny, huge in (("A", "G"), ("G", "A")):
        bench = Bench("dense", solver, 0.01)
        factors = bench.random_factors({tiny: 1e-20, huge: 1e12})
        bench.put(factors)
        bench.descent_step()


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
