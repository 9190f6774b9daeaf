"""Saved entries: keys, layers with other names, workers, faults."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.small import compiled_mlp, kfac_of
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
    assert int(store.pop("format:version:")) == 1
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


def test_stores_of_other_programs() -> None:
    """An unknown format is refused; state of others is not used."""
    optimizer = kfac_of(compiled_mlp())
    words = "format unknown, this version of tfkfac reads format 1"
    with pytest.raises(ValueError, match=words):
        optimizer.load_own_variables({"state:factor_updates:": np.array(7)})
    for keys in (["0", "1"], ["iteration"]):
        with pytest.warns(UserWarning, match=r"'kfac'.*another optim.*initial"):
            optimizer.load_own_variables(dict.fromkeys(keys, np.array(7)))
    assert int(optimizer.factor_updates) == 0


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
    """All replicas get the latest clock."""
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
