"""Choice of the Fisher matrix, its summary, and `register_distribution`."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.fisher.test_types import (
    BITS,
    CLASSES,
    COUNTS,
    HOT,
    OUT,
    REAL,
    X,
    factors_after,
    network,
)
from tests.support.harness import assert_close, find
from tests.support.small import gradients_of
from tfkfac.fisher import distributions

LOSSES = keras.losses


def fisher_summary(optimizer: Any) -> str:
    """Returns the line of the summary about the Fisher matrix."""
    texts: list[str] = []
    optimizer.summary(texts.append)
    (line,) = [
        line for line in texts[0].split("\n") if line.startswith("Fisher")
    ]
    return line.removeprefix("Fisher matrix: ")


def trained(loss: Any, y: Any, activation: str | None = None) -> Any:
    model = network(activation)
    model.compile(tfkfac.KFAC(step="natural"), loss, run_eagerly=True)
    model.train_on_batch(X, y)
    return model.optimizer


@pytest.mark.parametrize(
    ("loss", "y", "activation", "want"),
    [
        ("mse", REAL, None, "monte_carlo"),
        ("binary_crossentropy", BITS, "sigmoid", "monte_carlo"),
        ("poisson", COUNTS, "exponential", "monte_carlo"),
        ("categorical_crossentropy", HOT, "softmax", "empirical (the labels"),
        ("huber", REAL, None, "empirical (the distribution of loss 'huber'"),
        (LOSSES.Huber(delta=50.0), REAL, None, "empirical (the distribution"),
        (LOSSES.BinaryFocalCrossentropy(), BITS, "sigmoid", "empirical (the"),
    ],
)
def test_default_depends_on_the_loss(
    loss: Any, y: Any, activation: str | None, want: str
) -> None:
    assert fisher_summary(trained(loss, y, activation)).startswith(want)


def test_default_with_one_categorical_output() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(3)(inputs) for _ in range(2)])
    losses = ["mse", LOSSES.SparseCategoricalCrossentropy(from_logits=True)]
    model.compile(tfkfac.KFAC(step="natural"), losses, run_eagerly=True)
    model.train_on_batch(X, [REAL, CLASSES])
    assert fisher_summary(model.optimizer).startswith("monte_carlo")


@pytest.mark.parametrize(
    ("fisher", "loss", "outputs", "words"),
    [
        ("monte_carlo", "huber", OUT, "monte_carlo.*loss 'huber'"),
        ("type2", "log_cosh", OUT, "type2.*loss 'log_cosh'"),
        ("type2", "mse", 1025, "at most 1,024"),
    ],
)
def test_unusable_types_are_refused(
    fisher: str, loss: str, outputs: int, words: str
) -> None:
    model = network(out=outputs)
    model.compile(
        tfkfac.KFAC(step="natural", fisher=fisher), loss, run_eagerly=True
    )
    with pytest.raises(ValueError, match=words):
        model.train_on_batch(X, np.zeros((len(X), outputs)))


class Doubled(keras.Model):
    """Model whose loss is computed on twice its outputs."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any) -> Any:
        return super().compute_loss(x, y, 2 * y_pred, *args)


def test_loss_of_modified_outputs() -> None:
    inputs = keras.Input((4,))
    model = Doubled(inputs, layers.Dense(OUT)(inputs))
    model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=True)
    model.train_on_batch(X, REAL)
    assert fisher_summary(model.optimizer).startswith("empirical (the loss is")
    model.compile(
        tfkfac.KFAC(step="natural", fisher="monte_carlo"),
        "mse",
        run_eagerly=True,
    )
    with pytest.raises(ValueError, match="outputs of a call of the model"):
        model.train_on_batch(X, REAL)


def test_custom_loops() -> None:
    """Without `compute_loss`, the distribution of the labels is unknown."""
    model = network()
    variables = model.trainable_variables
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    optimizer.apply(gradients_of(model, X, REAL, squares), variables)
    assert fisher_summary(optimizer).startswith("empirical (no loss")
    optimizer = tfkfac.KFAC(step="natural", fisher="monte_carlo").attach(model)
    gradients = gradients_of(model, X, REAL, squares)
    with pytest.raises(ValueError, match="compute_loss"):
        optimizer.apply(gradients, variables)


def squares(y: Any, p: Any) -> Any:
    return tf.reduce_mean((p - y) ** 2)


# ------------------------------------------------------ register_distribution
@pytest.fixture(autouse=True)
def clean_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the registrations of a test."""
    for module, name in [
        (distributions, "_registered"),
        (distributions.loss_terms, "_KNOWN_LOSSES"),
    ]:
        monkeypatch.setattr(module, name, dict(getattr(module, name)))


class Tenths(tfkfac.fisher.Independent):
    """Normal distribution with standard deviation 0.1."""

    def sample(self, outputs: Any, seed: Any) -> Any:
        return 10 * tf.random.stateless_normal(tf.shape(outputs), seed)

    def fisher(self, outputs: Any) -> Any:
        return tf.fill(tf.shape(outputs), 100.0)


def huge_errors(y: Any, p: Any) -> Any:
    """A loss that is not a multiple of a known likelihood."""
    return tf.reduce_mean(50 * (y - p) ** 2 + tf.abs(p), -1)


def test_registered_distributions() -> None:
    """The loss is a mean over three outputs, so its unit is divided by 3."""
    register = functools.partial(tfkfac.register_distribution, features="mean")
    register(huge_errors, Tenths(), unit=1)
    model = network()
    factors = factors_after(model, X, REAL, huge_errors, "type2")
    assert_close(find(factors, "out")["G"], 100 * np.eye(OUT), 2e-5)
    assert fisher_summary(trained(huge_errors, REAL)).startswith("monte_carlo")
    # A loss and its unit, both multiplied by 7, give the same step.
    steps = []
    for factor in (1.0, 7.0):

        class Scaled(keras.losses.Loss):
            def call(self, y: Any, p: Any, factor: float = factor) -> Any:
                return factor * huge_errors(y, p)

        register(Scaled, lambda loss: Tenths(), unit=factor)
        model = network()
        before = model.get_weights()
        model.compile(
            tfkfac.KFAC(step="natural", fisher="type2"),
            Scaled(),
            run_eagerly=True,
        )
        model.train_on_batch(X, REAL)
        steps.append(model.get_weights()[2] - before[2])
    assert_close(steps[1], steps[0], 2e-5)


def test_registered_function_returns_none() -> None:
    tfkfac.register_distribution(huge_errors, lambda loss: None)
    assert fisher_summary(trained(huge_errors, REAL)).startswith("empirical")


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (("mse", Tenths()), {}, "`loss`"),
        ((layers.Dense, Tenths()), {}, "`loss`"),
        ((huge_errors, "normal"), {}, "`distribution`"),
        ((huge_errors, Tenths), {}, "`distribution`"),
        ((huge_errors, Tenths()), {"unit": 0.0}, "`unit`"),
        ((huge_errors, Tenths()), {"features": "max"}, "`features`"),
    ],
)
def test_invalid_registrations(
    arguments: Any, options: Any, match: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        tfkfac.register_distribution(*arguments, **options)


def test_outputs_without_feature_axis() -> None:
    """A model whose outputs have shape `(examples,)`."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, name="d"), layers.Reshape(())]
    )
    factors = factors_after(model, X, REAL[:, 0], "mse", "type2")
    assert_close(find(factors, "d")["G"], np.ones((1, 1)), 1e-6)
