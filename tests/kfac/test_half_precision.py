"""Statistics and decompositions in half precision, of any magnitude.

G is below 1e-8 late in training.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.lockstep import run_together
from tests.support.placements import SIZES, place
from tests.support.reference import SOLVES, Array
from tfkfac.blocks import MatrixGradient, Statistic
from tfkfac.kfac.bank import State
from tfkfac.kfac.placement import Placement

# -------------------------------------------- statistics and running averages
WORKERS, ROWS, UPDATES = 2, 8, 500
# Half a unit in the last place, of each worker's cast and of their sum.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
Shape = tuple[int, ...]


def batch(shape: Shape, size: float, *seed: int) -> Array:
    """Second moments summed over rows; they grow along a stack."""
    if len(shape) == 3:
        sizes = size * 10.0 ** np.arange(shape[0])
        return np.stack([batch(shape[1:], s, *seed) for s in sizes])
    rng = np.random.default_rng(seed)
    rows = np.sqrt(size) * rng.uniform(0.5, 1.5, (ROWS, shape[-1]))
    return np.sum(rows**2, 0) if len(shape) == 1 else rows.T @ rows


def reduced(
    placement: Placement, total: Callable[[str, Shape, int], Array]
) -> list[Any]:
    """The reduced statistics on each worker."""

    def work(group: Any) -> Any:
        own = {
            i: {
                name: Statistic(
                    tf.constant(total(name, kind.shape, group.rank), "float32"),
                    tf.constant(float(ROWS)),
                )
                for name, kind in block.factors.items()
            }
            for i, block in enumerate(placement.blocks)
        }
        return placement.exchange.reduce_statistics(group, own)

    return [found for found, _ in run_together(WORKERS, work)]


@pytest.mark.parametrize(
    ("dtype", "decay"), [("bfloat16", 0.99), ("float16", 0.95)]
)
def test_half_precision_averages_keep_changing(
    dtype: str, decay: float
) -> None:
    """Averages differ by the wire's rounding only, after many updates.

    Averages stored in half precision would stop changing once an update is
    below their rounding.
    """
    placement = place("comm_opt", WORKERS, "inverse", factor_dtype=dtype)
    layer = len(placement.blocks) - 1
    first, second = (
        reduced(
            placement,
            lambda _, shape, rank, t=turn: batch(shape, t + 1, t, rank),  # type: ignore[misc]
        )[0][layer]
        for turn in range(2)
    )
    state = State()
    state.fill(placement, 0)
    averages = state.preconditioners[layer].factors
    assert averages is not None

    @tf.function
    def run() -> None:
        for _ in tf.range(UPDATES // 2):
            averages.update(first, decay, tf.constant(True))
            averages.update(second, decay, tf.constant(True))

    run()
    kept = averages.values()
    assert kept
    for name, got in kept.items():
        want = np.zeros(got.shape)
        for update in range(UPDATES):
            turn = update % 2
            both = [
                batch(want.shape, turn + 1, turn, rank)
                for rank in range(WORKERS)
            ]
            want = decay * want + (1 - decay) * sum(both) / (WORKERS * ROWS)
        assert_close(got, want / (1 - decay**UPDATES), ROUNDING[dtype], name)


@pytest.mark.parametrize(
    ("packs", "dtype", "size"),
    [
        (False, "bfloat16", 1e-12),
        (True, "bfloat16", 1e8),
        (True, "float16", 1e-12),
        (False, "float16", 1e8),
    ],
)
def test_half_precision_statistics_of_any_magnitude(
    packs: bool, dtype: str, size: float
) -> None:
    """Large A (raw inputs) and small G (late in training) are exact."""
    placement = place(
        "mem_opt", WORKERS, "inverse", symmetric=packs, factor_dtype=dtype
    )
    for found in reduced(
        placement, lambda _, shape, rank: batch(shape, size, rank)
    ):
        for i, block in enumerate(placement.blocks):
            for name, kind in block.factors.items():
                both = [batch(kind.shape, size, r) for r in range(WORKERS)]
                got, want = np.asarray(found[i][name].total), sum(both)
                for part in range(len(got) if got.ndim == 3 else 1):
                    one = slice(part, part + 1) if got.ndim == 3 else ...
                    assert_close(got[one], want[one], ROUNDING[dtype], name)


def test_statistics_that_are_not_finite_stay_so() -> None:
    """Statistics that are not finite on one worker are so on all."""
    placement = place("comm_opt", WORKERS, "inverse", factor_dtype="float16")

    def total(name: str, shape: Shape, rank: int) -> Array:
        value = batch(shape, 1.0, rank)
        if rank and name == "G":
            value[..., :2] = np.nan, np.inf
        return value

    for found in reduced(placement, total):
        assert np.isfinite(found[len(found) - 1]["A"].total).all()
        assert not np.isfinite(found[len(found) - 1]["G"].total).all()


# ------------------------------------------------------------- decompositions
# A few roundings of a dtype: of both factors, on the wire and in storage.
ALWAYS = tf.constant(True)
TOLERANCE = 8 * 2.0**-8


def moments(shape: tuple[int, ...], size: float, *seed: int) -> Array:
    """A factor; matrices get smaller along a stack."""
    rng = np.random.default_rng(seed)
    if len(shape) == 1:
        return size * rng.uniform(0.2, 1.0, shape)
    rows = rng.normal(size=(*shape[:-2], 3 * shape[-1], shape[-1]))
    matrix = size * np.swapaxes(rows, -1, -2) @ rows / rows.shape[-2]
    if len(shape) == 2:
        return np.asarray(matrix)
    return np.asarray(matrix * 0.1 ** np.arange(shape[0])[:, None, None])


class Layers:
    """NumPy factors and gradients of the blocks of a small model."""

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
        """Layer, place and value of each gradient matrix."""
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
    """The preconditioned gradients on a worker."""
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


@pytest.mark.parametrize("size", [1e-12, 1e4])
@pytest.mark.parametrize("solver", SOLVES)
@pytest.mark.parametrize(
    ("mode", "workers", "packs"),
    [("comm_opt", 2, True), ("mem_opt", 2, False)],
)
def test_small_and_large_factors(
    mode: str, workers: int, packs: bool, solver: str, size: float
) -> None:
    """Errors are a few roundings compared with float64 on one worker."""
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
