"""Statistics of every layer type: weight sharing x row weights x dtype.

Statistics are computed from a record of an input and a gradient, without a
training step. The gradient of the rows is compared with Keras' gradient.
"""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close, randomize
from tests.support.layer_cases import DENSE, EMBEDDING, LINEAR, make_input
from tests.support.layer_models import expected_factors
from tests.support.layer_views import View, view_of
from tests.support.reference import Array
from tfkfac.blocks import Block, Record, patches, statistics
from tfkfac.blocks.registry import build_registry

BATCH = 6
SHARING = ["expand", "reduce", "average"]  # "average": DP-KFAC, eq. 13
ZERO = np.array([False, True, False, False, True, False])
# Layers whose input may have a mask over its first positions.
MASKED = {*DENSE, "einsum_sequence", "einsum_heads"}


def build(case: str, dtype: str) -> tuple[Any, Block]:
    """Create a layer without activation, and its block."""
    factory, shape = LINEAR[case]
    layer = factory(name="block", dtype=dtype)
    is_embedding = case in EMBEDDING
    inputs = keras.Input(shape, dtype="int32" if is_embedding else dtype)
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    if not is_embedding:
        layer.activation = keras.activations.linear
    (block,) = build_registry(model, ()).blocks
    return layer, block


def kronecker(view: View, A: Array, G: Array) -> Array:
    """Kronecker product of the factors of a layer, or of each group."""
    if view.groups is None:
        return np.kron(np.diag(A) if view.diagonal else A, G)
    return np.stack([np.kron(*pair) for pair in zip(A, G, strict=True)])


def row_cases(case: str, x: Array) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Examples, rows with loss, mask and zero weights, by name."""
    batch = range(BATCH)
    cases: dict[str, Any] = {
        "all": (batch, None, None, ()),
        "weights": (batch, ~ZERO, None, [ZERO[:, None]]),
        "subsample": ([1, 4], None, None, ()),
    }
    if case in MASKED and x.ndim > 2:
        mask = np.random.default_rng(4).random(x.shape[:2]) < 0.6
        mask[:, 0] = True
        cases["mask"] = batch, mask, mask, ()
    return cases


@pytest.mark.parametrize(
    ("case", "dtype"),
    zip(LINEAR, ["float32", "float64"] * len(LINEAR), strict=False),
)
def test_statistics(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several slices for each convolution, with a shorter last slice.
    monkeypatch.setattr(patches, "_SLICE_ELEMENTS", 500)
    layer, block = build(case, dtype)
    view, rtol = view_of(layer), 1e-5 if dtype == "float32" else 1e-12
    x = make_input(case, LINEAR[case][1], BATCH)
    with tf.GradientTape() as tape:
        z = layer(tf.constant(x))
        noise = np.random.default_rng(2).normal(size=z.shape)
        loss = tf.reduce_sum(z * tf.constant(noise, z.dtype))
    weights = [v.value for v in block.variables]
    want = block.to_matrix(tape.gradient(loss, weights))
    record = Record(tf.constant(x), tf.constant(noise, z.dtype))
    assert_close(block.gradient(block.rows(record)), want, rtol, "gradient")
    round_trip = block.to_matrix(block.from_matrix(want))
    assert_close(round_trip, want, rtol, "round trip")

    for name, (examples, keep, mask, weightless) in row_cases(case, x).items():
        g = noise.astype(dtype).astype(float)
        if keep is not None:
            g[~keep] = 0
        record = Record(
            tf.constant(x),
            tf.constant(g, z.dtype),
            None if mask is None else tf.constant(mask),
        )
        rows = view.rows(x.astype(float)), view.split(g)
        a, g = (r[:, list(examples)] for r in rows)
        if keep is not None:  # Repeat for the positions without a mask axis.
            times = a.shape[2] // (keep.shape[1] if keep.ndim > 1 else 1)
            keep = np.repeat(keep.reshape(BATCH, -1), times, axis=1)
        subsample = (
            statistics.Subsample(1 / 3, tf.constant(1, tf.int64))
            if name == "subsample"
            else None
        )
        for sharing in SHARING:
            settings = statistics.BatchSettings(
                sharing,
                weightless=[tf.constant(w) for w in weightless],
                terms=tf.constant(BATCH, block.dtype),
                subsample=subsample,
            )
            sums = statistics.batch_statistics(
                {0: (block, [record])}, settings
            )[0]
            values = {k: total / count for k, (total, count) in sums.items()}
            factors = expected_factors(view, a, g, sharing, keep)
            assert_close(
                block.dense(values),
                kronecker(view, *factors),
                3 * rtol,
                f"{sharing}, {name}",
            )
