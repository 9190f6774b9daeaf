"""Powers of the damped Fisher matrix, against NumPy."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.placements import place
from tests.support.reference import Array
from tfkfac.blocks import MatrixGradient, RowGradient
from tfkfac.cost.estimate import Candidate, Workload, compare_plans
from tfkfac.cost.machine import Machine
from tfkfac.factors import Dense, Diagonal, Factor, LowRank, Stack
from tfkfac.solvers import SOLVERS

CASES: dict[str, dict[str, Factor]] = {
    "dense": {"A": Dense(4), "G": Dense(3)},
    "groups": {"A": Stack(2, 4), "G": Stack(2, 3)},
    "diagonal": {"A": Diagonal(5), "G": Dense(3)},
    "missing A": {"G": Diagonal(4)},
    "wide": {"A": LowRank(6, 3), "G": LowRank(5, 2)},
}
DAMPING = 0.05
EVERY = pytest.mark.parametrize(
    ("case", "solver"), itertools.product(CASES, SOLVERS)
)


class Bench:
    """Random factors of a block, and one gradient."""

    def __init__(self, case: str, solver: str) -> None:
        self.kinds, self.solver = CASES[case], solver
        self.rng = np.random.default_rng(0)
        self.values = {
            name: kind.gram(
                tf.constant(
                    self.rng.normal(size=(8, 1, *kind.stack_shape, kind.size))
                )
            )
            for name, kind in self.kinds.items()
        }
        g = self.kinds["G"]
        inputs = self.kinds["A"].size if "A" in self.kinds else 1
        shape = (*g.stack_shape, inputs, g.size)
        self.W = self.rng.normal(size=shape)

    def decomposition(self, power: float, damping: float) -> dict[str, Any]:
        """Made of the values and the damping in their dtype."""
        solver, kinds = SOLVERS[self.solver](power), self.kinds
        own = tf.constant(damping, self.values["G"].dtype)
        means = {k: f.mean_eigenvalue(self.values[k]) for k, f in kinds.items()}
        made = solver.decompose(kinds, self.values, means, own)
        return dict(solver.combine(made, own))

    def step(self, power: float, damping: float, times: int = 1) -> Array:
        """The gradient, preconditioned some times."""
        kept = self.decomposition(power, damping)
        dtype = self.values["G"].dtype
        gradient: Any = MatrixGradient(tf.constant(self.W, dtype))
        for _ in range(times):
            solver = SOLVERS[self.solver](power)
            gradient = solver.apply(self.kinds, kept, gradient)
        return np.asarray(gradient.matrix)

    def damped(self, damping: float) -> Array:
        """The damped block, written out."""
        g = np.asarray(self.kinds["G"].as_matrix(self.values["G"]))
        a = np.ones((*g.shape[:-2], 1, 1))
        if "A" in self.kinds:
            a = np.asarray(self.kinds["A"].as_matrix(self.values["A"]))
        besides = damping
        if "inverse" in self.solver and "A" in self.kinds:
            besides = 0.0
            of_a = of_g = np.float64(damping)
            if self.solver == "inverse":
                traces = [np.trace(m, axis1=-2, axis2=-1) for m in (a, g)]
                means = traces[0] / a.shape[-1], traces[1] / g.shape[-1]
                pi = np.sqrt(means[0] / means[1])
                of_a, of_g = pi * math.sqrt(damping), math.sqrt(damping) / pi
            a = a + np.asarray(of_a)[..., None, None] * np.eye(a.shape[-1])
            g = g + np.asarray(of_g)[..., None, None] * np.eye(g.shape[-1])
        both = np.einsum("...ij,...kl->...ikjl", a, g)
        size = a.shape[-1] * g.shape[-1]
        both = both.reshape(*g.shape[:-2], size, size)
        return np.asarray(both + besides * np.eye(size))

    def wanted(self, power: float) -> Array:
        """The gradient times the damped block to the minus `power`."""
        values, vectors = np.linalg.eigh(self.damped(DAMPING))
        flat = self.W.reshape(*values.shape, 1)
        inside = np.swapaxes(vectors, -1, -2) @ flat
        found = vectors @ (values[..., None] ** -power * inside)
        return np.asarray(found.reshape(self.W.shape))


@EVERY
def test_powers(case: str, solver: str) -> None:
    bench = Bench(case, solver)
    for power in (0.5, 0.25, 1.0):
        want = bench.wanted(power)
        assert_close(bench.step(power, DAMPING), want, 1e-8)
    # Two roots make an inverse.
    assert_close(bench.step(0.5, DAMPING, times=2), bench.wanted(1.0), 1e-8)


@EVERY
def test_zeros(case: str, solver: str) -> None:
    """Damping alone divides the gradient; without it, it stays."""
    bench = Bench(case, solver)
    bench.values = {k: tf.zeros_like(v) for k, v in bench.values.items()}
    both = solver == "plain_inverse" and "A" in bench.kinds
    for damping, want in ((0.0, 1.0), (0.25, 4.0 if both else 2.0)):
        assert_close(bench.step(0.5, damping), want * bench.W, 1e-9)


@EVERY
def test_one_direction_without_damping(case: str, solver: str) -> None:
    """The floors of the inverse: finite, and downhill."""
    bench = Bench(case, solver)
    bench.values = {
        name: kind.gram(tf.ones((1, 1, *kind.stack_shape, kind.size)))
        for name, kind in bench.kinds.items()
    }
    P = bench.step(0.5, 0.0)
    assert P.dtype == "float32"
    assert np.isfinite(P).all()
    assert (np.sum(P * bench.W, (-2, -1)) > 0).all()


@EVERY
def test_what_is_not_finite_is_not_hidden(case: str, solver: str) -> None:
    bench = Bench(case, solver)
    for name in bench.kinds:
        bench.values[name] *= np.nan
    made = bench.decomposition(0.5, DAMPING)
    assert not all(np.isfinite(part).all() for part in made.values())


def test_rows_are_those_of_the_matrix() -> None:
    bench = Bench("dense", "inverse")
    solver, kept = SOLVERS["inverse"](0.5), bench.decomposition(0.5, DAMPING)
    a, g = bench.rng.normal(size=(2, 4)), bench.rng.normal(size=(2, 3))
    bench.W = a.T @ g
    rows = RowGradient(tf.constant(a), tf.constant(g))
    got = solver.apply(bench.kinds, kept, rows)
    assert_close(got.matrix, bench.wanted(0.5), 1e-8)


@pytest.mark.parametrize("name", SOLVERS)
def test_sections_of_files_differ(name: str) -> None:
    """A root is not loaded as an inverse, nor another solver's root."""
    assert SOLVERS[name]().section == name
    every = [
        kind(power).section
        for kind in SOLVERS.values()
        for power in (1.0, 0.5, 0.25)
    ]
    assert len({*every}) == len(every)


def test_roots_take_as_long_as_eigenvalues() -> None:
    """The work of Cholesky is that of the inverse itself only."""
    blocks = place("comm_opt", 1, "inverse").blocks
    load = Workload(blocks, [0] * len(blocks), 0, first_order=0.0)
    machine = Machine(1e12, 1e9, 1e7, 1e30, 1e9, 1e-6)  # 100 to 1

    def stages(solver: str, power: float) -> Any:
        own = dataclasses.replace(load, power=power)
        candidate = Candidate("comm_opt", None, solver)
        return compare_plans(own, [candidate], machine, 1)[0].stages

    inverse, root = stages("inverse", 1.0), stages("inverse", 0.5)
    assert root["decompose"] == pytest.approx(100 * inverse["decompose"])
    assert root["precondition"] == inverse["precondition"]
    assert stages("eigen", 0.5) == stages("eigen", 1.0)
