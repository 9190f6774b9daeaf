"""Warnings, hints and reports of K-FAC."""

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
from tests.support.harness import randomize
from tests.support.small import (
    FEATURES,
    LateBuilt,
    Scale,
    data,
    loss,
    summary_text,
    unbuilt_sequential,
)
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential
from tfkfac.kfac import length, natural


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


def dense(units: int) -> Any:
    return layers.Dense(units, use_bias=False)


# Layers, excluded layers, and words of the warning or None.
COVERAGE: dict[str, tuple[Callable[[], list[Any]], list[str], str | None]] = {
    "18 of 36": (lambda: [*map(Offset, [1] * 18), dense(3)], [], None),
    "18 of 37": (lambda: [*map(Offset, [1] * 19), dense(3)], [], "48.6%"),
    "6 of 120": (lambda: [Offset(6), dense(19)], [], None),
    "7 of 121": (lambda: [Offset(7), dense(19)], [], r"\(7 weights: no block"),
    "skipped": (lambda: [dense(50), Offset(60)], ["offset.*"], None),
    "all skipped": (lambda: [dense(50)], [".*"], None),
}


@pytest.mark.parametrize("case", COVERAGE)
def test_coverage(case: str) -> None:
    """Warns below 50 %, and of weights above 5 %."""
    parts, skipped, words = COVERAGE[case]
    texts = compiling(sequential(*parts()), skip_layers=skipped)
    assert len(texts) == (words is not None)
    assert words is None or re.search(words, texts[0]), texts


def test_embeddings_under_spectral_steps() -> None:
    """Embeddings, excluded by spectral steps, cause no warning."""
    model = sequential(
        layers.Embedding(90, 4, name="tokens"),
        layers.Flatten(),
        Offset(60, name="offset"),
        layers.Dense(1),
        shape=(3,),
    )
    (text,) = compiling(model, step="spectral")
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


# ------------------------------------------------------------ hints of a step
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = RNG.normal(size=(8, 2)).astype("float32")
SMALLER = "Try a smaller one, KFAC(kl_clip=0.005), or a larger damping"


@pytest.mark.parametrize(
    ("rate", "targets", "hint"),
    [
        (0.5, 1, None),
        (1e3, 1, SMALLER),
        (1e3, 100, None),  # A loss of thousands of nats needs long steps.
    ],
)
def test_clip_hint(
    rate: float, targets: float, hint: Any, capfd: Any, monkeypatch: Any
) -> None:
    """The hint is given once, after 20 steps, with the cause."""
    if hint is None:  # five steps suffice to see no hint
        monkeypatch.setattr(length, "HINT_STEP", 4)
        monkeypatch.setattr(length, "MIN_CLIPPED", 3)
        monkeypatch.setattr(natural, "MIN_CLIPPED", 3)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="d")])
    randomize(model)
    optimizer = tfkfac.KFAC(rate, damping=0.125, fisher="empirical")
    model.compile(optimizer, "mse", run_eagerly=True)
    data = tf.data.Dataset.from_tensors((X, targets * Y)).repeat()
    model.fit(data, steps_per_epoch=length.HINT_STEP - 1, verbose=0)
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
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    clips = []
    for _ in range(20):
        model.train_on_batch(128 + 60 * images, labels)
        clips.append(model.optimizer.last_step["clip_factor"])
    assert np.median(clips) > 0.1
    assert "normalise the inputs" in capfd.readouterr().err


def test_clip_hint_of_tokens(capfd: Any) -> None:
    """Tokens are not normalised."""
    stack = layers.Embedding(100, 3), layers.Flatten(), layers.Dense(2)
    model = keras.Sequential([keras.Input((4,)), *stack])
    optimizer = tfkfac.KFAC(1e3, fisher="empirical")
    model.compile(optimizer, "mse", run_eagerly=True)
    words = RNG.integers(50, 100, size=(8, 4)).astype("float32")
    for _ in range(20):
        model.train_on_batch(words, Y)
    text = capfd.readouterr().err
    assert SMALLER in text
    assert "normalise" not in text


# -------------------------------------------------------------------- summary
def test_summary() -> None:
    """One row per block with its shapes, weights and bytes."""
    model = sequential(
        layers.GroupNormalization(2, center=False, name="norm"),
        layers.SeparableConv2D(5, 2, name="conv"),
        Scale(name="scale"),
        shape=(5, 5, 6),
    )
    optimizer = bind(model)
    # The bytes of the factors and inverses, in float32.
    assert blocks_of(optimizer) == {
        "norm": ["Normalization", "-", "6 of 1 x 1", "6", "48 B"],
        "depthwise/conv": [
            "SeparableConv, depthwise",
            "6 of 4 x 4",
            "6 of 1 x 1",
            "24",
            "816 B",
        ],
        "pointwise/conv": [
            "SeparableConv, pointwise",
            "7 x 7",
            "5 x 5",
            "35",
            "592 B",
        ],
    }
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    text = summary_text(optimizer)
    assert "Preconditioned weights: 65 of 70." in text
    assert "solver inverse, inner optimizer SGD" in text
    assert f"model '{model.name}'" in text


@pytest.mark.parametrize("build", [unbuilt_sequential, LateBuilt])
def test_reports_before_a_first_step(build: Callable[[], Any]) -> None:
    """An error before the model is built; then factors of zeros."""
    model, (x, y) = build(), data()
    optimizer = tfkfac.KFAC(step="natural")
    model.compile(optimizer, loss(), run_eagerly=True)
    for report in (optimizer.summary, optimizer.state_bytes):
        with pytest.raises(ValueError, match=r"not built.*`model\.build"):
            report()
    with pytest.raises(ValueError, match=r"no factors yet.*Train a step"):
        optimizer.factors()
    model.train_on_batch(x[:0], y[:0])
    assert list(blocks_of(optimizer)) == ["hidden", "logits"]
    for block in optimizer.factors().values():
        assert not block["A"].any()
        assert not block["G"].any()
