"""What the jobs of workers are made of: rows, data, models, optimizers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

from tests.support.reference import Array
from tests.support.schedules import Formula
from tfkfac.kfac import spectral

CLASSES = 3
TOKENS = 6
Feed = Sequence[Sequence[Sequence[int]]]

# ------------------------------------------------------------------ models
# Rows of each quarter of the workers by step: with two workers each gets two
# quarters. Factor steps are the even ones, inverse steps every second of them.
_ROWS = [
    (2, 2, 2, 2),
    (2, 2, 2, 2),
    (3, 1, 4, 0),
    (1, 2, 3, 0),
    (4, 3, 0, 0),
    (2, 2, 2, 2),
    (0, 0, 0, 8),
    (1, 5, 1, 1),
    (0, 1, 3, 2),
    (1, 0, 0, 0),
]


def uneven(rows: Sequence[Sequence[int]] = _ROWS) -> Feed:
    """Other rows in every step; some workers have none."""
    fresh = iter(range(1000))
    return [[[next(fresh) for _ in range(n)] for n in step] for step in rows]


FEEDS: dict[str, Callable[[], Feed]] = {
    "uneven": uneven,
    "even": lambda: uneven([(2, 2, 2, 2)] * 10),
    # The first worker begins without any row.
    "late": lambda: uneven([(0, 0, 3, 1), *_ROWS[1:]]),
    # TensorFlow's float32 convolutions fail on a CPU without any row, unless
    # TF_ENABLE_ONEDNN_OPTS=0.
    "some": lambda: uneven([(3, 1, 2, 2), (1, 1, 2, 1)] * 5),
    # Every worker sees the same rows.
    "same": lambda: [[list(range(4 * s, 4 * s + 4))] * 4 for s in range(10)],
}


def shares(feed: Feed, workers: int) -> list[list[list[int]]]:
    """The rows of each worker by step."""
    size = 4 // workers
    return [
        [[*itertools.chain(*step[i : i + size])] for i in range(0, 4, size)]
        for step in feed
    ]


def images(rows: int = 160) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5, 5, 2))
    return x, np.argmax(x.mean((1, 2)) @ rng.normal(size=(2, CLASSES)), 1)


def sentences(rows: int = 160) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.integers(TOKENS, size=(rows, 5))
    return x, x[:, 0] % CLASSES


def stacked(*parts: keras.layers.Layer) -> keras.Model:
    """Layers on images, and one that has a number for each class."""
    logits = layers.Dense(CLASSES, name="logits")
    return keras.Sequential([keras.Input((5, 5, 2)), *parts, logits])


def vision() -> keras.Model:
    conv = layers.Conv2D(3, 3, activation="tanh", name="conv")
    norm = layers.LayerNormalization(name="norm")
    return stacked(conv, norm, layers.Flatten())


def cnn() -> keras.Model:
    """What the definition in NumPy knows."""
    conv = layers.Conv2D(3, 3, activation="tanh", name="conv")
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    return stacked(conv, layers.Flatten(), hidden)


def small() -> keras.Model:
    hidden = layers.Dense(4, activation="tanh", name="hidden")
    return stacked(layers.Flatten(), hidden)


def wide() -> keras.Model:
    """Layers that are preconditioned by their rows, and one that is not."""
    first = layers.Dense(40, activation="tanh", name="first")
    second = layers.Dense(40, activation="tanh", name="second")
    return stacked(layers.Flatten(), first, second)


def batch_norm() -> keras.Model:
    conv = layers.Conv2D(3, 3, name="conv")
    norm = layers.BatchNormalization(synchronized=True, name="norm")
    return stacked(conv, norm, layers.Activation("tanh"), layers.Flatten())


def text() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    h = layers.Embedding(TOKENS, 4, name="tokens")(tokens)
    h = layers.MultiHeadAttention(2, 3, name="attention")(h, h)
    h = layers.LayerNormalization(name="norm")(h)
    h = layers.GlobalAveragePooling1D()(h)
    return keras.Model(tokens, layers.Dense(CLASSES, name="logits")(h))


def language() -> keras.Model:
    """Projections back to the tokens, by tied weights and by others."""
    tokens = keras.Input((5,), dtype="int32")
    tied = layers.ReversibleEmbedding(TOKENS, 4, name="tied")
    own = layers.ReversibleEmbedding(TOKENS, 4, tie_weights=False, name="own")
    h = layers.GlobalAveragePooling1D()(tied(tokens) + own(tokens))
    h = layers.Dense(4, activation="tanh", name="hidden")(h)
    logits = tied(h, reverse=True) + own(h, reverse=True)
    return keras.Model(tokens, logits)


TEXTS: dict[str, Callable[[], keras.Model]] = {
    f.__name__: f for f in (text, language)
}
MODELS: dict[str, Callable[[], keras.Model]] = {
    f.__name__: f for f in (vision, cnn, small, wide, batch_norm)
} | TEXTS

# -------------------------------------------------------------- optimizers
# The same numbers in float32 and float64.
RATE, MOMENTUM, DAMPING, CLIP, DECAY = 2**-4, 0.5, 2**-4, 2**-6, 0.5
ADAM_RATE, BETAS = 2**-6, (1 - 2**-3, 1 - 2**-7)
SPECTRAL_MOMENTUM, BLOCK = 0.75, 4
SPECTRAL = {"step": "spectral", "momentum": SPECTRAL_MOMENTUM}


def exact_polar_factors(block: int = BLOCK) -> Any:
    """Patches spectral steps: polar factors that are exact in float64."""
    return mock.patch.multiple(spectral, BLOCK=block, ITERATIONS=14)


DEFAULTS = {
    "damping": DAMPING,
    "kl_clip": CLIP,
    "factor_decay": DECAY,
    "factor_update_interval": 2,
    "inverse_update_interval": 4,
}

_SGD, _ADAM = keras.optimizers.SGD, keras.optimizers.Adam
INNERS: dict[str, Callable[[], keras.optimizers.Optimizer | None]] = {
    "default": lambda: None,
    "sgd": lambda: _SGD(RATE, momentum=MOMENTUM),
    "multiplier": lambda: _SGD(1.0),
    "warm-up": lambda: _SGD(WarmUp(0.25)),
    "multiplier, accumulation": lambda: _SGD(
        1.0, gradient_accumulation_steps=2
    ),
    "adam": lambda: _ADAM(ADAM_RATE, *BETAS),
    "global clipnorm, average": lambda: _SGD(
        RATE,
        momentum=MOMENTUM,
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=3,
    ),
    "accumulation, clipvalue": lambda: _ADAM(
        ADAM_RATE, gradient_accumulation_steps=2, clipvalue=0.05
    ),
    "accumulation, average, decay": lambda: _SGD(
        RATE,
        momentum=MOMENTUM,
        weight_decay=0.5,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    ),
}


@keras.saving.register_keras_serializable(package="tests")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """From 0 to a rate at step 4, and down again."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: Any) -> Any:
        return self.rate * keras.ops.cast(warm_up(step), "float32")

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}


def warm_up(step: Any) -> Any:
    """The shape of `WarmUp`."""
    step = keras.ops.cast(step, "float64")
    return keras.ops.minimum(step / 4, (12 - step) / 8)


def clip_schedule(iteration: Any) -> Any:
    """The value of `kl_clip`, with Python's `if`."""
    if iteration < 4:
        return CLIP
    return CLIP / 8


DAMPINGS = keras.optimizers.schedules.PiecewiseConstantDecay
# Arguments that are objects, by the name a case gives them.
OBJECTS: dict[str, Callable[[], Any]] = {
    "damping schedule": lambda: DAMPINGS([2, 6], [1.0, DAMPING, 4.0]),
    "clip schedule": lambda: Formula(clip_schedule),
    "warm-up": lambda: _ADAM(WarmUp(ADAM_RATE), *BETAS),
}
