"""Blocks of every layer: gradients, statistics and sketches by definition.

Statistics are computed from the record of a forward and a backward pass,
without a training step: weight sharing x row weights x dtype.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.harness import assert_close, randomize
from tests.support.layers import (
    LAYERS,
    NOT_ON_CPU,
    View,
    make_input,
    slope_of,
    views_of,
)
from tests.support.reference import Array
from tfkfac.blocks import Block, Record, patches, statistics
from tfkfac.blocks.registry import build_registry
from tfkfac.capture.taps import Tap
from tfkfac.factors import Diagonal, Limit, LowRank
from tfkfac.factors.low_rank import probes

BATCH = 6
SHARING = ["expand", "reduce", "average"]  # "average": DP-KFAC, eq. 13
ZERO = np.array([False, True, False, False, False, True])


@dataclasses.dataclass
class Pass:
    """A forward and a backward pass through a layer, with gradient g."""

    model: Any
    layer: Any
    x: Array
    g: Array
    record: Record
    gradients: dict[int, Any]  # by id of the variable

    def blocks(self, limit: Limit | None = None) -> tuple[Block, ...]:
        options = {} if limit is None else {"limit": limit}
        return tuple(build_registry(self.model, (), **options).blocks)

    def statistics(self, block: Block, record: Record, **settings: Any) -> Any:
        settings.setdefault("sharing", "expand")
        settings.setdefault("terms", tf.constant(BATCH, block.dtype))
        return statistics.batch_statistics(
            {0: (block, [record])}, statistics.BatchSettings(**settings)
        )[0]


def run(case: str, dtype: str) -> Pass:
    factory, shape = LAYERS[case]
    layer = factory(name="block", dtype=dtype)
    is_embedding = case.startswith("embedding")
    inputs = keras.Input(shape, dtype="int32" if is_embedding else dtype)
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    x = make_input(case, shape, BATCH)
    rng = np.random.default_rng(2)
    if case in NOT_ON_CPU:
        noise = rng.normal(size=layer.compute_output_shape(x.shape))
        record = Record(tf.constant(x), tf.constant(noise, dtype))
        return Pass(model, layer, x.astype(float), noise, record, {})
    variables = layer.trainable_variables
    Tap.open(layer, model)
    with tf.GradientTape() as tape:
        outputs = model(tf.constant(x), training=True)
        noise = rng.normal(size=outputs.shape)
        value = tf.reduce_sum(outputs * tf.constant(noise, outputs.dtype))
    gradients = tape.gradient(value, [v.value for v in variables])
    ((record,),) = Tap.calls(layer)
    Tap.close(layer, model)
    g = noise * slope_of(layer, outputs)
    # The gradient of a `TimeDistributed` is that after the activation.
    captured = noise if isinstance(layer, layers.TimeDistributed) else g
    assert_close(record.gradient, captured, 1e-5, "captured gradient")
    by_variable = dict(zip(map(id, variables), gradients, strict=True))
    return Pass(model, layer, x.astype(float), g, record, by_variable)


def check_gradient(run: Pass, block: Block, view: View, rtol: float) -> None:
    """The sum of `a g^T` is the gradient of the block's weights."""
    a, g = view.rows(run.x, run.g)
    a = np.ones((*g.shape[:3], 1)) if a is None else a
    want = np.einsum("gnsi,gnso->gio", a, g).reshape(block.gradient_shape)
    result = block.gradient(block.rows(run.record))
    assert_close(result, want, rtol, "gradient of the rows")
    if run.gradients:
        tape = [run.gradients[id(v)] for v in block.variables]
        assert_close(block.to_matrix(tape), want, rtol, "gradient of Keras")
        back = block.from_matrix(tf.constant(want, block.dtype))
        for got, value in zip(back, tape, strict=True):
            value = tf.convert_to_tensor(value)
            assert_close(got, value, rtol, "round trip")


class RowCase(NamedTuple):
    """Rows of a batch that count in the statistics."""

    examples: Sequence[int]
    has_loss: Any  # False for rows without a gradient
    mask: Any
    settings: dict[str, Any]


def row_cases(case: str, x: Array) -> dict[str, RowCase]:
    part = statistics.Subsample(1 / 3, tf.constant(1, tf.int64))
    settings = {"weightless": [ZERO[:, None]], "subsample": part}
    cases = {
        "all": RowCase(range(BATCH), None, None, {}),
        "weights in a subsample": RowCase([1, 4], ~ZERO, None, settings),
    }
    if x.ndim > 2 and case.startswith(("dense", "einsum_seq", "einsum_heads")):
        # A masked row counts if it has a gradient, other rows always count.
        rng = np.random.default_rng(4)
        has_loss, mask = (rng.random(x.shape[:2]) < 0.6 for _ in range(2))
        has_loss[:, 0] = True
        cases["mask"] = RowCase(range(BATCH), has_loss, mask, {})
    return cases


@pytest.mark.parametrize(
    ("case", "dtype"),
    zip(LAYERS, ["float32", "float64"] * len(LAYERS), strict=False),
)
def test_statistics(
    case: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several slices for each convolution, with a shorter last slice.
    elements = 10_000 if case == "conv2d_correlated" else 500
    monkeypatch.setattr(patches, "_SLICE_ELEMENTS", elements)
    passed, rtol = run(case, dtype), 1e-5 if dtype == "float32" else 1e-12
    blocks, views = passed.blocks(), tuple(views_of(passed.layer))
    for block, view in zip(blocks, views, strict=True):
        check_gradient(passed, block, view, rtol)
        for name, row_case in row_cases(case, passed.x).items():
            check_statistics(passed, block, view, name, row_case, rtol)
    if case in WIDE:
        check_sketches(passed, WIDE[case])


def check_statistics(
    run: Pass,
    block: Block,
    view: View,
    name: str,
    row_case: RowCase,
    rtol: float,
) -> None:
    examples, keep, mask, settings = row_case
    g, captured = run.g.copy(), run.record.gradient.numpy()
    if keep is not None:
        g[~keep] = captured[~keep] = 0
    record = dataclasses.replace(
        run.record,
        gradient=tf.constant(captured),
        mask=None if mask is None else tf.constant(mask),
    )
    if mask is not None:
        keep = keep | mask
    a, g = (
        None if rows is None else rows[:, list(examples)]
        for rows in view.rows(run.x, g)
    )
    if keep is not None:  # Repeat for the positions without a mask axis.
        times = g.shape[2] // (keep.shape[1] if keep.ndim > 1 else 1)
        keep = np.repeat(keep.reshape(BATCH, -1), times, axis=1)
        keep = keep[list(examples)]
    sharings = SHARING
    if settings:  # with each of two dtypes
        sharings = [SHARING[block.dtype == "float64"]]
    for sharing in sharings:
        sums = run.statistics(block, record, sharing=sharing, **settings)
        want = view.factors(a, g, sharing, keep)
        assert sums.keys() == want.keys()
        for key, (total, count) in sums.items():
            message = f"{key}, {sharing}, {name}"
            assert_close(total / count, want[key], rtol, message)


# One case for each implementation of `rows`.
WIDE = {
    "dense_rank3": "reduce",
    "conv2d_same_even_strided": "expand",
    "conv2d_correlated": "expand",
    "conv2d_1x1": "expand",
    "conv2d_groups": "expand",
    "depthwise2d": "expand",
    "einsum_heads": "reduce",
    "einsum_groups": "expand",
    "embedding_sequence": "expand",
    "separable2d": "expand",
    "transposed2d_overlap": "expand",
}


def check_sketches(run: Pass, sharing: str) -> None:
    """A sketch is the product of the dense statistic and the probes."""
    for block, wide in zip(run.blocks(), run.blocks(Limit(2, 2)), strict=True):
        want, got = (
            run.statistics(b, run.record, sharing=sharing)
            for b in (block, wide)
        )
        for name, factor in wide.factors.items():
            (total, count), (matrix, expected) = got[name], want[name]
            assert count == expected
            size = block.factors[name].size
            is_sketch = size > 2 and not isinstance(factor, Diagonal)
            assert isinstance(factor, LowRank) == is_sketch
            if is_sketch:
                matrix = matrix @ probes(size, 2, matrix.dtype)
                total = total[..., :-1, :]
            np.testing.assert_allclose(total, matrix, rtol=1e-4, atol=1e-5)
