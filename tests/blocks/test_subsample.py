"""Statistics of a subsample of the batch: `factor_batch_fraction`."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import (
    assert_close,
    check_factors,
    compiled,
    find,
    weights_of,
)
from tests.support.layers import problem
from tests.support.reference import append_one
from tfkfac.blocks import Record
from tfkfac.blocks.dense import EinsumDenseBlock
from tfkfac.blocks.statistics import (
    BatchSettings,
    Examples,
    Subsample,
    batch_statistics,
    choose_subsample,
)


def subsample(fraction: float, offset: int) -> Subsample:
    return Subsample(fraction, tf.constant(offset, tf.int64))


def selected(
    size: int, fraction: float, offset: int
) -> tuple[list[int], float]:
    """Indices of the selected examples, and their weight."""
    examples = Examples(tf.constant(size), subsample(fraction, offset))
    indices = examples.of(tf.range(size)).numpy().tolist()
    return indices, float(examples.weight)


# --------------------------------------------------------- selected examples
@pytest.mark.parametrize(
    ("size", "fraction"),
    [(0, 0.25), (3, 0.25), (12, 1 / 3), (13, 0.3), (7, 1)],
)
def test_examples_are_selected_equally_often(
    size: int, fraction: float
) -> None:
    """Evenly spaced, at least one, without repetition, with equal weights."""
    assert selected(8, 0.25, 1) == ([1, 5], 4.0)
    count = math.ceil(fraction * size)
    totals = np.zeros(size)
    offsets = size // math.gcd(size, count) if size else 3
    for offset in range(offsets):
        indices, weight = selected(size, fraction, offset)
        assert len(set(indices)) == len(indices) == count
        assert weight == (size / count if size else 0)
        totals[indices] += weight
    np.testing.assert_allclose(totals, offsets)


# ------------------------------------------------------------------- default
def default_indices(size: int, offset: int, workers: int = 1) -> list[int]:
    """Indices of the default subsample of a worker's batch."""
    default = choose_subsample(None, tf.constant(offset, tf.int64), workers)
    assert default is not None
    examples = Examples(tf.constant(size), default)
    return sorted(examples.of(tf.range(size)).numpy().tolist())


def test_default_is_a_quarter_and_at_least_64() -> None:
    """The minimum of 64 examples is over all workers."""
    sizes = [1000, 256, 100, 64, 8, 0]
    counts = [len(default_indices(size, 0)) for size in sizes]
    assert counts == [250, 64, 64, 64, 8, 0]
    counts = [len(default_indices(size, 0, 4)) for size in (64, 12)]
    assert counts == [16, 12]


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_select_the_examples_of_one_process(workers: int) -> None:
    """Except for 96 examples, whose count per worker is not whole."""
    for size, offset in itertools.product([32, 96, 128, 192, 1024], [0, 3]):
        share = size // workers
        together = [
            rank * share + i
            for rank in range(workers)
            for i in default_indices(share, offset, workers)
        ]
        if size == 96:
            assert len(together) == len(default_indices(size, offset))
        else:
            assert together == default_indices(size, offset)


# ------------------------------------------------------------ one statistic
BATCH, FRACTION = 6, 1 / 3


def test_record_with_another_first_axis() -> None:
    """The output's first axis is a position: rows are subsampled instead."""
    # Keras builds this layer only with equally many positions and examples.
    layer = layers.EinsumDense("bsi,io->sbo", (BATCH, 2))
    layer.build((BATCH, BATCH, 3))
    block = EinsumDenseBlock(layer, "block")
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(BATCH, BATCH, n)) for n in (3, 2))
    record = Record(tf.constant(x, "float32"), tf.constant(g, "float32"))
    terms = tf.constant(6.0)
    for offset in range(3):
        rows = [offset, offset + 3]
        sample = subsample(FRACTION, offset)
        settings = BatchSettings("expand", terms=terms, subsample=sample)
        sums = batch_statistics({0: (block, [record])}, settings)[0]
        want_a = np.einsum("nsi,nsj->ij", x[rows], x[rows]) / 12
        want_g = np.einsum("sni,snj->ij", g[:, rows], g[:, rows]) / 2
        for name, want in (("A", want_a), ("G", want_g)):
            total, count = sums[name]
            assert_close(total / count, want, 1e-5, name)
        assert float(sums["A"].count) == pytest.approx(36)


# ------------------------------------------------------------ training steps
@pytest.mark.parametrize("accumulate", [False, True])
def test_batches_of_different_sizes(accumulate: bool) -> None:
    """Also as micro-batches of one step: sums are weighted by examples."""
    model, x, y = problem(layers.Dense(3, name="block"), (4,), 17)
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y
    optimizer = compiled(
        model,
        inner=0.0,
        eager=accumulate,
        factor_batch_fraction=0.25,
        factor_decay=0.5,
        gradient_accumulation_steps=3 if accumulate else None,
    )
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    if accumulate:
        rows, weights = [0, 4, 8, 12, 16], np.array([4, 4, 4, 4, 1]) / 17
    else:  # other rows of the second batch; the only row of the third
        rows, weights = [0, 4, 9, 13, 16], np.array([1, 1, 2, 2, 8]) / 14
    want = [(r.T * weights) @ r for r in (a[rows], g[rows])]
    check_factors(find(optimizer.factors(), "block"), *want)
