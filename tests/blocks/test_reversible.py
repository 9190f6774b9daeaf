"""Embeddings that project back to the tokens, tied or not.

Their factors are compared with those of a dense layer of the features in
float64 NumPy: A of its inputs, G of the gradients at its logits.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.harness import (
    assert_close,
    check_factors,
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layer_cases import make_input
from tests.support.layer_models import targets
from tests.support.reference import Array, eigen_solve, factors, softmax
from tests.support.summaries import leftovers_of

BATCH, TOKENS, WIDTH, TIME = 4, 6, 3, 5


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


def functional(tokens: Any, in_a_layer: bool = False) -> Any:
    inputs = keras.Input((TIME,), dtype="int32")
    hidden = layers.Dense(WIDTH, use_bias=False, name="hidden")(tokens(inputs))
    out = Head(tokens)(hidden) if in_a_layer else tokens(hidden, reverse=True)
    return keras.Model(inputs, out)


MODELS: dict[str, Callable[[Any], Any]] = {
    "functional": functional,
    "inside a layer": lambda tokens: functional(tokens, True),
    "subclassed": Language,
}
# Each with another way to share weights, and in a graph or not.
WAYS = [
    ("functional", "expand", True),
    ("inside a layer", "reduce", True),
    ("subclassed", "expand", False),
]


def embedding(tie_weights: bool, **kwargs: Any) -> Any:
    return layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, name="tokens", **kwargs
    )


def language(kind: str, tie_weights: bool, **kwargs: Any) -> Any:
    """A model that is built, tokens, and targets for its outputs."""
    model = MODELS[kind](embedding(tie_weights, **kwargs))
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


def check_projection(step: Any, tied: bool, A: Array, G: Array) -> None:
    """A and G of the projection, which tied weights keep the other way."""
    if tied:
        check_factors(step.factors["tokens"], np.diagonal(G), A)
    else:
        check_factors(step.factors["reverse/tokens"], A, G)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "sharing", "eager"), WAYS)
def test_factors_and_step(
    kind: str, sharing: str, eager: bool, tied: bool
) -> None:
    """With tied weights the projection's solve the gradient of both uses.

    Else there is a dense block besides that of the lookups, each of its own
    calls.
    """
    model, x, y = language(kind, tied)
    a, g, one_hot, down = rows_of(model, x, y)
    name = "embeddings" if tied else "reverse_embeddings"
    place = list(weights_by_name(model)).index(name)
    mean = gradient_by(a, g)
    if tied:
        mean = mean.T + gradient_by(one_hot, down)
    assert_close(mean, keras_gradients(model, x, y)[place], 1e-5, "gradient")
    step = train_once(
        model,
        x,
        y,
        solver="eigen",
        damping=0.3,
        weight_sharing=sharing,
        eager=eager,
    )
    assert leftovers_of(model.optimizer) == {}
    A, G = factors(a, g, sharing)
    check_projection(step, tied, A, G)
    paths = {"tokens", "hidden"}
    if tied:
        A, G = np.diag(np.diagonal(G)), A
    else:
        paths.add("reverse/tokens")
        lookups = factors(one_hot, down, sharing)
        diagonal = np.diagonal(lookups[0])
        check_factors(step.factors["tokens"], diagonal, lookups[1])
    assert set(step.factors) == paths
    assert_close(step.delta[place], eigen_solve(mean, A, G, 0.3), 1e-4, "step")


# --------------------------------------------------------- one of the two uses
def test_only_the_projection_is_used() -> None:
    """Its weights have a block, those of the lookups no gradient."""
    tokens = embedding(tie_weights=False)
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


def test_tied_weights_that_only_look_up() -> None:
    """An encoder whose embedding nobody uses in reverse."""
    tokens = embedding(tie_weights=True)
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


@pytest.mark.parametrize("tie_weights", [True, False])
def test_exact_fisher_matrix(tie_weights: bool) -> None:
    """Of a softmax at the logits: `diag(p) - p p^T`."""
    model, x, _ = language("functional", tie_weights)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    a, z, *_ = rows_of(model, x, 0.0)
    p = softmax(z)
    step = train_once(model, x, np.roll(x, -1, 1), loss=loss, fisher="type2")
    A = np.einsum("nsi,nsj->ij", a, a) / x.size
    G = (np.diag(p.sum((0, 1))) - np.einsum("nsi,nsj->ij", p, p)) / x.size
    check_projection(step, tie_weights, A, G)


# ---------------------------------------------------------------------- both
@pytest.mark.parametrize(
    ("tie_weights", "sharing"), [(True, "reduce"), (False, "expand")]
)
def test_soft_cap(tie_weights: bool, sharing: str) -> None:
    """G is that of the logits before they are capped."""
    model, x, y = language("functional", tie_weights, logit_soft_cap=0.7)
    a, g, *_ = rows_of(model, x, y, 0.7)
    step = train_once(model, x, y, weight_sharing=sharing)
    check_projection(step, tie_weights, *factors(a, g, sharing))


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
    model = functional(embedding(tie_weights, mask_zero=True))
    randomize(model)
    x = np.array([[1, 2, 0, 0, 0], [3, 1, 1, 2, 0], [5, 0, 0, 0, 0]], "int32")
    keep = x != 0
    y = targets(model, x)
    a, g, one_hot, _ = rows_of(model, x, y)
    weight = keep.astype("float32")
    step = train_once(model, x, y, weight, loss=half_square_of_terms)
    A, G = factors(a, g, keep=keep, terms=keep.size)
    check_projection(step, tie_weights, A, G)
    if not tie_weights:
        frequencies = np.einsum("nsi,ns->i", one_hot, keep) / keep.sum()
        assert_close(step.factors["tokens"]["A"], frequencies, 1e-6, "A")


def half_square_of_terms(y_true: Any, y_pred: Any) -> Any:
    """Half the squared distance of each position."""
    return 0.5 * tf.reduce_sum(tf.square(y_pred - y_true), -1)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_several_calls(tie_weights: bool) -> None:
    """The rows of all projections of a step are pooled."""
    tokens = embedding(tie_weights)
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
    check_projection(step, tie_weights, A, G)
