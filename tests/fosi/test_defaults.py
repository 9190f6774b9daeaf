"""What FOSI does unless told otherwise: alpha, one estimation, warm-up."""

import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD
from keras.optimizers.schedules import PolynomialDecay

import tfkfac
from tests.support.dtypes import floats
from tests.support.fosi_reference import (
    ROWS,
    Fosi,
    Network,
    Rule,
    assert_path,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
)
from tests.support.reference import Array
from tests.support.small import summary_text
from tfkfac.fosi.schedule import Timing
from tfkfac.shell.arguments import Hyperparameter

X, Y = data()
STEPS = 9
ALPHA = 0.5


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with floats("float64"):
        yield


def decaying(rates: Sequence[float], momentum: float = 0.9) -> Rule:
    """SGD with another learning rate in each step."""

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        v = momentum * slots.get("v", np.zeros_like(g)) - rates[t - 1] * g
        slots["v"] = v
        return v

    return rule


def reference(
    rates: Sequence[float], alpha: Callable[[int], float], **settings: Any
) -> tuple[Fosi, Array]:
    """The NumPy program and its path."""
    network = Network(X, Y)
    program = Fosi(decaying(rates), alpha=alpha, **settings)
    start = flat(mlp()).astype("float64")
    return program, program.run(
        network.gradient, network.hessian, start, len(rates)
    )


# ---------------------------------------------------------------------- alpha
def test_alpha_follows_a_schedule() -> None:
    """`alpha lr(t) / lr(0)`, as the inner optimizer's rate decays."""
    rates = [0.1 * (1 - t / 12) for t in range(STEPS)]
    _, want = reference(rates, lambda t: ALPHA * rates[t] / rates[0])
    _, constant = reference(rates, lambda t: ALPHA)
    model = mlp()
    model.compile(fosi(SGD(PolynomialDecay(0.1, 12, 0.0), 0.9)), loss())
    got = fit(model, X, Y, STEPS)
    assert_path(got, want, 1e-6)
    with pytest.raises(AssertionError):
        assert_path(got, constant, 1e-3)


@pytest.mark.slow
def test_a_schedule_of_alpha_is_left_alone() -> None:
    rates = [0.1 * (1 - t / 12) for t in range(STEPS)]
    _, want = reference(rates, lambda t: ALPHA / (1 + t))
    model = mlp()
    inner = SGD(PolynomialDecay(0.1, 12, 0.0), 0.9)
    model.compile(fosi(inner, alpha=lambda t: ALPHA / (1 + t)), loss())
    assert_path(fit(model, X, Y, STEPS), want, 1e-6)


class Rates(keras.callbacks.LearningRateScheduler):
    """Assigns `learning_rate` before each epoch."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__(lambda epoch, rate: rates[epoch])


def test_alpha_follows_assigned_rates(tmp_path: pathlib.Path) -> None:
    """Up to the largest so far: a warm-up does not multiply it. Saved."""
    rates = [0.0, 0.05, 0.1, 0.1, 0.05, 0.025, 0.05, 0.0125, 0.0125]
    largest = np.maximum.accumulate(rates)
    _, want = reference(rates, lambda t: ALPHA * rates[t] / largest[t])
    model = mlp()
    model.compile(fosi(SGD(0.0, 0.9)), loss())
    options: dict[str, Any] = {"batch_size": ROWS, "verbose": 0}
    options |= {"shuffle": False, "callbacks": [Rates(rates)]}
    model.fit(X, Y, epochs=5, **options)
    np.testing.assert_allclose(flat(model), want[5], rtol=0, atol=1e-6)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    model.fit(X, Y, epochs=STEPS, initial_epoch=5, **options)
    np.testing.assert_allclose(flat(model), want[-1], rtol=0, atol=1e-6)


# ------------------------------------------------------------- one estimation
def test_one_estimation() -> None:
    program, want = reference(
        [0.1] * STEPS, lambda t: ALPHA, interval=lambda t: 10**6
    )
    assert program.estimated == [2]
    model = mlp()
    model.compile(fosi(SGD(0.1, 0.9), update_interval=None), loss())
    assert_path(fit(model, X, Y, STEPS), want, 1e-6)
    assert int(model.optimizer.estimations) == 1


def due(timing: Timing, fails: bool) -> list[int]:
    """The updates at which estimations are made, of 310."""
    states: Any = types.SimpleNamespace(
        last=tf.Variable(-1, dtype="int64"),
        estimations=tf.Variable(0, dtype="int64"),
        warmup=tf.Variable(7, dtype="int64"),
    )
    found = []
    for clock in range(310):
        if timing.begins(tf.constant(clock, tf.int64), states):
            found.append(clock)
            states.last.assign(clock)
            states.estimations.assign_add(0 if fails else 1)
    return found


@pytest.mark.parametrize(
    "warmup,interval,fails,expected",
    [
        (5, None, False, [5]),
        (5, None, True, [5, 105, 205, 305]),
        (None, None, False, [7]),
        (None, 200, False, [7, 207]),
        (250, 30, True, [250, 280]),
    ],
)
def test_when_estimations_are_due(
    warmup: int | None, interval: int | None, fails: bool, expected: list[int]
) -> None:
    """Without an interval again only where nothing was found."""
    parameter = Hyperparameter("interval", interval, True, optional=True)
    parameter.build()
    assert due(Timing(warmup, parameter), fails) == expected


def test_accelerators_have_an_interval() -> None:
    """They estimate all the time."""
    assert tfkfac.FOSI().update_interval is None
    optimizer = tfkfac.FOSI(accelerator_fraction=0.5)
    assert optimizer.update_interval == 800
    optimizer = tfkfac.FOSI(accelerator_fraction=0.5, update_interval=9)
    assert optimizer.update_interval == 9


# -------------------------------------------------------------------- warm-up
class Counts(keras.callbacks.Callback):
    """Notes the number of estimations after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append(int(self.model.optimizer.estimations))


def network(*arguments: Any, **options: Any) -> Any:
    model = mlp()
    options = {"num_largest": 1, "lanczos_steps": 2} | options
    model.compile(tfkfac.FOSI(*arguments, **options), loss())
    return model


def first_estimation(model: Any, *args: Any, **kwargs: Any) -> int:
    """Steps before it."""
    counts = Counts()
    model.fit(*args, callbacks=counts, verbose=0, **kwargs)
    return counts.after.index(1)


@pytest.mark.parametrize(
    "options,updates",
    [
        # 7.5 % of 14 epochs of 3 batches, 42 steps, are 3.15.
        ({}, 4),
        pytest.param({"warmup_steps": 6}, 6, marks=pytest.mark.slow),
        # 21 updates.
        pytest.param(
            {"inner_optimizer": SGD(0.1, gradient_accumulation_steps=2)},
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fit_tells_the_length(options: dict[str, Any], updates: int) -> None:
    inner = options.get("inner_optimizer")
    each = 2 if inner else 1
    model = network(**options)
    steps = first_estimation(model, X, Y, batch_size=ROWS // 3, epochs=14)
    assert steps == updates * each


@pytest.mark.slow
def test_the_first_run_decides(tmp_path: pathlib.Path) -> None:
    """Saved: a run that goes on warms up as it would have."""
    model = network()
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(40)
    model.fit(batches, epochs=1, steps_per_epoch=1, verbose=0)
    assert "before update 2" in summary_text(model.optimizer)
    model = network()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", batch == 1
        )
    )
    model.fit(batches, callbacks=stop, verbose=0)  # 40 steps, ended after 2
    assert "before update 4" in summary_text(model.optimizer)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert first_estimation(copy, batches.repeat(), steps_per_epoch=5) == 1


@pytest.mark.slow
def test_without_a_length_it_is_a_hundred() -> None:
    model = network()
    model.train_on_batch(X, Y)
    assert "before update 101" in summary_text(model.optimizer)

    def endless() -> Iterator[tuple[Array, Array]]:
        for _ in range(2):
            yield X, Y

    model = network()
    model.fit(endless(), verbose=0)
    assert "before update 101" in summary_text(model.optimizer)
    # It can be told later, as long as nothing was estimated.
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(80)
    assert first_estimation(model, batches) == 6 - 2


@pytest.mark.slow
def test_an_unbuilt_model_is_told() -> None:
    layers = [keras.layers.Dense(2, "tanh"), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    optimizer = tfkfac.FOSI(num_largest=1, lanczos_steps=2)
    model.compile(optimizer, loss())
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(30)
    assert first_estimation(model, batches) == 3


def test_config_of_the_defaults() -> None:
    optimizer = tfkfac.FOSI.from_config(tfkfac.FOSI().get_config())
    assert optimizer.update_interval is None
    assert optimizer.warmup_steps is None
    config = tfkfac.FOSI(warmup_steps=3, update_interval=8).get_config()
    copy = tfkfac.FOSI.from_config(config)
    assert (copy.warmup_steps, copy.update_interval) == (3, 8)
