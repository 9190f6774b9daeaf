"""Directions that cannot be right never reach the weights."""

from typing import Any

import keras
import numpy as np
import pytest

from tests.support import workers_unsound
from tests.support.cluster import Pool
from tests.support.fosi_reference import data, flat, loss, mlp, small
from tests.support.jobs import Jobs
from tests.support.small import summary_text
from tests.support.weights import assert_same_bits

INNERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, 0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def break_(subspace: Any, name: str, value: float) -> None:
    """Fills the numbers, or multiplies them."""
    variable = getattr(subspace, name)
    old = variable.numpy()
    new = old * value if name == "directions" else np.full_like(old, value)
    variable.assign(new)


@pytest.mark.parametrize(
    ("inner", "name", "value"),
    [
        ("sgd", "directions", 1e30),
        *(
            pytest.param(i, n, v, marks=pytest.mark.slow)
            for i, n, v in [
                ("sgd", "directions", np.nan),
                ("adam", "directions", 0.5),
                ("adam", "ritz_values", np.nan),
                ("sgd", "momentum", np.inf),
            ]
        ),
    ],
)
def test_the_step_is_the_inner_optimizers(
    inner: str, name: str, value: float, capfd: Any
) -> None:
    """To the bit; the next one has new directions."""
    x, y = data()
    model, twin = mlp(), mlp()
    model.compile(small(INNERS[inner](), update_interval=100), loss())
    twin.compile(INNERS[inner](), loss())
    for _ in range(4):
        model.train_on_batch(x, y)
    optimizer = model.optimizer
    (state,) = optimizer.method.states
    twin.set_weights(model.get_weights())
    twin.optimizer.build(twin.trainable_variables)
    for theirs, mine in zip(
        twin.optimizer.variables,
        optimizer.inner_optimizer.variables,
        strict=True,
    ):
        theirs.assign(mine)
    break_(state.subspace, name, value)
    capfd.readouterr()
    for one in (model, twin):
        one.train_on_batch(x, y)
    np.testing.assert_array_equal(flat(model), flat(twin))
    assert "the directions of curvature are not" in capfd.readouterr().err
    assert "directions could not be right: 1" in summary_text(optimizer)
    assert optimizer.spectrum().shape == (0,)
    for _ in range(3):
        model.train_on_batch(x, y)
    assert optimizer.spectrum().shape == (2,)
    assert np.isfinite(flat(model)).all()
    assert int(state.forgotten.numpy()) == 1


# ------------------------------------------------------------ several workers
JOBS = Jobs(workers_unsound)
CASES: dict[str, dict[str, Any]] = {}
for name_, inner_, tensor_, kwargs_ in [
    ("two: rows", "sgd", "directions", {"layout": "rows"}),
    ("two: columns", "adam", "ritz_values", {"layout": "columns"}),
    ("four: rows", "adam", "directions", {"layout": "rows"}),
    ("four: columns", "sgd", "ritz_values", {"layout": "columns"}),
    ("four: MR-DHO2", "sgd", "directions", {"accelerator_fraction": 0.5}),
]:
    CASES[f"{name_}, {inner_}, {tensor_}"] = {
        "inner": inner_,
        "tensor": tensor_,
        **kwargs_,
    }
for name_, kwargs_ in CASES.items():
    JOBS.add(name_, "lose", slow=True, **kwargs_)


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_one_worker_loses_its_own(pool: Pool, name: str) -> None:
    """All take the plain step, and all have new directions after it."""
    workers = JOBS.results(pool, name)
    assert_same_bits(workers)
    for worker in workers:
        assert max(worker["moves"]) < 1
        assert worker["estimations"] in ([], [1], [2])
    trainers = [w for w in workers if w["forgotten"]]
    assert len(trainers) == 2 + 2 * ("four" in name and "MR" not in name)
    assert all(w["forgotten"] == [1] for w in trainers)
    assert all(w["estimations"] != [0] for w in trainers)
