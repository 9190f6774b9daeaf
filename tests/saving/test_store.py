"""Names of saved entries, and how they find their variables again."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.small import compiled_mlp, kfac_of
from tfkfac.saving.store import (
    Entry,
    Spread,
    load_state,
    save_state,
    why_unreadable,
)


def entry(layer: str, name: str, value: float, **kwargs: Any) -> Entry:
    return Entry(layer, name, tf.Variable([value]), **kwargs)


def saved(entries: list[Entry]) -> dict[str, Any]:
    store: dict[str, Any] = {}
    save_state(store, entries)
    return store


def values(entries: list[Entry]) -> list[float]:
    return [float(e.variable[0]) for e in entries]


def test_keys_name_spread_entry_and_layer() -> None:
    """And nothing of the place: groups of HDF5 are made by slashes."""
    store = saved(
        [
            entry("", "count", 1.0),
            entry("part/dense", "factor_A", 2.0, spread=Spread.OWNED),
        ]
    )
    assert {k: float(v[0]) for k, v in store.items()} == {
        "replicated:count:": 1.0,
        "owned:factor_A:part|dense": 2.0,
    }


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_halves_are_cast(dtype: tf.DType) -> None:
    """Averages were once kept in half precision."""
    old = [Entry("a", "x", tf.Variable([1.5], dtype=dtype))]
    new = [entry("a", "x", -1.0)]
    load_state(saved(old), new, "test")
    assert values(new) == [1.5]


def test_order_does_not_matter() -> None:
    old = [entry(layer, "x", i) for i, layer in enumerate("abc")]
    new = [entry(layer, "x", -1.0) for layer in "cab"]
    load_state(saved(old), new, "test")
    assert values(new) == [2.0, 0.0, 1.0]


def test_automatic_names_are_matched_by_their_numbers() -> None:
    """The tenth comes after the ninth, and the one without before all."""
    old = [entry(f"dense_{i}", "x", i) for i in (8, 9, 10)]
    new = [entry(layer, "x", -1.0) for layer in ("dense_2", "dense", "dense_1")]
    load_state(saved(old), new, "test")
    assert values(new) == [10.0, 8.0, 9.0]


def test_automatic_names_of_containers() -> None:
    old = [entry(f"part_{i}/dense_{i + 4}", "x", i) for i in (1, 2)]
    new = [entry(f"part_{i}/dense_{i}", "x", -1.0) for i in (5, 6)]
    load_state(saved(old), new, "test")
    assert values(new) == [1.0, 2.0]


def test_layers_of_other_kinds_do_not_match() -> None:
    with pytest.raises(
        ValueError, match=r"file: \['conv_1', 'dense'\].*model: \['d"
    ):
        load_state(
            saved([entry("conv_1", "x", 1.0), entry("dense", "x", 1.0)]),
            [entry("dense_2", "x", 1.0), entry("dense_3", "x", 1.0)],
            "test",
        )


def test_nothing_is_assigned_if_anything_differs() -> None:
    old = [entry("a", "x", 1.0), Entry("b", "x", tf.Variable([1.0, 2.0]))]
    new = [entry("a", "x", -1.0), entry("b", "x", -1.0)]
    with pytest.raises(ValueError, match="does not fit layer 'b'"):
        load_state(saved(old), new, "test")
    assert values(new) == [-1.0, -1.0]


def test_another_spread_is_another_entry() -> None:
    old = saved([entry("", "directions", 1.0, spread=Spread.ELEMENTS)])
    new = [entry("", "directions", -1.0, spread=Spread.DIRECTIONS)]
    with pytest.raises(ValueError, match=r"directions \(elements\)"):
        load_state(old, new, "test")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["0", "1"], "another optimizer"),
        (["iteration"], "another optimizer"),
        (["00000:weight:dense", "00001:factor_A:a|b"], "earlier version"),
        (["replicated:count:", "owned:x:dense"], None),
        ([], None),
    ],
)
def test_what_a_store_is(keys: list[str], words: str | None) -> None:
    why = why_unreadable(dict.fromkeys(keys, np.zeros(1)))
    assert why is None if words is None else words in str(why)


def test_the_format_of_before_is_named() -> None:
    """The optimizer starts anew and says why."""
    model = compiled_mlp()
    with pytest.warns(UserWarning, match=r"'kfac'.*earlier version.*anew"):
        kfac_of(model).load_own_variables(
            {"00000:factor_updates:": np.array(7)}
        )
    assert int(kfac_of(model).factor_updates) == 0


@pytest.mark.parametrize(
    ("layout", "spreads"),
    [
        ("rows", {"directions": "elements", "momentum": "replicated"}),
        ("columns", {"directions": "directions", "momentum": "directions"}),
    ],
)
def test_directions_say_how_they_are_spread(
    layout: str, spreads: dict[str, str]
) -> None:
    model = compiled_mlp()
    optimizer = tfkfac.FOSI(layout=layout, num_largest=2)
    model.compile(optimizer, "mse")
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    found = {k.split(":")[1]: k.split(":")[0] for k in store}
    assert spreads.items() <= found.items()
    assert found["ritz_values"] == found["skipped_steps"] == "replicated"
