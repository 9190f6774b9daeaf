"""Invalid saved entries raise an error that names the entry, or train."""

import functools
from typing import Any

import numpy as np
import pytest

from tests.support.small import compiled_mlp, data

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
    "none": lambda _: None,
    "text": lambda _: "x",
    "bytes": lambda _: b"x",
    "object": lambda _: object(),
    "dict": lambda _: {"a": 1},
    "ragged": lambda _: [[1.0], [1.0, 2.0]],
    "empty": lambda _: np.zeros(0),
    "other shape": lambda value: np.tile(np.ravel(value), 2),
    "one axis more": lambda value: np.asarray(value)[None, None],
    "transposed": lambda value: np.asarray(value).T,
    "complex": lambda value: np.asarray(value) + 1j,
    "bool": lambda value: np.asarray(value) > 0,
    "integers": lambda value: np.asarray(value).astype("int64"),
    "floats": lambda value: np.asarray(value).astype("float64"),
    "half": lambda value: np.asarray(value).astype("float16"),
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
