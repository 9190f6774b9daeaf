"""Embeddings that project back to the tokens, tied or not.

Their factors are compared with those of a dense layer of the features in
float64 NumPy: A of its inputs, G of the gradients at its logits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfkfac
from tests.support.harness import (
    assert_close,
    check_factors,
    compiled,
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import targets
from tests.support.reference import Array, eigen_solve, factors
from tests.support.small import assert_same, everything
from tests.support.summaries import blocks_of, leftovers_of

BATCH, TOKENS, WIDTH, TIME = 4, 6, 3, 5
SHARING = ["expand", "reduce"]


class Head(layers.Layer):
    """Projects by an embedding that it was given, as a masked model's head."""

    def __init__(self, tokens: Any) -> None:
        super().__init__()
        self.tokens = tokens

    def call(self, x: Any) -> Any:
        return self.tokens(x, reverse=True)


class Language(keras.Model):
    """Calls its embedding where no functional model sees it."""

    def __init__(self, tokens: Any) -> None:
        super().__init__()
        self.tokens = tokens
        self.hidden = layers.Dense(WIDTH, use_bias=False, name="hidden")

    def call(self, x: Any) -> Any:
        return self.tokens(self.hidden(self.tokens(x)), reverse=True)


def functional(tokens: Any) -> Any:
    inputs = keras.Input((TIME,), dtype="int32")
    hidden = layers.Dense(WIDTH, use_bias=False, name="hidden")(tokens(inputs))
    return keras.Model(inputs, tokens(hidden, reverse=True))


def headed(tokens: Any) -> Any:
    inputs = keras.Input((TIME,), dtype="int32")
    hidden = layers.Dense(WIDTH, use_bias=False, name="hidden")(tokens(inputs))
    return keras.Model(inputs, Head(tokens)(hidden))


MODELS: dict[str, Callable[[Any], Any]] = {
    "functional": functional,
    "inside a layer": headed,
    "subclassed": Language,
}


def language(kind: str, tie_weights: bool, **kwargs: Any) -> Any:
    """A model that is built, tokens, and targets for its outputs."""
    tokens = layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, name="tokens", **kwargs
    )
    model = MODELS[kind](tokens)
    x = make_input("embedding", (TIME,), BATCH)
    model(x)
    randomize(model)
    return model, x, targets(model, x)


def weights_by_name(model: Any) -> dict[str, Array]:
    return dict(
        zip(
            [v.name for v in model.trainable_variables],
            weights_of(model),
            strict=True,
        )
    )


def rows_of(model: Any, x: Array, y: Array, cap: float | None = None) -> Any:
    """Inputs and gradients at the projection, then those at the lookups."""
    weights = weights_by_name(model)
    table, hidden = weights["embeddings"], weights["kernel"]
    kernel = weights.get("reverse_embeddings", table.T)
    one_hot = np.eye(TOKENS)[x]
    a = one_hot @ table @ hidden
    z = a @ kernel
    out = z if cap is None else cap * np.tanh(z / cap)
    slope = 1.0 if cap is None else 1 - np.tanh(z / cap) ** 2
    g = (out - y) * slope
    return a, g, one_hot, g @ kernel.T @ hidden.T


def gradient_by(a: Array, g: Array) -> Array:
    return np.einsum("nsi,nso->io", a, g) / len(a)


# ------------------------------------------------------------ their own ones
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", MODELS)
def test_weights_of_their_own(kind: str, sharing: str) -> None:
    """A dense block besides that of the lookups, each of its own calls."""
    model, x, y = language(kind, tie_weights=False)
    a, g, one_hot, down = rows_of(model, x, y)
    gradients = dict(
        zip(weights_by_name(model), keras_gradients(model, x, y), strict=True)
    )
    mean = gradient_by(a, g)
    assert_close(mean, gradients["reverse_embeddings"], 1e-5, "gradient")
    optimizer = compiled(model, weight_sharing=sharing)
    model.train_on_batch(x, y)
    found = optimizer.factors()
    assert set(found) == {"tokens", "reverse/tokens", "hidden"}
    check_factors(found["reverse/tokens"], *factors(a, g, sharing))
    A, G = factors(one_hot, down, sharing)
    check_factors(found["tokens"], np.diagonal(A), G)
    assert leftovers_of(optimizer) == {}


def test_step_of_weights_of_their_own() -> None:
    """The projection moves as the dense layer that it is."""
    model, x, y = language("functional", tie_weights=False)
    a, g, *_ = rows_of(model, x, y)
    before = weights_by_name(model)
    train_once(model, x, y, solver="eigen", damping=0.3)
    want = eigen_solve(gradient_by(a, g), *factors(a, g), 0.3)
    moved = before["reverse_embeddings"]
    moved = moved - weights_by_name(model)["reverse_embeddings"]
    assert_close(moved, want, 1e-4, "step")


def test_a_wide_vocabulary_is_sketched() -> None:
    """As of a dense layer, with the whole trace; A of tokens is diagonal."""
    model, x, y = language("functional", tie_weights=False)
    a, g, *_ = rows_of(model, x, y)
    optimizer = compiled(model, max_factor_dim=4, factor_rank=2)
    rows = {path: row[:3] for path, row in blocks_of(optimizer).items()}
    assert rows["reverse/tokens"] == ["Projection", "3 x 3", "6 x 6, rank 2"]
    assert rows["tokens"] == ["Embedding", "diagonal 6", "3 x 3"]
    model.train_on_batch(x, y)
    A, G = factors(a, g)
    block = optimizer.factors()["reverse/tokens"]
    assert_close(block["A"], A, 1e-5, "A")
    assert_close(np.trace(block["G"]), np.trace(G), 1e-4, "trace of G")


def test_only_the_projection_is_used() -> None:
    """Its weights have a block, those of the lookups no gradient."""
    tokens = layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=False, name="tokens"
    )
    inputs = keras.Input((TIME, WIDTH))
    model = keras.Model(inputs, tokens(inputs, reverse=True))
    randomize(model)
    x = make_input("", (TIME, WIDTH), BATCH)
    y = targets(model, x)
    _, kernel = weights_of(model)
    step = train_once(model, x, y)
    a = x.astype(np.float64)
    check_factors(step.factors["reverse/tokens"], *factors(a, a @ kernel - y))
    assert not step.delta[0].any()


# ---------------------------------------------------------------------- tied
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", MODELS)
def test_tied_weights(kind: str, sharing: str) -> None:
    """The factors are those of the projection, G's diagonal for the tokens."""
    model, x, y = language(kind, tie_weights=True)
    a, g, one_hot, down = rows_of(model, x, y)
    both = gradient_by(a, g).T + gradient_by(one_hot, down)
    gradients = dict(
        zip(weights_by_name(model), keras_gradients(model, x, y), strict=True)
    )
    assert_close(both, gradients["embeddings"], 1e-5, "gradient")
    optimizer = compiled(model, weight_sharing=sharing)
    model.train_on_batch(x, y)
    features, vocabulary = factors(a, g, sharing)
    found = optimizer.factors()
    assert set(found) == {"tokens", "hidden"}
    check_factors(found["tokens"], np.diagonal(vocabulary), features)
    assert leftovers_of(optimizer) == {}


@pytest.mark.parametrize("eager", [True, False])
def test_step_of_tied_weights(eager: bool) -> None:
    """The whole gradient is solved with these factors, tokens first."""
    model, x, y = language("subclassed", tie_weights=True)
    a, g, one_hot, down = rows_of(model, x, y)
    before = weights_by_name(model)["embeddings"]
    train_once(model, x, y, solver="eigen", damping=0.3, eager=eager)
    features, vocabulary = factors(a, g)
    both = gradient_by(a, g).T + gradient_by(one_hot, down)
    diagonal = np.diag(np.diagonal(vocabulary))
    want = eigen_solve(both, diagonal, features, 0.3)
    moved = before - weights_by_name(model)["embeddings"]
    assert_close(moved, want, 1e-4, "step")


def test_tied_weights_that_only_look_up() -> None:
    """An encoder whose embedding nobody uses in reverse."""
    tokens = layers.ReversibleEmbedding(TOKENS, WIDTH, name="tokens")
    inputs = keras.Input((TIME,), dtype="int32")
    tokens(keras.Input((WIDTH,)), reverse=True)  # in a model that is not run
    model = keras.Model(inputs, tokens(inputs))
    randomize(model)
    x = make_input("embedding", (TIME,), BATCH)
    y = targets(model, x)
    one_hot = np.eye(TOKENS)[x]
    A, G = factors(one_hot, one_hot @ weights_of(model)[0] - y)
    step = train_once(model, x, y)
    check_factors(step.of("tokens"), np.diagonal(A), G)


@pytest.mark.parametrize("fisher", ["monte_carlo", "type2"])
@pytest.mark.parametrize("tie_weights", [True, False])
def test_types_of_the_fisher_matrix(tie_weights: bool, fisher: str) -> None:
    """Of a softmax at the logits: its own Fisher matrix, or a draw of it."""
    model, x, _ = language("functional", tie_weights)
    y = np.roll(x, -1, 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    a, z, *_ = rows_of(model, x, 0.0)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    step = train_once(model, x, y, loss=loss, fisher=fisher)
    A = np.einsum("nsi,nsj->ij", a, a) / x.size
    exact = np.mean(p * (1 - p), (0, 1))
    if tie_weights:
        found = step.factors["tokens"]
        features, diagonal = found["G"], found["A"]
    else:
        found = step.factors["reverse/tokens"]
        features, diagonal = found["A"], np.diagonal(found["G"])
    assert_close(features, A, 1e-5, "features")
    if fisher == "type2":
        assert_close(diagonal, exact, 1e-5, "tokens")
        return
    # Each draw is p - e_k: its squares add up to 1 - 2 p_k + |p|^2.
    assert 0 < diagonal.sum() < 2
    assert not np.allclose(diagonal, exact, rtol=1e-5)


# ---------------------------------------------------------------------- both
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("tie_weights", [True, False])
def test_soft_cap(tie_weights: bool, sharing: str) -> None:
    """G is that of the logits before they are capped."""
    model, x, y = language("functional", tie_weights, logit_soft_cap=0.7)
    a, g, *_ = rows_of(model, x, y, 0.7)
    step = train_once(model, x, y, weight_sharing=sharing)
    A, G = factors(a, g, sharing)
    if tie_weights:
        check_factors(step.factors["tokens"], np.diagonal(G), A)
    else:
        check_factors(step.factors["reverse/tokens"], A, G)


def test_soft_cap_of_a_part_of_the_batch() -> None:
    """Outputs and gradients of the same examples: here all are alike."""
    model, x, y = language("functional", False, logit_soft_cap=0.7)
    x, y = np.repeat(x[:1], 8, 0), np.repeat(y[:1], 8, 0)
    a, g, *_ = rows_of(model, x, y, 0.7)
    step = train_once(model, x, y, factor_batch_fraction=0.25)
    check_factors(step.factors["reverse/tokens"], *factors(a, g))


@pytest.mark.parametrize("tie_weights", [True, False])
def test_padding_does_not_count(tie_weights: bool) -> None:
    """Masked positions that carry no loss dilute neither use."""
    tokens = layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, mask_zero=True, name="tokens"
    )
    model = functional(tokens)
    randomize(model)
    x = np.array([[1, 2, 0, 0, 0], [3, 1, 1, 2, 0], [5, 0, 0, 0, 0]], "int32")
    keep = x != 0
    y = targets(model, x)
    a, g, one_hot, _ = rows_of(model, x, y)
    weight = keep.astype("float32")
    step = train_once(model, x, y, weight, loss=half_square_of_terms)
    A, G = factors(a, g, keep=keep, terms=keep.size)
    if tie_weights:
        check_factors(step.factors["tokens"], np.diagonal(G), A)
        return
    check_factors(step.factors["reverse/tokens"], A, G)
    frequencies = np.einsum("nsi,ns->i", one_hot, keep) / keep.sum()
    assert_close(step.factors["tokens"]["A"], frequencies, 1e-6, "A")


def half_square_of_terms(y_true: Any, y_pred: Any) -> Any:
    """Half the squared distance of each position."""
    return 0.5 * tf.reduce_sum(tf.square(y_pred - y_true), -1)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_several_calls(tie_weights: bool) -> None:
    """The rows of all projections of a step are pooled."""
    tokens = layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, name="tokens"
    )
    inputs = keras.Input((TIME,), dtype="int32")
    first = tokens(inputs)
    parts = [tokens(first, reverse=True), tokens(2 * first, reverse=True)]
    model = keras.Model(inputs, ops.concatenate(parts, -1))
    randomize(model)
    x = make_input("embedding", (TIME,), BATCH)
    y = targets(model, x)
    weights = weights_by_name(model)
    table = weights["embeddings"]
    kernel = weights.get("reverse_embeddings", table.T)
    inputs = [table[x], 2 * table[x]]
    pairs = [
        factors(a, a @ kernel - want)
        for a, want in zip(inputs, np.split(y, 2, -1), strict=True)
    ]
    A = sum(A for A, _ in pairs) / 2  # as many rows in each
    G = sum(G for _, G in pairs)
    step = train_once(model, x, y)
    if tie_weights:
        check_factors(step.factors["tokens"], np.diagonal(G), A)
    else:
        check_factors(step.factors["reverse/tokens"], A, G)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_saved_and_loaded(tie_weights: bool, tmp_path: Path) -> None:
    """Training goes on with the same bits."""
    tokens = layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, name="tokens"
    )
    model = functional(tokens)
    intervals = {"factor_update_interval": 2, "inverse_update_interval": 2}
    optimizer = tfkfac.KFAC(keras.optimizers.SGD(0.1), **intervals)
    model.compile(optimizer, "mse", run_eagerly=True)
    x = make_input("embedding", (TIME,), BATCH)
    y = targets(model, x)
    for _ in range(3):
        model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    for _ in range(2):
        assert_same(everything(copy), everything(model))
        for one in (model, copy):
            one.train_on_batch(x, y)
