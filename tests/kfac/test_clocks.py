"""When factors, decompositions and hyperparameters take effect."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import PiecewiseConstantDecay, PolynomialDecay

import tfkfac
from tests.support.graphs import functions_of
from tests.support.harness import assert_close
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.small import (
    assert_same,
    compiled_mlp,
    curvature,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    same,
)

X, Y = data()


# ------------------------------------------------------------------- a driver
class Loop:
    """A custom loop in one traced function, without a forward pass of its own.

    The gradients of one batch are applied again and again; with a learning
    rate of zero nothing else moves.
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
        """Iterations at which factors and decompositions were renewed."""
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

    def change(self) -> list[Array]:
        """What one step does to the weights."""
        before = self.weights()
        self.step()
        return [b - a for b, a in zip(before, self.weights(), strict=True)]


# --------------------------------------------------------------- the measured
def test_default_schedule() -> None:
    """Every step, every 5 from 20, every 20 from 100; 5, 20 and 100."""
    loop = Loop()
    factors, inverses = loop.updates(210)
    assert factors == [
        *range(20),
        *range(20, 100, 5),
        *(100, 120, 140, 160, 180, 200),
    ]
    assert inverses == [0, 5, 10, 15, 20, 40, 60, 80, 100, 200]
    assert loop.traces == 1


def every(interval: int, steps: int) -> list[int]:
    return list(range(0, steps, interval))


def growing(iteration: Any) -> Any:
    if iteration < 4:
        return 1
    return 3


def half(iteration: Any) -> Any:
    # Anything below 1 is 1.
    return 0.5 * iteration


@pytest.mark.parametrize(
    ("factor", "inverse", "want_factors", "want_inverses"),
    [
        (2, 3, every(2, 13), every(3, 13)),
        (4, 50, every(4, 13), [0]),
        (growing, half, [0, 1, 2, 3, 6, 9, 12], [0, 1, 2, 3, 4, 6, 8, 10, 12]),
        (
            PiecewiseConstantDecay([5, 8], [2, 3, 5]),
            PolynomialDecay(1.0, 8, 5.0),
            [0, 2, 4, 6, 10],
            # 1 + i / 2, rounded down: 1 1 2 2 3 3 4 4 5 5 ...
            [0, 1, 2, 10],
        ),
    ],
    ids=["integers", "rarely", "functions", "schedules"],
)
def test_intervals(
    factor: Any,
    inverse: Any,
    want_factors: list[int],
    want_inverses: list[int],
) -> None:
    loop = Loop(factor_update_interval=factor, inverse_update_interval=inverse)
    assert loop.updates(13) == (want_factors, want_inverses)
    assert loop.traces == 1


def test_clock_is_the_inner_optimizers() -> None:
    """Intervals count from iteration 0; a late start updates at once."""
    loop = Loop(factor_update_interval=5, inverse_update_interval=10)
    loop.optimizer.iterations.assign(7)
    assert loop.updates(15) == ([7, 10, 15, 20], [7, 10, 20])


# ---------------------------------------------------------------- plain steps
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_plain_step_changes_nothing_of_the_curvature(solver: str) -> None:
    """To the last bit, on another batch."""
    model = compiled_mlp(
        solver=solver,
        factor_update_interval=2,
        inverse_update_interval=3,
        eager=True,
    )
    optimizer = kfac_of(model)
    states = []
    for step in range(7):
        model.train_on_batch(*data(seed=step))
        states.append(curvature(optimizer))

    def part(state: dict[str, Array], kind: str) -> dict[str, Array]:
        found = {k: v for k, v in state.items() if f":{kind}" in k}
        assert found
        return found

    for kind, interval in (("factor_", 2), ("solver_", 3)):
        for step in range(1, 7):
            unchanged = same(
                part(states[step], kind), part(states[step - 1], kind)
            )
            assert unchanged == (step % interval != 0), (kind, step)


DECOMPOSITIONS = {"Cholesky", "SelfAdjointEigV2", "MatrixTriangularSolve"}


def work(concrete: Any) -> tuple[Counter[str], list[Counter[str]]]:
    """Operations outside of conditions, and those below each outermost one."""
    graph = concrete.graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    plain: Counter[str] = Counter()
    branches: list[Counter[str]] = []

    def visit(nodes: Any, into: Counter[str]) -> None:
        into.update(node.op for node in nodes)
        for node in nodes:
            below = into
            if "If" in node.op and into is plain:
                branches.append(below := Counter())
            for name in functions.keys() & functions_of(node):
                visit(functions[name].node_def, below)

    visit(graph.node, plain)
    return plain, branches


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_plain_step_does_no_factor_work(solver: str) -> None:
    """Statistics and decompositions have conditions of their own.

    What is left are the products that precondition: two for a layer with
    "inverse", four with "eigen".
    """
    loop = Loop(solver=solver)
    plain, branches = work(loop.step.get_concrete_function())
    assert not DECOMPOSITIONS & set(plain)
    expected = {"inverse": "Cholesky", "eigen": "SelfAdjointEigV2"}[solver]
    decompose = [ops for ops in branches if DECOMPOSITIONS & set(ops)]
    assert [ops[expected] for ops in decompose] == [4]
    products = sorted(ops["MatMul"] for ops in branches if ops["MatMul"])
    assert products == [4, {"inverse": 4, "eigen": 8}[solver]]


# ----------------------------------------------------- changes between steps
def test_new_damping_is_used_by_the_next_decomposition() -> None:
    loop = Loop(1.0, damping=1e4, kl_clip=None, inverse_update_interval=1)
    gradients = [np.array(g) for g in loop.step()]
    loop.optimizer.damping = 1e6
    assert loop.optimizer.damping == 1e6
    change = loop.change()
    for got, want in zip(change, gradients, strict=True):
        # So much damping leaves the gradient, divided by it.
        assert np.abs(got).max() <= 2e-6 * np.abs(want).max()
    loop.optimizer.damping = 1e2
    for got, before in zip(loop.change(), change, strict=True):
        assert np.linalg.norm(got) > 1e3 * np.linalg.norm(before)
    assert loop.traces == 1


def test_new_damping_waits_for_the_next_decomposition() -> None:
    loop = Loop(inverse_update_interval=4)
    loop.step()
    before = curvature(loop.optimizer)
    loop.optimizer.damping = 7.0
    for step in (1, 2, 3, 4):
        loop.step()
        state = curvature(loop.optimizer)
        inverse = [k for k in state if ":solver_" in k]
        assert len(inverse) == 4
        equal = [np.array_equal(state[k], before[k]) for k in inverse]
        assert equal == [step < 4] * 4


def length(change: list[Array], other: list[Array]) -> float:
    products = [np.sum(a * b) for a, b in zip(change, other, strict=True)]
    return float(sum(products))


def test_new_kl_clip_is_used_at_once() -> None:
    """|<P, W>| lr^2 is the new limit, from the next step on."""
    loop = Loop(1e-2, kl_clip=1e-4)
    for limit in (1e-4, 1e-6, 3e-5):
        loop.optimizer.kl_clip = limit
        before = loop.weights()
        gradients = [np.array(g) for g in loop.step()]
        change = [b - a for b, a in zip(before, loop.weights(), strict=True)]
        # change = lr nu P with nu^2 lr^2 <P, W> = limit, so that
        # <change, W>^2 = limit <P, W>.
        loop.optimizer.kl_clip = 1e9
        loop.optimizer.iterations.assign_add(-1)
        for variable, value in zip(loop.variables, before, strict=True):
            variable.assign(value)
        free = loop.change()
        squared = 1e-2 * length(free, gradients)
        assert squared > limit
        nu = np.sqrt(limit / squared)
        for got, unclipped in zip(change, free, strict=True):
            assert_close(got, nu * unclipped, 1e-2)
    assert loop.traces == 1


def test_new_intervals_are_used_at_once() -> None:
    loop = Loop(factor_update_interval=2, inverse_update_interval=3)
    assert loop.updates(6) == ([0, 2, 4], [0, 3])
    loop.optimizer.factor_update_interval = 3
    loop.optimizer.inverse_update_interval = 7
    assert loop.updates(10) == ([6, 9, 12, 15], [7, 14])
    assert loop.traces == 1


def test_changes_between_batches_of_fit() -> None:
    """A callback may turn the knobs; the train function stays."""

    class Knobs(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.damping = 1.0 + batch
            self.model.optimizer.factor_update_interval = 1 + batch % 2

    model = compiled_mlp(factor_update_interval=1)
    model.fit(X, Y, batch_size=2, verbose=0, callbacks=[Knobs()])
    optimizer = kfac_of(model)
    assert optimizer.damping == 8.0
    # Interval 1 at even iterations, 2 at odd ones: never due at those.
    assert int(optimizer.factor_updates) == 4


@pytest.mark.parametrize(
    ("name", "start", "other"),
    [
        ("damping", 0.1, PolynomialDecay(0.1, 5)),
        ("damping", PolynomialDecay(0.1, 5), 0.1),
        ("damping", half, growing),
        ("kl_clip", 0.1, None),
        ("kl_clip", None, 0.1),
        ("factor_update_interval", None, 5),
        ("factor_update_interval", 5, None),
        ("inverse_update_interval", 5, growing),
    ],
)
def test_another_kind_of_value(name: str, start: Any, other: Any) -> None:
    """Free before the model is built, an error afterwards."""
    optimizer = tfkfac.KFAC(**{name: start})
    setattr(optimizer, name, other)
    assert getattr(optimizer, name) is other or not callable(other)
    setattr(optimizer, name, start)
    mlp().compile(optimizer, loss())
    with pytest.raises(ValueError, match=rf"`{name}` is part of.*Received"):
        setattr(optimizer, name, other)
    assert getattr(optimizer, name) is start


# -------------------------------------------------------------- learning rates
def test_learning_rate_callbacks() -> None:
    """They read and write the inner optimizer's."""
    model = compiled_mlp(keras.optimizers.SGD(0.5), eager=True)
    rates = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    def schedule(epoch: int, rate: float) -> float:
        return rate / 2 if epoch else rate

    history = model.fit(
        X,
        Y,
        epochs=4,
        verbose=0,
        callbacks=[keras.callbacks.LearningRateScheduler(schedule), Watch()],
    ).history
    assert rates == pytest.approx([0.5, 0.25, 0.125, 0.0625])
    assert history["learning_rate"] == pytest.approx(rates)
    inner = kfac_of(model).inner_optimizer
    assert float(inner.learning_rate) == pytest.approx(0.0625)


def test_learning_rate_schedule_counts_steps() -> None:
    """One step, one iteration; the rate is that of the iteration."""
    rates = [0.5, 0.25, 0.125]
    schedule = PiecewiseConstantDecay([0, 1], rates)
    loop = Loop(keras.optimizers.SGD(schedule))
    for step, rate in enumerate(rates):
        assert int(loop.optimizer.iterations) == step
        assert float(loop.optimizer.learning_rate) == rate
        loop.step()


# ------------------------------------------------------------ the inner options
INNER: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "weight decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "averaging": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(PolynomialDecay(0.2, 3, 0.05)),
}


@pytest.mark.parametrize("case", with_slow(INNER, "averaging"))
def test_inner_options_act_on_the_preconditioned_gradient(case: str) -> None:
    """The same as the inner optimizer alone, fed with K-FAC's gradients.

    `source` says what these are: plain SGD of rate 1 at the same weights. All
    curvature is that of the first step.
    """
    fixed: Any = {
        "factor_update_interval": 100,
        "inverse_update_interval": 100,
        "kl_clip": None,
        "damping": 0.1,
    }
    models = [mlp() for _ in range(3)]
    source, target, alone = models
    plain = tfkfac.KFAC(keras.optimizers.SGD(1.0), **fixed).attach(source)
    wrapped = tfkfac.KFAC(INNER[case](), **fixed).attach(target)
    inner = INNER[case]()
    inner.build(alone.trainable_variables)
    for step in range(3):
        x, y = data(seed=step)
        source.set_weights(alone.get_weights())
        plain.apply(gradients_of(source, x, y), source.trainable_variables)
        preconditioned = [
            tf.constant(b - a)
            for b, a in zip(
                alone.get_weights(), source.get_weights(), strict=True
            )
        ]
        inner.apply(preconditioned, alone.trainable_variables)
        wrapped.apply(gradients_of(target, x, y), target.trainable_variables)
        # The gradients are differences of float32 weights.
        for got, want in zip(
            target.get_weights(), alone.get_weights(), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    for one in models[:2]:
        assert not np.array_equal(one.get_weights()[0], mlp().get_weights()[0])


def test_averages_replace_the_weights_after_fit() -> None:
    """`finalize_variable_values` is the inner optimizer's."""
    model = compiled_mlp(
        keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), eager=True
    )
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(self.model.get_weights()[0])

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Watch()])
    average = seen[0]
    for value in seen[1:]:
        average = 0.5 * average + 0.5 * value
    got = model.get_weights()[0]
    assert_close(got, average, 1e-5)
    assert not np.allclose(got, seen[-1], rtol=1e-3)


def test_constraints_hold() -> None:
    """A weight constraint is applied after the step, as always."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((X.shape[1],)),
            keras.layers.Dense(3, kernel_constraint="non_neg", name="positive"),
        ]
    )
    model.compile(tfkfac.KFAC(1.0), loss(), run_eagerly=True)
    assert (model.get_weights()[0] < 0).any()
    model.train_on_batch(X, Y)
    assert (model.get_weights()[0] >= 0).all()


def test_variables_are_the_inner_optimizers() -> None:
    """What Keras asks of a wrapped optimizer goes through."""
    model = compiled_mlp(keras.optimizers.Adam(0.01))
    optimizer = kfac_of(model)
    inner = optimizer.inner_optimizer
    assert optimizer.iterations is inner.iterations
    assert len(optimizer.variables) == 2 + 2 * 4
    state = {str(i): np.array(v) for i, v in enumerate(inner.variables)}
    model.train_on_batch(X, Y)
    assert not same(
        {str(i): np.array(v) for i, v in enumerate(optimizer.variables)}, state
    )
    assert_same(
        {str(i): np.array(v) for i, v in enumerate(optimizer.variables)},
        {str(i): np.array(v) for i, v in enumerate(inner.variables)},
    )
