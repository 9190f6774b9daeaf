"""Running averages over many updates, against float64 NumPy."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.lockstep import run_together
from tests.support.placements import place
from tests.support.reference import Array
from tfkfac.blocks import Statistic
from tfkfac.kfac.bank import State

WORKERS, ROWS, UPDATES = 2, 8, 500
# Half a unit in the last place, of each worker's cast and of their sum.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def batch(shape: tuple[int, ...], size: float, *seed: int) -> Array:
    """Sum over rows of a matrix's or a diagonal's second moments."""
    rng = np.random.default_rng(seed)
    rows = np.sqrt(size) * rng.uniform(0.5, 1.5, (ROWS, shape[-1]))
    return np.sum(rows**2, 0) if len(shape) == 1 else rows.T @ rows


@pytest.mark.parametrize("decay", [0.95, 0.99])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_averages_do_not_get_stuck(dtype: str, decay: float) -> None:
    """Two batches in turn; off by the wire's rounding, however many updates.

    Averages in half precision stop where the rest of the way is less than a
    rounding of them over `1 - decay`.
    """
    placement = place("comm_opt", WORKERS, "inverse", factor_dtype=dtype)
    kinds = placement.blocks[-1].factors
    layer = len(placement.blocks) - 1

    def exchanged(group: Any) -> list[dict[str, Statistic]]:
        """What this worker has of the two batches."""
        received = []
        for turn in range(2):
            own = {
                name: Statistic(
                    tf.constant(
                        batch(kind.shape, turn + 1, turn, group.rank),
                        tf.float32,
                    ),
                    tf.constant(float(ROWS)),
                )
                for name, kind in kinds.items()
            }
            reduced = placement.exchange.reduce_statistics(group, {layer: own})
            received.append(reduced[layer])
        return received

    (first, second), _ = run_together(WORKERS, exchanged)[0]
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
        want = np.zeros(kinds[name].shape)
        for update in range(UPDATES):
            turn = update % 2
            both = [
                batch(want.shape, turn + 1, turn, rank)
                for rank in range(WORKERS)
            ]
            want = decay * want + (1 - decay) * sum(both) / (WORKERS * ROWS)
        assert_close(got, want / (1 - decay**UPDATES), ROUNDING[dtype], name)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e8])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("packs", [False, True])
def test_statistics_of_any_size_travel_in_half_precision(
    packs: bool, dtype: str, size: float
) -> None:
    """A is large where inputs are not normalised; G is small late on."""
    placement = place(
        "mem_opt", WORKERS, "inverse", symmetric=packs, factor_dtype=dtype
    )

    def total_of(shape: tuple[int, ...], rank: int) -> Array:
        """Of a stack of matrices each has another size."""
        if len(shape) < 3:
            return batch(shape, size, rank)
        sizes = size * 10.0 ** np.arange(shape[0])
        return np.stack([batch(shape, s, rank) for s in sizes])

    def exchanged(group: Any) -> Any:
        own = {
            i: {
                name: Statistic(
                    tf.constant(total_of(kind.shape, group.rank), tf.float32),
                    tf.constant(float(ROWS)),
                )
                for name, kind in block.factors.items()
            }
            for i, block in enumerate(placement.blocks)
        }
        return placement.exchange.reduce_statistics(group, own)

    for reduced, _ in run_together(WORKERS, exchanged):
        for i, block in enumerate(placement.blocks):
            for name, kind in block.factors.items():
                both = [total_of(kind.shape, rank) for rank in range(WORKERS)]
                got, want = np.asarray(reduced[i][name].total), sum(both)
                for part in range(len(got) if len(got.shape) == 3 else 1):
                    one = slice(part, part + 1) if got.ndim == 3 else ...
                    assert_close(got[one], want[one], ROUNDING[dtype], name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_statistics_that_are_not_finite_stay_so(bad: float) -> None:
    """One worker's, for all to reject."""
    placement = place("comm_opt", WORKERS, "inverse", factor_dtype="float16")
    layer = len(placement.blocks) - 1
    kinds = placement.blocks[layer].factors

    def exchanged(group: Any) -> Any:
        own = {}
        for name, kind in kinds.items():
            total = batch(kind.shape, 1.0, group.rank)
            if group.rank and name == "G":
                total[0, 0] = bad
            own[name] = Statistic(
                tf.constant(total, tf.float32), tf.constant(float(ROWS))
            )
        return placement.exchange.reduce_statistics(group, {layer: own})

    for reduced, _ in run_together(WORKERS, exchanged):
        assert np.isfinite(reduced[layer]["A"].total).all()
        assert not np.isfinite(reduced[layer]["G"].total).all()
