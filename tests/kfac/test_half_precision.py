"""Statistics and decompositions in half precision, of any magnitude.

G is below 1e-8 late in training. Workers are threads.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import assert_close, train_once
from tests.support.lockstep import run_together
from tests.support.reference import SOLVES, Array, append_one, factors, gradient
from tfkfac.blocks import Statistic
from tfkfac.blocks.registry import build_registry
from tfkfac.distributed.topology import Topology
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.settings import Distribution
from tfkfac.solvers.registry import make_solver

WORKERS, ROWS = 2, 8


def place(packs: bool, dtype: str) -> Placement:
    """Place factors of all types; a normalisation has no A."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4)(inputs)  # with a diagonal A
    x = layers.Conv1D(6, 2, groups=2)(x)
    x = layers.LayerNormalization()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    everyone = tuple(range(WORKERS))
    return Placement(
        build_registry(model, ()),
        Topology(WORKERS, everyone, (None,) * WORKERS, "auto"),
        make_solver("inverse"),
        Distribution("comm_opt", symmetric=packs, factor_dtype=dtype),
    )


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
        local = {
            i: {
                name: Statistic(
                    tf.constant(total(name, spec.shape, group.rank), "float32"),
                    tf.constant(float(ROWS)),
                )
                for name, spec in block.factors.items()
            }
            for i, block in enumerate(placement.blocks)
        }
        return placement.exchange.reduce_statistics(group, local)

    return [result for result, _ in run_together(WORKERS, work)]


@pytest.mark.parametrize(
    ("packs", "dtype", "size"),
    [(False, "bfloat16", 1e8), (True, "float16", 1e-12)],
)
def test_statistics_of_any_magnitude(
    packs: bool, dtype: str, size: float
) -> None:
    """Large A (raw inputs) and small G (late in training) are exact."""
    placement = place(packs, dtype)
    for result in reduced(
        placement, lambda _, shape, rank: batch(shape, size, rank)
    ):
        for i, block in enumerate(placement.blocks):
            for name, spec in block.factors.items():
                both = [batch(spec.shape, size, r) for r in range(WORKERS)]
                got, want = np.asarray(result[i][name].total), sum(both)
                if got.ndim < 3:
                    got, want = got[None], want[None]
                for pair in zip(got, want, strict=True):
                    assert_close(*pair, ROUNDING[dtype], name)


def test_statistics_that_are_not_finite() -> None:
    """Statistics that are not finite on one worker are so on all."""
    placement = place(packs=False, dtype="float16")

    def total(name: str, shape: Shape, rank: int) -> Array:
        value = batch(shape, 1.0, rank)
        if rank and name == "G":
            value[..., :2] = np.nan, np.inf
        return value

    for result in reduced(placement, total):
        assert np.isfinite(result[len(result) - 1]["A"].total).all()
        assert not np.isfinite(result[len(result) - 1]["G"].total).all()


@pytest.mark.parametrize(
    ("solver", "size", "damping"),
    [("inverse", 1e-12, 1e-2), ("eigen", 1e4, 1e-2)],
)
def test_decompositions(solver: str, size: float, damping: float) -> None:
    """The error of a step is a few roundings, for G of any size."""
    layer = layers.Dense(3, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((6,)), layer])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 6)).astype("float32")
    y = np.sqrt(size) * rng.normal(size=(40, 3)).astype("float32")
    a, g = append_one(x.astype(np.float64)), -y.astype(np.float64)
    rows = a[:, None], g[:, None]
    P = SOLVES[solver](gradient(*rows), *factors(*rows), damping)
    step = train_once(
        model,
        x,
        y,
        inner=damping,  # |P| is at most |W| / damping
        solver=solver,
        damping=damping,
        inverse_dtype="bfloat16",
    )
    got = np.vstack(step.delta)
    assert_close(got, damping * P, 8 * ROUNDING["bfloat16"])
