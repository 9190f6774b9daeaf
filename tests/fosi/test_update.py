"""How often a step reads the directions, and that it still is FOSI's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers import SGD, Adam

from tests.support.dtypes import floats
from tests.support.fosi_reference import (
    CLASSES,
    HIDDEN,
    SIZE,
    Fosi,
    Network,
    assert_path,
    data,
    fit,
    flat,
    fosi,
    loss,
    mlp,
    sgd,
)
from tests.support.marks import with_slow
from tests.support.reference import Array
from tfkfac.fosi.layouts import LAYOUTS
from tfkfac.fosi.update import is_plain_sgd
from tfkfac.training.job import Job

Maker = Callable[[], Any]
DIRECTIONS = 3


# ------------------------------------------------------------------ readings
SUMS: dict[str, Maker] = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, 0.9),
    "nesterov": lambda: SGD(0.1, 0.9, True),
    "no decay": lambda: SGD(0.1, weight_decay=0.0),
    "averages": lambda: SGD(0.1, 0.9, use_ema=True),
}
OTHERS: dict[str, Maker] = {
    "decay": lambda: SGD(0.1, weight_decay=0.1),
    "clipnorm": lambda: SGD(0.1, clipnorm=1.0),
    "clipvalue": lambda: SGD(0.1, clipvalue=1.0),
    "global clipnorm": lambda: SGD(0.1, global_clipnorm=1.0),
    "accumulation": lambda: SGD(0.1, gradient_accumulation_steps=2),
    "a kind of SGD": lambda: type("Other", (SGD,), {})(0.1),
    "adam": lambda: Adam(0.1),
}


@pytest.mark.parametrize("inner", [*SUMS, *OTHERS])
def test_which_changes_are_sums_of_gradients(inner: str) -> None:
    job = Job("fosi", mlp(), (SUMS | OTHERS)[inner]())
    assert is_plain_sgd(job) == (inner in SUMS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_changes_are_not(dtype: str) -> None:
    """They are not orthogonal to anything."""
    with floats(dtype):
        model = mlp()
        assert not is_plain_sgd(Job("fosi", model, SGD(0.1)))


# ------------------------------------------------------------- what it does
@pytest.mark.parametrize("layout", with_slow(LAYOUTS, "columns"))
@pytest.mark.parametrize("nesterov", with_slow([True, False], False))
def test_momentum_stays_out_of_new_directions(
    nesterov: bool, layout: str
) -> None:
    """In float32, with SGD's momentum of the directions before, and `s`.

    Without Newton steps no weight moves in the directions at all.
    """
    x, y = data()
    model = mlp()
    options = {"num_smallest": 1, "learning_rate_clip": 2.0}
    optimizer = fosi(
        SGD(0.1, 0.9, nesterov), alpha=0.0, layout=layout, **options
    )
    model.compile(optimizer, loss())
    before, seen = flat(model), set()
    for count in range(10):
        model.train_on_batch(x, y)
        change, before = flat(model) - before, flat(model)
        length = np.linalg.norm(change)
        assert length > 1e-3
        if count < 2:
            continue
        rows = optimizer.method.states[0].subspace.directions.numpy()
        rounding = 3e-7 * np.abs(before).max()
        np.testing.assert_allclose(rows @ change, 0, atol=rounding)
        # The momentum itself has much of what it had before.
        slots = momentum_of(optimizer)
        assert np.abs(rows @ slots).max() > 1e-2 * np.linalg.norm(slots)
        seen.add(rows.tobytes())
    assert len(seen) == 3


def momentum_of(optimizer: Any) -> Array:
    """SGD's."""
    momenta = optimizer.inner_optimizer.momentums
    return np.concatenate([np.ravel(b) for b in momenta])


@pytest.mark.slow
def test_gradients_of_some_weights_between(double: None) -> None:
    """A momentum of theirs has parts in directions that do not change."""
    x, y = data()
    model = mlp()
    optimizer = fosi(SGD(0.1, 0.9))
    model.compile(optimizer, loss())
    weights = model.trainable_variables
    start, path = flat(model), [flat(model)]
    optimizer.build(weights)

    @tf.function
    def train(trained: tuple[int, ...]) -> None:
        with tf.GradientTape() as tape:
            value = model.compute_loss(x, y, model(x, training=True))
        chosen = [weights[i] for i in trained]
        optimizer.apply(tape.gradient(value, chosen), chosen)

    for count in range(10):
        train((2, 3) if count % 3 == 1 else (0, 1, 2, 3))
        path.append(flat(model))
        subspace = optimizer.method.states[0].subspace
        inside = subspace.directions.numpy() @ momentum_of(optimizer)
        known = subspace.inner_momentum.numpy()
        np.testing.assert_allclose(known, inside, atol=1e-14)
        assert count < 2 or np.abs(inside).max() > 1e-4
    network = Network(x, y)
    # The hidden layer is frozen in a third of the steps.
    mask, step_, last = np.ones(SIZE), 0, start
    hidden = SIZE - (HIDDEN + 1) * CLASSES

    def gradient(w: Array) -> Array:
        mask[:hidden] = step_ % 3 != 1
        return mask * network.gradient(w)

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        old = slots.get("v", np.zeros_like(g))
        slots["v"] = np.where(mask > 0, 0.9 * old - 0.1 * g, old)
        return mask * slots["v"]

    def finish(w: Array, t: int) -> Array:
        nonlocal step_, last
        last = np.where(mask > 0, w, last)
        step_ += 1
        return last

    program = Fosi(rule, finish=finish)
    want = program.run(gradient, network.hessian, start, 10)
    assert program.estimated == [2, 5, 8]
    assert_path(np.stack(path), want, 1e-6)


@pytest.mark.slow
def test_decay_and_clipping(double: None) -> None:
    """Changes that are no sums of gradients, after other directions."""
    x, y = data()
    model = mlp()
    inner = SGD(0.1, 0.9, weight_decay=0.3, clipvalue=0.05)
    model.compile(fosi(inner), loss())
    momentum = sgd(0.1, 0.9)

    def rule(g: Array, w: Array, slots: dict[str, Array], t: int) -> Array:
        clipped = np.clip(g, -0.05, 0.05)
        return momentum(clipped, w, slots, t) - 0.1 * 0.3 * w

    network, start = Network(x, y), flat(model)
    want = Fosi(rule).run(network.gradient, network.hessian, start, 9)
    assert_path(fit(model, x, y, 9), want, 1e-6)


# -------------------------------------------------------------- what is said
