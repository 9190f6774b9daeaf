"""The factors G of each type of the Fisher matrix, against NumPy.

Hessians of the loss at the pre-activations of the outputs:

- softmax: `diag(p) - p p^T`,
- Bernoulli: `p (1 - p)`,
- normal: 1,
- Poisson with the rate `exp(z)`: `exp(z)`.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfkfac
from tests.support.harness import assert_close, find, randomize, weights_of
from tests.support.reference import Array, append_one, softmax

ROWS, OUT = 8, 3
LOSSES = keras.losses
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
        LOSSES.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        ),
        of_softmax,
    ),
    # Keras warns, and uses the logits before the softmax.
    "probabilities as logits": (
        CLASSES,
        "softmax",
        LOSSES.SparseCategoricalCrossentropy(from_logits=True),
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
    w1, b1, w2, b2 = weights_of(model)
    h = np.tanh(x.astype(np.float64) @ w1 + b1)
    return h, h @ w2 + b2


def hidden_factor(model: Any, hessians: Array) -> Array:
    """`J^T H J` per example, with the Jacobian J of the outputs."""
    h, _ = forward(model)
    jacobians = (1 - h**2)[..., None] * weights_of(model)[2]
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


@pytest.mark.parametrize("case", ["binary", "sparse logits, unreduced"])
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
def test_sample_weights() -> None:
    """G is `(1/T) sum_t s_t F_t`; rows of weight 0 do not count in A."""
    model = network("sigmoid")
    h, z = forward(model)
    weights = np.array([1, 0, 2, 0.5, 0, 1, 3, 1], "float32")
    factors = factors_after(
        model, X, BITS, "binary_crossentropy", "type2", sample_weight=weights
    )
    want = np.einsum("n,nij->ij", weights, of_bernoulli(z)) / ROWS
    assert_close(find(factors, "out")["G"], want, 2e-5)
    a = append_one(h)[weights > 0]
    assert_close(find(factors, "out")["A"], a.T @ a / len(a), 2e-5)


def test_tokens_and_masks() -> None:
    """Terms are the valid tokens; padded tokens have no gradient."""
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 0]], bool)
    x = RNG.normal(size=(4, 3, 4)).astype("float32") * mask[..., None]
    inputs = keras.Input((3, 4))
    h = layers.Masking()(inputs)
    model = keras.Model(inputs, layers.Dense(2, name="out")(h))
    randomize(model)
    y = RNG.integers(0, 2, (4, 3))
    loss = LOSSES.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    factors = factors_after(model, x, y, loss, "type2")
    w, b = weights_of(model)
    valid = of_softmax(x.astype(np.float64) @ w + b)[mask]
    assert_close(find(factors, "out")["G"], valid.mean(0), 2e-5)
    a = append_one(x.astype(np.float64))[mask]
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
