"""Factors G of each type of the Fisher matrix, against NumPy, and the choice.

Hessians of the loss at the pre-activations of the outputs:

- softmax: `diag(p) - p p^T`,
- Bernoulli: `p (1 - p)`,
- normal: 1,
- Poisson with the rate `exp(z)`: `exp(z)`.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import (
    assert_close,
    check_factors,
    find,
    randomize,
    weights_of,
)
from tests.support.reference import Array, append_one, softmax
from tests.support.small import Scale, gradients_of, summary_text
from tfkfac.fisher import distributions

ROWS, OUT = 8, 3
LOSSES = keras.losses
SPARSE = LOSSES.SparseCategoricalCrossentropy
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
REAL = RNG.normal(size=(ROWS, OUT)).astype("float32")
BITS = (REAL > 0).astype("float32")
CLASSES = RNG.integers(0, OUT, ROWS)
HOT = np.eye(OUT, dtype="float32")[CLASSES]
COUNTS = RNG.poisson(2.0, (ROWS, OUT)).astype("float32")


def diagonal(values: Array) -> Array:
    return values[..., None] * np.eye(values.shape[-1])


def of_normal(z: Array) -> Array:
    return diagonal(np.ones_like(z))


def of_bernoulli(z: Array) -> Array:
    p = 1 / (1 + np.exp(-z))
    return diagonal(p * (1 - p))


def of_softmax(z: Array) -> Array:
    p = softmax(z)
    return diagonal(p) - p[..., None] * p[..., None, :]


def of_poisson(z: Array) -> Array:
    return diagonal(np.exp(z))


Hessian = Callable[[Array], Array]
# Labels, activation of the outputs, loss, Hessian at the pre-activation.
CASES: dict[str, tuple[Array, str | None, Any, Hessian]] = {
    "mse": (REAL, None, "mse", of_normal),
    "binary": (BITS, "sigmoid", "binary_crossentropy", of_bernoulli),
    "binary logits, smoothed": (
        BITS,
        None,
        LOSSES.BinaryCrossentropy(from_logits=True, label_smoothing=0.2),
        of_bernoulli,
    ),
    "categorical, smoothed": (
        HOT,
        "softmax",
        LOSSES.CategoricalCrossentropy(label_smoothing=0.2),
        of_softmax,
    ),
    "sparse logits, unreduced": (
        CLASSES,
        None,
        SPARSE(from_logits=True, reduction="none"),
        of_softmax,
    ),
    # Keras warns, and uses the logits before the softmax.
    "probabilities as logits": (
        CLASSES,
        "softmax",
        SPARSE(from_logits=True),
        of_softmax,
    ),
    "poisson": (COUNTS, "exponential", "poisson", of_poisson),
}


def network(activation: str | None = None, out: int = OUT) -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", name="hidden"),
            layers.Dense(out, activation=activation, name="out"),
        ]
    )
    randomize(model)
    return model


def forward(model: Any, x: Array = X) -> tuple[Array, Array]:
    """Activations of the hidden layer, and pre-activations of the outputs."""
    w1, b1, w2, b2 = weights_of(model)[-4:]
    h = np.tanh(x.astype(np.float64) @ w1 + b1)
    return h, h @ w2 + b2


def hidden_factor(model: Any, hessians: Array) -> Array:
    """`J^T H J` per example, with the Jacobian J of the outputs."""
    h, _ = forward(model)
    jacobians = (1 - h**2)[..., None] * weights_of(model)[-2]
    return np.einsum("nij,njk,nlk->nil", jacobians, hessians, jacobians)


def factors_after(
    model: Any, x: Any, y: Any, loss: Any, fisher: str | None, **fit: Any
) -> dict[str, Any]:
    """Factors after one step with a negligible learning rate."""
    options = {k: fit.pop(k) for k in ("loss_weights",) if k in fit}
    eager = fit.pop("eager", True)
    optimizer = tfkfac.KFAC(learning_rate=1e-9, fisher=fisher)
    model.compile(optimizer, loss, run_eagerly=eager, **options)
    model.train_on_batch(x, y, **fit)
    return optimizer.factors()


@pytest.mark.filterwarnings("ignore:.*received `from_logits=True`")
@pytest.mark.parametrize("case", CASES)
def test_type2_is_the_output_hessian(case: str) -> None:
    y, activation, loss, hessian = CASES[case]
    model = network(activation)
    h, z = forward(model)
    factors = factors_after(model, X, y, loss, "type2")
    hessians = hessian(z)
    assert_close(find(factors, "out")["G"], hessians.mean(0), 2e-5)
    want = hidden_factor(model, hessians).mean(0)
    assert_close(find(factors, "hidden")["G"], want, 2e-5)
    a = append_one(h)
    assert_close(find(factors, "out")["A"], a.T @ a / ROWS, 2e-5)


@pytest.mark.parametrize("case", ["sparse logits, unreduced"])
def test_mean_of_monte_carlo_is_the_output_hessian(case: str) -> None:
    """With 4,000 samples for each of 8 examples: 1/sqrt(32,000) = 0.6 %."""
    y, activation, loss, hessian = CASES[case]
    model = network(activation)
    _, z = forward(model)
    repeated = np.repeat(X, 4000, 0), np.repeat(y, 4000, 0)
    factors = factors_after(model, *repeated, loss, "monte_carlo")
    hessians = hessian(z)
    assert_close(find(factors, "out")["G"], hessians.mean(0), 0.05)
    want = hidden_factor(model, hessians).mean(0)
    assert_close(find(factors, "hidden")["G"], want, 0.05)


# ------------------------------------------------- weights, terms, outputs
@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "mean_with_sample_weight"]
)
def test_sample_weights(reduction: str) -> None:
    """G is `(1/T) sum_t s_t F_t`; rows of weight 0 do not count in A."""
    model = network("sigmoid")
    h, z = forward(model)
    weights = np.array([1, 0, 2, 0.5, 0, 1, 3, 1], "float32")
    loss = LOSSES.BinaryCrossentropy(reduction=reduction)
    factors = factors_after(
        model, X, BITS, loss, "type2", sample_weight=weights
    )
    terms = ROWS if reduction == "sum_over_batch_size" else weights.sum()
    want = np.einsum("n,nij->ij", weights, of_bernoulli(z)) / terms
    assert_close(find(factors, "out")["G"], want, 2e-5)
    a = append_one(h)[weights > 0]
    assert_close(find(factors, "out")["A"], a.T @ a / len(a), 2e-5)


def test_two_outputs() -> None:
    """G is in the unit of the main loss: weight 3 times 2/3 for `mse`."""
    inputs = keras.Input((4,))
    h = layers.Dense(5, activation="tanh", name="hidden")(inputs)
    model = keras.Model(
        inputs,
        [
            layers.Dense(OUT, name="out")(h),
            layers.Dense(2, activation="sigmoid", name="bits")(h),
        ],
    )
    randomize(model)
    w1, b1, w2, b2, w3, b3 = weights_of(model)
    a = np.tanh(X @ w1 + b1)
    hessians = of_normal(a @ w2 + b2), of_bernoulli(a @ w3 + b3)
    losses = ["mse", "binary_crossentropy"]
    factors = factors_after(
        model, X, [REAL, BITS[:, :2]], losses, "type2", loss_weights=[3, 0.5]
    )
    want = 0
    for w, hessian, unit in [(w2, hessians[0], 2.0), (w3, hessians[1], 0.25)]:
        jacobian = (1 - a**2)[..., None] * w
        total = np.einsum("nij,njk,nlk->il", jacobian, hessian, jacobian)
        want = want + unit / 2 * total / ROWS
    assert_close(find(factors, "hidden")["G"], want, 2e-5)
    assert_close(find(factors, "bits")["G"], hessians[1].mean(0) / 8, 2e-5)


# ---------------------------------------------- curvature of a fitted model
def test_factors_of_a_fitted_model() -> None:
    """With the rate 0, all weights stay equal bit for bit."""
    # `Scale` has no block, and does not change its inputs.
    model = keras.Sequential([keras.Input((4,)), Scale(), *network().layers])
    before = model.get_weights()
    h, z = forward(model)
    optimizer = tfkfac.KFAC(
        learning_rate=0.0,
        factor_decay=0.0,
        factor_batch_fraction=1.0,
        max_factor_dim=None,
        fisher="type2",
        gradient_accumulation_steps=2,
    )
    loss = SPARSE(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=True)
    model.fit(X, CLASSES, batch_size=ROWS // 2, verbose=0)
    assert int(optimizer.iterations) == 1
    for old, new in zip(before, model.get_weights(), strict=True):
        assert old.tobytes() == new.tobytes()
    hessians = of_softmax(z)
    want = {"hidden": (X, hidden_factor(model, hessians)), "out": (h, hessians)}
    for name, (inputs, matrices) in want.items():
        a = append_one(inputs.astype(np.float64))
        pair = a.T @ a / ROWS, matrices.mean(0)
        check_factors(find(optimizer.factors(), name), *pair, 2e-5)


# ------------------------------------------------------------------ choice
def fisher_summary(optimizer: Any) -> str:
    """Returns the line of the summary about the Fisher matrix."""
    pattern = "^Fisher matrix: (.*)$"
    (line,) = re.findall(pattern, summary_text(optimizer), re.MULTILINE)
    return str(line)


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
        (distributions.loss_terms, "KNOWN_LOSSES"),
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
