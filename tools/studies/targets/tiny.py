"""The data of the tiny problems, by their names."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from common.data import Data, Split
from targets.data import idx_images, moved_digits, rows_of, tokens

WORDS = 2000  # vocabulary of the Llama
TRAINED_DIGITS = 1440  # of scikit-learn's 1,797


def load(name: str, directory: pathlib.Path | None, examples: int) -> Data:
    """Load the data of a problem by its name, see `data.load`."""
    if name == "mlp":
        return _fashion(directory, examples)
    if name == "siamese":
        return _pairs(*_digits())
    if name in _DIGITS:
        rows, trained = Split(*_DIGITS[name](*_digits())), TRAINED_DIGITS
    else:
        rows = Split(*_SAMPLED[name](np.random.default_rng(0)))
        trained = examples
    return Data(rows.first(examples), rows_of(rows, trained))


def _fashion(directory: pathlib.Path | None, examples: int) -> Data:
    """Return images; the last 4,000 training images are held out."""
    held_out = 4_000
    if directory is None:
        return moved_digits(examples, held_out)
    train = idx_images(directory, 60_000).train
    return Data(train.first(examples), rows_of(train, -held_out))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits in a fixed order, 8x8x1."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    return x[order], y[order].astype("int32")


def _enlarged(side: int, channels: int) -> Callable[..., Any]:
    def enlarge(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = tf.image.resize(x, (side, side)).numpy()
        return np.repeat(images, channels, -1), y

    return enlarge


def _pixels_as_targets(
    x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return x.reshape(-1, 64), x.reshape(-1, 64)


_DIGITS: dict[str, Callable[..., Any]] = {
    "cnn": _enlarged(16, 1),
    "autoencoder": _pixels_as_targets,
    "vae": _pixels_as_targets,
    "vit": _enlarged(16, 3),
    "mobilenet": _enlarged(32, 3),
}


def _pairs(x: np.ndarray, y: np.ndarray) -> Data:
    """Return pairs of equal digits, and three times as many unequal pairs."""
    random = np.random.default_rng(0)
    x = x.reshape(-1, 64)

    def pairs(rows: slice) -> Split:
        images, labels = x[rows], y[rows]
        other = random.permutation(len(images))
        equal = labels == labels[other]
        unequal = np.flatnonzero(~equal)[: 3 * int(equal.sum())]
        chosen = np.concatenate([np.flatnonzero(equal), unequal])
        answers = equal[chosen].astype("float32")[:, None]
        return Split((images[chosen], images[other][chosen]), answers)

    train = pairs(slice(TRAINED_DIGITS))
    return Data(train, pairs(slice(TRAINED_DIGITS, None)))


def _function(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a smooth function of six numbers, with noise."""
    x = random.uniform(-1, 1, (1500, 6)).astype("float32")
    a, b, c, d, e, f = x.T
    y = np.sin(3 * a * b) + c**2 - np.exp(d * e) + 0.5 * np.sin(5 * f)
    y = y + 0.05 * random.normal(size=1500)
    return x, y.astype("float32")[:, None]


def _majority(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return 1 if more than half of the words are above 25."""
    words = random.integers(1, 50, (900, 20)).astype("int32")
    lengths = random.integers(8, 21, 900)
    words[np.arange(20)[None] >= lengths[:, None]] = 0
    return words, ((words > 25).sum(1) * 2 > lengths).astype("int32")


def _counts(random: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Count large words: fewer than four, four, or more."""
    words = random.integers(1, 60, (1800, 16)).astype("int32")
    large = (words[:, :8] > 30).sum(1)
    y = np.where(large < 4, 0, np.where(large == 4, 1, 2)).astype("int32")
    return {**tokens(words), "segment_ids": np.zeros_like(words)}, y


def _sums(random: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Return running sums of random steps, to predict the next."""
    steps = random.integers(1, 4, (700, 33))
    return _next((np.cumsum(steps, 1) % 97).astype("int32"))


def _markov(random: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Return Markov chains with twenty successors of a word."""
    successors, count, length = 20, 1264, 33
    odds = random.dirichlet(np.full(successors, 0.3), size=WORDS)
    words = random.integers(0, WORDS, (WORDS, successors))
    text = np.zeros((count, length), "int32")
    text[:, 0] = random.integers(0, WORDS, count)
    for position in range(1, length):
        before = text[:, position - 1]
        draw = random.uniform(size=count)
        chosen = (draw[:, None] > odds[before].cumsum(1)).sum(1)
        text[:, position] = words[before, np.minimum(chosen, successors - 1)]
    return _next(text)


def _next(text: np.ndarray) -> tuple[Any, np.ndarray]:
    return tokens(text[:, :-1]), text[:, 1:]


_SAMPLED: dict[str, Callable[[np.random.Generator], tuple[Any, np.ndarray]]] = {
    "regression": _function,
    "lstm": _majority,
    "bert": _counts,
    "gpt2": _sums,
    "llama": _markov,
    "llama-tied": _markov,
}
