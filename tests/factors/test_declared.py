"""Sketches of wide factors of each layer type."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.layer_cases import (
    LINEAR,
    NORMS,
    PRELU,
    TRANSPOSED,
    make_input,
)
from tests.support.layer_models import one_layer
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import BatchSettings, batch_statistics
from tfkfac.capture.taps import Record, Tap
from tfkfac.factors import Diagonal, Limit, LowRank
from tfkfac.factors.low_rank import probes

SEPARABLE: dict[str, Any] = {
    "separable1d": (lambda name: layers.SeparableConv1D(3, 2), (5, 2)),
    "separable2d": (
        lambda name: layers.SeparableConv2D(2, 2, depth_multiplier=2),
        (4, 3, 2),
    ),
}
ALL = {**LINEAR, **NORMS, **SEPARABLE, **TRANSPOSED, **PRELU}


Recorded = tuple[keras.Model, list[Record], dict[int, tf.Tensor]]


def recorded(case: str) -> Recorded:
    """Create a model of one layer; record a forward and backward pass.

    Return the model, the records, and the gradients by id of the variable.
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


# One case for each implementation of `rows`.
WIDE = [
    "dense_rank3", "conv2d_same_even_strided", "conv2d_correlated",
    "conv2d_1x1", "conv2d_groups", "depthwise2d", "einsum_heads",
    "einsum_groups", "embedding_sequence", "separable2d",
    "transposed2d_overlap",
]  # fmt: skip


@pytest.mark.parametrize("case", WIDE)
def test_sketches_of_wide_factors(case: str) -> None:
    """A sketch is the product of the dense statistic and the probes."""
    model, records, _ = recorded(case)
    sharing = "reduce" if case in ("dense_rank3", "einsum_heads") else "expand"
    exact = build_registry(model, ()).blocks
    wide = build_registry(model, (), limit=Limit(2, 2)).blocks
    for block, sketched in zip(exact, wide, strict=True):
        settings = BatchSettings(sharing)
        want = batch_statistics({0: (block, records)}, settings)[0]
        got = batch_statistics({0: (sketched, records)}, settings)[0]
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
