"""Logs and metrics of batches with a loss that is not finite."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.strategies import copies, strategy
from tests.support.training import FEEDS, Training, build
from tests.support.training import fit as train
from tfkfac.training.guards import Streak

BATCH, BATCHES = 8, 4
# Steps of length 0: the loss of each batch is that of the initial weights.
SGD = keras.optimizers.SGD
STILL: dict[str, Callable[..., Any]] = {
    "kfac": lambda **options: tfkfac.KFAC(SGD(0.0), **options),
    "fosi": lambda: tfkfac.FOSI(SGD(0.0), warmup_steps=999),
    "gauss_newton": lambda: tfkfac.GaussNewton(learning_rate=0.0),
}
NONE, ALL = (), tuple(range(BATCHES))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH * BATCHES, 3)).astype("float32")
Y = X[:, :1] + 0.1 * RNG.normal(size=(BATCH * BATCHES, 1)).astype("float32")
KERNEL = np.array([[0.5], [-0.2], [0.1]], "float32")


def linear(kind: type[Any] = keras.Model, **compile_options: Any) -> Any:
    inputs = keras.Input((3,))
    dense = layers.Dense(1, use_bias=False, name="dense")
    model = kind(inputs, dense(inputs))
    dense.kernel.assign(KERNEL)
    model.compile(loss="mse", **compile_options)
    return model


def spoiled(bad: tuple[int, ...], value: float = np.nan) -> Array:
    x = X.copy()
    for batch in bad:
        x[BATCH * batch + 3, 1] = value
    return x


def errors(batches: list[int]) -> dict[str, float]:
    """Keras' means over some batches, in NumPy; nan without batches."""
    rows = [i for b in batches for i in range(BATCH * b, BATCH * (b + 1))]
    gaps = (X @ KERNEL - Y)[rows]
    if not rows:
        return {"loss": np.nan, "mae": np.nan}
    return {"loss": float(np.mean(gaps**2)), "mae": float(np.mean(abs(gaps)))}


class Logs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(dict(logs))


def fit(model: Any, x: Array, **options: Any) -> Any:
    """Train; return the logs of the batches and of the last epoch."""
    logs = Logs()
    history = model.fit(
        x, Y, BATCH, shuffle=False, verbose=0, callbacks=[logs], **options
    ).history
    return logs.batches, {name: value[-1] for name, value in history.items()}


def check(model: Any, bad: tuple[int, ...], value: float = np.nan) -> None:
    """Compare the logs of an epoch with NumPy's."""
    batches, epoch = fit(model, spoiled(bad, value))
    good = [b for b in ALL if b not in bad]
    for number, logs in enumerate(batches):
        if number in bad:
            assert not np.isfinite(list(logs.values())).any()
            continue
        want = errors([b for b in good if b <= number])
        assert logs == pytest.approx(want, rel=1e-5)
    assert epoch == pytest.approx(errors(good), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "name",
    with_slow(["kfac", "fosi", "gauss_newton"], "fosi", "gauss_newton"),
)
def test_logs(name: str) -> None:
    """A bad batch affects only its own logs; an epoch of bad ones is nan."""
    model = linear(optimizer=STILL[name](), metrics=["mae"])
    for bad in [(0,), (1, 2), (3,), NONE, ALL]:
        check(model, bad)
    check(model, (1,), np.inf)
    before = model.evaluate(X, Y, BATCH, verbose=0, return_dict=True)
    assert before == pytest.approx(errors([*ALL]), rel=1e-5)


def test_logs_of_micro_batches() -> None:
    """Micro-batches after a bad one in the same step are excluded."""
    options = {"gradient_accumulation_steps": 2, "skip_layers": layers.Dense}
    model = linear(optimizer=STILL["kfac"](**options))
    for bad, good in [((0,), [2, 3]), ((3,), [0, 1, 2]), (ALL, [])]:
        batches, epoch = fit(model, spoiled(bad))
        assert np.isnan(batches[bad[0]]["loss"])
        want = errors(good)["loss"]
        assert epoch["loss"] == pytest.approx(want, rel=1e-5, nan_ok=True)


class Trackers(keras.Model):
    """A custom `train_step` that updates metrics after the weights."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = keras.metrics.Mean("loss")
        self.mae = keras.metrics.MeanAbsoluteError("mae")

    @property
    def metrics(self) -> list[Any]:
        return [self.mean, self.mae]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean((outputs - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean.update_state(loss)
        self.mae.update_state(y, outputs)
        return {m.name: m.result() for m in self.metrics}


@pytest.mark.filterwarnings("ignore:Optimizer 'kfac' did not observe the loss")
def test_train_step_of_the_user() -> None:
    """A custom training step with an unobserved loss: metrics are nan."""
    model = linear(Trackers, optimizer=STILL["kfac"]())
    for bad in [(0,), (3,), ALL]:
        check(model, bad)


class Extremes(keras.metrics.Metric):
    """Metric of the smallest output; not 0 after a reset."""

    def __init__(self, name: str = "least") -> None:
        super().__init__(name=name)
        self.least = self.add_variable((), "zeros", name="least")
        self.reset_state()

    def update_state(self, y: Any, outputs: Any, sample_weight: Any) -> None:
        low = keras.ops.min(outputs)
        self.least.assign(keras.ops.minimum(self.least, low))

    def result(self) -> Any:
        return self.least

    def reset_state(self) -> None:
        self.least.assign(1e9)


def test_other_metrics() -> None:
    """Two outputs, weighted and vector metrics, nonzero reset values."""
    inputs = keras.Input((3,))
    heads = [layers.Dense(2, name=name)(inputs) for name in "ab"]
    model = keras.Model(inputs, heads)
    model.compile(
        optimizer=STILL["kfac"](skip_layers=layers.Dense),
        loss=["mse", "mse"],
        metrics=[["mae", Extremes()], [keras.metrics.F1Score()]],
        weighted_metrics=[["mse"], []],
    )
    y = np.eye(2, dtype="float32")[[0, 1] * (len(X) // 2)]

    def logs(x: Array) -> dict[str, list[Any]]:
        run = model.fit(x, [y, y], BATCH, shuffle=False, verbose=0)
        history: dict[str, list[Any]] = run.history
        return history

    good = logs(X)
    lost = logs(spoiled(ALL))
    assert set(good) == set(lost) == {
        "loss", "a_loss", "b_loss", "a_mae", "a_least", "a_mse", "b_f1_score",
    }  # fmt: skip
    assert all(np.isnan(value).all() for value in lost.values())
    again = logs(X)
    for name, value in good.items():
        np.testing.assert_array_equal(again[name], value)


def test_eager_train_on_batch(capfd: Any) -> None:
    """Nan for bad batches only, as with Keras' SGD; one warning.

    The first batch, which is bad, creates the metrics.
    """
    optimizer = STILL["kfac"]()
    model = linear(optimizer=optimizer, metrics=["mae"], run_eagerly=True)
    bad = spoiled((0,))[:BATCH]
    for _ in range(2):
        assert np.isnan(model.train_on_batch(bad, Y[:BATCH])).all()
    assert capfd.readouterr().err.count("kfac: a step is skipped") == 1
    good = model.train_on_batch(X[:BATCH], Y[:BATCH], return_dict=True)
    assert good == pytest.approx(errors([0]), rel=1e-5)
    check(model, (0,))


# ------------------------------------- gradients that are not, of finite losses
def scaled(make: Callable[[], Any], scaler: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    half = {"dtype": "mixed_float16"}
    hidden = layers.Dense(8, "tanh", **half)
    model = keras.Sequential(
        [keras.Input((3,)), hidden, layers.Dense(1, **half)]
    )
    optimizer = scaler(make(), initial_scale=2.0**40)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    history: dict[str, Any] = model.fit(X, Y, BATCH, verbose=0).history
    assert int(model.optimizer.iterations) == 0
    return history


def test_finite_losses_count(run_eagerly: Any) -> None:
    """If every step overflows, the history equals that of Keras' Adam."""
    run_eagerly(True)
    keras_scaler = keras.optimizers.LossScaleOptimizer
    want = scaled(keras.optimizers.Adam, keras_scaler)
    for got in (
        scaled(STILL["kfac"], keras_scaler),
        scaled(STILL["fosi"], tfkfac.LossScaleOptimizer),
    ):
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-3)


# ------------------------------------------------------------------- callbacks
def test_callbacks_that_monitor_the_loss(tmp_path: Any) -> None:
    """A bad epoch is never the best; `TerminateOnNaN` ends an epoch."""
    model = linear(optimizer=tfkfac.KFAC(skip_layers=layers.Dense))
    checkpoint = keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.keras", monitor="loss", save_best_only=True
    )
    stopping = keras.callbacks.EarlyStopping("loss", patience=3)
    x, y = np.concatenate([X, spoiled(ALL), X]), np.tile(Y, (3, 1))
    losses = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),
        steps_per_epoch=BATCHES, epochs=3, verbose=0,
        callbacks=[checkpoint, stopping],
    ).history["loss"]  # fmt: skip
    assert np.isnan(losses).tolist() == [False, True, False]
    assert [checkpoint.best, stopping.best] == [np.nanmin(losses)] * 2
    assert {path.stem for path in tmp_path.iterdir()} == {"1", "3"}
    callbacks = [keras.callbacks.TerminateOnNaN(), logs := Logs()]
    x = spoiled((2,), np.inf)
    model.fit(x, Y, BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    assert len(logs.batches) == 3


# ------------------------------------------------------- too many skipped steps
def test_100_steps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 skipped steps end training, without a sync in each step."""
    reads, below = [], Streak.check

    def counted(self: Streak, *args: Any) -> int:
        reads.append(args)
        return below(self, *args)

    monkeypatch.setattr(Streak, "check", counted)
    for make in (tfkfac.KFAC, tfkfac.FOSI, tfkfac.GaussNewton):
        assert make().max_skipped_steps == 100
    model = linear(optimizer=STILL["kfac"](skip_layers=layers.Dense))
    x, y = np.resize(X, (150, 3)), np.resize(Y, (150, 1))
    model.fit(x, y, 1, epochs=2, verbose=0)
    assert len(reads) == 3  # after 100, 200 and 300 batches
    model.fit(x[:30] * np.nan, y[:30], 1, verbose=0)
    model.fit(x[:30], y[:30], 1, verbose=0)
    message = (
        r"has skipped 100 steps in a row \(max_skipped_steps=100\): 1 of 1 "
        r"gradients are not finite, the first is that of '.*kernel'"
    )
    with pytest.raises(FloatingPointError, match=message):
        model.fit(x * np.nan, y, 1, verbose=0)
    assert int(model.optimizer.skipped_steps) == 30 + 100


# ------------------------------------------------------------- several workers
def lose_batches(case: Training) -> None:
    """The last worker has a NaN in step 1; then all have NaN in all steps."""
    losses: list[float] = []
    results: list[list[Array]] = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    def run(case: Training, *callbacks: Any) -> Any:
        model = build(case, metrics=["accuracy"])
        model.optimizer.max_skipped_steps = 3
        history = train(model, case, *callbacks)
        results.append(copies(model.variables)[0])
        return model, [history[name][0] for name in ("loss", "accuracy")]

    workers = range(strategy().num_replicas_in_sync)
    bad = [-1]
    if "accelerator_fraction" in case.options:
        bad = [*workers]  # an accelerator alone does not train
    model, epoch = run(
        replace(case, faults=tuple((1, worker, np.nan) for worker in bad)),
        Losses(),
    )
    assert np.isnan(losses).tolist() == [False, True, False]
    np.testing.assert_allclose(epoch, run(case.without_step(1))[1], 1e-5)
    np.testing.assert_equal(*results)  # bit for bit, as if it were not there
    faults = tuple((s, worker, np.nan) for s in range(3) for worker in workers)
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        train(model, replace(case, faults=faults))


EVEN = FEEDS["even"][:3]
OPTIONS = {"warmup_steps": 1}
RUNS = {
    "two: KFAC": Training(feed=EVEN, options={"only_layers": "hidden"}),
    "mirrored: KFAC": Training(model="batch_norm", feed=EVEN),
    "two: FOSI": Training("FOSI", feed=EVEN, options=OPTIONS),
    "two: MR-DHO2": Training(
        "FOSI", feed=EVEN, options={"accelerator_fraction": 0.5, **OPTIONS}
    ),
}


@pytest.mark.parametrize("name", with_slow(RUNS, *[*RUNS][1:]))
def test_all_workers_exclude_the_same_batch(on_workers: Any, name: str) -> None:
    on_workers(name.partition(":")[0], lose_batches, RUNS[name])
