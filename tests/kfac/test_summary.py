"""`summary`, `factors` and `state_bytes`."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.small import (
    LateBuilt,
    Scale,
    compiled_mlp,
    curvature,
    data,
    loss,
    summary_text,
    unbuilt_sequential,
)
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential

X, Y = data()


def test_summary() -> None:
    """One row per block with its shapes, weights and bytes."""
    model = sequential(
        layers.Conv2D(6, 3, groups=2, use_bias=False, name="grouped"),
        layers.GroupNormalization(2, center=False, name="norm"),
        layers.SeparableConv2D(5, 2, name="separable"),
        layers.Flatten(),
        layers.Dense(7, name="dense"),
        Scale(name="scale"),
        shape=(5, 5, 2),
    )
    optimizer = bind(model)
    assert {k: v[:4] for k, v in blocks_of(optimizer).items()} == {
        "grouped": ["Conv", "2 of 9 x 9", "2 of 3 x 3", "54"],
        "norm": ["Normalization", "-", "6 of 1 x 1", "6"],
        "depthwise/separable": [
            "SeparableConv, depthwise",
            "6 of 4 x 4",
            "6 of 1 x 1",
            "24",
        ],
        "pointwise/separable": [
            "SeparableConv, pointwise",
            "7 x 7",
            "5 x 5",
            "35",
        ],
        "dense": ["Dense", "21 x 21", "7 x 7", "147"],
    }
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    text = summary_text(optimizer)
    assert "Preconditioned weights: 266 of 273." in text
    assert "solver inverse, inner optimizer SGD" in text
    assert f"model '{model.name}'" in text
    # The factors and inverses of the last layer, in float32.
    assert blocks_of(optimizer)["dense"][4] == "3.83 KB"
    size = 2 * 4 * (21**2 + 7**2) / 1024
    assert size == pytest.approx(3.83, abs=5e-3)


# ------------------------------------------------------------- before build
@pytest.mark.parametrize("build", [unbuilt_sequential, LateBuilt])
def test_summary_before_the_model_is_built(build: Callable[[], Any]) -> None:
    """An error before the model is built; a table after a step."""
    model = build()
    optimizer = tfkfac.KFAC(step="natural")
    model.compile(optimizer, loss(), run_eagerly=True)
    for report in (optimizer.summary, optimizer.state_bytes):
        with pytest.raises(ValueError, match=r"not built.*`model\.build"):
            report()
    model.train_on_batch(X, Y)
    assert list(blocks_of(optimizer)) == ["hidden", "logits"]


def test_reports_before_a_first_step() -> None:
    """A built model has factors of zeros."""
    optimizer = compiled_mlp().optimizer
    for block in optimizer.factors().values():
        assert not block["A"].any()
        assert not block["G"].any()
    late = tfkfac.KFAC(step="natural")
    keras.Sequential([layers.Dense(2)]).compile(late)
    with pytest.raises(ValueError, match=r"no factors yet.*Train a step"):
        late.factors()


# ------------------------------------------------------------------- bytes
@pytest.mark.parametrize(
    ("solver", "dtype", "inverse"),
    [("eigen", "float64", None), ("inverse", "float32", "bfloat16")],
)
def test_state_bytes_are_those_of_the_variables(
    solver: str, dtype: str, inverse: str | None
) -> None:
    with floats(dtype):
        tokens = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(9, 4, name="tokens"),
                layers.Conv1D(4, 2, groups=2),
                layers.BatchNormalization(),
                layers.SeparableConv1D(3, 2),
                layers.Flatten(),
                layers.Dense(2, use_bias=False),
            ]
        )
    optimizer = bind(
        tokens, solver=solver, inverse_dtype=inverse, factor_dtype=inverse
    )
    row = blocks_of(optimizer)["tokens"]
    assert row[:4] == ["Embedding", "diagonal 9", "4 x 4", "36"]
    state = curvature(optimizer)

    def stored_bytes(entry: str, stored: str) -> int:
        values = [
            v for k, v in state.items() if k.split(":")[1].startswith(entry)
        ]
        assert all(v.dtype.name == stored for v in values)
        return sum(v.nbytes for v in values)

    got = optimizer.state_bytes()
    assert got == {
        "factors": stored_bytes("factor_A", dtype)
        + stored_bytes("factor_G", dtype),
        "decompositions": stored_bytes("solver_", inverse or dtype),
        "total": got["factors"] + got["decompositions"],
    }
    assert got["factors"] > 0
    assert got["decompositions"] > 0
