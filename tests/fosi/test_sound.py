"""Guards against invalid directions and outliers among gradients."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD

import tfkfac
from tests.support.fosi_reference import data, flat, loss, mlp, small
from tests.support.lockstep import run_together
from tests.support.reference import Array
from tests.support.small import summary_text
from tests.support.strategies import copies, local_ranks
from tests.support.training import (
    Spoil,
    Training,
    assert_same_bits,
    build,
    fit,
)
from tfkfac.fosi.layouts import LAYOUTS, Geometry
from tfkfac.fosi.subspace import InnerTraits, Subspace


def break_(subspace: Any, name: str, value: float) -> None:
    """Fill a variable with a value; multiply the directions by it."""
    variable = getattr(subspace, name)
    old = variable.numpy()
    new = old * value if name == "directions" else np.full_like(old, value)
    variable.assign(new)


BROKEN = [("directions", 1e30), ("ritz_values", np.nan), ("momentum", np.inf)]


def test_the_step_is_the_inner_optimizers(capfd: Any) -> None:
    """With invalid state, a step is the inner optimizer's bit for bit."""
    x, y = data()
    model, twin = mlp(), mlp()
    model.compile(small(SGD(0.1, 0.9), update_interval=100), loss())
    twin.compile(SGD(0.1, 0.9), loss())
    optimizer = model.optimizer
    twin.optimizer.build(twin.trainable_variables)
    for _ in range(4):
        model.train_on_batch(x, y)
    (state,) = optimizer.method.states
    capfd.readouterr()
    for count, (name, value) in enumerate(BROKEN, 1):
        twin.set_weights(model.get_weights())
        for theirs, mine in zip(
            twin.optimizer.variables,
            optimizer.inner_optimizer.variables,
            strict=True,
        ):
            theirs.assign(mine)
        break_(state.subspace, name, value)
        for one in (model, twin):
            one.train_on_batch(x, y)
        np.testing.assert_array_equal(flat(model), flat(twin))
        assert optimizer.spectrum().shape == (0,)
        for _ in range(3):
            model.train_on_batch(x, y)
        assert optimizer.spectrum().shape == (2,)
        assert np.isfinite(flat(model)).all()
        assert int(state.forgotten.numpy()) == count
    assert "the directions of curvature are not" in capfd.readouterr().err
    assert "invalid directions were dropped: 3" in summary_text(optimizer)


# ------------------------------------------------------------ several workers
def fosi(inner: str, **options: Any) -> Training:
    sizes = {"num_largest": 3, "num_smallest": 0, "lanczos_steps": 6}
    clocks = {"warmup_steps": 0, "update_interval": 4}
    options = sizes | clocks | options
    return Training("FOSI", inner=inner, feed="even", options=options)


# Training, and the tensor that is invalid on worker 1.
SPOILED = {
    "two: columns": (fosi("adam", layout="columns"), "ritz_values"),
    "four: MR-DHO2": (fosi("sgd", accelerator_fraction=0.5), "directions"),
}


def train_spoiled(case: Training, tensor: str) -> Any:
    def tensors(states: Any) -> list[Any]:
        local = zip(local_ranks(), states, strict=True)
        return [getattr(s.subspace, tensor) for rank, s in local if rank == 1]

    callback, model = Spoil(tensors), build(case)
    fit(model, case, callback)
    assert callback.largest_change() < 1
    states = [s for s in model.optimizer.method.states if s.subspace]
    return {
        "copies": copies(model.variables),
        "forgotten": [int(s.forgotten.numpy()) for s in states],
        "estimations": [int(s.estimations.numpy()) for s in states],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILED)
def test_invalid_state_on_one_worker(on_workers: Any, name: str) -> None:
    """Invalid state on one worker: all take a plain step, then estimate."""
    where = name.partition(":")[0]
    workers = on_workers(where, train_spoiled, *SPOILED[name])
    assert_same_bits(workers)
    for worker in workers:
        assert worker["estimations"] in ([], [1], [2])
    trainers = [w for w in workers if w["forgotten"]]
    assert len(trainers) == 2
    assert all(w["forgotten"] == [1] for w in trainers)
    assert all(w["estimations"] != [0] for w in trainers)


# ------------------------------------------------------------------- outliers
def test_targets_of_1e10_in_one_batch() -> None:
    """FOSI with Adam recovers from an outlier, as Adam does."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    keras.utils.set_random_seed(0)
    hidden, last = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((8,)), hidden, last])
    model.compile(tfkfac.FOSI("adam", warmup_steps=3), "mse")
    for _ in range(10):
        model.train_on_batch(x, y)
    assert int(model.optimizer.estimations) == 1
    before = np.abs(flat(model)).max()
    model.train_on_batch(x, y + 1e10)
    for _ in range(20):
        model.train_on_batch(x, y)
    assert np.abs(flat(model)).max() < before + 10
    assert model.evaluate(x, y, verbose=0) < 100 * float(np.var(y))


def by_definition(steps: Array, values: Array) -> Array:
    """NumPy: step lengths clipped at 10 times their running RMS."""
    mean, kept = 0.0, []
    for step in steps:
        square = np.sum((step / np.abs(values)) ** 2)
        share = 1.0
        if mean == 0:
            mean = square
        else:
            share = min(1.0, 10 * np.sqrt(mean / square))
            mean = 0.99 * mean + 0.01 * share**2 * square
        kept.append(share * step)
    return np.array(kept)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_coefficients(layout: str, workers: int) -> None:
    """All workers clip by the same length; unclipped values keep their bits."""
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(12, 3))
    steps[5, 1], steps[7] = 1e10, -500.0
    values = np.array([-1.0, 2.0, 5.0])
    shared = LAYOUTS[layout](Geometry(23, 3, 0, 5, tf.float64), workers)

    def work(group: Any) -> tuple[list[Array], float]:
        subspace = Subspace(shared, InnerTraits(), group.rank)
        subspace.ritz_values.assign(values)
        kept = []
        for step in steps:
            own = shared.local_values(tf.constant(step), group.rank)
            kept.append(subspace.clip_outlier(own, group).numpy())
        return kept, float(subspace.square)

    want = by_definition(steps, values)
    clipped = np.any(want != steps, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(clipped), [5, 7])
    for rank, ((got, _), received) in enumerate(run_together(workers, work)):
        for i, one in enumerate(got):
            own = shared.local_values(tf.constant(want[i]), rank).numpy()
            np.testing.assert_allclose(one, own, rtol=1e-12)
            if not clipped[i]:
                np.testing.assert_array_equal(one, own)
        reported = 12 * Subspace.clip_bytes(shared)
        assert received * 8 == pytest.approx(reported, abs=12)


def test_without_a_gradient() -> None:
    """Zero gradients set no bound; an overflow gives a zero step."""
    shared = LAYOUTS["rows"](Geometry(5, 1, 0, 3, tf.float32), 1)
    subspace = Subspace(shared, InnerTraits(), 0)
    subspace.ritz_values.assign([1.0])

    def work(group: Any) -> list[Array]:
        return [
            subspace.clip_outlier(tf.constant([c]), group).numpy()
            for c in (0.0, 7.0, 1e30, 7.0)
        ]

    ((got, _),) = run_together(1, work)
    np.testing.assert_array_equal(np.ravel(got), [0, 7, 0, 7])
