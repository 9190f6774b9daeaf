"""Saved entries: keys, other layers, solvers, workers and faults."""

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.reference import eigen_solve, inverse_solve
from tests.support.saved_models import train
from tests.support.small import (
    CLASSES,
    FEATURES,
    assert_same,
    compiled_mlp,
    curvature,
    data,
    everything,
    gradients_of,
    kfac_of,
    loss,
)
from tfkfac.saving.entries import STATE, Entry, Region, Spread
from tfkfac.saving.store import Saved, load_state, save_state


def entry(layer: str, name: str, value: float, **kwargs: Any) -> Entry:
    return Entry(layer, name, tf.Variable([float(value)]), **kwargs)


def saved(entries: list[Entry]) -> dict[str, Any]:
    store: dict[str, Any] = {}
    save_state(store, {0: entries}, 1)
    return store


def load(store: dict[str, Any], entries: list[Entry]) -> None:
    state = Saved(store)
    state.match({e.layer for e in entries}, {STATE}, "test")
    load_state(state, {0: entries}, 1, "test")


def test_keys() -> None:
    """Keys have section, entry and layer; "/" would be a group of HDF5."""
    store = saved(
        [
            entry("", "count", 1.0),
            entry("part/dense", "factor_A", 2.0, spread=Spread.OWNED),
        ]
    )
    assert int(store.pop("format:version:")) == 2
    assert {k: float(v[0]) for k, v in store.items()} == {
        "state:count:": 1.0,
        "state:factor_A:part|dense": 2.0,
    }


@pytest.mark.parametrize(
    ("old", "new", "values"),
    [
        ("a b c", "c a b", [2, 0, 1]),
        # Ordered by number; a name without a number is first.
        ("d_8 d_9 d_10", "d_2 d d_1", [2, 0, 1]),
        # Containers have automatic names, too.
        ("part_1/d_5 part_2/d_6", "part_6/d_6 part_5/d_5", [1, 0]),
    ],
)
def test_layers_are_found(old: str, new: str, values: list[int]) -> None:
    entries = [entry(layer, "x", -1.0) for layer in new.split()]
    stored = [entry(layer, "x", i) for i, layer in enumerate(old.split())]
    load(saved(stored), entries)
    assert [int(e.variable[0]) for e in entries] == values


def test_stores_without_state() -> None:
    """An unknown format is refused; state of others is not used."""
    model = compiled_mlp(eager=True)
    train(model, 0, 1)
    optimizer, before = kfac_of(model), everything(model)
    words = "format unknown, this version of tfkfac reads format 2"
    with pytest.raises(ValueError, match=words):
        optimizer.load_own_variables({"state:factor_updates:": np.array(7)})
    for keys, words in (
        ([], "no curvature in the loaded file"),
        (["0", "1"], "'kfac'.*another optim.*initial"),
        (["iteration"], "'kfac'.*another optim.*initial"),
    ):
        with pytest.warns(UserWarning, match=words):
            optimizer.load_own_variables(dict.fromkeys(keys, np.array(7)))
        assert_same(everything(model), before)


# ------------------------------------------------------------ several workers
WHOLE = np.arange(1.0, 11.0).reshape(2, 5)


def slices(workers: int, length: int) -> dict[int, list[Entry]]:
    """Equal slices of the last axis; the last ones end in zeros."""
    starts = [min(rank * length, 5) for rank in range(workers)]
    zeros = tf.zeros([2, length], tf.float64)
    return {
        rank: [
            Entry("a", "x", tf.Variable(zeros), region=Region((2, 5), place))
        ]
        for rank, place in enumerate((0, start) for start in starts)
    }


def loaded(store: dict[str, Any], entries: dict[int, list[Entry]]) -> list[Any]:
    """The values of each worker after it has loaded the store."""
    state = Saved(store)
    state.match({"a"}, {STATE}, "test")
    for rank, local in entries.items():
        load_state(state, {rank: local}, len(entries), "test")
    return [e[0].variable.numpy().tolist() for e in entries.values()]


@pytest.mark.parametrize(("workers", "length"), [(1, 8), (2, 3), (4, 2)])
def test_slices_are_gathered(workers: int, length: int) -> None:
    entries = slices(workers, length)
    got = loaded({"state:x:a": WHOLE}, entries)
    padded = np.pad(WHOLE, [(0, 0), (0, workers * length - 5)])
    assert np.concatenate(got, 1).tolist() == padded.tolist()
    store: dict[str, Any] = {}
    save_state(store, entries, workers)
    assert store["state:x:a"].tolist() == WHOLE.tolist()


def numbers(values: list[float], spread: Spread) -> dict[int, list[Entry]]:
    return {
        rank: [Entry("a", "x", tf.Variable(value), spread)]
        for rank, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("spread", "before", "after"),
    [
        (Spread.PARTIAL, [1.0, 2.0], [1.0, 2.0]),
        (Spread.PARTIAL, [1.0, 2.0], [3.0]),
        (Spread.PARTIAL, [1.0, 2.0, 4.0, 8.0], [5.0, 10.0]),
        (Spread.PARTIAL, [1.0, 2.0], [1.0, 2.0, 0.0, 0.0]),
        (Spread.PARTIAL, [7.0], [7.0, 0.0]),
        (Spread.EACH, [1.0, 3.0, 2.0], [1.0, 3.0, 2.0]),
        (Spread.EACH, [1.0, 3.0, 2.0], [3.0, 3.0]),
        (Spread.EACH, [4.0], [4.0, 4.0]),
        (Spread.REPLICATED, [4.0, 4.0], [4.0]),
    ],
)
def test_numbers_of_workers(
    spread: Spread, before: list[float], after: list[float]
) -> None:
    """The sum over workers is kept; all workers get the latest clock."""
    store: dict[str, Any] = {}
    save_state(store, numbers(before, spread), len(before))
    new = numbers([-1.0] * len(after), spread)
    assert loaded(store, new) == after


def test_clocks_of_several_owners() -> None:
    new = numbers([0.0, 0.0], Spread.REPLICATED)
    assert loaded({"state:x:a": np.array([2.0, 5.0])}, new) == [5.0, 5.0]


def test_all_faults_are_listed() -> None:
    """Nothing is assigned if any entry differs."""
    pairs = ("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")
    new = [entry(*pair, -1.0) for pair in pairs]
    stored = [entry("a", "x", np.nan), entry("b", "x", np.inf)]
    with pytest.raises(
        ValueError, match=r"'a': x has 1.*, y is not in the file; layer 'b': x"
    ):
        load(saved([*stored, entry("c", "x", 1.0)]), new)
    assert [float(e.variable[0]) for e in new] == [-1.0] * 4


# -------------------------------------------------------------- invalid entries
X, Y = data()


@functools.cache
def kept() -> tuple[Any, dict[str, Any]]:
    """A trained model and its saved state."""
    model = compiled_mlp(solver="eigen", eager=True)
    for _ in range(2):
        model.train_on_batch(X, Y)
    store: dict[str, Any] = {}
    model.optimizer.save_own_variables(store)
    return model, store


CHANGES: dict[str, Any] = {
    "missing": None,
    "text": lambda _: "x",
    "ragged": lambda _: [[1.0], [1.0, 2.0]],
    "empty": lambda _: np.zeros(0),
    "other shape": lambda value: np.tile(np.ravel(value), 2),
    "transposed": lambda value: np.asarray(value).T,
    "complex": lambda value: np.asarray(value) + 1j,
    "bool": lambda value: np.asarray(value) > 0,
    "integers": lambda value: np.asarray(value).astype("int64"),
    "floats": lambda value: np.asarray(value).astype("float64"),
    "unsigned": lambda value: np.full(np.shape(value), 2**64 - 1, "uint64"),
    "strings": lambda value: np.asarray(value).astype("U8"),
    "NaN": lambda value: np.full(np.shape(value), np.nan),
    "infinity": lambda value: np.full(np.shape(value), np.inf),
    "large": lambda value: np.full(np.shape(value), 1e300),
    "negative": lambda value: -np.abs(np.asarray(value)) - 1,
    "python": lambda value: np.asarray(value).tolist(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_entries(change: str) -> None:
    """The error names the entry, or the next step is finite."""
    model, good = kept()
    key = next(k for k in good if "factor_A" in k)
    broken = dict(good)
    del broken[key]
    if CHANGES[change] is not None:
        broken[key] = CHANGES[change](good[key])
    try:
        model.optimizer.load_own_variables(broken)
    except (TypeError, ValueError) as error:
        assert key.split(":")[1] in str(error), str(error)
    else:
        model.train_on_batch(X, Y)
        assert all(np.isfinite(w).all() for w in model.get_weights())
    model.optimizer.load_own_variables(good)


# --------------------------------------------- other layers, shapes and solvers
def state_of(names: str, width: int = 5, **arguments: Any) -> dict[str, Any]:
    """The saved state for a network of dense layers of these names."""
    *hidden, last = names.split()
    stack = [layers.Dense(width, name=name) for name in hidden]
    stack.append(layers.Dense(CLASSES, name=last))
    model = keras.Sequential([keras.Input((FEATURES,)), *stack])
    model.compile(tfkfac.KFAC(**{"step": "natural", **arguments}), loss())
    return curvature(kfac_of(model))


def test_other_layers() -> None:
    model = compiled_mlp()
    both = "hidden logits"
    for state, words in (
        (state_of("first logits"), "'kfac'.*'first'.*'hidden'"),
        (state_of(f"{both} more"), r"Only in the file: \['more'\]"),
        (
            state_of(both, skip_layers=["hidden"]),
            r"Only in.*model: \['hidden'\]",
        ),
        (state_of(both, 9), r"not fit layer 'hidden'.*\(5, 5\).*\(9, 9\)"),
    ):
        with pytest.raises(ValueError, match=words):
            kfac_of(model).load_own_variables(state)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("eigen", "inverse"), ("inverse", "eigen")]
)
def test_other_solver(saved: str, loaded: str, tmp_path: Path) -> None:
    """Factors are loaded; the next step decomposes them at any interval."""
    arguments: Any = {"kl_clip": None, "factor_update_interval": 3}
    arguments |= {"inverse_update_interval": 3, "damping": 0.1, "eager": True}
    model = compiled_mlp(keras.optimizers.SGD(0.05), solver=saved, **arguments)
    train(model, 0, 4)
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled_mlp(keras.optimizers.SGD(0.05), solver=loaded, **arguments)
    train(other, 0, 1)
    words = rf"'kfac'.*\['{saved}'\].*\['{loaded}'\] is reset"
    with pytest.warns(UserWarning, match=words):
        other.load_weights(tmp_path / "model.weights.h5")
    factors = kfac_of(other).factors()
    for layer, kept in kfac_of(model).factors().items():
        assert_same(factors[layer], kept)
    before = other.get_weights()
    x, y = data(seed=4)
    kernel, bias, *_ = (np.array(g) for g in gradients_of(other, x, y))
    other.train_on_batch(x, y)
    solve = {"eigen": eigen_solve, "inverse": inverse_solve}[loaded]
    step = solve(np.vstack([kernel, bias]), **factors["hidden"], damping=0.1)
    moved = np.vstack(
        [b - w for b, w in zip(before, other.get_weights(), strict=True)][:2]
    )
    np.testing.assert_allclose(moved, 0.05 * step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"step": "natural"}, {"step": "spectral"}),
        ({"step": "spectral"}, {"step": "natural"}),
        ({"step": "spectral", "solver": "eigen"}, {"step": "spectral"}),
    ],
)
def test_other_step(saved: dict[str, str], loaded: dict[str, str]) -> None:
    """Factors are loaded; momenta and length of spectral steps are reset.

    Momenta are whitened by the roots of a solver.
    """
    state = state_of("hidden logits", **saved)
    model = compiled_mlp(**loaded, eager=True)
    model.train_on_batch(X, Y)
    optimizer = kfac_of(model)
    with pytest.warns(UserWarning, match="is reset"):
        optimizer.load_own_variables(state)
    (kept,) = optimizer.method.states
    for block in kept.preconditioners:
        momenta = [v for v in (block.momentum, block.extents) if v is not None]
        assert not any(np.any(variable) for variable in momenta)
