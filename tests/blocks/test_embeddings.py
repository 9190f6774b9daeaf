"""Position embeddings, and embeddings that project back to tokens.

The factors of the projection of a `ReversibleEmbedding`, with tied and untied
weights, are those of a dense layer in float64 NumPy: A from the features, G
from the gradients at the logits.
"""

from collections.abc import Callable
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
    keras_gradients,
    randomize,
    train_once,
    weights_of,
)
from tests.support.layers import make_input, targets
from tests.support.reference import Array, eigen_solve, factors
from tests.support.summaries import leftovers_of

BATCH, TOKENS, WIDTH, TIME = 4, 6, 3, 5


class PositionEmbedding(layers.Layer):
    """Imitates the layer of this name in keras-hub."""

    __module__ = "keras_hub.src.layers.modeling.position_embedding"

    def __init__(self, sequence_length: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sequence_length = sequence_length

    def build(self, shape: Any) -> None:
        self.position_embeddings = self.add_weight(
            name="embeddings", shape=[self.sequence_length, shape[-1]]
        )

    def call(self, inputs: Any, start_index: Any = 0, positions: Any = None):
        shape = ops.shape(inputs)
        table = ops.convert_to_tensor(self.position_embeddings)
        if positions is None:
            table = ops.slice(table, (start_index, 0), shape[-2:])
        else:
            if len(positions.shape) == 1:
                positions = ops.expand_dims(positions, 0)
            table = ops.take(table, positions, axis=0)
        return ops.broadcast_to(table, shape)


CHOSEN = np.array([[0, 1, 2], [3, 4, 5], [1, 1, 1], [5, 0, 2]], "int32")
# Arguments of a call, and the positions that it looks up.
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], Array]] = {
    "start": (dict, np.tile(np.arange(3), (BATCH, 1))),
    "later": (
        lambda: {"start_index": ops.convert_to_tensor(2, "int64")},
        np.tile(np.arange(2, 5), (BATCH, 1)),
    ),
    "given": (lambda: {"positions": ops.convert_to_tensor(CHOSEN)}, CHOSEN),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_position_embedding(sharing: str) -> None:
    """The factors equal an embedding's factors with positions as tokens."""

    class Positioned(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [PositionEmbedding(6, name=name) for name in CALLS]

        def call(self, x: Any) -> Any:
            arguments = [make() for make, _ in CALLS.values()]
            pairs = zip(self.tables, arguments, strict=True)
            return ops.tanh(x + sum(table(x, **kw) for table, kw in pairs))

    model = Positioned()
    x = make_input("", (3, WIDTH), BATCH)
    model(x)
    randomize(model)
    y = targets(model, x)
    one_hot = [np.eye(6)[positions] for _, positions in CALLS.values()]
    pairs = zip(one_hot, weights_of(model), strict=True)
    out = np.tanh(x + sum(a @ table for a, table in pairs))
    g = (out - y) * (1 - out**2)
    gradients = keras_gradients(model, x, y)
    step = train_once(model, x, y, weight_sharing=sharing)
    for name, a, gradient in zip(CALLS, one_hot, gradients, strict=True):
        assert_close(gradient_by(a, g), gradient, 1e-5, "gradient")
        A, G = factors(a, g, sharing)
        check_factors(step.of(name), np.diagonal(A), G)


@pytest.mark.filterwarnings("ignore:Layer 'block'.*does not support masking")
def test_positions_of_padding_do_not_count() -> None:
    inputs = keras.Input((TIME,), dtype="int32")
    tokens = layers.Embedding(TOKENS, WIDTH, mask_zero=True)(inputs)
    positions = PositionEmbedding(TIME, name="block")(tokens)
    kept = ops.cast(inputs > 0, "float32")[..., None]
    hidden = (positions + tokens) * kept
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    x = np.array([[1, 2, 0, 0, 0], [3, 1, 1, 2, 0]], "int32")
    step = train_once(model, x, targets(model, x), loss="mse")
    want = np.array([2, 2, 1, 1, 0]) / 6
    assert_close(step.of("block")["A"], want, 1e-6, "A")


class FirstTokens(layers.Layer):
    """Changes the number of tokens, but not Keras' mask."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return x[:, :3]


def test_masks_of_other_shapes_do_not_count() -> None:
    x = np.array([[1, 2, 0, 0, 0], [3, 1, 1, 2, 0]], "int32")
    steps = []
    for mask_zero in (True, False):
        inputs = keras.Input((TIME,), dtype="int32")
        tokens = layers.Embedding(TOKENS, WIDTH, mask_zero=mask_zero)(inputs)
        hidden = layers.Dense(2, name="block")(FirstTokens()(tokens))
        outputs = layers.Dense(2)(layers.Flatten()(hidden))
        model = keras.Model(inputs, outputs)
        randomize(model)
        steps.append(train_once(model, x, targets(model, x), loss="mse"))
    for name, factor in steps[0].of("block").items():
        np.testing.assert_array_equal(factor, steps[1].of("block")[name])


def test_ragged_tokens() -> None:
    """A is the frequency of the tokens."""

    class Mean(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.block = layers.Embedding(TOKENS, WIDTH, name="block")

        def call(self, x: Any) -> Any:
            return tf.reduce_mean(self.block(x), 1)

    model = Mean()
    x = tf.ragged.constant([[1, 2, 0], [1], [3, 1]], dtype=tf.int32)
    model(x)
    model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=True)
    model.train_on_batch(x, np.ones([3, WIDTH]))
    (factors_of_block,) = model.optimizer.factors().values()
    want = np.array([1, 3, 1, 1, 0, 0]) / 6
    assert_close(factors_of_block["A"], want, 1e-6, "A")


# ---------------------------------------------------- reversible embeddings
class Head(layers.Layer):
    """Output head that projects by a given embedding, as in masked models."""

    def __init__(self, tokens: Any) -> None:
        super().__init__()
        self.tokens = tokens

    def call(self, x: Any) -> Any:
        return self.tokens(x, reverse=True)


def functional(tokens: Any, in_a_layer: bool = False) -> Any:
    inputs = keras.Input((TIME,), dtype="int32")
    hidden = layers.Dense(WIDTH, use_bias=False, name="hidden")(tokens(inputs))
    out = Head(tokens)(hidden) if in_a_layer else tokens(hidden, reverse=True)
    return keras.Model(inputs, out)


def embedding(tie_weights: bool, **kwargs: Any) -> Any:
    return layers.ReversibleEmbedding(
        TOKENS, WIDTH, tie_weights=tie_weights, name="tokens", **kwargs
    )


def language(tie_weights: bool, in_a_layer: bool = False, **kwargs: Any) -> Any:
    """Create a built model, tokens, and targets for its outputs."""
    model = functional(embedding(tie_weights, **kwargs), in_a_layer)
    x = make_input("embedding", (TIME,), BATCH)
    model(x)
    randomize(model)
    return model, x, targets(model, x)


def weights_by_name(model: Any) -> dict[str, Array]:
    names = [v.name for v in model.trainable_variables]
    return dict(zip(names, weights_of(model), strict=True))


def rows_of(model: Any, x: Array, y: Array, cap: float | None = None) -> Any:
    """Inputs and gradients of the projection, then of the lookups."""
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
    """Check A and G of the projection; tied weights exchange A and G."""
    if tied:
        check_factors(step.factors["tokens"], np.diagonal(G), A)
    else:
        check_factors(step.factors["reverse/tokens"], A, G)


@pytest.mark.parametrize(
    ("sharing", "tied", "cap"),
    [("expand", True, None), ("reduce", False, 0.7)],
)
def test_factors_and_step(sharing: str, tied: bool, cap: float | None) -> None:
    """Tied: the factors of the projection precondition the whole gradient.

    Untied: lookups and projection have separate blocks. G is computed at the
    logits before a soft cap.
    """
    model, x, y = language(tied, in_a_layer=not tied, logit_soft_cap=cap)
    a, g, one_hot, down = rows_of(model, x, y, cap)
    name = "embeddings" if tied else "reverse_embeddings"
    index = list(weights_by_name(model)).index(name)
    mean = gradient_by(a, g)
    if tied:
        mean = mean.T + gradient_by(one_hot, down)
    assert_close(mean, keras_gradients(model, x, y)[index], 1e-5, "gradient")
    step = train_once(
        model,
        x,
        y,
        solver="eigen",
        damping=0.3,
        weight_sharing=sharing,
        eager=not tied,
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
    assert_close(step.delta[index], eigen_solve(mean, A, G, 0.3), 1e-4, "step")


@pytest.mark.parametrize("tied", [True, False])
def test_spectral_steps_cover_the_untied_projection(tied: bool) -> None:
    """Tables have no block; the tied projection is a table."""
    model, x, y = language(tied)
    a, g, *_ = rows_of(model, x, y)
    step = train_once(model, x, y, step="spectral", rest_optimizer="adam")
    excluded = "spectral steps leave embeddings to the rest optimizer"
    assert leftovers_of(model.optimizer) == {"tokens:embeddings": excluded}
    paths = {"hidden"} if tied else {"hidden", "reverse/tokens"}
    assert set(step.factors) == paths
    if not tied:
        A, G = factors(a, g)
        # Spectral steps divide the loss by the variance of the targets.
        columns = np.reshape(y, [-1, np.shape(y)[-1]])
        variance = np.mean(np.var(columns, 0, ddof=1))
        check_projection(step, tied, A, G / variance**2)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_padding_does_not_count(tie_weights: bool) -> None:
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
