"""The data of the programs, without a download, and their losses."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from common import canvases, data, text

Make = Callable[[], keras.optimizers.Optimizer]
Losses = tuple[float, float]  # of the training and of the validation data
Pair = tuple[Any, Any]  # inputs and targets

_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty "
    "thirty forty fifty sixty seventy eighty ninety"
)
_ROMAN = {
    **{"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90},
    **{"L": 50, "XL": 40, "X": 10, "IX": 9, "V": 5, "IV": 4, "I": 1},
}


def losses(model: keras.Model, train: Pair, test: Pair) -> Losses:
    """Return the losses of `evaluate` on training and validation data."""
    first, second = (
        model.evaluate(*pair, verbose=0, return_dict=True)["loss"]
        for pair in (train, test)
    )
    return float(first), float(second)


def split(arrays: Any, share: float = 0.8) -> tuple[Any, Any]:
    """Split arrays in two at `share`, in a fixed random order."""
    count = len(tree.flatten(arrays)[0])
    order = np.random.default_rng(0).permutation(count)
    first, last = np.split(order, [int(share * count)])
    return (
        tree.map_structure(lambda a: a[first], arrays),
        tree.map_structure(lambda a: a[last], arrays),
    )


def digits() -> tuple[Pair, Pair]:
    """Return scikit-learn's digits, 8x8, to train and to validate."""
    sets = data.digits()
    parts = (sets.train, sets.test)
    train, test = ((p.x / np.float32(16), p.y.astype("int32")) for p in parts)
    return train, test


def pixel_classes(count: int) -> tuple[Pair, Pair]:
    """Return images of two digits, 48x48, and the class of each pixel."""
    parts = canvases.compose_all(data.digits(), count)
    train, test = ((p.x / np.float32(255), p.y) for p in parts)
    return train, test


def daily_windows(length: int, count: int) -> np.ndarray:
    """Return windows of a periodic series with a trend and noise."""
    random = np.random.default_rng(0)
    time = np.arange(length + count * 8)
    series = np.sin(2 * np.pi * time / 48) + 0.5 * np.sin(2 * np.pi * time / 32)
    series += 0.3 * np.sin(time / 700) + 0.1 * random.normal(size=len(time))
    starts = 8 * np.arange(count)
    windows = series[starts[:, None] + np.arange(length)]
    return windows[..., None].astype("float32")


def spelled(number: int) -> list[str]:
    """Return the English words of a number below 10,000, [] for 0."""
    names = _NAMES.split()
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if number >= unit:
            rest = spelled(number % unit)
            return [*spelled(number // unit), name, *rest]
    if number < 20:
        return names[number : number + 1] if number else []
    return [names[18 + number // 10], *spelled(number % 10)]


def roman(number: int) -> str:
    """Return a number below 4,000 in Roman numerals."""
    for sign, value in _ROMAN.items():
        if number >= value:
            return sign + roman(number - value)
    return ""


def encode(rows: Sequence[Sequence[str]]) -> tuple[np.ndarray, int]:
    """Return rows of codes, padded with at least one 0, and the code count."""
    words = sorted(set(itertools.chain.from_iterable(rows)))
    code_of = {word: code for code, word in enumerate(words, 1)}
    codes = np.zeros((len(rows), 1 + max(map(len, rows))), "int32")
    for row_codes, row in zip(codes, rows, strict=True):
        row_codes[: len(row)] = [code_of[word] for word in row]
    return codes, len(code_of) + 1


def numbers() -> tuple[np.ndarray, int, np.ndarray, int]:
    """Return codes and code counts of English words and of Roman numerals."""
    values = range(1, 4000)
    words = encode([spelled(value) for value in values])
    return *words, *encode([f"<{roman(value)}>" for value in values])


def characters(count: int, length: int) -> tuple[Pair, Pair]:
    """Return pieces of Python's standard library and the next characters."""
    pieces = text.pieces(text.standard_library(), length + 1)[:count]
    train, test = split(pieces)
    return (train[:, :-1], train[:, 1:]), (test[:, :-1], test[:, 1:])


def incomes(count: int) -> Pair:
    """Return numeric and string columns, and a class that depends on both."""
    random = np.random.default_rng(0)
    sizes = {"job": 12, "town": 40, "school": 6, "sector": 4}
    codes = {name: random.integers(0, n, count) for name, n in sizes.items()}
    columns: dict[str, Any] = {
        name: np.char.add(name, code.astype(str)).astype(object)
        for name, code in codes.items()
    }
    for name in ("age", "hours", "gain"):
        columns[name] = random.normal(size=count).astype("float32")
    table = random.normal(size=(12, 6))[codes["job"], codes["school"]]
    town = random.normal(size=40)[codes["town"]]
    odds = 2 * table + town * columns["hours"] - columns["age"] ** 2
    odds += columns["gain"] * (codes["sector"] == 0) + 1
    labels = random.uniform(size=count) < 1 / (1 + np.exp(-2 * odds))
    return columns, labels.astype("float32")[:, None]


def neighbours(count: int, degree: int) -> tuple[np.ndarray, ...]:
    """Return noisy digits, edges between the most similar ones, and labels."""
    (x, y), _ = digits()
    x, y = x[:count].reshape(-1, 64), y[:count]
    distances = np.square(x[:, None] - x[None]).sum(-1)
    near = np.argsort(distances, 1)[:, : degree + 1]  # itself is among them
    edges = np.stack([np.repeat(np.arange(count), degree + 1), near.ravel()], 1)
    noise = np.random.default_rng(0).normal(size=x.shape)
    return (x + noise).astype("float32"), edges.astype("int32"), y
