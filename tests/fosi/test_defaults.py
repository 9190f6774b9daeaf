"""Defaults of FOSI: proportional alpha, one estimation, warm-up."""

import pathlib
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import tfkfac
from tests.support.fosi_reference import (
    ROWS,
    Fosi,
    Network,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    sgd,
)
from tests.support.reference import Array
from tests.support.small import curvature as saved_curvature
from tests.support.small import summary_text
from tfkfac.fosi.subspace import Timing
from tfkfac.shell.arguments import Hyperparameter

X, Y = data()


# ---------------------------------------------------------------------- alpha
class Rates(keras.callbacks.LearningRateScheduler):
    """Callback that assigns `learning_rate` before each epoch."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__(lambda epoch, rate: rates[epoch])


def test_alpha_follows_assigned_rates(double: None) -> None:
    """Alpha scales with rate / largest rate so far, which is saved."""
    rates = [0.0, 0.05, 0.1, 0.1, 0.05, 0.025, 0.05, 0.0125, 0.0125]
    largest = np.maximum.accumulate(rates)
    x = X.astype(float)

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        return sgd(rates[t - 1], 0.9)(g, w, slots, t)

    model, network = mlp(), Network(x, Y)
    program = Fosi(rule, alpha=lambda t: 0.5 * rates[t] / largest[t])
    want = program.run(
        network.gradient, network.hessian, flat(model), len(rates)
    )
    model.compile(fosi(SGD(0.0, 0.9)), loss())
    got = fit(model, x, Y, len(rates), callbacks=[Rates(rates)])
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    saved = saved_curvature(model.optimizer)
    (largest_rate,) = (v for k, v in saved.items() if "largest_rate" in k)
    assert largest_rate == pytest.approx(0.1)


# ------------------------------------------------------------- one estimation
def due(timing: Timing, fails: bool) -> list[int]:
    """The updates, out of 310, at which estimations begin."""
    states: Any = types.SimpleNamespace(
        last=tf.Variable(-1, dtype="int64"),
        estimations=tf.Variable(0, dtype="int64"),
        warmup=tf.Variable(7, dtype="int64"),
    )
    updates = []
    for clock in range(310):
        if timing.begins(tf.constant(clock, tf.int64), states):
            updates.append(clock)
            states.last.assign(clock)
            states.estimations.assign_add(0 if fails else 1)
    return updates


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
    """Without an interval, only a failed estimation is repeated."""
    parameter = Hyperparameter("interval", interval, True, optional=True)
    parameter.build()
    assert due(Timing(warmup, parameter), fails) == expected


def test_accelerators_have_an_interval() -> None:
    """The default interval with accelerators is 800."""
    assert tfkfac.FOSI().update_interval is None
    optimizer = tfkfac.FOSI(accelerator_fraction=0.5)
    assert optimizer.update_interval == 800
    optimizer = tfkfac.FOSI(accelerator_fraction=0.5, update_interval=9)
    assert optimizer.update_interval == 9


# -------------------------------------------------------------------- warm-up
def network(**options: Any) -> Any:
    model = mlp()
    optimizer = tfkfac.FOSI(num_largest=1, lanczos_steps=2, **options)
    model.compile(optimizer, loss())
    return model


def first_estimation(model: Any, *args: Any, **kwargs: Any) -> int:
    """Number of steps before the first estimation."""
    after: list[int] = []
    notes = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: after.append(
            int(model.optimizer.estimations)
        )
    )
    model.fit(*args, callbacks=[notes], verbose=0, **kwargs)
    return after.index(1)


def test_warmup_is_a_share_of_the_run() -> None:
    """7.5 % of the 21 updates of 14 epochs of 3 batches are 1.6."""
    inner = SGD(0.1, gradient_accumulation_steps=2)
    model = network(inner_optimizer=inner)
    steps = first_estimation(model, X, Y, batch_size=ROWS // 3, epochs=14)
    assert steps == 2 * 2


def test_warmup_of_an_unknown_run_is_100() -> None:
    """A later run of known length replaces it: 7.5 % of 80 updates are 6."""
    model = network()
    model.run_eagerly = True
    model.fit((batch for batch in [(X, Y)]), verbose=0)
    assert "before update 101" in summary_text(model.optimizer)
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", True
        )
    )
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(80)
    model.fit(batches, callbacks=stop, verbose=0)
    assert "before update 7" in summary_text(model.optimizer)


@pytest.mark.slow
def test_the_first_run_decides(tmp_path: pathlib.Path) -> None:
    """The warm-up is saved: a resumed run has the same warm-up."""
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(40)
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
