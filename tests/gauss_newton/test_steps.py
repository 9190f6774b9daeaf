"""Steps for all layer types against NumPy, in both spaces."""

import numpy as np
import pytest

import tfkfac
from tests.support.curvature_models import ready
from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    Reference,
    get_flat,
    loss_of,
    squares,
    squares_pull,
)
from tests.support.marks import with_slow

STEPS = 4
# In the space of residuals; all others in the space of parameters. Grouped
# convolutions and masks loop over examples.
RESIDUALS = ("layer_two_axes", "lstm")
CASES = ["tanh", "conv_groups", "attention", "masked_rnn", *RESIDUALS]


@pytest.mark.parametrize("case", with_slow(CASES, *CASES[1:]))
def test_every_layer(case: str) -> None:
    solve = "residuals" if case in RESIDUALS else "parameters"
    with floats("float64"):
        model, x, y = ready(case)
        start, done = get_flat(model), []
        optimizer = tfkfac.GaussNewton(solve=solve)
        model.compile(optimizer, "mse")
        for _ in range(STEPS):
            model.train_on_batch(x, y)
            done.append(optimizer.last_step)
        got = get_flat(model)
        reference = Reference(
            loss_of(model, x, y),
            squares(model, x, y),
            start,
            squares_pull(model, x),
        )
        for _ in done:
            reference.step()
    want = reference.weights
    assert np.linalg.norm(got - want) <= 1e-7 * np.linalg.norm(want - start)
    assert [d["tries"] for d in done] == reference.tries
    assert [d["accepted"] for d in done] == reference.accepted
    np.testing.assert_allclose(
        [d["damping"] for d in done], reference.dampings, rtol=1e-5
    )
