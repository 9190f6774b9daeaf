"""The kinds of factors that the block of each layer type declares."""

from typing import Any

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
from tfkfac.blocks.registry import build_registry
from tfkfac.blocks.statistics import batch_statistics
from tfkfac.capture.taps import Tap
from tfkfac.factors import Dense, Diagonal, Factor, Stack

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


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("case", ALL)
def test_blocks_declare_what_they_make(case: str, sharing: str) -> None:
    """Kinds, statistics and gradients of a block fit together."""
    factory, shape = ALL[case]
    layer = factory(name="block")
    model = one_layer(layer, shape)
    blocks = build_registry(model, ()).blocks
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

    kinds = [{k: type(f) for k, f in b.factors.items()} for b in blocks]
    assert kinds == expected_kinds(case)
    for block in blocks:
        factors = block.factors
        made = batch_statistics(block, records, sharing)
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
