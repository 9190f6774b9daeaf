"""Steps against plain NumPy, in both spaces."""

from typing import Any

import numpy as np
import pytest

import tfkfac
from tests.support.curvature_models import ZOO, ready
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Reference,
    get_flat,
    loss_of,
    set_flat,
    squares,
)
from tests.support.marks import with_slow
from tests.support.reference import Array

STEPS = 4
# Layers whose outputs are not of single examples, or that add losses.
REFUSED = {
    "batch", "batch_synchronized", "batch_masked", "dropout",
    "activity_regularizer", "add_loss", "kernel_regularizer",
}  # fmt: skip
ALLOWED = [case for case in ZOO if case not in REFUSED]
FEW = ("tanh",)


def train(
    model: Any, x: Any, y: Any, steps: int = STEPS, **kwargs: Any
) -> tuple[Any, list[dict[str, float]]]:
    """Compiles and trains; returns the optimizer and its steps."""
    weights = kwargs.pop("sample_weight", None)
    loss = kwargs.pop("loss", "mse")
    optimizer = tfkfac.GaussNewton(**kwargs)
    model.compile(optimizer, loss)
    done = []
    for _ in range(steps):
        model.train_on_batch(x, y, sample_weight=weights)
        done.append(optimizer.last_step)
    return optimizer, done


def check(
    reference: Reference, model: Any, start: Array, done: Any, rtol: float
) -> None:
    got = get_flat(model)
    for _ in done:
        reference.step()
    want = reference.weights
    scale = np.linalg.norm(want - start)
    assert np.linalg.norm(got - want) <= rtol * scale
    assert [d["tries"] for d in done] == reference.tries
    assert [d["accepted"] for d in done] == reference.accepted
    np.testing.assert_allclose(
        [d["damping"] for d in done], reference.dampings, rtol=1e-5
    )


@pytest.mark.parametrize(
    "case", with_slow(ALLOWED, *(case for case in ALLOWED if case not in FEW))
)
def test_every_layer(case: str) -> None:
    check_steps(case, "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tanh", "conv_strides", "lstm"])
def test_residuals(case: str) -> None:
    check_steps(case, "residuals")


def check_steps(case: str, solve: str) -> None:
    with floats("float64"):
        model, x, y = ready(case)
        start = get_flat(model)
        _, done = train(model, x, y, solve=solve)
        end = get_flat(model)
        reference = Reference(loss_of(model, x, y), squares(model, x, y), start)
        set_flat(model, end)
        check(reference, model, start, done, 1e-7)
