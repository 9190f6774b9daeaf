"""`FitDecay`: rates over `fit`, resumed runs, rates set during training."""

import contextlib
import re
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.dtypes import floats
from tests.support.small import (
    FEATURES,
    data,
    loss,
    mlp,
    summary_text,
)

Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
Decay = keras.optimizers.schedules.PolynomialDecay
X, Y = data(60)  # 4 batches of 16, the last one of 12
STEPS = 4


class Rates(keras.callbacks.Callback):
    """Record the learning rate before each batch, and save the model."""

    def __init__(
        self,
        files: str = "",
        fail_after: int | None = None,
        optimizer: Any = None,
    ) -> None:
        super().__init__()
        self.rates: list[float] = []
        self._optimizer = optimizer  # by default, that of the model
        self._files = files
        self._fail_after = fail_after

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if len(self.rates) == self._fail_after:
            raise RuntimeError("crash")
        optimizer = self._optimizer or self.model.optimizer
        self._rate = float(optimizer.learning_rate)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(self._rate)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._files:
            self.model.save(self._files.format(epoch=epoch))


LEFT: dict[str, Any] = {"skip_layers": ["logits"]}  # to the rest optimizer
# The trace of a block takes seconds.
NO_BLOCK: dict[str, Any] = {"skip_layers": keras.layers.Dense}


def spectral() -> Any:
    return tfkfac.KFAC(step="spectral", **NO_BLOCK)


def compiled(optimizer: Any = None) -> Any:
    """Eager steps, by default of an optimizer whose steps take little time."""
    model = mlp()
    if optimizer is None:
        inner = Adam(tfkfac.schedules.FitDecay(1.0))
        optimizer = tfkfac.FOSI(inner, warmup_steps=1000)
    model.compile(optimizer, loss(), run_eagerly=True)
    return model


def load(file: str) -> Any:
    """A saved model, with eager steps again."""
    model = keras.models.load_model(file)
    model.run_eagerly = True
    return model


def fit(model: Any, *callbacks: Any, **options: Any) -> list[float]:
    """Learning rate of each batch of a `fit`."""
    rates = Rates()
    if "x" not in options:
        options |= {"x": X, "y": Y, "batch_size": 16}
    options = {"epochs": 2, "shuffle": False, "verbose": 0} | options
    model.fit(callbacks=[*callbacks, rates], **options)
    return rates.rates


def linear(length: int, steps: int | None = None) -> list[float]:
    return [1 - i / length for i in range(steps or length)]


def batches() -> Iterator[Any]:
    for i in range(0, 60, 16):
        yield X[i : i + 16], Y[i : i + 16]


def unknown_length() -> tf.data.Dataset:
    """A dataset of 4 batches whose cardinality Keras does not know."""
    kinds = tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(batches, output_signature=kinds)


# ----------------------------------------------------------------- the rates
def test_default_is_polynomial_decay_over_the_fit() -> None:
    """Equal, bit for bit, to schedules of the known number of updates."""
    decay = Decay(1.0, STEPS, 0.0)
    explicit = tfkfac.KFAC(step="spectral", learning_rate=decay, **LEFT)
    default = tfkfac.KFAC(step="spectral", **LEFT)
    ours, other = compiled(default), compiled(explicit)
    rates = fit(ours, epochs=1)
    assert rates == fit(other, epochs=1) == pytest.approx(linear(STEPS))
    np.testing.assert_equal(ours.get_weights(), other.get_weights())


FITS: list[tuple[dict[str, Any], list[float]]] = [
    ({"epochs": 1}, linear(4)),
    ({"epochs": 3, "initial_epoch": 1}, linear(8)),
    ({"x": unknown_length().repeat(), "steps_per_epoch": 3}, linear(6)),
    ({"x": unknown_length(), "epochs": 1}, [1.0] * 4),
    ({"x": unknown_length(), "epochs": 3}, [1.0] * 4 + linear(8)),
]


class CustomStep(keras.Sequential):
    """A model with a list of the numbers of updates of its next batches."""

    updates: list[int]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        for _ in range(self.updates.pop(0)):
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("updates", [[0, 1], [2, 2]])
def test_rates_of_other_numbers_of_updates(updates: list[int]) -> None:
    """The first epoch counts the updates, and the others decay to 0."""
    model = CustomStep(mlp().layers)
    optimizer = spectral()
    model.compile(optimizer, loss(), run_eagerly=True)
    model.updates = updates * 6
    rates = fit(model, epochs=3)
    earlier = np.cumsum([0, *updates * 6])
    expected = 1 - earlier[:STEPS] / 12
    expected = [*expected, *(1 - earlier[STEPS:-1] / earlier[-1])]
    assert rates == pytest.approx(expected)
    assert earlier[-1] == optimizer.iterations


def test_rates_of_each_fit() -> None:
    """Each `fit` falls from the peak over its own length, in one trace.

    In one epoch of unknown length the rate stays, with a warning.
    """
    traces = []

    def traced_loss(y: Any, p: Any) -> Any:
        traces.append(1)
        return loss()(y, p)

    model = mlp()
    model.compile(spectral(), traced_loss)
    for options, rates in FITS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert fit(model, **options) == pytest.approx(rates), options
        texts = " ".join(str(w.message) for w in caught)
        warned = re.search("steps_per_epoch.*assert_cardinality", texts)
        assert bool(warned) == (rates == [1.0] * 4), options
        before = len(traces)
        assert fit(model, **options) == pytest.approx(rates), options
        assert len(traces) == before
        assert float(model.optimizer.learning_rate) == 1
    assert "constant: no length known" in summary_text(model.optimizer)


def test_several_steps_in_one_execution() -> None:
    ends = []
    for count in (1, 3):
        rest, model = SGD(tfkfac.schedules.FitDecay(0.1)), mlp()
        optimizer = tfkfac.KFAC(rest_optimizer=rest, **NO_BLOCK)
        model.compile(optimizer, loss(), steps_per_execution=count)
        fit(model)
        ends.append(model.get_weights())
    for one_step, three_steps in zip(*ends, strict=True):
        np.testing.assert_allclose(three_steps, one_step, rtol=1e-5, atol=1e-6)


def test_length_counts_updates_of_accumulated_gradients() -> None:
    """Two updates of three batches; two batches are left."""
    inner = SGD(tfkfac.schedules.FitDecay(1.0))
    options = {"gradient_accumulation_steps": 3, **NO_BLOCK}
    model = compiled(tfkfac.KFAC(inner, **options))
    rates = fit(model)
    assert rates == pytest.approx([1, 1, 1, 0.5, 0.5, 0.5, 0, 0])
    # The two batches and the first of the next `fit` make its first update.
    model.evaluate(X, Y, verbose=0)
    assert fit(model, epochs=1) == pytest.approx([1, 0.5, 0.5, 0.5])
    # Four updates of three batches in three epochs of four batches.
    rates = fit(model, x=unknown_length(), epochs=3)
    assert rates == pytest.approx([1] * 6 + [2 / 3] * 3 + [1 / 3] * 3)


def test_rest_optimizers() -> None:
    """Natural steps fall from a tenth; one of the user has its own rates."""
    model = compiled(tfkfac.KFAC(step="natural", **LEFT))
    shown = Rates(optimizer=model.optimizer.rest_optimizer)
    rates = fit(model, shown)
    assert rates == pytest.approx([0.1 * share for share in linear(8)])
    pairs = zip(shown.rates, rates, strict=True)
    assert all(0 <= small <= 0.1001 * rate for small, rate in pairs)
    rest = Adam(tfkfac.schedules.FitDecay(0.003))
    model = compiled(tfkfac.KFAC(0.2, rest_optimizer=rest, **NO_BLOCK))
    shown = Rates(optimizer=rest)
    assert fit(model, shown) == pytest.approx([0.2] * 8)
    assert shown.rates == pytest.approx([0.003 * s for s in linear(8)])


def test_own_loop() -> None:
    """Without a length the rate is the peak; `begin_run` tells one."""
    # In other optimizers the rate is constant.
    assert float(Adam(tfkfac.schedules.FitDecay(0.5)).learning_rate) == 0.5
    model = compiled()
    optimizer = model.optimizer
    for _ in range(2):
        model.train_on_batch(X, Y)
        assert float(optimizer.learning_rate) == 1
    assert "constant: no length known" in summary_text(optimizer)
    optimizer.begin_run(4)
    rates = []
    for _ in range(5):
        rates.append(float(optimizer.learning_rate))
        model.train_on_batch(X, Y)
    assert rates == pytest.approx([*linear(4), 0])
    text = "falls linearly to 0 from update 2 to 6."
    assert text in summary_text(optimizer)


def test_interrupted_fit_ends_its_plan() -> None:
    model = compiled()
    with pytest.raises(RuntimeError, match="crash"):
        fit(model, Rates(fail_after=3))
    assert float(model.optimizer.learning_rate) == 1
    assert fit(model, initial_epoch=1) == pytest.approx(linear(4))


# ------------------------------------------------------------- resumed runs
SPOILED = np.where(np.arange(60)[:, None] < 16, np.nan, X)
LARGE = {"x": X, "y": Y, "batch_size": 30}
# Arguments of a `fit`, of which each epoch is saved; those of the `fit` that
# continues it from a later epoch, and its rates.
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any], list[float]]] = {
    "same end": ({}, {"initial_epoch": 1}, linear(8)[4:]),
    # Another end, or another first epoch, is another run.
    "another end": ({}, {"epochs": 3, "initial_epoch": 1}, linear(8)),
    "another beginning": ({}, {"epochs": 1}, linear(4)),
    "generator": (
        {"x": unknown_length(), "epochs": 3},
        {"x": unknown_length(), "epochs": 3, "initial_epoch": 2},
        linear(8)[4:],
    ),
    "generator, another end": (
        {"x": unknown_length(), "epochs": 3},
        {"x": unknown_length(), "epochs": 4, "initial_epoch": 2},
        [1.0] * STEPS + linear(STEPS),
    ),
    # Two batches, not four; also if such a run is resumed.
    "other batches": (
        {"epochs": 3},
        {"epochs": 3, "initial_epoch": 1, **LARGE},
        [2 / 3 * share for share in linear(4)],
    ),
    # A batch of NaN in each epoch makes no update, and does not move the end.
    "skipped steps": (
        {"x": SPOILED, "y": Y, "batch_size": 16},
        {"x": SPOILED, "y": Y, "batch_size": 16, "initial_epoch": 1},
        [5 / 8] + [5 / 8 - i / 8 for i in range(3)],
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on(name: str, tmp_path: Any) -> None:
    options, rest, want = RESUMED[name]
    files = str(tmp_path / "{epoch}.keras")
    last = rest.get("initial_epoch", 1) - 1
    with contextlib.suppress(RuntimeError):
        rates = Rates(files, fail_after=STEPS * (last + 1) + 1)
        fit(compiled(), rates, **options)
    saver = Rates(files if name == "other batches" else "")
    model = load(files.format(epoch=last))
    assert float(model.optimizer.learning_rate) == 1  # outside of `fit`
    got = fit(model, saver, **rest)
    assert got == pytest.approx(want, abs=1e-6)
    if name == "other batches":
        again = load(files.format(epoch=1))
        got = fit(again, **{**rest, "initial_epoch": 2})
        assert got == pytest.approx(want[2:], abs=1e-6)


def test_two_crashes_in_one_epoch(tmp_path: Any) -> None:
    """Keras repeats the epoch of a backup in the middle of an epoch.

    The rate goes on where it was, and falls to 0 over the remaining epochs.
    """
    rates = []
    for crash in (3, 3, None):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=2)
        log = Rates(fail_after=crash)
        with contextlib.suppress(RuntimeError):
            fit(compiled(), backup, log)
        rates.append(log.rates)
    saved = 1 - 2 / 8
    for count, got in enumerate(rates):
        want = [saved**count * share for share in linear(8)]
        assert got == pytest.approx(want[: len(got)], abs=1e-6)
    assert len(rates[-1]) == 8


def test_moved_end_keeps_the_rate_and_the_length() -> None:
    """A third of 12 updates is done; with 4 more, the whole run has 6."""
    optimizer = tfkfac.KFAC(step="spectral")
    optimizer.begin_run(12)
    optimizer.plan.move_end(4, 4, 2)
    fractions = [float(optimizer.plan.remaining_fraction(t)) for t in (4, 6, 8)]
    assert fractions == pytest.approx([2 / 3, 1 / 3, 0])
    assert int(optimizer.plan.count_updates(5)) == 6


def test_chief_backup_in_an_epoch_goes_on(tmp_path: Any) -> None:
    """The resumed job skips the batches before the backup."""
    rates = Rates()

    def terminate(batch: int, logs: Any = None) -> None:
        if len(rates.rates) == 6:
            signal.raise_signal(signal.SIGTERM)

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=terminate)
    backup = tfkfac.callbacks.ChiefBackup
    with pytest.raises(SystemExit):
        fit(compiled(), backup(tmp_path), rates, callback)
    got = fit(compiled(), backup(tmp_path))
    assert got[-1:] == pytest.approx(linear(8)[-1:])


def test_a_backup_of_fewer_epochs_begins_again(
    tmp_path: Any, capsys: Any
) -> None:
    """At the peak, with a line that says so."""
    backup = tfkfac.callbacks.ChiefBackup(tmp_path, delete_checkpoint=False)
    fit(compiled(), backup, epochs=1)
    assert "begins again" not in capsys.readouterr().err
    assert fit(compiled(), backup) == pytest.approx(linear(STEPS))
    line = "begins again at its peak: .* of a `fit` of 1 epochs, not 2."
    assert re.search(line, capsys.readouterr().err)


# ------------------------------------------------ rates set during training
def test_callbacks_that_set_the_rate_end_the_decay(tmp_path: Any) -> None:
    callback = keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: 0.25 if epoch else rate
    )
    model = compiled(spectral())
    optimizer, file = model.optimizer, str(tmp_path / "model.keras")
    rates = fit(model, callback)
    constant = float(optimizer.learning_rate)
    assert rates[-STEPS:] == [constant] * STEPS
    rest_rate = float(optimizer.rest_optimizer.learning_rate)
    assert 0 < rest_rate <= 0.1001 * constant
    assert "set during training" in summary_text(optimizer)
    model.save(file)
    for again in (model, load(file)):
        assert fit(again, epochs=1) == [constant] * STEPS


# ------------------------------------------------------------- other users
def test_loss_scale_optimizer_and_mixed_precision() -> None:
    with floats("mixed_float16"):
        model = mlp()
    scaler = keras.optimizers.LossScaleOptimizer(spectral(), initial_scale=4.0)
    model.compile(scaler, loss(), run_eagerly=True)
    assert fit(model, epochs=1) == pytest.approx(linear(4))
    scaler.learning_rate = 0.5
    assert fit(model, epochs=1) == [0.5] * STEPS


def test_config() -> None:
    """Schedules, also those set later; each optimizer has its own."""
    rest = SGD(tfkfac.schedules.FitDecay(0.3))
    optimizer = tfkfac.KFAC(step="spectral", rest_optimizer=rest)
    config = optimizer.get_config()
    again, other = (tfkfac.KFAC.from_config(config) for _ in range(2))
    assert again.get_config() == config
    again.begin_run(4)
    again.inner_optimizer.iterations.assign(1)
    again.rest_optimizer.iterations.assign(1)
    assert float(again.learning_rate) == 0.75
    rest_rate = float(again.rest_optimizer.learning_rate)
    assert rest_rate == pytest.approx(0.225)
    again.learning_rate = 0.25
    third = tfkfac.KFAC.from_config(again.get_config())
    assert float(third.learning_rate) == 0.25
    third.learning_rate = tfkfac.schedules.FitDecay(2.0)
    fourth = tfkfac.KFAC.from_config(third.get_config())
    for each, rate in ((other, 1), (third, 2), (fourth, 2)):
        assert float(each.learning_rate) == rate


def test_optimizers_share_no_schedule() -> None:
    schedule = tfkfac.schedules.FitDecay(1.0)
    first, second = (
        tfkfac.KFAC(schedule, step="spectral", rest_optimizer=Adam(schedule))
        for _ in range(2)
    )
    first.learning_rate = 0.5
    assert float(first.learning_rate) == 0.5
    for rate in first.rest_optimizer.learning_rate, second.learning_rate:
        assert float(rate) == 1


def test_optimizer_outside_of_the_scope() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    optimizer = tfkfac.KFAC()
    with strategy.scope():
        model = mlp()
        with pytest.raises(ValueError, match=r"inside of `strategy.scope\(\)`"):
            model.compile(optimizer, loss())
