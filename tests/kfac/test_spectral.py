"""Spectral steps by their definition, and what must not change them."""

from typing import Any

import keras
import numpy as np
import pytest

import tfkfac
from tests.support.dtypes import floats
from tests.support.mode_cases import (
    Result,
    assert_close,
    by_definition,
)
from tests.support.worker_parts import (
    DEFAULTS,
    FEEDS,
    INNERS,
    OBJECTS,
    cnn,
    images,
    shares,
)

STEPS = shares(FEEDS["even"](), 1)[:6]


def cross_entropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, dtype="float64", **options
    )


def trained(
    optimizer: Any, loss: Any = None, scale: float = 1.0, eager: bool = True
) -> Result:
    """Some steps of the network that the definition knows, in float64."""
    with floats("float64"):
        keras.utils.set_random_seed(0)
        model = cnn()
        start = [scale * w for w in model.get_weights()]
        model.set_weights(start)
        model.compile(optimizer, loss or cross_entropy(), run_eagerly=eager)
        x, y = images()
        for (rows,) in STEPS:
            model.train_on_batch(x[rows], y[rows])
    return {"start": start, "weights": model.get_weights(), "model": model}


def kfac(inner: Any = "default", **options: Any) -> Any:
    """By names, as in the cases of the modes."""
    options = DEFAULTS | {"step": "exact"} | options
    options = {
        name: OBJECTS[value]() if value in OBJECTS else value
        for name, value in options.items()
    }
    if inner in INNERS:
        inner = INNERS[inner]()
    return tfkfac.KFAC(inner, **options)


LEFT: dict[str, Any] = {"skip_layers": ("hidden",)}


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 1),
        ({"solver": "eigen"}, 8),  # a loss of several nats
        # The schedule of one optimizer is that of the other.
        ({"inner": "warm-up", **LEFT}, 1),
        ({"rest_optimizer": "warm-up", **LEFT}, 1),
    ],
)
def test_steps_are_the_definition(
    options: dict[str, Any], scale: float
) -> None:
    result = trained(kfac(**options), scale=scale, eager=scale > 1)
    options = {"inner": "default", "step": "exact"} | options
    want = by_definition(result["start"], STEPS, None, **options)
    assert_close(result, want)


@pytest.mark.parametrize(
    ("inner", "loss"),
    [
        (1e-3, None),
        (30.0, None),
        (None, cross_entropy(reduction="sum")),
        (None, lambda y, p: 17.0 * cross_entropy()(y, p)),
    ],
)
def test_neither_the_rate_nor_the_unit_of_the_loss_matters(
    inner: Any, loss: Any
) -> None:
    """But for the gradients that Adam is given of what is left out."""
    options = {} if loss is not None else LEFT
    want = trained(kfac(**options))
    got = trained(kfac(inner, **options), loss)
    assert_close(got, want["weights"])


def test_half_a_rate_is_half_a_step() -> None:
    """Of both optimizers, also where a callback sets it after a save."""
    moves = []
    for rate in (0.25, 0.125):
        model = trained(kfac(0.25, **LEFT))["model"]
        model.optimizer.learning_rate = rate
        before = model.get_weights()
        with floats("float64"):
            x, y = images()
            model.train_on_batch(x[:8], y[:8])
        after = model.get_weights()
        moves.append([a - b for a, b in zip(after, before, strict=True)])
    for one, other in zip(*moves, strict=True):
        assert np.abs(one).max() > 1e-5
        np.testing.assert_allclose(other, one / 2, rtol=1e-6)
