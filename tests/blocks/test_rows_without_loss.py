"""Sample weights, masks and losses for which some rows have no gradient."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.harness import (
    check_factors,
    half_squared_error,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import (
    expected_factors,
    expected_rows,
    one_layer,
    problem,
    targets,
)
from tests.support.layer_views import view_of
from tests.support.reference import append_one, factors

BATCH = 4


@pytest.mark.parametrize(
    ("sharing", "eager"), [("expand", True), ("reduce", False)]
)
def test_zero_sample_weights(sharing: str, eager: bool) -> None:
    layer = layers.Dense(3, activation="tanh", name="block")
    model, x, y = problem(layer, (2, 4), 6)
    weight = np.array([1, 0, 2, 0, 1, 0.5], "float32")
    view = view_of(layer)
    a, g = expected_rows(view, weights_of(model), x, y, "tanh")
    g = g * weight[:, None, None]
    keep = np.repeat(weight[:, None] > 0, 2, axis=1)
    step = train_once(
        model,
        x,
        y,
        sample_weight=weight,
        weight_sharing=sharing,
        eager=eager,
    )
    want = expected_factors(view, a, g, sharing, keep)
    check_factors(step.of("block"), *want)


def test_sample_weights_per_output() -> None:
    """The rows of a head count where its own loss has a nonzero weight."""
    inputs = keras.Input((3,))
    heads = [layers.Dense(2, name=f"head_{i}") for i in range(2)]
    model = keras.Model(inputs, [head(inputs) for head in heads])
    randomize(model)
    x = make_input("", (3,), 5)
    y = list(np.random.default_rng(5).normal(size=(2, 5, 2)).astype("float32"))
    weights = [
        np.array([1, 0, 1, 0, 2], "float32"),
        np.array([0, 1, 1, 0, 1], "float32"),
    ]
    a = append_one(x.astype(np.float64))
    want = {}
    for head, target, weight in zip(heads, y, weights, strict=True):
        g = (a @ np.vstack(weights_of(head)) - target) * weight[:, None]
        keep = (weight > 0)[:, None]
        want[head.name] = factors(a[:, None], g[:, None], keep=keep)
    step = train_once(
        model, x, y, sample_weight=weights, loss=[half_squared_error] * 2
    )
    for name, (A, G) in want.items():
        check_factors(step.of(name), A, G)


def test_all_sample_weights_zero() -> None:
    """A batch without loss has finite factors and a step of zero."""
    model = one_layer(layers.Dense(3, name="block"), (4,))
    x = make_input("", (4,), BATCH)
    step = train_once(
        model, x, targets(model, x), sample_weight=np.zeros(BATCH, "float32")
    )
    for value in step.of("block").values():
        assert np.isfinite(value).all()
    for value in step.delta:
        np.testing.assert_array_equal(value, 0.0)


MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], bool)


def test_valid_positions_without_gradient_still_count() -> None:
    """With a mask, a position with a dead unit counts."""
    layer = layers.Dense(1, activation="relu", name="block")
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layer(layers.Masking()(inputs)))
    randomize(model)
    x = make_input("", (3, 4), 4) * MASK[..., None]
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    out = np.maximum(a @ np.vstack(weights_of(model)), 0)
    # The square of one feature is twice the negative log-likelihood.
    g = (out - y) * (out > 0) * MASK[..., None]
    assert 0 < np.count_nonzero(g) < MASK.sum()
    step = train_once(model, x, y, loss="mse")
    want = factors(a, g, keep=MASK, terms=MASK.sum())
    check_factors(step.of("block"), *want)


def test_mask_that_the_loss_ignores() -> None:
    """Padded positions whose outputs enter the loss count."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    masked = layer(layers.Masking()(inputs))
    # The reshape drops the mask but keeps the padded positions.
    flat_rows = keras.ops.reshape(masked * 1.0, (-1, 6))
    model = keras.Model(inputs, flat_rows)
    randomize(model)
    x = make_input("", (3, 4), 4) * MASK[..., None]
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y.reshape(4, 3, 2)
    step = train_once(model, x, y)
    check_factors(step.of("block"), *factors(a, g))


def test_embedding_padding_mask() -> None:
    """Padding tokens have no loss and do not count."""
    inputs = keras.Input((3,), dtype="int32")
    layer = layers.Embedding(5, 2, mask_zero=True, name="embedding")
    head = layers.Dense(2, use_bias=False, name="head")
    model = keras.Model(inputs, head(layer(inputs)))
    randomize(model)
    x = np.array([[1, 4, 0], [4, 0, 0], [2, 2, 4]], "int32")
    mask = x != 0
    y = targets(model, x)
    table, kernel = weights_of(model)
    h = table[x]
    g2 = (h @ kernel - y) * mask[..., None]
    g1 = g2 @ kernel.T
    step = train_once(model, x, y, loss="mse")
    want = factors(h, g2, keep=mask, terms=mask.sum())
    check_factors(step.of("head"), *want)
    A, G = factors(np.eye(5)[x], g1, keep=mask, terms=mask.sum())
    check_factors(step.of("embedding"), np.diagonal(A), G)


def test_batch_folded_into_positions() -> None:
    """A layer sees positions as examples; the loss has the real batch."""
    layer = layers.Dense(2, name="block")
    inputs = keras.Input((3, 4))
    rows = layer(keras.ops.reshape(inputs, (-1, 4)))
    model = keras.Model(inputs, keras.ops.reshape(rows, (-1, 3, 2)))
    randomize(model)
    x = make_input("", (3, 4), BATCH)
    y = targets(model, x)
    weight = np.array([1, 0, 2, 1], "float32")
    a = append_one(x.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - y
    g = g * weight[:, None, None]
    keep = np.repeat(weight[:, None] > 0, 3, axis=1)
    step = train_once(model, x, y, weight, eager=False)
    check_factors(step.of("block"), *factors(a, g, keep=keep))


def test_positions_without_gradient_count() -> None:
    """All rows count without a mask, even if the loss uses the last only."""
    layer = layers.Dense(2, activation="relu", name="block")
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layer(inputs)[:, -1])
    randomize(model)
    x = make_input("", (3, 4), 12)
    y = targets(model, x)
    a = append_one(x.astype(np.float64))
    out = np.maximum(a @ np.vstack(weights_of(model)), 0)
    g = (out - y[:, None]) * (out > 0)
    assert not g[:, -1].all()  # dead units
    g[:, :-1] = 0
    weight = np.ones(12, "float32")
    step = train_once(model, x, y, weight, weight_sharing="reduce")
    check_factors(step.of("block"), *factors(a, g, "reduce"))
