"""Invalid decompositions or factors never reach the weights."""

import contextlib
import io
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.marks import with_slow
from tests.support.small import (
    CLASSES,
    compiled_mlp,
    curvature,
    data,
    gradients_of,
    kfac_of,
    loss,
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


def block_of(optimizer: Any, path: str) -> Any:
    (state,) = optimizer.method.states
    (one,) = (p for p in state.preconditioners if p.block.path == path)
    return one


def spoil(optimizer: Any, path: str, value: float) -> None:
    """Fill one tensor of a decomposition."""
    tensor = block_of(optimizer, path).decomposition.tensors[0]
    tensor.assign(np.full(tensor.shape, value))


def test_the_plain_gradient_of_that_block_alone(capfd: Any) -> None:
    """Only that block takes the plain gradient, for one step."""
    model, twin = (
        compiled_mlp(
            keras.optimizers.SGD(0.1),
            kl_clip=None,
            factor_update_interval=100,
            inverse_update_interval=100,
            eager=True,
        )
        for _ in range(2)
    )
    for one in (model, twin):
        one.train_on_batch(X, Y)
    optimizer = kfac_of(model)
    spoil(optimizer, "hidden", 1e30)
    gradients = [np.array(g) for g in gradients_of(model, X, Y)]
    before = model.get_weights()
    capfd.readouterr()
    for one in (model, twin):
        one.train_on_batch(X, Y)
    after, usual = model.get_weights(), twin.get_weights()
    for i in (0, 1):  # hidden
        assert_close(before[i] - after[i], 0.1 * gradients[i], 1e-5)
    for i in (2, 3):  # logits
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
    for one in (model, twin):
        one.train_on_batch(X, Y)
    assert int(optimizer.inverse_updates) == renewed + 1
    assert optimizer.events() == {"plain gradients in hidden": 1}
    for got, want in zip(model.get_weights(), twin.get_weights(), strict=True):
        assert_close(got, want, 1e-5)


def wide() -> Any:
    """A model with one layer with row gradients and one without."""
    return sequential(
        layers.Dense(60, activation="tanh", name="hidden"),
        layers.Dense(60, activation="tanh", name="second"),
        layers.Dense(CLASSES, name="logits"),
    )


CASES: dict[str, dict[str, Any]] = {
    "sketch": {"max_factor_dim": 10},
    "rows": {"inner_optimizer": keras.optimizers.SGD(0.1), "kl_clip": None},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), zip(CASES, [NAN, 1e30], strict=True)
)
def test_weights_stay_near(name: str, value: float) -> None:
    """Weights stay near with any step rule; a valid run moves by less than 1.

    With rows, the fallback works although the dense gradient is not formed.
    """
    model = wide()
    model.compile(tfkfac.KFAC(**{"step": "natural", **CASES[name]}), loss())
    x, y = X[:4], Y[:4]
    for _ in range(2):
        model.train_on_batch(x, y)
    optimizer = kfac_of(model)
    gradients = [np.array(g) for g in gradients_of(model, x, y)]
    before = model.get_weights()
    for path in ("second", "hidden"):
        spoil(optimizer, path, value)
    for step in range(2):
        model.train_on_batch(x, y)
        if name == "rows" and step == 0:
            for i in (2, 3):
                moved = before[i] - model.get_weights()[i]
                assert_close(moved, 0.1 * gradients[i], 1e-4)
    for new, old in zip(model.get_weights(), before, strict=True):
        assert np.abs(new - old).max() < 10
    for _ in range(2):
        model.train_on_batch(x, y)
    for path in ("second", "hidden"):
        assert optimizer.events()[f"plain gradients in {path}"] == 1
    for key, tensor in curvature(optimizer).items():
        assert np.isfinite(tensor).all(), key
        assert np.abs(tensor).max() < 1e20, key


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
    average = block_of(optimizer, "hidden").factors.averages[0]
    average.assign(np.full(average.shape, NAN))
    fresh.set_weights(model.get_weights())
    capfd.readouterr()
    for one in (model, fresh):
        one.train_on_batch(X, Y)
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
def kfac(model: str = "small", **options: Any) -> Training:
    rarely = {"inverse_update_interval": 100, "factor_update_interval": 100}
    return Training(model=model, feed="even", options=rarely | options)


# Training, and the layer with an invalid decomposition or factor.
SPOILED = {
    "two: decomposition": (kfac(distribution="mem_opt"), "hidden"),
    # A factor has one owner in any mode.
    "two: factor": (
        kfac(distribution="dp_kfac", factor_update_interval=1),
        "hidden",
    ),
    "two: decomposition, rows": (kfac("wide"), "second"),
}


def train_spoiled(case: Training, path: str, spoils_factor: bool) -> Any:
    def tensors(states: Any) -> list[Any]:
        kept = [
            p
            for state in states
            for p in state.preconditioners
            if p.block.path.endswith(path)
        ]
        if spoils_factor:
            lists = [p.factors.averages for p in kept if p.factors]
        else:
            lists = [p.decomposition.tensors for p in kept if p.decomposition]
        return [tensor for tensors in lists for tensor in tensors]

    callback, stderr = Spoil(tensors), io.StringIO()
    model = build(case)
    with contextlib.redirect_stderr(stderr):
        fit(model, case, callback)
    assert callback.largest_change() < 1
    return describe(model) | {"stderr": stderr.getvalue()}


@pytest.mark.parametrize("name", with_slow(SPOILED, *[*SPOILED][1:]))
def test_all_workers_fall_back_together(on_workers: Any, name: str) -> None:
    """No worker hangs; weights stay bitwise equal and near.

    An invalid decomposition gives the plain gradient. An invalid factor
    restarts on its owner without a plain gradient. Each worker counts the
    faults of its blocks; `fit` prints the largest count on all workers.
    """
    case, path = SPOILED[name]
    where, spoils_factor = name.partition(":")[0], "factor" in name
    workers = on_workers(where, train_spoiled, case, path, spoils_factor)
    assert_same_bits(workers)
    event = "factors dropped of" if spoils_factor else "plain gradients in"
    for worker in workers:
        assert worker["iterations"] == len(case.rows)
        assert all(np.isfinite(w).all() for w in worker["weights"])
        assert worker["events"] in ({f"{event} {path}": 1}, {})
        assert f"in this fit: {event} {path}: 1\n" in worker["stderr"]
    assert any(worker["events"] for worker in workers)
