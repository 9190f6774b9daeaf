"""What a skipped step leaves behind: nothing, and after many an error."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import workers_unsound
from tests.support.cluster import Pool
from tests.support.jobs import Jobs
from tests.support.reference import Array
from tests.support.small import CLASSES, FEATURES, data, gradients_of, loss

X, Y = data(64)
BATCH, BAD = 16, 1
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "kfac": tfkfac.KFAC,
    "fosi": lambda **kwargs: tfkfac.FOSI(warmup_steps=2, **kwargs),
    "quadratic": lambda **kwargs: tfkfac.KFAC(step="quadratic", **kwargs),
}


def noisy() -> Any:
    """A model that keeps statistics, seeds, and metrics that can be NaN."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(CLASSES),
        ]
    )


def compiled(optimizer: Any, eager: bool = False) -> Any:
    model = noisy()
    entropy = keras.metrics.SparseCategoricalCrossentropy(
        from_logits=True, name="entropy"
    )
    model.compile(
        optimizer, loss(), metrics=["accuracy", entropy], run_eagerly=eager
    )
    return model


def batches(bad: bool) -> Iterator[tuple[Array, Array]]:
    """Four, one of which has a NaN or is missing."""
    for i in range(4):
        rows = slice(BATCH * i, BATCH * (i + 1))
        x = X[rows].copy()
        if i == BAD:
            if not bad:
                continue
            x[0, 0] = np.nan
        yield x, Y[rows]


@pytest.mark.parametrize(
    ("name", "eager"),
    [
        ("kfac", False),
        pytest.param("kfac", True, marks=pytest.mark.slow),
        pytest.param("fosi", False, marks=pytest.mark.slow),
        pytest.param("quadratic", False, marks=pytest.mark.slow),
    ],
)
def test_no_trace(name: str, eager: bool) -> None:
    """Statistics, seeds, loss and metrics: as if there was no such batch."""
    found = []
    for bad in (True, False):
        model = compiled(OPTIMIZERS[name](), eager)
        history = model.fit(batches(bad), shuffle=False, verbose=0).history
        assert int(model.optimizer.skipped_steps) == bad
        state = [np.array(v) for v in model.variables]
        found.append((history, state))
    (history, state), (want_history, want_state) = found
    assert history == want_history
    assert np.isfinite(list(history.values())).all()
    for got, want in zip(state, want_state, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_nothing_but_skipped_steps() -> None:
    """Where all steps are skipped the statistics are those of the start."""
    model = compiled(tfkfac.KFAC())
    before = [np.array(v) for v in model.variables]
    bad = np.full_like(X, np.nan)
    history = model.fit(bad, Y, BATCH, epochs=2, verbose=0).history
    assert history["loss"] == [0.0, 0.0]
    for got, want in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bad_micro_batch(place: int) -> None:
    """Whichever it is, nothing that is kept is NaN; nor the epoch's loss."""
    rows, x = slice(2 * BATCH, 4 * BATCH), X.copy()
    x[BATCH * place : BATCH * (place + 1)] = np.nan

    def run(x: Array, y: Array) -> tuple[Any, dict[str, Any]]:
        model = compiled(tfkfac.KFAC(gradient_accumulation_steps=2))
        done = model.fit(x, y, BATCH, shuffle=False, verbose=0)
        return model, done.history

    model, history = run(x, Y)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite(list(history.values())).all()
    for variable in model.variables:
        assert np.isfinite(np.array(variable)).all()
    if place == 0:  # with it the rest of its step is gone
        twin, want = run(X[rows], Y[rows])
        assert history == want
        for got, value in zip(model.variables, twin.variables, strict=True):
            np.testing.assert_array_equal(np.array(got), np.array(value))


# ------------------------------------------------------------- too many of them
def lost(count: int) -> Array:
    x = X.copy()
    x[: BATCH * count] = np.nan
    return x


@pytest.mark.parametrize(
    "name", ["kfac", pytest.param("fosi", marks=pytest.mark.slow)]
)
def test_fit_ends(name: str) -> None:
    """With how many, and what was not finite; not before."""
    eager = name == "kfac"
    model = compiled(OPTIMIZERS[name](max_skipped_steps=3), eager)
    model.fit(lost(2), Y, BATCH, epochs=2, shuffle=False, verbose=0)
    message = (
        r"has skipped 3 steps in a row \(max_skipped_steps=3\): 6 of 6 "
        r"gradients are not finite, the first of them that of '.*kernel'"
    )
    with pytest.raises(FloatingPointError, match=message):
        model.fit(lost(4), Y, BATCH, verbose=0)
    assert int(model.optimizer.skipped_steps) == 4 + 3


def test_other_loops() -> None:
    """`train_on_batch`, eager loops, and graphs that look after themselves."""
    model = compiled(tfkfac.KFAC(max_skipped_steps=2), eager=True)
    bad = lost(1)[:BATCH]
    model.train_on_batch(bad, Y[:BATCH])
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        model.train_on_batch(bad, Y[:BATCH])
    model = noisy()
    optimizer = tfkfac.KFAC(max_skipped_steps=2).attach(model)

    def step() -> None:
        gradients = gradients_of(model, bad, Y[:BATCH])
        optimizer.apply(gradients, model.trainable_variables)

    step()
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        step()
    compiled_step = tf.function(step)
    compiled_step()
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        optimizer.check_skipped_steps()


def test_what_went_wrong_is_said_at_the_end(capfd: Any) -> None:
    """What is new in this `fit`, however often the like was before."""
    model = compiled(tfkfac.KFAC(), eager=True)
    for count in (1, 2, 0):
        capfd.readouterr()
        model.fit(lost(count), Y, BATCH, shuffle=False, verbose=0)
        said = f"in this fit: steps skipped, gradients not finite: {count}\n"
        assert (said in capfd.readouterr().err) == bool(count)
    assert model.optimizer.events() == {
        "steps skipped, gradients not finite": 3
    }


def test_one_gradient_of_many() -> None:
    """The message names it."""
    model = noisy()
    optimizer = tfkfac.KFAC(max_skipped_steps=1).attach(model)
    gradients = gradients_of(model, X, Y)
    gradients[3] *= np.inf
    path = model.trainable_variables[3].path
    with pytest.raises(FloatingPointError, match=f"1 of 6 .* that of '{path}'"):
        optimizer.apply(gradients, model.trainable_variables)


def test_the_argument() -> None:
    for cls in (tfkfac.KFAC, tfkfac.FOSI):
        assert cls().max_skipped_steps is None
        optimizer = cls(max_skipped_steps=7)
        again = cls.from_config(optimizer.get_config())
        assert again.max_skipped_steps == 7
        again.max_skipped_steps = None
        for wrong in (0, -1, 1.5, "x", True):
            with pytest.raises((TypeError, ValueError), match="`max_skipped"):
                cls(max_skipped_steps=wrong)


# ------------------------------------------------------------ several workers
JOBS = Jobs(workers_unsound)
for where_ in ("two", "mirrored"):
    for kind_ in ("kfac", "fosi"):
        JOBS.add(
            f"{where_}: {kind_}",
            "skip",
            kind_,
            slow=True,
        )


@pytest.mark.parametrize(
    "name",
    JOBS.params(["two: kfac", "two: fosi", "mirrored: kfac", "mirrored: fosi"]),
)
def test_all_workers_together(pool: Pool, name: str) -> None:
    """One worker has a NaN: no trace on any; with too many, all raise."""
    for worker in JOBS.results(pool, name):
        history, variables = worker["bad"]
        want_history, want_variables = worker["without"]
        assert history == want_history
        for got, want in zip(variables, want_variables, strict=True):
            np.testing.assert_array_equal(got, want)
        assert "2 steps in a row" in worker["error"]
        assert "gradients are not finite" in worker["error"]


JOBS.add("two: accelerator", "end", slow=True)


@pytest.mark.parametrize("name", JOBS.params(["two: accelerator"]))
def test_accelerators_end_with_the_workers(pool: Pool, name: str) -> None:
    """They have no gradients of their own; the words are those of a worker."""
    worker, accelerator = JOBS.results(pool, name)
    assert "skipped 3 steps in a row (max_skipped_steps=3): " in worker
    assert "gradients are not finite, the first of them that of" in worker
    assert accelerator == worker
