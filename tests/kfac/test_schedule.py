"""Schedule groups spread inverse updates over the interval.

Small models have one group, see `test_clocks`.
"""

import itertools
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import Array
from tests.support.small import curvature, data, loss
from tests.support.summaries import sequential
from tfkfac.kfac import placement
from tfkfac.kfac.placement import assign_groups, find_due_groups


def cubes(*sizes: tuple[int, ...]) -> list[int]:
    """Operations of blocks with dense factors."""
    return [sum(n**3 for n in block) for block in sizes]


def chain(*widths: int) -> list[int]:
    """Operations of a network of dense layers with biases."""
    return cubes(*((n + 1, m) for n, m in itertools.pairwise(widths)))


# ------------------------------------------------------------ which blocks
@pytest.mark.parametrize(
    "operations",
    [
        [],
        chain(64, 128, 128, 128, 10),
        chain(784, 256, 128, 10),  # nearly all is one block
    ],
)
def test_a_small_model_has_one_group(operations: list[int]) -> None:
    assert assign_groups(operations) == (0,) * len(operations)


def test_groups_of_an_autoencoder() -> None:
    """Four groups with one large block each; small blocks balance them.

    In units of 10^6 operations: 1484, 1128, 142, 16, 16, 141, 1126, 1485.
    """
    groups = assign_groups(chain(784, 1000, 500, 250, 30, 250, 500, 1000, 784))
    assert groups == (1, 2, 3, 3, 2, 2, 3, 0)


def test_fewest_groups_within_the_limit() -> None:
    block = 10**9
    assert assign_groups([block] * 2) == (0, 1)
    assert len(set(assign_groups([block] * 16))) == 4
    assert np.bincount(assign_groups([block] * 16)).tolist() == [4] * 4
    # Two groups are within 1.5 times the largest block.
    assert len(set(assign_groups([2 * block, block, block // 2]))) == 2
    assert assign_groups([2 * block, block // 2, block // 2]) == (0, 0, 0)


# -------------------------------------------------------------------- when
def due_steps(
    groups: int, inverse: Any, factor: int, steps: int
) -> list[list[int]]:
    """The steps at which each group is due."""

    @tf.function
    def due(clock: tf.Tensor) -> tf.Tensor:
        interval = inverse(clock) if callable(inverse) else inverse
        return tf.stack(
            find_due_groups(
                groups,
                tf.cast(interval, tf.int64),
                tf.constant(factor, tf.int64),
                clock,
            )
        )

    table = np.array([due(tf.constant(i, tf.int64)) for i in range(steps)])
    return [np.flatnonzero(column).tolist() for column in table.T]


@pytest.mark.parametrize(
    ("factor", "inverse", "first"),
    [
        (10, 100, [1, 25, 51, 75]),
        (10, 50, [1, 12, 25, 37]),
        (1, 10, [0, 2, 5, 7]),
        (1, 2, [0, 0, 1, 1]),
        (1, 1, [0, 0, 0, 0]),
        (100, 100, [1, 25, 50, 75]),
    ],
)
def test_four_groups(factor: int, inverse: int, first: list[int]) -> None:
    """Each group is due once per interval, not with a factor update."""
    found = due_steps(4, inverse, factor, 3 * inverse)
    assert found == [[s + k * inverse for k in range(3)] for s in first]


def test_no_group_is_lost_when_the_interval_changes() -> None:
    """After a change, inverse updates are at most both intervals apart."""

    def interval(clock: tf.Tensor) -> tf.Tensor:
        return tf.where(clock < 21, 5, tf.where(clock < 107, 20, 50))

    for found in due_steps(4, interval, 5, 400):
        assert found[0] < 5
        gaps = np.diff(found)
        assert gaps[np.array(found[:-1]) < 15].max() == 5
        assert gaps.max() <= 70
        assert gaps[np.array(found[:-1]) > 130].max() == 50


# -------------------------------------------------------------- in training
def inverses(state: dict[str, Array], layer: str) -> list[Array]:
    named = {k: v for k, v in state.items() if ":solver_" in k and layer in k}
    assert sorted(k.split(":")[1] for k in named) == ["solver_A", "solver_G"]
    return [named[k] for k in sorted(named)]


def damped_inverses(factors: dict[str, Array], damping: float) -> list[Array]:
    """`(A + pi sqrt(d) I)^-1` and `(G + sqrt(d) / pi I)^-1`."""
    a, g = (factors[name].astype(float) for name in "AG")
    pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g)))
    shifts = (pi * np.sqrt(damping), np.sqrt(damping) / pi)
    return [
        np.linalg.inv(m + shift * np.eye(len(m)))
        for m, shift in zip((a, g), shifts, strict=True)
    ]


@mock.patch.multiple(placement, _MIN_OPERATIONS=1, _SLACK=1)
def test_each_block_with_its_group() -> None:
    """All decompose at first, then each group by its step's factors.

    Three blocks, of 468, 341 and 243 operations, form groups here.
    """
    turns = {"first": [0, 1, 7], "second": [0, 3, 9], "logits": [0, 5]}
    model = sequential(
        keras.layers.Dense(5, activation="tanh", name="first"),
        keras.layers.Dense(5, activation="tanh", name="second"),
        keras.layers.Dense(3, name="logits"),
    )
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1),
        damping=0.1,
        factor_update_interval=2,
        inverse_update_interval=6,
        gradient_accumulation_steps=2,
    )
    model.compile(optimizer, loss())
    before: dict[str, Array] = {}
    for step in range(10):
        x, y = data(seed=step)
        for _ in range(2):
            model.train_on_batch(x, y)
        after, factors = curvature(optimizer), optimizer.factors()
        for layer, due in turns.items():
            got = inverses(after, layer)
            if step in due:
                (name,) = (k for k in factors if k.endswith(layer))
                want = damped_inverses(factors[name], 0.1)
                for one, other in zip(got, want, strict=True):
                    assert_close(one, other, 1e-4)
            else:
                old = inverses(before, layer)
                assert all(map(np.array_equal, got, old)), (layer, step)
        before = after
    # Steps 0, 1, 3, 5, 7 and 9.
    assert int(optimizer.inverse_updates) == 6
