"""The kinds of factors that the block of each layer type declares."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.layer_cases import (
    EMBEDDING,
    GROUPED,
    LINEAR,
    NORMS,
    PRELU,
    TRANSPOSED,
    make_input,
)
from tests.support.layer_models import one_layer
from tests.support.marks import with_slow
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import View, batch_statistics
from tfkfac.capture.taps import Record, Tap
from tfkfac.factors import Dense, Diagonal, Factor, Limit, LowRank, Stack
from tfkfac.factors.low_rank import probes

SEPARABLE: dict[str, Any] = {
    "separable1d": (lambda name: layers.SeparableConv1D(3, 2), (5, 2)),
    "separable2d": (
        lambda name: layers.SeparableConv2D(2, 2, depth_multiplier=2),
        (4, 3, 2),
    ),
}
ALL = {**LINEAR, **NORMS, **SEPARABLE, **TRANSPOSED, **PRELU}


def expected_kinds(case: str) -> list[dict[str, type[Factor]]]:
    if case in NORMS:
        return [{"G": Stack}]
    if case in PRELU:
        return [{"G": Diagonal}]
    if case in EMBEDDING:
        return [{"A": Diagonal, "G": Dense}]
    whole: dict[str, type[Factor]] = {"A": Dense, "G": Dense}
    if case in TRANSPOSED:
        return [whole] if "no_bias" in case else [whole, {"G": Dense}]
    parts: dict[str, type[Factor]] = {"A": Stack, "G": Stack}
    if case in SEPARABLE:
        return [parts, whole]
    return [parts if case in GROUPED or "group" in case else whole]


Seen = tuple[keras.Model, list[Record], dict[int, tf.Tensor]]


def seen(case: str) -> Seen:
    """A model of one layer, with what a step left behind in it."""
    factory, shape = ALL[case]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    Tap.open(layer, model)
    with tf.GradientTape() as tape:
        out = model(make_input(case, shape, 4), training=True)
        loss = tf.reduce_sum(tf.square(out))
    gradients = dict(
        zip(
            map(id, layer.trainable_variables),
            tape.gradient(loss, [v.value for v in layer.trainable_variables]),
            strict=True,
        )
    )
    records = [call[-1] for call in Tap.calls(layer)]
    Tap.close(layer, model)
    return model, records, gradients


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ALL)
def test_blocks_declare_what_they_make(case: str, sharing: str) -> None:
    """Kinds, statistics and gradients of a block fit together."""
    model, records, gradients = seen(case)
    blocks = build_registry(model, ()).blocks
    kinds = [{k: type(f) for k, f in b.factors.items()} for b in blocks]
    assert kinds == expected_kinds(case)
    for block in blocks:
        factors = block.factors
        made = batch_statistics({0: (block, records)}, View(sharing))[0]
        assert set(made) == set(factors)
        for key, statistic in made.items():
            assert statistic.total.shape == factors[key].shape
        assert block.factor_shapes == {k: f.shape for k, f in factors.items()}
        own = [gradients[id(v)] for v in block.variables]
        assert block.to_matrix(own).shape == block.gradient_shape
        values = {k: tf.ones(f.shape) for k, f in factors.items()}
        *stack, inputs, outputs = block.gradient_shape
        size = inputs * outputs
        assert block.dense(values).shape == (*stack, size, size)


# Of each way to make rows, one.
QUICK = {
    "dense_rank3",
    "conv2d_same_even_strided",
    "conv2d_1x1",
    "conv2d_groups",
    "depthwise2d",
    "einsum_heads",
    "einsum_groups",
    "embedding_sequence",
    "separable2d",
    "transposed2d_overlap",
}
WIDE = {**LINEAR, **SEPARABLE, **TRANSPOSED}


@pytest.mark.parametrize("sharing", with_slow(["expand", "reduce"], "reduce"))
@pytest.mark.parametrize("case", with_slow(WIDE, *(WIDE.keys() - QUICK)))
def test_blocks_make_sketches_of_wide_factors(case: str, sharing: str) -> None:
    """The product of what they make otherwise with the probes."""
    model, records, _ = seen(case)
    whole = build_registry(model, ()).blocks
    wide = build_registry(model, (), Limit(2, 2)).blocks
    for block, other in zip(whole, wide, strict=True):
        want = batch_statistics({0: (block, records)}, View(sharing))[0]
        got = batch_statistics({0: (other, records)}, View(sharing))[0]
        for name, kind in other.factors.items():
            (total, count), (matrix, same) = got[name], want[name]
            assert count == same
            size = block.factors[name].size
            assert isinstance(kind, LowRank) == (
                size > 2 and not isinstance(kind, Diagonal)
            )
            if isinstance(kind, LowRank):
                columns = probes(size, 2, matrix.dtype)
                matrix = tf.matmul(matrix, columns)
                total = total[..., :-1, :]
            np.testing.assert_allclose(total, matrix, rtol=1e-4, atol=1e-5)
