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
from tests.support.harness import randomize, weights_of
from tests.support.placements import place
from tests.support.reference import (
    append_one,
    clip_factor,
    factors,
    gradient,
    inverse_solve,
)
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


def test_last_step() -> None:
    model = model_of(kl_clip=1e-3)
    assert model.optimizer.last_step == {}
    a = append_one(X.astype(np.float64))
    g = a @ np.vstack(weights_of(model)) - Y
    W = gradient(a[:, None], g[:, None])
    P = inverse_solve(W, *factors(a[:, None], g[:, None]), DAMPING)
    nu = clip_factor([(P, W)], RATE, 1e-3)
    assert nu < 1
    model.train_on_batch(X, Y)
    got = model.optimizer.last_step
    assert set(got) == {"clip_factor", "length", "damping"}
    length = RATE**2 * np.sum(P * W) * nu**2
    assert got["clip_factor"] == pytest.approx(nu, rel=1e-4)
    assert got["length"] == pytest.approx(length, rel=1e-4)
    assert got["damping"] == pytest.approx(DAMPING)


SMALLER = "Try a smaller one, KFAC(kl_clip=0.005), or a larger damping"


@pytest.mark.parametrize(
    ("rate", "targets", "hint"),
    [
        (RATE, 1, None),
        (1e3, 1, SMALLER),
        (1e3, 100, None),  # A loss of thousands of nats needs long steps.
    ],
)
def test_clip_hint(
    rate: float, targets: float, hint: str | None, capfd: Any
) -> None:
    """The hint is given once, after 20 steps, with the cause."""
    model = model_of(rate)
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
    model.compile(tfkfac.KFAC(step="natural"), loss())
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
    model.compile(tfkfac.KFAC(1e3, fisher="empirical"), "mse")
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
        layers.Conv2D(6, 3, groups=2, use_bias=False, name="grouped"),
        layers.GroupNormalization(2, center=False, name="norm"),
        layers.SeparableConv2D(5, 2, name="separable"),
        layers.Flatten(),
        layers.Dense(7, name="dense"),
        Scale(name="scale"),
        shape=(5, 5, 2),
    )
    optimizer = bind(model)
    assert {k: v[:4] for k, v in blocks_of(optimizer).items()} == {
        "grouped": ["Conv", "2 of 9 x 9", "2 of 3 x 3", "54"],
        "norm": ["Normalization", "-", "6 of 1 x 1", "6"],
        "depthwise/separable": [
            "SeparableConv, depthwise",
            "6 of 4 x 4",
            "6 of 1 x 1",
            "24",
        ],
        "pointwise/separable": [
            "SeparableConv, pointwise",
            "7 x 7",
            "5 x 5",
            "35",
        ],
        "dense": ["Dense", "21 x 21", "7 x 7", "147"],
    }
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    text = summary_text(optimizer)
    assert "Preconditioned weights: 266 of 273." in text
    assert "solver inverse, inner optimizer SGD" in text
    assert f"model '{model.name}'" in text
    # The factors and inverses of the last layer, in float32.
    assert blocks_of(optimizer)["dense"][4] == "3.83 KB"
    size = 2 * 4 * (21**2 + 7**2) / 1024
    assert size == pytest.approx(3.83, abs=5e-3)


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


# ------------------------------------------------------------------- bytes
WORKERS = 4
FLOAT = 4
# Mode: number of gradient workers of a layer.
MODES = {"comm_opt": 4, "mem_opt": 1, "hybrid_opt 1/2": 2, "dp_kfac": 1}
# Elements of all layers of `SIZES`; the embedding's A is diagonal.
WEIGHTS = 7 * 4 + 2 * 5 * 3 + 6 * 2 + 7 * 3
FACTORS = 7 + 4**2 + 2 * (5**2 + 3**2) + 6 * 2**2 + 7**2 + 3**2
EIGENVALUES = 4 + 2 * (5 + 3) + 6 * 2 + 7 + 3
SENT = {"inverse": FACTORS, "eigen": FACTORS + EIGENVALUES}
# Products of eigenvalues are stored, one per weight (KAISA, section 4.4).
KEPT = {"inverse": FACTORS, "eigen": FACTORS - 7 + WEIGHTS}


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize(("mode", "gradient_workers"), MODES.items())
def test_bytes_by_hand(mode: str, gradient_workers: int, solver: str) -> None:
    """KAISA, section 3.1: sums over four workers, g of them gradient workers.

    Each factor has one owner, which sends its decomposition to g - 1 workers.
    A preconditioned gradient goes to the workers outside of the g.
    """
    placement = place(mode, WORKERS, solver)
    g, ranks = gradient_workers, range(WORKERS)
    states = [placement.state_bytes(rank) for rank in ranks]
    received = [placement.communication_bytes(rank, 400) for rank in ranks]

    def total(step: str, message: str) -> float:
        return sum(row[step][message] for row in received) / FLOAT

    assert sum(row["factors"] for row in states) == FLOAT * FACTORS
    kept = sum(row["decompositions"] for row in states)
    assert kept == FLOAT * g * KEPT[solver]
    sent = total("inverse", "decompositions")
    assert sent == (g - 1) * SENT[solver]
    away = total("plain", "preconditioned_gradients")
    assert away == (WORKERS - g) * WEIGHTS
    # All-reduce: 2 (P - 1) / P of the data per worker. The message has the
    # seven factors and their numbers of rows.
    assert total("plain", "gradients") == 2 * (WORKERS - 1) * 100
    reduced = 0 if mode == "dp_kfac" else FACTORS + 7
    assert total("factor", "factors") == 2 * (WORKERS - 1) * reduced
