"""Guards against invalid values, and low precision."""

import contextlib
import io
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.harness import assert_close
from tests.support.marks import with_slow
from tests.support.reference import Array
from tests.support.small import (
    CLASSES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    rows_of,
    summary_text,
)
from tests.support.summaries import sequential
from tests.support.training import (
    Spoil,
    Training,
    assert_same_bits,
    build,
    describe,
    fit,
)

X, Y = data()
NAN = float("nan")
INTERVALS = ("factor_update_interval", "inverse_update_interval")


def assert_same_weights(model: Any, want: list[Array]) -> None:
    np.testing.assert_equal(model.get_weights(), want)


# --------------------------------------------------------------- bad batches
def test_empty_batches() -> None:
    """After an empty first batch, the second acts as the first."""
    model, twin = (
        compiled_mlp(keras.optimizers.SGD(0.1), eager=True) for _ in range(2)
    )
    model.train_on_batch(X[:0], Y[:0])
    assert int(kfac_of(model).factor_updates) == 0
    assert_same_weights(model, twin.get_weights())
    for each in (model, twin):
        each.train_on_batch(X, Y)
    assert_same_weights(model, twin.get_weights())
    factors = kfac_of(model).factors()
    model.train_on_batch(X[:0], Y[:0])
    for path, block in kfac_of(model).factors().items():
        assert_same(block, factors[path])
    assert_same_weights(model, twin.get_weights())


def test_nan_in_sparse_gradients() -> None:
    """The values of an embedding's sparse gradient are checked."""
    tokens = layers.Embedding(5, 2, name="tokens")
    logits = layers.Dense(CLASSES, name="logits")
    model = sequential(tokens, layers.Flatten(), logits, shape=(3,))
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    x, y = np.array([[0, 1, 2], [2, 3, 4]]), np.array([0, 1])
    model.train_on_batch(x, y)
    before = everything(model)
    weight = np.array([1.0, NAN], "float32")
    model.train_on_batch(x, y, sample_weight=weight)
    optimizer = kfac_of(model)
    assert int(optimizer.skipped_steps) == 1
    optimizer.skipped_steps.assign(0)
    assert_same(everything(model), before)


# -------------------------------------------------------- bad decompositions


@pytest.mark.parametrize(
    ("solver", "factor", "eager"),
    [("inverse", "G", False), ("eigen", "A", True)],
)
def test_failed_decomposition_keeps_the_last_good_one(
    solver: str, factor: str, eager: bool, capfd: Any
) -> None:
    """A failure is counted and logged once; other layers are unaffected."""
    model = compiled_mlp(
        solver=solver,
        factor_update_interval=100,
        inverse_update_interval=1,
        eager=eager,
    )
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    (average,) = rows_of(optimizer.method.states, "hidden", f"factor_{factor}")
    average.assign(np.full(average.shape, NAN))
    before, weights = curvature(optimizer), model.get_weights()
    capfd.readouterr()
    optimizer.damping = 0.5
    for _ in range(3):
        model.train_on_batch(X, Y)
    err = capfd.readouterr().err
    assert err.count("decomposition") == 1
    assert "hidden" in err
    assert "logits" not in err
    for name, value in curvature(optimizer).items():
        if ":solver_" in name:
            unchanged = np.array_equal(value, before[name])
            # Unchanged factors have the same eigenvectors.
            if solver == "inverse" or ":solver_D:" in name:
                assert unchanged == ("hidden" in name), name
            assert np.isfinite(value).all()
    assert optimizer.events() == {"failed decompositions of hidden": 3}
    assert "failed decompositions of hidden: 3" in summary_text(optimizer)
    for got, old in zip(model.get_weights(), weights, strict=True):
        assert np.isfinite(got).all()
        assert not np.array_equal(got, old)


def test_statistics_that_overflow_are_rejected(capfd: Any) -> None:
    """Inputs with infinite squares are rejected; their gradients are finite."""
    model = sequential(
        layers.Dense(2, use_bias=False, name="huge"),
        layers.Lambda(lambda x: x * 1e-30),
        layers.Dense(CLASSES, name="logits"),
        shape=(2,),
    )
    model.compile(
        tfkfac.KFAC(step="natural", factor_update_interval=1),
        loss(),
        run_eagerly=True,
    )
    x, y = np.ones((4, 2), "float32"), np.zeros(4, "int32")
    model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    before = optimizer.factors()
    for _ in range(2):
        model.train_on_batch(x * 1e25, y)
    after = optimizer.factors()
    assert_same(after["huge"], before["huge"])
    assert not np.array_equal(after["logits"]["G"], before["logits"]["G"])
    err = capfd.readouterr().err
    assert err.count("statistics") == 1
    assert "huge" in err
    assert "statistics not finite in huge: 2" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 0
    for name, value in everything(model).items():
        assert np.isfinite(value).all(), name


# -------------------------------------------------------------- half precision
@pytest.mark.parametrize(
    ("name", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)]
)
def test_mixed_precision_has_the_true_scale(
    name: str, tolerance: float
) -> None:
    """Factors equal those of float32 for any loss scale."""
    x, y = data(64, seed=5)
    want = compiled_mlp(eager=True)
    with floats(name):
        model = compiled_mlp(eager=True)
    outer = tfkfac.KFAC
    if name == "mixed_float16":
        outer = keras.optimizers.LossScaleOptimizer
    assert type(model.optimizer) is outer
    for each in (want, model):
        each.train_on_batch(x, y)
    optimizer = kfac_of(model)
    assert int(optimizer.iterations) == 1
    for path, block in kfac_of(want).factors().items():
        for factor, value in block.items():
            got = optimizer.factors()[path][factor]
            assert got.dtype == np.float32
            assert_close(got, value, tolerance, f"{factor} of {path}")
    for got, value in zip(model.get_weights(), want.get_weights(), strict=True):
        assert_close(got, value, 10 * tolerance)


def test_float16_trains() -> None:
    """A few epochs with the defaults decrease the loss."""
    with floats("float16"):
        model = compiled_mlp(eager=True)
        history = model.fit(*data(64, seed=5), 64, 4, 0).history
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    factors = kfac_of(model).factors()["hidden"].values()
    assert {v.dtype.name for v in factors} == {"float32"}


def test_loss_scale_of_a_custom_loop() -> None:
    """An unknown loss scale is an error; the square of a scale overflows."""

    def scaled_step() -> None:
        gradients = gradients_of(
            model, X, Y, lambda y, p: scaler.scale_loss(loss()(y, p))
        )
        scaler.apply(gradients, model.trainable_variables)

    model, plain = mlp(), compiled_mlp(eager=True)
    scaler = keras.optimizers.LossScaleOptimizer(
        tfkfac.KFAC(step="natural"), initial_scale=2.0**100
    )
    before = model.get_weights()
    scaler.inner_optimizer.attach(model)
    with pytest.raises(ValueError, match=r"attach\(model, loss_scaler=\.\.\."):
        scaled_step()
    assert_same_weights(model, before)
    scaler.inner_optimizer.attach(model, loss_scaler=scaler)
    scaled_step()
    plain.train_on_batch(X, Y)
    factors = scaler.inner_optimizer.factors()
    for path, block in kfac_of(plain).factors().items():
        for name, want in block.items():
            assert_close(factors[path][name], want, 1e-5)


# ----------------------------------------- invalid preconditioned gradients


def test_the_plain_gradient_of_that_block_alone(capfd: Any) -> None:
    """Only that block takes the plain gradient, for one step."""
    x, y = X, Y
    model, twin = mlp(), mlp()
    for candidate in (model, twin):
        options = dict.fromkeys(INTERVALS, 100)
        candidate.compile(
            tfkfac.KFAC(keras.optimizers.SGD(0.1), kl_clip=None, **options),
            loss(),
            run_eagerly=True,
        )
        candidate.train_on_batch(x, y)
    optimizer = kfac_of(model)
    tensor = rows_of(optimizer.method.states, "hidden", "solver_")[0]
    tensor.assign(np.full(tensor.shape, 1e30))
    gradients = [np.array(g) for g in gradients_of(model, x, y)]
    before = model.get_weights()
    capfd.readouterr()
    for candidate in (model, twin):
        candidate.train_on_batch(x, y)
    after, usual = model.get_weights(), twin.get_weights()
    for i, variable in enumerate(model.trainable_variables):
        if "hidden" in variable.path:
            assert_close(before[i] - after[i], 0.1 * gradients[i], 1e-4)
        else:
            np.testing.assert_array_equal(after[i], usual[i])
    err = capfd.readouterr().err
    assert "hidden: the preconditioned gradient" in err
    assert "logits" not in err
    assert optimizer.events() == {"plain gradients in hidden": 1}
    assert "plain gradients in hidden: 1" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 0
    # The step after that has a new decomposition, of that block alone.
    twin.set_weights(after)
    renewed = int(optimizer.inverse_updates)
    for candidate in (model, twin):
        candidate.train_on_batch(x, y)
    assert int(optimizer.inverse_updates) == renewed + 1
    assert optimizer.events() == {"plain gradients in hidden": 1}
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        assert_close(got, want, 1e-5)


def test_an_invalid_average_restarts(capfd: Any) -> None:
    """An invalid average restarts from the next statistics."""
    model, fresh = (
        compiled_mlp(
            fisher="empirical",
            factor_update_interval=1,
            inverse_update_interval=100,
            eager=True,
        )
        for _ in range(2)
    )
    for _ in range(3):
        model.train_on_batch(X, Y)
    optimizer = kfac_of(model)
    average = rows_of(optimizer.method.states, "hidden", "factor_")[0]
    average.assign(np.full(average.shape, NAN))
    fresh.set_weights(model.get_weights())
    capfd.readouterr()
    for candidate in (model, fresh):
        candidate.train_on_batch(X, Y)
    err = capfd.readouterr().err
    assert "hidden: the factors are not finite" in err
    assert "logits" not in err
    assert optimizer.events() == {"factors dropped of hidden": 1}
    got, want = optimizer.factors(), kfac_of(fresh).factors()
    for kind in ("A", "G"):
        assert_close(got["hidden"][kind], want["hidden"][kind], 1e-6)
        assert not np.allclose(got["logits"][kind], want["logits"][kind])
    # It is decomposed anew in the next step, out of turn.
    renewed = int(optimizer.inverse_updates)
    model.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    model.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    assert optimizer.events() == {"factors dropped of hidden": 1}


def test_growing_damping_is_valid() -> None:
    """Longer gradients by an older, smaller damping are valid."""
    model = compiled_mlp(damping=1e-3, inverse_update_interval=100, eager=True)
    model.train_on_batch(X, Y)
    kfac_of(model).damping = 10.0
    model.train_on_batch(X, Y)
    assert kfac_of(model).events() == {}


# ------------------------------------------------------------ several workers
# Options where a decomposition or factor of the hidden layer is invalid. A
# factor has one owner in any mode.
SPOILED = {
    "two: decomposition": {"distribution": "mem_opt"},
    "two: factor": {"distribution": "dp_kfac", "factor_update_interval": 1},
}


def train_spoiled(name: str) -> Any:
    rarely = dict.fromkeys(INTERVALS, 100)
    case = Training(feed="even", options=rarely | SPOILED[name])
    prefix = "factor_" if "factor" in name else "solver_"
    callback = Spoil(lambda states: rows_of(states, "hidden", prefix))
    stderr = io.StringIO()
    model = build(case)
    with contextlib.redirect_stderr(stderr):
        fit(model, case, callback)
    assert callback.largest_change() < 1
    return describe(model) | {"stderr": stderr.getvalue()}


@pytest.mark.parametrize("name", with_slow(SPOILED, "two: factor"))
def test_all_workers_fall_back_together(on_workers: Any, name: str) -> None:
    """No worker hangs; weights stay bitwise equal and near.

    An invalid decomposition gives the plain gradient. An invalid factor
    restarts on its owner without a plain gradient. Each worker counts the
    faults of its blocks; `fit` prints the largest count on all workers.
    """
    workers = on_workers("two", train_spoiled, name)
    assert_same_bits(workers)
    is_factor = "factor" in name
    event = "factors dropped of" if is_factor else "plain gradients in"
    event += " hidden"
    for worker in workers:
        assert worker["iterations"] == 10
        assert all(np.isfinite(w).all() for w in worker["weights"])
        assert worker["events"] in ({event: 1}, {})
        assert f"in this fit: {event}: 1\n" in worker["stderr"]
    assert any(worker["events"] for worker in workers)


def test_scaler_of_a_compiled_optimizer() -> None:
    """An optimizer compiled again with a loss scaler knows its scale."""
    model = compiled_mlp(eager=True)
    optimizer = kfac_of(model)
    model.train_on_batch(X, Y)
    want = optimizer.factors()["logits"]["G"]
    scaler = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(scaler, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    got = optimizer.factors()["logits"]["G"]
    assert np.trace(got) < 2 * np.trace(want)
