"""Statistics of a part of a batch: `factor_batch_fraction`."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.factors.test_declared import ALL, seen
from tests.support.harness import (
    assert_close,
    check_factors,
    compiled,
    find,
    weights_of,
)
from tests.support.layer_models import (
    expected_factors,
    expected_rows,
    problem,
)
from tests.support.layer_views import view_of
from tests.support.reference import Array, append_one
from tfkfac.blocks import Record
from tfkfac.blocks.dense import EinsumDenseBlock
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import (
    Examples,
    Subsample,
    View,
    batch_statistics,
    choose_subsample,
)


def part(fraction: float, turn: int) -> Subsample:
    return Subsample(fraction, tf.constant(turn, tf.int64))


def chosen(size: int, fraction: float, turn: int) -> tuple[list[int], float]:
    """The positions that are taken, and what each stands for."""
    examples = Examples(tf.constant(size), part(fraction, turn))
    positions = examples.of(tf.range(size)).numpy().tolist()
    return positions, float(examples.weight)


# ------------------------------------------------------------ which examples
def test_they_are_evenly_spaced_and_move_on() -> None:
    assert [chosen(8, 0.25, t) for t in range(5)] == [
        ([0, 4], 4.0),
        ([1, 5], 4.0),
        ([2, 6], 4.0),
        ([3, 7], 4.0),
        ([0, 4], 4.0),
    ]


@pytest.mark.parametrize(
    ("size", "fraction"),
    [(0, 0.25), (1, 0.25), (3, 0.25), (5, 0.4), (12, 1 / 3), (13, 0.3), (7, 1)],
)
def test_each_is_taken_as_often(size: int, fraction: float) -> None:
    """One at least, each once in a turn at most, all with the same weight."""
    count = math.ceil(fraction * size)
    taken = np.zeros(size)
    turns = size // math.gcd(size, count) if size else 3
    for turn in range(turns):
        positions, weight = chosen(size, fraction, turn)
        assert len(set(positions)) == len(positions) == count
        assert weight == (size / count if size else 0)
        taken[positions] += weight
    np.testing.assert_allclose(taken, turns)


# ------------------------------------------------------------------- default
def measured(size: int, turn: int, workers: int = 1) -> list[int]:
    """The positions of a worker's batch that are taken by default."""
    part = choose_subsample(None, tf.constant(turn, tf.int64), workers)
    assert part is not None
    examples = Examples(tf.constant(size), part)
    return sorted(examples.of(tf.range(size)).numpy().tolist())


def test_a_quarter_but_no_small_batch() -> None:
    """At least 64 of all workers together."""
    sizes = [1000, 256, 100, 64, 8, 0]
    counts = [len(measured(size, 0)) for size in sizes]
    assert counts == [250, 64, 64, 64, 8, 0]
    assert [len(measured(size, 0, 4)) for size in (64, 12)] == [16, 12]


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_take_what_one_process_takes(workers: int) -> None:
    """Where the shares are whole: no number of 96 examples is."""
    for size, turn in itertools.product([32, 96, 128, 192, 1024], [0, 3]):
        share = size // workers
        together = [
            rank * share + i
            for rank in range(workers)
            for i in measured(share, turn, workers)
        ]
        if size == 96:
            assert len(together) == len(measured(size, turn))
        else:
            assert together == measured(size, turn)


# ---------------------------------------------------------- every layer type
BATCH, FRACTION = 6, 1 / 3


@pytest.mark.parametrize("case", ALL)
def test_no_bias(case: str) -> None:
    """Over its turns, the parts come to the whole batch."""
    model, records, _ = seen(case)
    for block in build_registry(model, ()).blocks:
        layers = {0: (block, records)}
        view = View("reduce", terms=tf.constant(4, block.dtype))
        want = batch_statistics(layers, view)[0]
        halves = [
            batch_statistics(layers, view._replace(subsample=part(0.5, turn)))[
                0
            ]
            for turn in range(2)
        ]
        for name, (total, _) in want.items():
            mean = np.mean([half[name].total for half in halves], 0)
            assert_close(mean, total, 1e-5, name)


def test_a_record_with_its_examples_elsewhere() -> None:
    """The output's first axis is a position: examples are taken of rows."""
    # Keras builds it with as many positions as examples only.
    layer = layers.EinsumDense("bsi,io->sbo", (BATCH, 2))
    layer.build((BATCH, BATCH, 3))
    block = EinsumDenseBlock(layer, "block")
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(BATCH, BATCH, n)) for n in (3, 2))
    record = Record(tf.constant(x, "float32"), tf.constant(g, "float32"))
    terms = tf.constant(6.0)
    for turn in range(3):
        rows = [turn, turn + 3]
        view = View("expand", terms=terms, subsample=part(FRACTION, turn))
        found = batch_statistics({0: (block, [record])}, view)[0]
        want_a = np.einsum("nsi,nsj->ij", x[rows], x[rows]) / 12
        want_g = np.einsum("sni,snj->ij", g[:, rows], g[:, rows]) / 2
        for name, want in (("A", want_a), ("G", want_g)):
            total, count = found[name]
            assert_close(total / count, want, 1e-5, name)
        assert float(found["A"].count) == pytest.approx(36)


# ------------------------------------------------------------- with the rest
def test_sample_weights() -> None:
    """What has no loss does not count, of those that are taken."""
    layer = layers.Dense(3, activation="tanh", name="block")
    model, x, y = problem(layer, (2, 4), BATCH)
    weight = np.array([1, 0, 2, 0, 1, 0.5], "float32")
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, "tanh")
    g = g * weight[:, None, None]
    rows = [0, 2, 4]
    optimizer = compiled(
        model, inner=0.0, eager=False, factor_batch_fraction=0.5, factor_decay=0
    )
    model.train_on_batch(x, y, sample_weight=weight)
    want = expected_factors(view, a[:, rows], g[:, rows], "expand")
    check_factors(find(optimizer.factors(), "block"), *want)
    model.train_on_batch(x, y, sample_weight=weight)
    rows = [1, 3, 5]
    keep = np.repeat(weight[rows, None] > 0, 2, axis=1)
    want = expected_factors(view, a[:, rows], g[:, rows], "expand", keep)
    check_factors(find(optimizer.factors(), "block"), *want)


def dense(size: int) -> tuple[Any, list[Array], list[Array]]:
    """A model of one layer, with its data, and its rows of a and g."""
    model, x, y = problem(layers.Dense(3, name="block"), (4,), size)
    a = append_one(x.astype(np.float64))
    return model, [x, y], [a, a @ np.vstack(weights_of(model)) - y]


def test_micro_batches() -> None:
    """Of each its own part; they are added up in units of examples."""
    model, (x, y), rows_of_all = dense(7)
    optimizer = compiled(
        model, gradient_accumulation_steps=2, factor_batch_fraction=0.25
    )
    for rows in (slice(0, 1), slice(1, 7)):
        model.train_on_batch(x[rows], y[rows])
    # The one row of the first, and of the other six the first and fourth.
    weights = np.array([1, 3, 0, 0, 3, 0, 0])
    want = [(r * weights[:, None]).T @ r / 7 for r in rows_of_all]
    check_factors(find(optimizer.factors(), "block"), *want)


def test_in_fit_with_a_ragged_last_batch() -> None:
    """The number of rows is known in the step only."""
    model, (x, y), rows_of_all = dense(9)
    optimizer = compiled(
        model,
        inner=0.0,
        eager=False,
        factor_batch_fraction=0.25,
        factor_decay=0.5,
    )
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    want = [
        (r[[0, 4]].T @ r[[0, 4]] / 2 + 2 * r[[8]].T @ r[[8]]) / 3
        for r in rows_of_all
    ]
    check_factors(find(optimizer.factors(), "block"), *want)
