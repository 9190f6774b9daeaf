"""`gauss_newton_form` against finite differences of the outputs."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.curvature_models import (
    differences,
    noise,
    ready,
    split,
    weight_count,
)
from tests.support.dtypes import floats
from tests.support.reference import Array
from tfkfac.curvature.gauss_newton import gauss_newton_form
from tfkfac.loss.batch import training_call

DIRECTIONS = 3
CASES = (
    "conv_strides", "batch", "lstm", "attention", "embedding", "dropout",
    "kernel_regularizer",
)  # fmt: skip


def form(model: Any, vectors: Array, x: Any, y: Any, **kwargs: Any) -> Array:
    """`gauss_newton_form` with the rows of a matrix as directions."""
    variables = model.trainable_variables
    arguments = {"x": x, "y": y, **kwargs}

    @tf.function(autograph=False)
    def compute() -> Any:
        return gauss_newton_form(
            model,
            training_call(model, x),
            arguments,
            variables,
            [tf.identity(v.value) for v in variables],
            [[tf.constant(p) for p in split(model, v)] for v in vectors],
        )

    return np.asarray(compute())


@pytest.mark.parametrize("case", CASES)
def test_every_layer(case: str) -> None:
    """For the mean squared error: `2 / (B D)` times products of tangents."""
    with floats("float64"):
        model, x, y = ready(case)
        vectors = noise(DIRECTIONS, weight_count(model))
        before = [np.array(v) for v in model.variables]
        got = form(model, vectors, x, y)
        for v, old in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(np.asarray(v), old)
        tangents = differences(
            model, lambda: np.asarray(model(x, training=True)), vectors, 1e-6
        ).reshape(DIRECTIONS, -1)
    want = 2 / tangents.shape[1] * tangents @ tangents.T
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)
