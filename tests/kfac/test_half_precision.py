"""Decompositions in half precision: factors of any size, of all kinds.

G is 1e-8 and less late in training.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.lockstep import run_together
from tests.support.placements import SIZES, place
from tests.support.reference import SOLVES, Array
from tfkfac.blocks import MatrixGradient
from tfkfac.kfac.bank import State
from tfkfac.kfac.placement import Placement

# A few roundings of a dtype: of both factors, on the wire and in storage.
ALWAYS = tf.constant(True)
TOLERANCE = 8 * 2.0**-8
sizes_of_g = pytest.mark.parametrize(
    "size",
    [
        1e-12,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (1e-8, 1e-4, 1.0)),
        1e4,
    ],
)


def moments(shape: tuple[int, ...], size: float, *seed: int) -> Array:
    """A factor; the matrices of a stack are smaller one after the other."""
    rng = np.random.default_rng(seed)
    if len(shape) == 1:
        return size * rng.uniform(0.2, 1.0, shape)
    rows = rng.normal(size=(*shape[:-2], 3 * shape[-1], shape[-1]))
    matrix = size * np.swapaxes(rows, -1, -2) @ rows / rows.shape[-2]
    if len(shape) == 2:
        return np.asarray(matrix)
    return np.asarray(matrix * 0.1 ** np.arange(shape[0])[:, None, None])


class Layers:
    """Factors and gradients of the blocks of a small model, in NumPy."""

    def __init__(self, placement: Placement, size: float) -> None:
        self.factors = [
            {
                name: moments(kind.shape, size if name == "G" else 1.0, i)
                for name, kind in block.factors.items()
            }
            for i, block in enumerate(placement.blocks)
        ]
        rng = np.random.default_rng(1)
        self.gradients = [
            rng.normal(size=block.gradient_shape) for block in placement.blocks
        ]

    def parts(
        self, solver: str, damping: float
    ) -> Iterator[tuple[int, Any, Array]]:
        """Layer, place and result of each matrix of gradients."""
        for i, (factors, W) in enumerate(
            zip(self.factors, self.gradients, strict=True)
        ):
            G = factors["G"]
            A = factors.get("A")
            if A is None:
                # Damped exactly, by both solvers.
                for k, (g, w) in enumerate(zip(G, W, strict=True)):
                    g = g + damping * np.eye(len(g))
                    yield i, k, np.linalg.solve(g, w.T).T
            elif G.ndim == 2:
                A = np.diag(A) if A.ndim == 1 else A
                yield i, ..., SOLVES[solver](W, A, G, damping)
            else:
                for k, (a, g, w) in enumerate(zip(A, G, W, strict=True)):
                    yield i, k, SOLVES[solver](w, a, g, damping)


def preconditioned(
    placement: Placement, layers: Layers, damping: float, group: Any
) -> dict[int, Array]:
    """What a worker makes of the gradients of its layers."""
    solver, number = placement.solver, tf.constant(damping)
    made = {}
    for i, block in enumerate(placement.blocks):
        values = {
            name: tf.constant(value, tf.float32)
            for name, value in layers.factors[i].items()
        }
        means = {
            name: block.factors[name].mean_eigenvalue(value)
            for name, value in values.items()
        }
        owned = {n: values[n] for n in placement.plan.owns(group.rank, i)}
        if owned:
            made[i] = solver.decompose(block.factors, owned, means, number)
    everything = list(range(len(placement.blocks)))
    parts = placement.exchange.share_decompositions(group, made, everything)
    bytes_ = placement.communication_bytes(group.rank, 0)["inverse"]
    assert group.received_bytes == bytes_["decompositions"]
    state = State()
    state.fill(placement, group.rank)
    results = {}
    for i, kept in enumerate(state.preconditioners):
        if kept.decomposition is None:
            continue
        assert bool(kept.decomposition.replace(parts[i], number, ALWAYS))
        W = tf.constant(layers.gradients[i], tf.float32)
        results[i] = kept.decomposition.apply(MatrixGradient(W)).matrix.numpy()
    return results


@sizes_of_g
@pytest.mark.parametrize("solver", SOLVES)
@pytest.mark.parametrize(
    ("mode", "workers", "packs"),
    [("comm_opt", 1, False), ("comm_opt", 2, True), ("mem_opt", 2, False)],
)
def test_small_and_large_factors(
    mode: str, workers: int, packs: bool, solver: str, size: float
) -> None:
    """Within a few roundings of float64 without any wire or storage."""
    placement = place(
        mode, workers, solver, symmetric=packs, inverse_dtype="bfloat16"
    )
    layers = Layers(placement, size)
    for damping in (1e-2, 1e-8):
        seen = set()
        for results, _ in run_together(
            workers,
            lambda group, d=damping: preconditioned(  # type: ignore[misc]
                placement, layers, d, group
            ),
        ):
            for i, place_, want in layers.parts(solver, damping):
                if i in results:
                    got = results[i][place_]
                    assert_close(got, want, TOLERANCE, str(i))
            seen |= set(results)
        assert seen == set(range(len(SIZES)))


@pytest.mark.parametrize("solver", SOLVES)
def test_what_is_not_finite_is_rejected(solver: str) -> None:
    """Of any kind of factor; the last good decomposition stays in use."""
    placement = place("comm_opt", 1, solver, inverse_dtype="bfloat16")
    state = State()
    state.fill(placement, 0)
    number = tf.constant(1e-2)
    for block, kept in zip(
        placement.blocks, state.preconditioners, strict=True
    ):
        decomposition = kept.decomposition
        assert decomposition is not None
        before = [tensor.numpy() for tensor in decomposition.tensors]
        values = {
            name: tf.fill(kind.shape, np.nan)
            for name, kind in block.factors.items()
        }
        parts = placement.solver.decompose(
            block.factors, values, dict.fromkeys(values, number), number
        )
        assert not bool(decomposition.replace(parts, number, ALWAYS))
        for tensor, old in zip(decomposition.tensors, before, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), old)
        W = tf.random.stateless_normal(block.gradient_shape, [0, 1])
        P = decomposition.apply(MatrixGradient(W)).matrix
        # The identity, in whose dtype the product is.
        rtol = 2**-8 if solver == "inverse" else 0
        np.testing.assert_allclose(P, W, rtol=rtol)


@pytest.mark.parametrize("solver", SOLVES)
def test_without_damping(solver: str) -> None:
    """Zeros leave the gradient; factors that are regular are inverted."""
    placement = place("comm_opt", 1, solver, inverse_dtype="bfloat16")
    layers = Layers(placement, 1e-6)
    (results, _), *_ = run_together(
        1, lambda group: preconditioned(placement, layers, 0.0, group)
    )
    for i, place_, want in layers.parts(solver, 0.0):
        assert_close(results[i][place_], want, 4 * TOLERANCE, str(i))
    for factors in layers.factors:
        for name, factor in factors.items():
            factors[name] = np.zeros_like(factor)
    (results, _), *_ = run_together(
        1, lambda group: preconditioned(placement, layers, 0.0, group)
    )
    for i, got in results.items():
        assert_close(got, layers.gradients[i], TOLERANCE, str(i))
