"""FOSI: unusable batches, Hessians and directions; reports; custom steps."""

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.optimizers import SGD

import tfkfac
from tests.support.fosi_reference import (
    FEATURES,
    SIZE,
    Fosi,
    data,
    flat,
    loss,
    mlp,
    sgd,
    small,
)
from tests.support.lockstep import run_together
from tests.support.reference import Array
from tests.support.small import curvature, summary_text
from tests.support.strategies import copies, local_ranks
from tests.support.training import Spoil, Training, assert_same_bits, build
from tests.support.training import fit as train
from tfkfac.distributed.collectives import all_reduce_bytes
from tfkfac.fosi.layouts import LAYOUTS, Geometry, Layout
from tfkfac.fosi.subspace import InnerTraits, Subspace

NAN = float("nan")


# --------------------------------------------------------------- bad Hessians
@tf.custom_gradient
def kinked(x: Any) -> Any:
    """The identity, with a second derivative of NaN above 100."""

    @tf.custom_gradient
    def slope(z: Any) -> Any:
        def curve(upstream: Any) -> Any:
            return upstream * tf.where(z > 100, NAN, 0.0)

        return tf.ones_like(z), curve

    return tf.identity(x), lambda upstream: upstream * slope(x)


def kinked_model() -> Any:
    """A linear model whose Hessian is not finite for a large input."""
    stack = [layers.Dense(2), layers.Activation(kinked), layers.Dense(1)]
    model = keras.Sequential([keras.Input((FEATURES,)), *stack])
    for v in model.trainable_variables:
        v.assign(np.linspace(0.1, 0.5, v.shape.num_elements()).reshape(v.shape))
    return model


def test_bad_hessians(capfd: Any) -> None:
    """Bad Hessians are counted; training keeps the last directions.

    Before the first valid estimation, the inner optimizer trains alone.
    """
    x, y = data()[0], np.ones((12, 1), "float32")
    large = x.copy()
    large[0] = 200.0
    model, twin = kinked_model(), kinked_model()
    optimizer = small(SGD(1e-6), warmup_steps=0, alpha=1e-3)
    model.compile(optimizer, "mse")
    twin.compile(SGD(1e-6), "mse")

    def train(network: Any, *batches: Any) -> None:
        weight = np.full(12, 1e-3)  # keeps the steps small
        for batch in batches:
            network.train_on_batch(batch, y, sample_weight=weight)

    capfd.readouterr()
    train(model, large, x)
    assert capfd.readouterr().err.count("estimation of curvature") == 1
    train(twin, large, x)
    np.testing.assert_array_equal(flat(model), flat(twin))
    assert optimizer.spectrum().shape == (0,)
    train(model, x, x)
    before, spectrum = curvature(optimizer), optimizer.spectrum()
    weights = flat(model)
    train(model, large)
    moved = ("momentum", "square", "last_estimation", "failures")
    for name, value in curvature(optimizer).items():
        same = np.array_equal(before[name], value)
        assert same is not any(k in name for k in moved), name
    np.testing.assert_array_equal(optimizer.spectrum(), spectrum)
    assert spectrum.shape == (2,)
    assert np.isfinite(flat(model)).all()
    assert not np.array_equal(flat(model), weights)
    assert int(optimizer.skipped_steps) == 0
    text = summary_text(optimizer)
    assert "estimations of curvature that were not finite: 2" in text
    train(model, x, x)
    assert not np.array_equal(optimizer.spectrum(), spectrum)


# ------------------------------------------------------------------- reports
X, Y = data()
SAVED = {
    "directions", "estimations", "failures", "inner_momentum", "largest_rate",
    "last_estimation", "momentum", "ritz_values", "skipped_steps", "square",
    "version", "warmup",
}  # fmt: skip


def test_reports() -> None:
    """Ritz values after the first estimation; bytes of the state.

    An empty batch does not change the directions.
    """
    model = mlp()
    optimizer = small(num_smallest=1, warmup_steps=2)
    model.compile(optimizer, loss(), run_eagerly=True)
    before = optimizer.state_bytes()
    for step in range(4):
        estimated = step > 2
        assert (optimizer.spectrum().size > 0) == estimated
        assert ("Ritz values" in summary_text(optimizer)) == estimated
        model.train_on_batch(X, Y)
    assert (np.diff(optimizer.spectrum()) > 0).all()
    state = {k.split(":")[1]: v for k, v in curvature(optimizer).items()}
    state = {k: v for k, v in state.items() if not k.startswith("run_")}
    del state["set_learning_rate"]
    assert set(state) == SAVED
    floats = sum(v.nbytes for v in state.values() if v.dtype == np.float32)
    want = {"directions": floats, "basis": 4 * SIZE * 4}
    want |= {"copies": 0, "counters": 6 * 8}
    want["total"] = sum(want.values())
    assert optimizer.state_bytes() == before == want
    traffic = optimizer.communication_bytes()
    assert set(traffic) == {"warmup", "plain", "estimation"}
    for sizes in traffic.values():  # no communication on one device
        assert set(sizes.values()) == {0}
    spectrum = optimizer.spectrum()
    model.train_on_batch(X[:0], Y[:0])
    assert np.isfinite(flat(model)).all()
    np.testing.assert_array_equal(optimizer.spectrum(), spectrum)


def test_without_compute_loss() -> None:
    class OwnLoss(keras.Sequential):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                value = tf.reduce_mean(loss()(y, self(x, training=True)))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(value, weights), weights)

    model = mlp(OwnLoss)
    model.compile(small(), loss())
    with pytest.raises(ValueError, match=r"model\.compute_loss\(x=x, y=y"):
        model.fit(X, Y, verbose=0)


# ---------------------------------------------- invalid directions and outliers
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
    optimizer = small(SGD(0.1, 0.9), update_interval=100)
    model.compile(optimizer, loss())
    twin.compile(SGD(0.1, 0.9), loss())
    twin.optimizer.build(twin.trainable_variables)
    for _ in range(3):
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
        for candidate in (model, twin):
            candidate.train_on_batch(x, y)
        np.testing.assert_array_equal(flat(model), flat(twin))
        assert optimizer.spectrum().shape == (0,)
        for _ in range(2):
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
    train(model, case, callback)
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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 3])
def test_coefficients(layout: str, workers: int) -> None:
    """All workers clip by the same length; unclipped values keep their bits."""
    rng = np.random.default_rng(0)
    steps = rng.normal(size=(12, 3))
    steps[5, 1], steps[7] = 1e10, -500.0
    values = np.array([-1.0, 2.0, 5.0])
    shared = Layout(layout, Geometry(23, 3, 0, 5, tf.float64), workers)

    def work(group: Any) -> tuple[list[Array], float]:
        subspace = Subspace(shared, InnerTraits(), group.rank)
        subspace.ritz_values.assign(values)
        kept = []
        for step in steps:
            own = shared.columns.local_slice(tf.constant(step), group.rank)
            kept.append(subspace.clip_outlier(own, group).numpy())
        return kept, float(subspace.square)

    program = Fosi(sgd(0.1))
    want = np.array([program._bounded(x, np.abs(values)) for x in steps])
    clipped = np.any(want != steps, axis=1)
    np.testing.assert_array_equal(np.flatnonzero(clipped), [5, 7])
    for rank, ((got, _), received) in enumerate(run_together(workers, work)):
        for i, result in enumerate(got):
            own = shared.columns.local_slice(tf.constant(want[i]), rank).numpy()
            np.testing.assert_allclose(result, own, rtol=1e-12)
            if not clipped[i]:
                np.testing.assert_array_equal(result, own)
        sent = 0 if shared.reduces_gradients else 12 * 8
        reported = all_reduce_bytes(sent, workers)
        assert received * 8 == pytest.approx(reported, abs=12)


def test_state_of_other_sizes_is_refused() -> None:
    """There are at most as many directions as weights."""
    store: dict[str, Array] = {}
    optimizers = []
    for count in (2, 99):
        model, optimizer = mlp(), small(num_largest=count, lanczos_steps=None)
        message = f"uses {SIZE} directions, not 99"
        warns = pytest.warns(UserWarning, match=message)
        with warns if count == 99 else contextlib.nullcontext():
            model.compile(optimizer, loss())
        optimizer.build(model.trainable_variables)
        optimizers.append(optimizer)
    optimizers[0].save_own_variables(store)
    with pytest.raises(ValueError, match="does not fit"):
        optimizers[1].load_own_variables(store)


def test_without_a_gradient() -> None:
    """Zero gradients set no bound; an overflow gives a zero step."""
    shared = Layout("rows", Geometry(5, 1, 0, 3, tf.float32), 1)
    subspace = Subspace(shared, InnerTraits(), 0)
    subspace.ritz_values.assign([1.0])

    def work(group: Any) -> list[Array]:
        return [
            subspace.clip_outlier(tf.constant([c]), group).numpy()
            for c in (0.0, 7.0, 1e30, 7.0)
        ]

    ((got, _),) = run_together(1, work)
    np.testing.assert_array_equal(np.ravel(got), [0, 7, 0, 7])


def test_directions_belong_to_their_weights(run_eagerly: Any) -> None:
    """Two layers of equal size are trained one after the other."""
    run_eagerly(True)
    first, second = (keras.layers.Dense(3) for _ in range(2))
    model = keras.Sequential([keras.Input((3,)), first, second])
    optimizer = tfkfac.FOSI("sgd", num_largest=1, warmup_steps=1)
    x, estimations = np.eye(3), []
    for frozen in (None, first, second):
        first.trainable, second.trainable = first != frozen, second != frozen
        model.compile(optimizer, "mse")
        estimations.append(int(optimizer.estimations))
        for _ in range(2):
            model.train_on_batch(x, x)
    assert int(optimizer.estimations) == 1
    assert estimations == [0, 0, 0]
