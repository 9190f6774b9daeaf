"""Warnings and hints of K-FAC."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import randomize, weights_of
from tests.support.reference import (
    append_one,
    clip_factor,
    factors,
    gradient,
    inverse_solve,
)
from tests.support.small import (
    FEATURES,
    gradients_of,
)
from tests.support.summaries import leftovers_of, sequential


def warnings_of(action: Callable[[], Any]) -> list[str]:
    """The warnings of K-FAC, including repeated ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(w.message) for w in caught if "K-FAC" in str(w.message)]


def compiling(model: Any, **kwargs: Any) -> list[str]:
    optimizer = tfkfac.KFAC(**{"step": "natural", **kwargs})
    return warnings_of(
        lambda: model.compile(optimizer, "mse", run_eagerly=True)
    )


class Offset(layers.Layer):
    """A layer without a block, with a given number of weights."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def build(self, shape: Any) -> None:
        self.offset = self.add_weight((self.size,), name="offset")

    def call(self, x: Any) -> Any:
        return x + keras.ops.sum(self.offset)


class Subclassed(keras.Model):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts
        self(np.ones((1, FEATURES)))

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def dense(units: int) -> Any:
    return layers.Dense(units, use_bias=False)


# Layers, excluded layers, and words of the warning or None.
COVERAGE: dict[str, tuple[Callable[[], list[Any]], list[str], str | None]] = {
    "18 of 36": (lambda: [*map(Offset, [1] * 18), dense(3)], [], None),
    "18 of 37": (lambda: [*map(Offset, [1] * 19), dense(3)], [], "48.6%"),
    "6 of 120": (lambda: [Offset(6), dense(19)], [], None),
    "7 of 121": (lambda: [Offset(7), dense(19)], [], r"\(7 weights: no block"),
    "last": (lambda: [dense(50), Offset(1)], [], r"\(1 weights: no block"),
    "first": (lambda: [Offset(1), dense(50)], [], None),
    "skipped last": (lambda: [dense(50), Offset(1)], ["offset.*"], None),
    "all skipped": (lambda: [dense(50)], [".*"], None),
}


@pytest.mark.parametrize("case", COVERAGE)
@pytest.mark.parametrize("make", [sequential, Subclassed])
def test_coverage(make: Any, case: str) -> None:
    """Warns below 50 %, of weights above 5 %, and of the last layer."""
    parts, skipped, words = COVERAGE[case]
    texts = compiling(make(*parts()), skip_layers=skipped)
    assert len(texts) == (words is not None)
    assert words is None or re.search(words, texts[0]), texts


@pytest.mark.parametrize("size", [0, 60])
def test_embeddings_under_spectral_steps(size: int) -> None:
    """Embeddings, excluded by spectral steps, cause no warning."""
    model = sequential(
        layers.Embedding(90, 4, name="tokens"),
        layers.Flatten(),
        *([Offset(size, name="offset")] if size else []),
        layers.Dense(1),
        shape=(3,),
    )
    texts = compiling(model, step="spectral")
    assert len(texts) == (size > 0)
    for text in texts:
        assert "alone: offset (60 weights: no block" in text
        assert "tokens" not in text
    assert "tokens:embeddings" in leftovers_of(model.optimizer)


@pytest.mark.parametrize("built_late", [False, True])
def test_warnings_are_given_once(built_late: bool) -> None:
    """A warning is given once, when the weights are known."""
    parts = [Offset(50), layers.Dense(1)]
    model = keras.Sequential(parts) if built_late else sequential(*parts)
    assert len(compiling(model)) == (not built_late)
    x = np.ones((4, FEATURES), "float32")

    def train() -> None:
        for _ in range(2):
            model.train_on_batch(x, x[:, :1])
            model.compile(model.optimizer, "mse", run_eagerly=True)

    assert len(warnings_of(train)) == built_late


# ------------------------------------------------- records and hints of a step
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = RNG.normal(size=(8, 2)).astype("float32")
RATE, DAMPING = 0.5, 0.125


def model_of(rate: Any = RATE, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="d")])
    randomize(model)
    inner = keras.optimizers.SGD(rate)
    options |= {"damping": DAMPING, "fisher": "empirical"}
    model.compile(tfkfac.KFAC(inner, **options), "mse")
    return model


@pytest.mark.parametrize("kl_clip", [1e-3, None])
def test_last_step(kl_clip: float | None) -> None:
    model = model_of(kl_clip=kl_clip)
    assert model.optimizer.last_step == {}
    a = append_one(X.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - Y
    W = gradient(a[:, None], g[:, None])
    P = inverse_solve(W, *factors(a[:, None], g[:, None]), DAMPING)
    nu = clip_factor([(P, W)], RATE, kl_clip)
    assert (nu < 1) == (kl_clip == 1e-3)
    model.train_on_batch(X, Y)
    got = model.optimizer.last_step
    assert set(got) == {"clip_factor", "length", "damping"}
    length = RATE**2 * np.sum(P * W) * nu**2
    assert got["clip_factor"] == pytest.approx(nu, rel=1e-4)
    assert got["length"] == pytest.approx(length, rel=1e-4)
    assert got["damping"] == pytest.approx(DAMPING)


SMALLER = "Try a smaller one, KFAC(kl_clip=0.005), or a larger damping"


@pytest.mark.parametrize(
    ("options", "targets", "hint"),
    [
        ({}, 1, None),
        ({"rate": 1e3}, 1, SMALLER),
        # A loss of thousands of nats needs long steps.
        ({"rate": 1e3}, 100, None),
    ],
)
def test_clip_hint(
    options: Any, targets: float, hint: str | None, capfd: Any
) -> None:
    """The hint is given once, after 20 steps, with the cause."""
    model = model_of(**options)
    data = tf.data.Dataset.from_tensors((X, targets * Y)).repeat()
    model.fit(data, steps_per_epoch=19, verbose=0)
    assert "tfkfac" not in capfd.readouterr().err
    model.fit(data, epochs=2, steps_per_epoch=2, verbose=0)
    text = capfd.readouterr().err
    assert text.count("kl_clip has left less than") == bool(hint)
    assert ("hints on the first steps" in text) == bool(hint)
    assert hint is None or hint in text


def test_clip_hint_of_raw_pixels(capfd: Any) -> None:
    """Raw pixels cause the hint also if most clip factors are above 0.1."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, size=32)
    images = rng.normal(size=(10, 64))[labels] + rng.normal(size=(32, 64))
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64, "relu"), layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfkfac.KFAC(step="natural"), loss)
    factors = []
    for _ in range(20):
        model.train_on_batch(128 + 60 * images, labels)
        factors.append(model.optimizer.last_step["clip_factor"])
    assert np.median(factors) > 0.1
    assert "normalise the inputs" in capfd.readouterr().err


def test_clip_hint_of_tokens(capfd: Any) -> None:
    """Tokens are not normalised."""
    stack = layers.Embedding(100, 3), layers.Flatten(), layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), *stack])
    model.compile(tfkfac.KFAC(1e3, fisher="empirical"), "mse")
    words = RNG.integers(50, 100, size=(8, 4)).astype("float32")
    for _ in range(20):
        model.train_on_batch(words, Y)
    text = capfd.readouterr().err
    assert SMALLER in text
    assert "normalise" not in text


@pytest.mark.parametrize("terms", [None, 1])
def test_a_custom_loop_is_warned_of_an_unobserved_loss(terms: Any) -> None:
    """Unless the number of terms is given."""
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    optimizer = tfkfac.KFAC(step="natural").attach(model, loss_terms=terms)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gradients = gradients_of(
                model, X, Y, lambda y, p: tf.reduce_sum(tf.square(p - y))
            )
            optimizer.apply(gradients, model.trainable_variables)
    texts = [str(w.message) for w in caught if "1 for a sum" in str(w.message)]
    assert len(texts) == (terms is None)
