"""The least value of a loss for its targets, and the number of labels."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.dtypes import floats
from tests.support.reference import Array, softmax
from tfkfac.compat.losses import observed_losses
from tfkfac.distributed.collectives import Communicator
from tfkfac.loss.shares import measure_loss
from tfkfac.loss.targets import label_count, least_loss
from tfkfac.loss.terms import check_labels, read_terms

LOSSES = keras.losses
RNG = np.random.default_rng(0)
EXAMPLES, ROWS, COLUMNS = 5, 3, 4
SHAPE = EXAMPLES, ROWS, COLUMNS


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with floats("float64"):
        yield


# -------------------------------------------------------------------- targets
def logit(p: Array) -> Array:
    return np.log(p) - np.log(1 - p)


def entropy(p: Array) -> Array:
    """Entropies of distributions along the last axis."""
    return -np.sum(p * np.log(p), -1)


def bit_entropy(p: Array) -> Array:
    """Entropy of each bit with the probability p."""
    return entropy(np.stack([p, 1 - p], -1))


PIXELS = 1 / (1 + np.exp(-RNG.normal(size=SHAPE)))
BITS = np.round(PIXELS)
COUNTS = np.ceil(100 * PIXELS)
CLASSES = RNG.integers(0, COLUMNS, (EXAMPLES, ROWS))
HOT = np.eye(COLUMNS)[CLASSES]
SOFT = softmax(RNG.normal(size=SHAPE))
SMOOTH_BITS, SMOOTH_HOT = 0.8 * BITS + 0.1, 0.8 * HOT + 0.2 / COLUMNS


# --------------------------------------------------------------------- losses
def summed_pixels(y: Any, z: Any) -> Any:
    """Sum over the pixels of each image."""
    values = tf.nn.sigmoid_cross_entropy_with_logits(y, z)
    return tf.reduce_sum(values, (1, 2))


class Task(NamedTuple):
    """A loss of labels, with the outputs at which it is least.

    Attributes:
        least: The least value of the loss.
        num_labels: Number of labels of a term.
    """

    loss: Any
    labels: Any
    outputs: Array
    least: float
    num_labels: int = 1


def measure(
    *tasks: Task,
    weights: Any = None,
    loss_weights: Any = None,
    is_masked: bool = False,
) -> tuple[Any, float]:
    """Return the terms of the losses of a batch, and the value of the loss.

    With `is_masked`, positions whose outputs are all 0 are masked.
    """
    layer = keras.layers.Masking if is_masked else keras.layers.Identity
    inputs = [keras.Input(task.outputs.shape[1:]) for task in tasks]
    model = keras.Model(inputs, [layer()(x) for x in inputs])
    losses = [task.loss for task in tasks]
    model.compile("sgd", losses, loss_weights=loss_weights)
    with observed_losses(check_labels) as calls:
        value = model.compute_loss(
            y=[task.labels for task in tasks],
            y_pred=model([tf.constant(task.outputs) for task in tasks]),
            sample_weight=weights,
        )
    terms = read_terms(model, calls)
    measured = measure_loss(terms, Communicator(0, 1, ""), 1, False)
    return measured.losses, float(tf.reduce_sum(value))


BINARY, CATEGORICAL = LOSSES.BinaryCrossentropy, LOSSES.CategoricalCrossentropy
SPARSE = LOSSES.SparseCategoricalCrossentropy
H = bit_entropy(PIXELS)
TASKS = {
    "binary": Task(BINARY(), PIXELS, PIXELS, H.mean(), COLUMNS),
    "binary, sum": Task(
        BINARY(reduction="sum"), PIXELS, PIXELS, H.mean(-1).sum(), COLUMNS
    ),
    "binary, smooth": Task(
        BINARY(label_smoothing=0.2),
        BITS,
        SMOOTH_BITS,
        bit_entropy(SMOOTH_BITS).mean(),
        COLUMNS,
    ),
    "sum of pixels": Task(
        summed_pixels, PIXELS, logit(PIXELS), H.sum((1, 2)).mean(), 12
    ),
    "multiple of pixels": Task(
        lambda y, z: 7 * tf.reduce_mean(summed_pixels(y, z)),
        PIXELS,
        logit(PIXELS),
        7 * H.sum((1, 2)).mean(),
        COLUMNS,
    ),
    "categorical": Task(CATEGORICAL(), SOFT, SOFT, entropy(SOFT).mean()),
    "categorical, smooth": Task(
        CATEGORICAL(label_smoothing=0.2),
        HOT,
        SMOOTH_HOT,
        entropy(SMOOTH_HOT).mean(),
    ),
    "categorical, counts": Task(
        CATEGORICAL(), 3 * SOFT, SOFT, 3 * entropy(SOFT).mean()
    ),
    "categorical, custom": Task(
        lambda y, z: tf.nn.softmax_cross_entropy_with_logits(y, z),
        SOFT,
        np.log(SOFT),
        entropy(SOFT).mean(),
    ),
    "one-hot": Task(CATEGORICAL(), HOT, HOT, 0.0),
    "classes": Task(SPARSE(), CLASSES, HOT, 0.0),
    "divergence": Task(LOSSES.KLDivergence(), SOFT, SOFT, 0.0),
    "squares": Task(LOSSES.MeanSquaredError(), PIXELS, PIXELS, 0.0, COLUMNS),
    "counts": Task(
        LOSSES.Poisson(),
        COUNTS,
        COUNTS,
        (COUNTS - COUNTS * np.log(COUNTS)).mean(),
        COLUMNS,
    ),
    "constant": Task(
        lambda y, p: 3 * tf.reduce_mean(abs(y - p), -1) + 0.5,
        PIXELS,
        PIXELS,
        0.5,
        COLUMNS,
    ),
    "cosine": Task(LOSSES.CosineSimilarity(), SOFT, SOFT, -1.0),
    "cross-entropy and constant": Task(
        lambda y, z: 2 * LOSSES.binary_crossentropy(y, z, True) + 0.5,
        BITS,
        80.0 * BITS - 40.0,
        0.5,
        COLUMNS,
    ),
}


def test_outputs_without_an_axis() -> None:
    """An example has one label, as with outputs of shape `(EXAMPLES, 1)`."""
    bits = PIXELS[:, 0, 0]
    losses, _ = measure(Task(BINARY(), bits, bits, 0.0))
    assert float(label_count(losses)) == 1


@pytest.mark.parametrize("name", TASKS)
def test_targets(name: str) -> None:
    """The least loss does not depend on the outputs."""
    task = TASKS[name]
    # `train_on_batch` passes arrays if it runs eagerly.
    losses, value = measure(task)
    assert value == pytest.approx(task.least, rel=1e-6, abs=1e-6)
    others = softmax(RNG.normal(size=SHAPE))
    labels = tf.constant(task.labels)
    other_losses, _ = measure(task._replace(outputs=others, labels=labels))
    for measured in (losses, other_losses):
        assert float(least_loss(measured, 1)) == pytest.approx(task.least)
        assert float(label_count(measured)) == task.num_labels


@pytest.mark.parametrize(
    ("reduction", "shape", "is_masked"),
    [
        ("sum", (5, 3), True),
        ("sum_over_batch_size", (5, 3, 1), False),
        ("sum_over_batch_size", None, True),
        ("mean_with_sample_weight", (5, 3, 1), True),
    ],
)
def test_weights_and_masks(
    reduction: str, shape: tuple[int, ...] | None, is_masked: bool
) -> None:
    """Terms count in the least loss as in the loss."""
    valid = np.ones(SHAPE[:2])
    if is_masked:
        valid[1:3, 2] = valid[4] = 0
    weights = RNG.integers(0, 3, (5, 3)) if shape else np.ones((5, 3))
    divisor = {
        "sum": 1.0,
        "sum_over_batch_size": valid.sum(),
        "mean_with_sample_weight": (valid * weights).sum(),
    }[reduction]
    for loss, labels, outputs, entropies in (
        (BINARY, PIXELS, logit(PIXELS), H.mean(-1)),
        (CATEGORICAL, SOFT, np.log(SOFT), entropy(SOFT)),
    ):
        want = (valid * weights * entropies).sum() / divisor
        task = Task(
            loss(from_logits=True, reduction=reduction),
            labels,
            valid[..., None] * outputs,
            want,
        )
        losses, value = measure(
            task,
            weights=tf.reshape(weights, shape) if shape else None,
            is_masked=is_masked,
        )
        assert value == pytest.approx(want)
        assert float(least_loss(losses, 1)) == pytest.approx(want)


def test_several_losses() -> None:
    """Least values are weighted, numbers of labels are not."""
    tasks = TASKS["binary"], TASKS["categorical"]
    losses, value = measure(*tasks, loss_weights=[0.5, 3.0])
    want = 0.5 * tasks[0].least + 3.0 * tasks[1].least
    assert value == pytest.approx(want)
    assert float(least_loss(losses, 1)) == pytest.approx(want)
    assert float(label_count(losses)) == COLUMNS + 1


def test_replicas() -> None:
    """Keras divides a mean by their number, but not a sum."""
    for name, divisor in (("binary", 2), ("binary, sum", 1)):
        losses, value = measure(TASKS[name])
        assert float(least_loss(losses, 2)) == pytest.approx(value / divisor)
