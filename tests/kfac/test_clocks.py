"""When factors, decompositions and hyperparameters take effect."""

import itertools
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import PiecewiseConstantDecay, PolynomialDecay

import tfkfac
from tests.support.harness import assert_close, find
from tests.support.reference import Array, inverse_solve
from tests.support.small import curvature, data, gradients_of, loss, mlp
from tests.support.summaries import sequential
from tfkfac.distributed.plan import Shapes, plan_layers
from tfkfac.kfac import placement
from tfkfac.kfac.placement import assign_groups, find_due_groups

X, Y = data()


class Loop:
    """A custom loop that repeats one traced step without a forward pass.

    The gradients of one batch are applied repeatedly; with a learning rate of
    zero nothing else changes.
    """

    def __init__(self, inner: Any = 0.0, **kwargs: Any) -> None:
        if isinstance(inner, float):
            inner = keras.optimizers.SGD(inner)
        self.model = mlp()
        self.optimizer: Any = tfkfac.KFAC(inner, **kwargs)
        self.optimizer.attach(self.model)
        self.variables = self.model.trainable_variables
        self.optimizer.build(self.variables)
        self.traces = 0
        self.step = tf.function(self._step)

    def _step(self, x: Any = X, y: Any = Y) -> list[Any]:
        self.traces += 1
        gradients = gradients_of(self.model, x, y)
        self.optimizer.apply(gradients, self.variables)
        return gradients

    def updates(self, steps: int) -> tuple[list[int], list[int]]:
        """Iterations of factor updates and of inverse updates."""
        factors, inverses = [], []
        for _ in range(steps):
            optimizer = self.optimizer
            at = int(optimizer.iterations)
            before = int(optimizer.factor_updates)
            inverted = int(optimizer.inverse_updates)
            self.step()
            factors += [at] * (int(optimizer.factor_updates) - before)
            inverses += [at] * (int(optimizer.inverse_updates) - inverted)
        return factors, inverses

    def weights(self) -> list[Array]:
        return [np.array(v) for v in self.variables]

    def change(self) -> tuple[list[Array], list[Array]]:
        """Weight change of one step, and its gradients."""
        before = self.weights()
        gradients = [np.array(g) for g in self.step()]
        after = self.weights()
        changes = [b - a for b, a in zip(before, after, strict=True)]
        return changes, gradients


# ------------------------------------------------------------------ schedules
def test_default_schedule() -> None:
    """Factors: 1, 5 from step 20, 20 from step 100; inverses: 5, 20, 100."""
    loop = Loop()
    factors, inverses = loop.updates(210)
    assert factors == [
        *range(20),
        *range(20, 100, 5),
        *(100, 120, 140, 160, 180, 200),
    ]
    assert inverses == [0, 5, 10, 15, 20, 40, 60, 80, 100, 200]
    assert loop.traces == 1


def test_intervals() -> None:
    """Numbers below 1 are 1."""
    loop = Loop(
        factor_update_interval=PiecewiseConstantDecay([5, 8], [2, 3, 5]),
        inverse_update_interval=PiecewiseConstantDecay([3], [0.5, 3.0]),
    )
    factors, inverses = loop.updates(13)
    assert factors == [0, 2, 4, 6, 10]
    assert inverses == [0, 1, 2, 3, 6, 9, 12]
    assert loop.traces == 1


# ----------------------------------------------------- changes between steps
def test_new_damping_waits_for_the_next_decomposition() -> None:
    """A new, huge damping takes effect in the next decomposition."""
    loop = Loop(1.0, damping=1e3, kl_clip=None, inverse_update_interval=4)
    loop.step()
    loop.optimizer.damping = 1e4
    for damping in (1e3, 1e3, 1e3, 1e4):
        for got, gradient in zip(*loop.change(), strict=True):
            assert_close(got, gradient / damping, 0.1)
    assert loop.traces == 1


def test_new_kl_clip_is_used_at_once() -> None:
    """`|<P, W>| lr^2 nu^2` is the new limit from the next step on."""
    rate = 1e-2
    loop = Loop(rate, kl_clip=1e-4)
    for limit in (1e-4, 1e-6, 3e-5):
        loop.optimizer.kl_clip = limit
        change, gradients = loop.change()  # lr nu P, and W
        nu = loop.optimizer.last_step["clip_factor"]
        assert nu < 1
        product = sum(map(np.vdot, change, gradients))
        assert rate * nu * product == pytest.approx(limit, rel=1e-2)
    assert loop.traces == 1


def test_new_intervals_are_used_at_once() -> None:
    """New intervals count from iteration 0; a late start updates at once."""
    loop = Loop(factor_update_interval=5, inverse_update_interval=10)
    loop.optimizer.iterations.assign(7)
    assert loop.updates(15) == ([7, 10, 15, 20], [7, 10, 20])
    loop.optimizer.factor_update_interval = 3
    loop.optimizer.inverse_update_interval = 7
    assert loop.updates(9) == ([24, 27, 30], [28])
    assert loop.traces == 1


@pytest.mark.parametrize(
    ("name", "start", "other"),
    [
        ("damping", PolynomialDecay(1.0, 8), PolynomialDecay(2.0, 8)),
        ("kl_clip", 0.1, None),
        ("factor_update_interval", None, 5),
    ],
)
def test_change_between_number_and_schedule(
    name: str, start: Any, other: Any
) -> None:
    """A change between number and schedule is an error after `build`."""
    optimizer = tfkfac.KFAC(step="natural", **{name: start})
    setattr(optimizer, name, other)
    assert getattr(optimizer, name) is other or not callable(other)
    setattr(optimizer, name, start)
    mlp().compile(optimizer, loss())
    with pytest.raises(ValueError, match=rf"`{name}` is part of.*Received"):
        setattr(optimizer, name, other)
    assert getattr(optimizer, name) is start


# ------------------------------------------------------------ schedule groups
def chain(*widths: int) -> list[int]:
    """Operations of a network of dense layers with biases."""
    return [(n + 1) ** 3 + m**3 for n, m in itertools.pairwise(widths)]


BLOCK = 10**9


@pytest.mark.parametrize(
    ("operations", "groups"),
    [
        ([], []),
        # A small model, and one with nearly all work in one block.
        (chain(64, 128, 128, 128, 10), [0] * 4),
        (chain(784, 256, 128, 10), [0] * 3),
        # In units of 10^6: 1484, 1128, 142, 16, 16, 141, 1126, 1485.
        (
            chain(784, 1000, 500, 250, 30, 250, 500, 1000, 784),
            [1, 2, 3, 3, 2, 2, 3, 0],
        ),
        ([BLOCK] * 16, [0, 1, 2, 3] * 4),
        # Two groups are within 1.5 times the largest block.
        ([2 * BLOCK, BLOCK, BLOCK // 2], [0, 1, 1]),
        ([2 * BLOCK, BLOCK // 2, BLOCK // 2], [0, 0, 0]),
    ],
)
def test_fewest_balanced_groups(
    operations: list[int], groups: list[int]
) -> None:
    # A diagonal of n rows has n operations.
    shapes: list[Shapes] = [{"A": (count,)} for count in operations]
    plan = plan_layers(shapes, 1, "mem_opt")
    assert list(assign_groups(plan, shapes)) == groups


def resnet50() -> list[Shapes]:
    """Factors of the convolutions and of the dense layer, with biases."""
    shapes: list[Shapes] = [matrices(7 * 7 * 3, 64)]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        shapes.append(matrices(inputs, 4 * width))
        for _ in range(count):
            shapes.append(matrices(inputs, width))
            shapes.append(matrices(9 * width, width))
            shapes.append(matrices(width, 4 * width))
            inputs = 4 * width
    return [*shapes, matrices(2048, 1000)]


def matrices(inputs: int, outputs: int) -> Shapes:
    return {"A": (inputs + 1, inputs + 1), "G": (outputs, outputs)}


@pytest.mark.parametrize("workers", [2, 16, 64])
@pytest.mark.parametrize("mode", ["comm_opt", "mem_opt"])
def test_inverse_updates_scale(mode: str, workers: int) -> None:
    """The workers wait for the busiest one of each group.

    An interval takes 1/P of the work, or as long as its largest task. A group
    is within 1.5 times the largest block, or near a quarter of an interval.
    """
    shapes = resnet50()
    plan = plan_layers(shapes, workers, mode)
    groups = assign_groups(plan, shapes)
    work = np.zeros([max(groups) + 1, workers])
    tasks, blocks = [], []
    for group, layer, factors in zip(groups, plan, shapes, strict=True):
        sizes = {name: shape[0] ** 3 for name, shape in factors.items()}
        for name, size in sizes.items():
            work[group, layer.owners[name]] += size
        blocks.append(sum(sizes.values()))
        tasks += sizes.values() if mode == "comm_opt" else [blocks[-1]]
    interval = work.max(axis=1).sum()
    assert interval < 1.02 * max(sum(tasks) / workers, max(tasks))
    assert work.max() < max(1.5 * max(blocks), 1.3 * interval / 4)


def due_steps(
    groups: int, inverse: Any, factor: int, steps: int
) -> list[list[int]]:
    """The steps at which each group is due."""

    @tf.function
    def due(clock: tf.Tensor) -> tf.Tensor:
        interval = inverse(clock) if callable(inverse) else inverse
        return find_due_groups(
            groups,
            tf.cast(interval, tf.int64),
            tf.constant(factor, tf.int64),
            clock,
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


def inverses(state: dict[str, Array], layer: str) -> list[Array]:
    named = {k: v for k, v in state.items() if ":solver_" in k and layer in k}
    assert sorted(k.split(":")[1] for k in named) == ["solver_A", "solver_G"]
    return [named[k] for k in sorted(named)]


# Form groups of the three blocks, of 468, 341 and 243 operations.
@mock.patch.multiple(placement, _MIN_OPERATIONS=1, _SLACK=1)
def test_each_block_with_its_group() -> None:
    """All decompose at first, then each group by its step's factors."""
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
                A, G = (find(factors, layer)[k].astype(float) for k in "AG")
                A_inverse, G_inverse = got
                # P = A_inverse W G_inverse, of a random W.
                W = np.random.default_rng(0).normal(size=(len(A), len(G)))
                want = inverse_solve(W, A, G, 0.1)
                assert_close(A_inverse @ W @ G_inverse, want, 1e-4)
            else:
                old = inverses(before, layer)
                assert all(map(np.array_equal, got, old)), (layer, step)
        before = after
    # Steps 0, 1, 3, 5, 7 and 9.
    assert int(optimizer.inverse_updates) == 6


def test_constraints_hold() -> None:
    """Weight constraints are applied after the step."""
    keras.utils.set_random_seed(0)
    positive = keras.layers.Dense(3, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((X.shape[1],)), positive])
    model.compile(tfkfac.KFAC(1.0), loss(), run_eagerly=True)
    assert (model.get_weights()[0] < 0).any()
    model.train_on_batch(X, Y)
    assert (model.get_weights()[0] >= 0).all()
