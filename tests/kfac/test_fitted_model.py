"""Factors of a fitted model: the learning rate is 0."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.reference import Array
from tests.support.small import CLASSES, FEATURES, Scale, data, loss

ROWS = 24
X, Y = data(ROWS)


def second_moment(rows: Array) -> Array:
    """Sum over the rows of `r r^T`, by the number of examples."""
    return rows.T @ rows / ROWS


def expected(model: Any) -> dict[str, dict[str, Array]]:
    """Factors from the weights of `tanh(x W + b) * s W' + b'`."""
    W, b, scale, V, c = model.get_weights()
    ones = np.ones((ROWS, 1))
    hidden = np.tanh(X @ W + b)
    logits = np.exp(hidden * scale @ V + c)
    p = logits / logits.sum(1, keepdims=True)
    # Columns of the square root of the Hessian diag(p) - p p^T.
    roots = [
        np.sqrt(p[:, k, None]) * (np.eye(CLASSES)[k] - p)
        for k in range(CLASSES)
    ]
    back = [root @ V.T * scale * (1 - hidden**2) for root in roots]
    return {
        "hidden": {
            "A": second_moment(np.hstack([X, ones])),
            "G": second_moment(np.vstack(back)),
        },
        "logits": {
            "A": second_moment(np.hstack([hidden * scale, ones])),
            "G": second_moment(np.vstack(roots)),
        },
    }


@pytest.mark.parametrize("batches", [1, 3])
def test_factors_of_all_examples(batches: int) -> None:
    """In one batch, or accumulated; the weights are equal bit for bit."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(4, "tanh", name="hidden"),
            Scale(name="scale"),  # belongs to the rest optimizer
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    optimizer = tfkfac.KFAC(
        learning_rate=0.0,
        factor_decay=0.0,
        factor_batch_fraction=1.0,
        max_factor_dim=None,
        fisher="type2",
        gradient_accumulation_steps=batches if batches > 1 else None,
    )
    model.compile(optimizer, loss())
    before = model.get_weights()
    model.fit(X, Y, batch_size=ROWS // batches, verbose=0)
    assert int(optimizer.iterations) == 1
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()
    factors, want = optimizer.factors(), expected(model)
    assert factors.keys() == want.keys()
    for path, pair in want.items():
        for name, value in pair.items():
            np.testing.assert_allclose(factors[path][name], value, 1e-4, 1e-7)
