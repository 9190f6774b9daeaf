"""Independence of the units of targets, weights and losses."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.dtypes import floats
from tests.support.reference import Array
from tests.support.strategies import strategy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 4))
SIGNAL = np.stack([np.sin(X[:, 0] + X[:, 1]), np.tanh(X[:, 2]) * X[:, 3]], 1)


def network(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(24, "relu"),
            layers.Dense(24, "relu"),
            layers.Dense(2),
        ]
    )


def restart_of(model: Any) -> Callable[[], None]:
    """A function that sets the present state again, without a new trace."""
    weights, store = model.get_weights(), {}
    model.optimizer.save_own_variables(store)
    state = {name: np.array(value) for name, value in store.items()}

    def restart() -> None:
        model.set_weights(weights)
        model.optimizer.load_own_variables(state)

    return restart


def unexplained(loss: Any, *units: tuple[float, float]) -> list[float]:
    """Shares of the variance of the targets that trainings leave."""
    model, x = network(), X.astype("float32")
    model.compile(tfkfac.KFAC(), loss)
    restart, shares = restart_of(model), []
    for scale, offset in units:
        restart()
        y = (offset + scale * SIGNAL).astype("float32")
        model.fit(x, y, batch_size=40, epochs=8, verbose=0)
        error = np.array(model(x), float) - y
        shares.append(float(np.mean(error**2) / np.mean(np.var(y, 0))))
    return shares


@pytest.mark.parametrize("loss", ["mse", "huber"])
def test_targets_may_have_any_unit(loss: str) -> None:
    """The training is that of standardised targets."""
    units = [(1.0, 0.0), (1e-3, 0.0), (1e5, 29e5)]
    want, *shares = unexplained(loss, *units)
    assert want < 0.04
    for (scale, offset), got in zip(units[1:], shares, strict=True):
        # Huber losses are squares for small residuals, absolute for large ones.
        # With small targets, the first outputs are far from them.
        is_same = loss == "mse" and scale >= 1
        assert got < (2 * want if is_same else 0.1), (scale, offset)


# ----------------------------------------------------------- exact identities
ROWS = 60
WEIGHTS = RNG.uniform(0.5, 2.0, ROWS)


class Constant(layers.Layer):
    """Adds a constant to the loss of the model."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self._loss = loss

    def call(self, x: Any) -> Any:
        if self._loss:
            self.add_loss(tf.constant(self._loss, tf.float64))
        return x


# Numbers b and a of the targets `a + b y`, and a factor of the sample weights.
Unit = tuple[float, float, float | None]


def trained(
    loss: Any,
    *units: Unit,
    penalty: float = 0.0,
    epochs: int = 1,
    **options: Any,
) -> list[list[Array]]:
    """Weights after some steps in float64, for each unit of the targets.

    The outputs have the unit of the targets: the first kernel and bias of the
    last layer are those of `b = 1`, times b, plus a. The result has them in the
    unit of `b = 1` again.
    """
    with strategy().scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = layers.Dense(7, "tanh")(inputs)
        outputs = layers.Dense(2)(Constant(penalty)(hidden))
        model = keras.Model(inputs, outputs)
        if "accumulate" in options:
            steps = options.pop("accumulate")
            options["gradient_accumulation_steps"] = steps
        model.compile(tfkfac.KFAC(**options), loss, run_eagerly=True)
    *first, kernel, bias = model.get_weights()
    restart, results = restart_of(model), []
    for b, a, factor in units:
        if len(units) > 1:
            restart()
        model.set_weights([*first, b * kernel, b * bias + a])
        data: Any = (X[:ROWS], a + b * SIGNAL[:ROWS])
        if factor is not None:
            data += (factor * WEIGHTS,)
        rows = tf.data.Dataset.from_tensor_slices(data).batch(20)
        model.fit(rows, epochs=epochs, shuffle=False, verbose=0)
        *others, last, shift = model.get_weights()
        results.append([*others, last / b, (shift - a) / b])
    return results


def assert_equal(got: list[Array], want: list[Array]) -> None:
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def own(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p))


# Loss, factors of the sample weights, arguments.
WAYS: dict[str, tuple[Any, list[float | None], dict[str, Any]]] = {
    "absolute": ("mae", [None] * 2, {"solver": "eigen", "fisher": "empirical"}),
    "scalar": (own, [1.0, 1e-4], {}),
    "micro-batches": ("mse", [1.0, 1e4], {"accumulate": 3, "epochs": 2}),
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_follow_the_targets(way: str) -> None:
    """A training on `a + b y` is that on y, if the first outputs are.

    It does not depend on a constant factor of the weights either.
    """
    loss, (factor, *factors), options = WAYS[way]
    units = [(2.0, 1.0, factor), *((2e4, 3e4, f) for f in factors)]
    with floats("float64"):
        want, *others = trained(loss, *units, **options)
    for got in others:
        assert_equal(got, want)


def test_losses_times_and_plus_a_constant() -> None:
    """For two units of the targets."""
    unit: Unit = 2e4, 3e4, None
    total = keras.losses.MeanSquaredError(reduction="sum", dtype="float64")
    with floats("float64"):
        (want,) = trained("mse", (2.0, 1.0, None))
        others = trained(total, unit, penalty=10.0)
        others += trained(lambda y, p: 300 * own(y, p) + 10.0, unit)
    for got in others:
        assert_equal(got, want)


def train_exactly(b: float, a: float) -> list[Array]:
    """Without sampled labels, and with lengths from all examples of a batch."""
    options = {"fisher": "empirical", "accumulate": 4}
    with floats("float64"):
        (weights,) = trained("mse", (b, a, 1.0), epochs=4, **options)
    return weights


def test_workers(on_workers: Any) -> None:
    """The units are those of all workers, as in a single process."""
    first, second = on_workers("two", train_exactly, 2e4, 3e4)
    assert_equal(first, train_exactly(2.0, 1.0))
    np.testing.assert_equal(second, first)


def test_other_losses_restart_the_averages() -> None:
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    model = keras.Model(x, [layers.Dense(2)(x), layers.Dense(2)(x)])
    weights, y = model.get_weights(), SIGNAL[:40]
    model.compile(tfkfac.KFAC(), ["mse", "mse"], run_eagerly=True)
    model.train_on_batch(X[:40], [1e6 * y, y])
    model.compile(model.optimizer, ["mse", None], run_eagerly=True)
    model.set_weights(weights)
    with pytest.warns(UserWarning, match="'kfac' restarts.*Received: .*, 2"):
        model.train_on_batch(X[:40], [y, y])
    assert max(np.abs(w).max() for w in model.get_weights()) < 2.0


def test_labels_that_a_loss_ignores() -> None:
    """A number for missing labels has no influence on the units."""

    def loss(y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.where(y > -999.0, tf.square(y - p), 0.0), -1)

    y = SIGNAL[:, :1].astype("float32")
    missing = np.arange(len(y)) % 3 == 0
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(24, "relu"), layers.Dense(1)]
    )
    model.compile(tfkfac.KFAC(), loss)
    restart, errors = restart_of(model), []
    for number in (0.0, -999.0):
        restart()
        labels = np.where(missing[:, None], np.float32(number), y)
        weights = np.where(missing & (number == 0), 0.0, 1.0)
        model.fit(X, labels, 40, 8, 0, sample_weight=weights)
        error = (np.array(model(X)) - y)[~missing]
        errors.append(float(np.mean(error**2) / np.var(y)))
    assert max(errors) < 0.1
    assert errors[1] < 3 * errors[0]


def test_a_trained_model_is_kept() -> None:
    """Outputs are not fitted to labels that are close together."""
    model, y = network(), (SIGNAL + 2).astype("float32")
    model.compile("adam", "mse")
    model.fit(X, y, batch_size=40, epochs=10, verbose=0)
    before = np.mean((model(X) - y) ** 2)
    weights = model.get_weights()
    near = np.argsort(np.abs(y - 2).sum(1))[:16]
    for rows in (near, near[:1]):
        model.set_weights(weights)
        model.compile(tfkfac.KFAC(), "mse", run_eagerly=True)
        model.train_on_batch(X[rows], y[rows])
        assert np.mean((model(X) - y) ** 2) < 1.5 * before


def test_two_losses_of_one_layer() -> None:
    """The outputs are fitted to neither: they would be far from the other."""
    keras.utils.set_random_seed(0)
    x = keras.Input(X.shape[1:])
    hidden, last = layers.Dense(8, "tanh"), layers.Dense(SIGNAL.shape[1])
    outputs = [last(hidden(x)), last(hidden(-x))]
    model = keras.Model(x, outputs)
    model.compile(tfkfac.KFAC(), ["mse", "mse"], loss_weights=[1.0, 1e-3])
    y = [SIGNAL, SIGNAL + 100]
    before, *_ = model.evaluate(X, y, verbose=0)
    model.fit(X, y, batch_size=40, epochs=3, verbose=0)
    assert model.evaluate(X, y, verbose=0)[0] < before


def test_targets_and_logits_of_one_layer() -> None:
    """The logits do not move by the unit of the targets."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(X.shape[1:])
    both = layers.Dense(2)(layers.Dense(8, "tanh")(inputs))
    outputs = {"logit": both[:, :1], "mean": both[:, 1:]}
    model = keras.Model(inputs, outputs)
    logits = keras.losses.BinaryCrossentropy(from_logits=True)
    losses = {"logit": logits, "mean": "mse"}
    model.compile(tfkfac.KFAC(), losses)
    labels = (X[:, :1] > 0).astype("float32")
    y = {"logit": labels, "mean": 1e3 * SIGNAL[:, :1]}
    model.fit(X, y, batch_size=40, epochs=3, verbose=0)
    logit = model.predict(X, verbose=0)["logit"]
    assert float(logits(labels, logit)) < 2


def test_sparse_gradients_beside_a_fit_of_outputs() -> None:
    """The embedding does not move in the step that fits the outputs."""
    x = np.random.default_rng(0).integers(12, size=(16, 5))
    y = 1e4 + x.sum(1, keepdims=True)
    weights = []
    for eager in (False, True):
        keras.utils.set_random_seed(0)
        table = layers.Embedding(12, 4)
        stack = [keras.Input((5,)), table, layers.Flatten(), layers.Dense(1)]
        model = keras.Sequential(stack)
        model.compile(tfkfac.KFAC(), "mse", run_eagerly=eager)
        before = table.get_weights()
        model.train_on_batch(x, y)
        np.testing.assert_array_equal(table.get_weights(), before)
        model.train_on_batch(x, y)
        assert np.abs(table.get_weights()[0] - before[0]).max() > 0
        weights.append(model.get_weights())
    for graph, plain in zip(*weights, strict=True):
        np.testing.assert_allclose(graph, plain, rtol=1e-4)
