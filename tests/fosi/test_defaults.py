"""Defaults of FOSI: one estimation, warm-up."""

import pathlib
import types
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import tfkfac
from tests.support.fosi_reference import ROWS, data, loss, mlp
from tests.support.small import summary_text
from tfkfac.fosi.subspace import Timing
from tfkfac.shell.arguments import Hyperparameter

X, Y = data()


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
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def fit_a_batch(model: Any, *args: Any, **kwargs: Any) -> str:
    """End a run after its first batch; return the summary."""
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(
            model, "stop_training", True
        )
    )
    model.fit(*args, callbacks=stop, verbose=0, **kwargs)
    return summary_text(model.optimizer)


def test_default_warmup(tmp_path: pathlib.Path) -> None:
    """7.5 % of the updates of the first run of known length, else 100.

    The warm-up is saved: a resumed run has the same warm-up.
    """
    inner = SGD(0.1, gradient_accumulation_steps=2)
    model = network(inner_optimizer=inner)  # 21 updates: 1.6
    text = fit_a_batch(model, X, Y, batch_size=ROWS // 3, epochs=14)
    assert "before update 3" in text
    model = network()
    assert "before update 101" in fit_a_batch(model, (b for b in [(X, Y)]))
    batches = tf.data.Dataset.from_tensors((X, Y)).repeat(80)
    assert "before update 7" in fit_a_batch(model, batches)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert "before update 7" in fit_a_batch(model, batches.repeat(2))
