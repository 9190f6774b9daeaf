"""Trains small models from a description, in one process or on each worker.

`train` is called with the same `Training` by every worker of a cluster. In a
single process it trains on the same global batches: the rows of all workers.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import fosi_reference
from tests.support.dtypes import floats
from tests.support.options import nested
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tfkfac.distributed import collectives
from tfkfac.kfac import method, placement, scales, spectral

Result = Mapping[str, Any]
CLASSES, TOKENS = 3, 6

# -------------------------------------------------------------------- data
# Rows by step, for four workers; of two workers, each has the rows of two.
Feed = Sequence[Sequence[Sequence[int]]]
Steps = list[list[list[int]]]  # rows of each worker
_COUNTS = [
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


def rows_of(counts: Sequence[Sequence[int]]) -> Feed:
    """Return new rows in each step, as many as the counts."""
    row = itertools.count()
    return [[[next(row) for _ in range(n)] for n in step] for step in counts]


FEEDS: dict[str, Feed] = {
    "uneven": rows_of(_COUNTS),
    "even": rows_of([(2, 2, 2, 2)] * 10),
    # The first of two workers has no row in the first step.
    "late": rows_of([(0, 0, 3, 1), *_COUNTS[1:]]),
    # At least one row for every worker, as float32 convolutions need on CPUs.
    "some": rows_of([(3, 1, 2, 2), (1, 1, 2, 1)] * 5),
}


def shares(feed: Feed, workers: int) -> Steps:
    """Divide the rows of each step among a number of workers."""
    size = 4 // workers
    return [
        [[*itertools.chain(*step[i : i + size])] for i in range(0, 4, size)]
        for step in feed
    ]


def images(rows: int = 160) -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 5, 5, 2))
    return x, np.argmax(x.mean((1, 2)) @ rng.normal(size=(2, CLASSES)), 1)


def sentences() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x = rng.integers(TOKENS, size=(160, 5))
    return x, x[:, 0] % CLASSES


def values() -> tuple[Array, Array]:
    """Images, and two real targets."""
    x, _ = images()
    flat = x.reshape(len(x), -1)
    weights = np.random.default_rng(1).normal(size=(flat.shape[1], 2))
    return x, np.tanh(flat @ weights)


def dataset(
    data: Any,
    steps: Steps,
    faults: Sequence[tuple[int, int, float]] = (),
) -> Any:
    """Return batches with exactly the given rows for each worker.

    Args:
        data: Structure of arrays; the first array is the input.
        steps: Rows of each worker by step.
        faults: Step, worker and a value that is added to its inputs there.
    """

    def batches() -> Iterator[Any]:
        for number, step in enumerate(steps):
            for rank in local_ranks():
                rows = np.array(step[rank], int)
                batch = tf.nest.map_structure(lambda a, r=rows: a[r], data)
                for at, worker, value in faults:
                    if (at, worker % len(step)) == (number, rank):
                        x, *rest = batch
                        batch = (x + np.asarray(value, x.dtype), *rest)
                yield batch

    def make(context: Any = None) -> tf.data.Dataset:
        signature = tf.nest.map_structure(
            lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), data
        )
        return tf.data.Dataset.from_generator(
            batches, output_signature=signature
        )

    if strategy().num_replicas_in_sync == 1:
        return make()
    return strategy().distribute_datasets_from_function(make)


# ------------------------------------------------------------------ models
def stacked(*parts: keras.layers.Layer) -> keras.Model:
    """Layers on images, and a dense layer with an output for each class."""
    logits = layers.Dense(CLASSES, name="logits")
    return keras.Sequential([keras.Input((5, 5, 2)), *parts, logits])


def vision() -> keras.Model:
    conv = layers.Conv2D(3, 3, activation="tanh", name="conv")
    norm = layers.LayerNormalization(name="norm")
    return stacked(conv, norm, layers.Flatten())


def cnn() -> keras.Model:
    """The model of `definition`."""
    conv = layers.Conv2D(3, 3, activation="tanh", name="conv")
    hidden = layers.Dense(5, activation="tanh", name="hidden")
    return stacked(conv, layers.Flatten(), hidden)


def small() -> keras.Model:
    hidden = layers.Dense(4, activation="tanh", name="hidden")
    return stacked(layers.Flatten(), hidden)


def wide() -> keras.Model:
    """Two layers with row gradients and one without."""
    first = layers.Dense(40, activation="tanh", name="first")
    second = layers.Dense(40, activation="tanh", name="second")
    return stacked(layers.Flatten(), first, second)


def recurrent() -> keras.Model:
    """Kernels without a block, and a dense layer."""
    rnn = layers.SimpleRNN(4, name="rnn")
    return stacked(layers.Reshape((5, 10)), rnn)


def batch_norm() -> keras.Model:
    conv = layers.Conv2D(3, 3, name="conv")
    norm = layers.BatchNormalization(
        momentum=0.5, synchronized=True, name="norm"
    )
    return stacked(conv, norm, layers.Activation("tanh"), layers.Flatten())


def regression() -> keras.Model:
    penalty = keras.regularizers.L2(2**-6)
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Flatten(),
            layers.Dense(3, "tanh", kernel_regularizer=penalty, name="hidden"),
            layers.Dense(2, name="values"),
        ]
    )


def text() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    h = layers.Embedding(TOKENS, 4, name="tokens")(tokens)
    h = layers.MultiHeadAttention(2, 3, name="attention")(h, h)
    h = layers.LayerNormalization(name="norm")(h)
    h = layers.GlobalAveragePooling1D()(h)
    return keras.Model(tokens, layers.Dense(CLASSES, name="logits")(h))


HIDDEN, SIZE = 3, 17  # of "network"; neither 2 nor 4 divides the 17 weights


def network() -> keras.Model:
    """The model of `fosi_reference`."""
    return fosi_reference.mlp(hidden=HIDDEN)


_OF_IMAGES = vision, cnn, small, wide, recurrent, batch_norm
# Model and data by name.
MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    **{f.__name__: (f, images) for f in _OF_IMAGES},
    "text": (text, sentences),
    "regression": (regression, values),
    "network": (network, lambda: fosi_reference.data(160)),
}

# -------------------------------------------------------------- optimizers
# Numbers that float32 and float64 hold exactly.
RATE, MOMENTUM, DAMPING, CLIP, DECAY = 2**-4, 0.5, 2**-4, 2**-6, 0.5
ADAM_RATE, BETAS = 2**-6, (1 - 2**-3, 1 - 2**-7)
SPECTRAL_MOMENTUM, BLOCK = 0.75, 4
SPECTRAL = {"step": "spectral", "momentum": SPECTRAL_MOMENTUM}
DEFAULTS = {
    "damping": DAMPING,
    "kl_clip": CLIP,
    "factor_decay": DECAY,
    "factor_update_interval": 2,
    "inverse_update_interval": 4,
}
FOSI_DEFAULTS: dict[str, Any] = {
    "num_largest": 2,
    "num_smallest": 1,
    "alpha": 0.25,
    "update_interval": 2,
    "warmup_steps": 2,
    "lanczos_steps": 5,
    "learning_rate_clip": 3.0,
}
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
INNERS: dict[str, Callable[[], keras.optimizers.Optimizer | None]] = {
    "default": lambda: None,
    "plain": lambda: SGD(RATE),
    "sgd": lambda: SGD(RATE, momentum=MOMENTUM),
    "multiplier": lambda: SGD(1.0),
    "warm-up": lambda: SGD(WarmUp(0.25)),
    "multiplier, accumulation": lambda: SGD(1.0, gradient_accumulation_steps=2),
    "adam": lambda: Adam(ADAM_RATE, *BETAS),
    "accumulation, average, decay": lambda: SGD(
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
    """Return the learning rate of `WarmUp` over its largest one."""
    step = keras.ops.cast(step, "float64")
    return keras.ops.minimum(step / 4, (12 - step) / 8)


# Values of options that are objects.
STEPWISE = keras.optimizers.schedules.PiecewiseConstantDecay
OBJECTS: dict[str, Callable[[], Any]] = {
    "damping schedule": lambda: STEPWISE([2, 6], [1.0, DAMPING, 4.0]),
    "clip schedule": lambda: STEPWISE([3], [CLIP, CLIP / 8]),
    "warm-up": lambda: Adam(WarmUp(ADAM_RATE), *BETAS),
}


# ----------------------------------------------------------------- patches
def exact_polar_factors(block: int = BLOCK) -> Any:
    """Patch spectral steps: polar factors that are exact in float64."""
    return mock.patch.multiple(spectral, BLOCK=block, ITERATIONS=14)


def least_likely_labels() -> Any:
    """Patch sampled labels: the least likely class of each row."""

    def sample(_: Any, logits: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        least = tf.one_hot(tf.argmin(logits, -1), CLASSES, dtype=logits.dtype)
        return tf.nn.softmax(logits) - least

    return mock.patch.object(tfkfac.fisher.Categorical, "sample", sample)


PATCHES: dict[str, Callable[[], Any]] = {
    "least likely labels": least_likely_labels,
    # Two schedule groups, for any number of workers.
    "groups": lambda: mock.patch.object(
        placement,
        "assign_groups",
        lambda layers, _: tuple(i % 2 for i in range(len(layers))),
    ),
    # A message for each tensor.
    "small buckets": lambda: mock.patch.object(collectives, "BUCKET_BYTES", 1),
    # Else the Gauss-Newton matrix is that of other rows in a single process.
    "whole batches": lambda: mock.patch.object(scales, "_BATCH_FRACTION", 1.0),
    "rank 3": lambda: mock.patch.object(method, "FACTOR_RANK", 3),
}


# ---------------------------------------------------------------- training
@dataclasses.dataclass(frozen=True)
class Training:
    """Description of a training in float64.

    Attributes:
        optimizer: "KFAC", "FOSI" or "GaussNewton".
        model: Key of `MODELS`.
        inner: Key of `INNERS`.
        feed: Key of `FEEDS`, or the rows of each quarter of the workers.
        faults: Step, worker and a value that is added to its inputs there.
        changes: Values for attributes of the optimizer before a step.
        eager: True to run without a graph.
        patches: Keys of `PATCHES`.
        options: Arguments of the optimizer; a value may be a key of `OBJECTS`.
    """

    optimizer: str = "KFAC"
    model: str = "small"
    inner: str = "sgd"
    feed: str | Feed = "uneven"
    faults: tuple[tuple[int, int, float], ...] = ()
    changes: Mapping[int, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    eager: bool = False
    patches: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> Feed:
        return FEEDS[self.feed] if isinstance(self.feed, str) else self.feed

    @property
    def data(self) -> Any:
        return MODELS[self.model][1]()

    def without_step(self, step: int) -> "Training":
        """Return the training without a step and without faults."""
        feed = [*self.rows]
        del feed[step]
        return dataclasses.replace(self, feed=feed, faults=())

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(floats("float64"))
            if self.options.get("step") == "spectral":
                stack.enter_context(exact_polar_factors())
            for name in self.patches:
                stack.enter_context(PATCHES[name]())
            yield

    def make_optimizer(self) -> Any:
        options = {
            name: OBJECTS[value]() if value in OBJECTS else value
            for name, value in self.options.items()
        }
        if self.optimizer == "GaussNewton":
            return tfkfac.GaussNewton(**options)
        inner = INNERS[self.inner]()
        if self.optimizer == "FOSI":
            return tfkfac.FOSI(inner, **(FOSI_DEFAULTS | options))
        return tfkfac.KFAC(inner, **nested(DEFAULTS | options))


class Changes(keras.callbacks.Callback):
    """Sets attributes of the optimizer before some steps."""

    def __init__(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        super().__init__()
        self._changes = changes

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for name, value in self._changes.get(batch, {}).items():
            setattr(self.model.optimizer, name, value)


class Spoil(keras.callbacks.Callback):
    """Fills tensors with NaN before a step, and records all weights."""

    step = 5

    def __init__(self, tensors: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__()
        self._tensors = tensors
        self.weights: list[list[Array]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.weights.append(self.model.get_weights())
        if batch == self.step:
            for tensor in self._tensors(self.model.optimizer.method.states):
                tensor.assign(np.full(tensor.shape, np.nan))

    def largest_change(self) -> float:
        """Return the largest change of a weight in a step."""
        return max(
            float(np.abs(b - a).max())
            for pair in itertools.pairwise(self.weights)
            for a, b in zip(*pair, strict=True)
        )


def build(training: Training, **compile_options: Any) -> Any:
    """Return the compiled model, always with the same weights."""
    with training.context(), strategy().scope():
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if training.model == "regression":
            loss = "mse"
        keras.utils.set_random_seed(0)
        model = MODELS[training.model][0]()
        model.compile(
            training.make_optimizer(),
            loss,
            **{"run_eagerly": training.eager, **compile_options},
        )
    return model


def fit(
    model: Any,
    training: Training,
    *callbacks: Any,
    steps: slice = slice(None),
    **options: Any,
) -> dict[str, list[float]]:
    """Train for some steps of the feed; return the history."""
    rows = shares(training.rows, strategy().num_replicas_in_sync)[steps]
    with training.context():
        history: dict[str, list[float]] = model.fit(
            dataset(training.data, rows, training.faults),
            shuffle=False,
            verbose=0,
            callbacks=[Changes(training.changes), *callbacks],
            **{"steps_per_epoch": len(rows), **options},
        ).history
    return history


def train(training: Training, *callbacks: Any) -> dict[str, Any]:
    """Train a new model; return what tests compare."""
    model = build(training)
    start = model.get_weights()
    fit(model, training, *callbacks)
    return {"start": start, **describe(model)}


def describe(model: Any) -> dict[str, Any]:
    """Return the state of a model and its optimizer on this process."""
    optimizer = model.optimizer
    lines: list[str] = []
    optimizer.summary(print_fn=lines.append)
    return {
        "weights": model.get_weights(),
        "copies": copies([*model.variables, *optimizer.variables]),
        "iterations": int(optimizer.iterations.numpy()),
        "skipped": [int(v) for v in optimizer.method.job.skipped],
        "events": optimizer.events(),
        "state_bytes": optimizer.state_bytes(),
        "communication_bytes": optimizer.communication_bytes(),
        "summary": "\n".join(lines),
    }


# -------------------------------------------------------------- comparison
def distance(a: Sequence[Array], b: Sequence[Array]) -> float:
    """Return the Euclidean distance of two lists of arrays."""
    squares = [
        np.sum((np.asarray(x, float) - y) ** 2)
        for x, y in zip(a, b, strict=True)
    ]
    return float(np.sqrt(np.sum(squares)))


def assert_same_bits(workers: Sequence[Result]) -> None:
    """Compare the "copies" of all replicas of all workers bit for bit."""
    first, *others = [copy for w in workers for copy in w["copies"]]
    assert others
    for other in others:
        for got, want in zip(other, first, strict=True):
            np.testing.assert_array_equal(got, want)


def assert_close(
    got: Result, want: Sequence[Array], tolerance: float = 2e-7
) -> None:
    """Compare the weights, relative to their distance from the start.

    The default tolerance is that of float64 with a few float32 numbers.
    """
    travelled = distance(want, got["start"])
    assert travelled > 0.1
    assert distance(got["weights"], want) <= tolerance * travelled
