"""Factor types that the block of each layer type declares."""

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


def expected_types(case: str) -> list[dict[str, type[Factor]]]:
    if case in NORMS:
        return [{"G": Stack}]
    if case in PRELU:
        return [{"G": Diagonal}]
    if case in EMBEDDING:
        return [{"A": Diagonal, "G": Dense}]
    dense: dict[str, type[Factor]] = {"A": Dense, "G": Dense}
    if case in TRANSPOSED:
        return [dense] if "no_bias" in case else [dense, {"G": Dense}]
    stacks: dict[str, type[Factor]] = {"A": Stack, "G": Stack}
    if case in SEPARABLE:
        return [stacks, dense]
    return [stacks if case in GROUPED or "group" in case else dense]


Recorded = tuple[keras.Model, list[Record], dict[int, tf.Tensor]]


def recorded(case: str) -> Recorded:
    """Creates a model of one layer; records a forward and backward pass.

    Returns the model, the records, and the gradients by id of the variable.
    """
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
def test_shapes_match_the_declared_factors(case: str, sharing: str) -> None:
    """Types and shapes of factors, statistics and gradients agree."""
    model, records, gradients = recorded(case)
    blocks = build_registry(model, ()).blocks
    types = [{k: type(f) for k, f in b.factors.items()} for b in blocks]
    assert types == expected_types(case)
    for block in blocks:
        factors = block.factors
        statistics = batch_statistics({0: (block, records)}, View(sharing))[0]
        assert set(statistics) == set(factors)
        for key, statistic in statistics.items():
            assert statistic.total.shape == factors[key].shape
        assert block.factor_shapes == {k: f.shape for k, f in factors.items()}
        block_gradients = [gradients[id(v)] for v in block.variables]
        assert block.to_matrix(block_gradients).shape == block.gradient_shape
        values = {k: tf.ones(f.shape) for k, f in factors.items()}
        *stack, inputs, outputs = block.gradient_shape
        size = inputs * outputs
        assert block.dense(values).shape == (*stack, size, size)


# One case for each implementation of `rows`.
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
def test_sketches_of_wide_factors(case: str, sharing: str) -> None:
    """A sketch is the product of the dense statistic and the probes."""
    model, records, _ = recorded(case)
    exact = build_registry(model, ()).blocks
    wide = build_registry(model, (), Limit(2, 2)).blocks
    for block, sketched in zip(exact, wide, strict=True):
        want = batch_statistics({0: (block, records)}, View(sharing))[0]
        got = batch_statistics({0: (sketched, records)}, View(sharing))[0]
        for name, factor in sketched.factors.items():
            (total, count), (matrix, expected) = got[name], want[name]
            assert count == expected
            size = block.factors[name].size
            assert isinstance(factor, LowRank) == (
                size > 2 and not isinstance(factor, Diagonal)
            )
            if isinstance(factor, LowRank):
                columns = probes(size, 2, matrix.dtype)
                matrix = tf.matmul(matrix, columns)
                total = total[..., :-1, :]
            np.testing.assert_allclose(total, matrix, rtol=1e-4, atol=1e-5)
