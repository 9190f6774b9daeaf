"""`GaussNewton.minimize` against NumPy."""

import pathlib
import signal
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Reference,
    get_flat,
    outputs_and_jacobians,
    second,
    set_flat,
)
from tests.support.reference import Array
from tests.support.strategies import copies, strategy
from tests.support.training import assert_same_bits, distance
from tfkfac.gauss_newton import support
from tfkfac.shell.conditions import Conditions

# Weights of the conditions of `Decay`.
WEIGHTS = {"seen": 3.0}


class Decay:
    """The equation `u' = -rate u` with the unknown rate 2; u is exp(-2 x)."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(1)
        hidden, last = layers.Dense(3, "tanh"), layers.Dense(1)
        self.network = keras.Sequential([keras.Input((1,)), hidden, last])
        self.rate = keras.Variable(1.0, dtype=keras.config.floatx())
        self.trainable_variables = [
            *self.network.trainable_variables,
            self.rate,
        ]
        x = [np.linspace(0, 1, n)[:, None] for n in (12, 5)]
        self.points = {"slope": x[0], "seen": x[1]}
        self.residuals = {"slope": self.slope, "seen": self.error}

    def error(self, x: Any) -> Any:
        error = self.network(x) - tf.exp(-2 * x)
        return tf.concat([error, 0.5 * error], 1)

    def slope(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            u = self.network(x)[:, 0]
        return tape.gradient(u, x)[:, 0] + self.rate * u

    def __call__(self, points: Any, training: bool = True) -> Any:
        """Scaled residuals: `|.|^2 / 2 = sum weight mean(r^2)`."""
        parts = []
        for name, residual in self.residuals.items():
            r = residual(tf.constant(points[name]))
            scale = np.sqrt(2 * WEIGHTS.get(name, 1) / np.size(r))
            parts.append(tf.reshape(scale * r, [-1]))
        return tf.concat(parts, 0)

    def minimize(self, optimizer: tfkfac.GaussNewton, **options: Any) -> Any:
        return optimizer.minimize(
            self.residuals,
            self.trainable_variables,
            self.points,
            weights=WEIGHTS,
            **options,
        )


def minimize_decay() -> dict[str, Any]:
    """Take five steps; replicas cannot divide all points evenly."""
    with floats("float64"), strategy().scope():
        problem = Decay()
        start = [np.array(v) for v in problem.trainable_variables]
        optimizer = tfkfac.GaussNewton(solve="parameters")
        problem.minimize(optimizer, steps=5)
        return {
            "start": start,
            "weights": [np.array(v) for v in problem.trainable_variables],
            "copies": copies(problem.trainable_variables),
            "last": optimizer.last_step,
        }


def reference_of(problem: Decay) -> Reference:
    """The steps for the residuals of all conditions."""
    known: dict[bytes, tuple[Array, Array]] = {}

    def residuals(weights: Array) -> Array:
        set_flat(problem, weights)
        return problem(problem.points).numpy()

    def loss(weights: Array) -> float:
        return float(np.sum(residuals(weights) ** 2) / 2)

    def rows(weights: Array) -> tuple[Array, Array]:
        if (key := weights.tobytes()) not in known:
            points = problem.points
            ((r, matrix),) = outputs_and_jacobians(problem, points, weights)
            known[key] = matrix, r
        return known[key]

    def pull(weights: Array, direction: Array) -> Array:
        return rows(weights)[0].T @ second(residuals, weights, direction)

    return Reference(loss, rows, get_flat(problem), pull)


def test_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an unknown coefficient, several batch sizes and `(batch, k)`.

    Backward passes have few examples.
    """
    monkeypatch.setattr(support, "MAX_STORED", 100)
    with floats("float64"):
        problem = Decay()
        reference, start = reference_of(problem), get_flat(problem)
        optimizer = tfkfac.GaussNewton(solve="parameters")
        history = problem.minimize(optimizer, steps=4)
        got = get_flat(problem)
        first = reference.loss(reference.weights)
        for _ in range(4):
            reference.step()
    travelled = distance(reference.weights, start)
    assert travelled > 0.5
    assert distance(got, reference.weights) <= 1e-7 * travelled
    assert any(reference.bent)
    assert optimizer.last_step["tries"] == reference.tries[-1]
    assert optimizer.last_step["residuals"] == 12 + 2 * 5
    assert len(history.history["loss"]) == 4
    np.testing.assert_allclose(history.history["loss"][0], first)


class Root:
    """Find the root of 1 + number of steps, with resampled points."""

    def __init__(self) -> None:
        self.level = keras.Variable(0.7)
        self.drawn: list[int] = []

    def draw(self, step: int) -> Array:
        self.drawn.append(step)
        return np.full([3, 1], 1.0 + step)

    def minimize(self, optimizer: Any, **options: Any) -> Any:
        return optimizer.minimize(
            {"level": lambda x: self.level**2 - x[:, 0]},
            [self.level],
            {"level": self.draw},
            **options,
        )


def test_points_from_a_function(tmp_path: pathlib.Path) -> None:
    """New points every third step; the steps use them.

    Two calls, the second of which restarts from a backup, equal a whole run
    bit for bit. A further call may have other conditions. No step begins after
    `seconds`, nor with other variables.
    """
    problem, optimizer = Root(), tfkfac.GaussNewton(1e-6)
    followed: list[float] = []

    def minimize(steps: int, *callbacks: Any) -> list[Array]:
        problem.minimize(optimizer, steps=steps, every=3, callbacks=callbacks)
        (state,) = optimizer.method.states
        entries = [entry.variable.numpy() for entry in state.entries()]
        return [np.array(problem.level), *entries]

    follow = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: followed.append(float(problem.level))
    )
    want = minimize(9, follow)
    assert problem.drawn == [0, 3, 6]
    assert int(optimizer.iterations) == 9
    np.testing.assert_allclose(np.square(followed), [1, 4, 7], rtol=0.1)
    other = {"other": lambda x: problem.level - x[:, 0]}
    points = {"other": np.full([1, 1], 5.0)}
    optimizer.minimize(other, [problem.level], points, seconds=1e-9)
    assert int(optimizer.iterations) == 10
    assert float(problem.level) == pytest.approx(5, rel=1e-3)
    with pytest.raises(ValueError, match="already belongs to other variables"):
        Root().minimize(optimizer, steps=1)

    def stop(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise KeyboardInterrupt

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    problem, optimizer = Root(), tfkfac.GaussNewton(1e-6)
    minimize(3)
    with pytest.raises(KeyboardInterrupt):
        minimize(6, backup(), keras.callbacks.LambdaCallback(stop))
    problem, optimizer = Root(), tfkfac.GaussNewton(1e-6)
    np.testing.assert_equal(minimize(6, backup()), want)

    def terminate(batch: int, logs: Any) -> None:
        if int(optimizer.iterations) == 5:  # within the second epoch
            signal.raise_signal(signal.SIGTERM)

    chief = tfkfac.callbacks.ChiefBackup(tmp_path / "chief")
    killer = keras.callbacks.LambdaCallback(on_train_batch_end=terminate)
    problem, optimizer = Root(), tfkfac.GaussNewton(1e-6)
    with pytest.raises(SystemExit):
        minimize(9, killer, chief)
    problem, optimizer = Root(), tfkfac.GaussNewton(1e-6)
    np.testing.assert_equal(minimize(9, chief), want)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["mirrored"])
def test_replicas_share_the_points(on_workers: Any, where: str) -> None:
    """Two replicas, each with half of the points, equal one process."""
    (worker,) = on_workers(where, minimize_decay)
    single = minimize_decay()
    assert_same_bits([{"copies": [c]} for c in worker["copies"]])
    travelled = distance(single["weights"], single["start"])
    assert travelled > 0.5
    away = distance(worker["weights"], single["weights"])
    assert away <= 1e-10 * travelled
    for key in ("damping", "tries"):
        assert worker["last"][key] == pytest.approx(single["last"][key])


def refuse_seconds() -> None:
    message = "`seconds` must be None with several processes"
    with strategy().scope(), pytest.raises(ValueError, match=message):
        Decay().minimize(tfkfac.GaussNewton(), seconds=1)


@pytest.mark.slow
def test_seconds_with_several_processes(on_workers: Any) -> None:
    on_workers("two", refuse_seconds)


def residual(points: Any) -> Any:
    return points[:, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residuals": {}}, "`residuals` must be a dictionary of functions"),
        ({"residuals": [residual]}, "`residuals` must be a dictionary of func"),
        ({"points": np.ones([2, 1])}, "`points` must be a dictionary with the"),
        ({"variables": keras.Variable(1.0)}, "`variables` must be a list of"),
        ({"points": {"b": np.ones([2, 1])}}, "must have the names of"),
        ({"weights": {"b": 1.0}}, "must have the names of"),
        ({"weights": {"a": -1.0}}, "`weights` must be a number"),
        ({"variables": []}, "`variables` must be a list of"),
        ({"variables": [tf.Variable(1.0)]}, "`variables` must be a list of"),
        ({"steps": None}, "`steps` or `seconds` must be a number"),
        ({"steps": 0}, "`steps` must be an integer of at least 1"),
        ({"every": 0}, "`every` must be an integer of at least 1"),
        ({"seconds": 0}, "`seconds` must be a positive number"),
        (
            {"residuals": {"a": lambda points: tf.reduce_sum(points)}},
            r"Residuals 'a' must have the shape `\(batch,\)`",
        ),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "residuals": {"a": residual},
        "variables": [keras.Variable(1.0)],
        "points": {"a": np.ones([2, 1])},
        "steps": 1,
    }
    with pytest.raises(ValueError, match=message):
        tfkfac.GaussNewton().minimize(**(arguments | change))


def test_warning_for_a_variable_of_lower_precision() -> None:
    """`keras.Variable(1.0)` is float32 for every `floatx`."""
    with pytest.warns(UserWarning, match=r"is float32.*is float64"):
        model = Conditions(
            [keras.Variable(1.0), keras.Variable(1.0, dtype="float64")]
        )
    assert model.compute_dtype == "float64"
