"""Spectral steps of matrices without a block."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.definition import ROOTS, Spectral, polar
from tests.support.dtypes import floats
from tests.support.reference import Array, adam
from tests.support.small import (
    CLASSES,
    assert_same,
    everything,
    gradients_of,
    loss,
)
from tests.support.training import exact_polar_factors

TOKENS, LENGTH, ROWS, MU = 7, 5, 12, 0.75
RNG = np.random.default_rng(0)
X = RNG.integers(TOKENS, size=(4, ROWS, LENGTH))
Y = X[..., 0] % CLASSES


@keras.saving.register_keras_serializable(package="tests")
class Mix(layers.Layer):
    """A custom layer with weights of one, two and three axes."""

    def build(self, shape: Any) -> None:
        self.cube = self.add_weight((2, shape[-1], 4), name="cube")
        self.row = self.add_weight((1, 4), name="row")
        self.table = self.add_weight((2, 4), name="position_embedding")

    def call(self, x: Any) -> Any:
        mixed = tf.einsum("bi,kij->bkj", x, self.cube) * self.row
        return tf.reshape(tf.tanh(mixed + self.table), [-1, 8])


def network() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(TOKENS, 4, name="tokens"),
            layers.LSTM(3, name="lstm"),
            Mix(name="mix"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


def compiled(**options: Any) -> Any:
    model = network()
    options = {"step": "spectral", "momentum": MU} | options
    model.compile(tfkfac.KFAC(**options), loss(), run_eagerly=True)
    return model


MATRICES = (
    "lstm/lstm_cell/kernel",
    "lstm/lstm_cell/recurrent_kernel",
    "mix/cube",
)
REST = (
    "tokens/embeddings",
    "lstm/lstm_cell/bias",
    "mix/row",
    "mix/position_embedding",
)


def train(model: Any, step: int) -> list[tuple[str, Array, Array]]:
    """Return path, gradient and change of each weight in a step."""
    gradients = gradients_of(model, X[step], Y[step])
    before = model.get_weights()
    model.train_on_batch(X[step], Y[step])
    return [
        (v.path.partition("/")[2], np.array(tf.convert_to_tensor(g)), new - old)
        for v, g, old, new in zip(
            model.trainable_variables,
            gradients,
            before,
            model.get_weights(),
            strict=True,
        )
    ]


def rms(array: Array) -> float:
    return float(np.sqrt(np.mean(array**2)))


def squared_length(model: Any) -> float:
    report = model.optimizer.last_step
    return float(report["length"] / report["clip_factor"] ** 2)


def test_matrices_move_along_their_polar_factors() -> None:
    """As far as the matrix of a block; all have the RMS 0.2 times r.

    The length of a step is that of the block.
    """
    momenta = dict.fromkeys(MATRICES, 0.0)
    block, root = ("logits/kernel", "logits/bias"), Spectral(ROOTS["inverse"])
    with floats("float64"), exact_polar_factors():
        model = compiled()
        for step in range(3):
            results = train(model, step)
            changes = {path: change for path, _, change in results}
            gradients = {path: gradient for path, gradient, _ in results}
            length = rms(np.vstack([changes[path] for path in block]))
            assert length > 1e-3
            for path in MATRICES:
                gradient, change = gradients[path], changes[path]
                W = gradient.reshape(-1, gradient.shape[-1])
                M = momenta[path] = MU * momenta[path] + W
                Q = polar(W + MU * M).reshape(change.shape)
                want = -length / rms(Q) * Q
                np.testing.assert_allclose(change, want, rtol=1e-6)
            if step == 0:
                W = np.vstack([gradients[path] for path in block])
                [factors] = model.optimizer.factors().values()
                A_and_G = factors["A"], factors["G"]
                _, squares = root.direction(0, W, A_and_G, 0.01)
                assert squared_length(model) == pytest.approx(squares)


def test_a_model_without_blocks() -> None:
    """All matrices move by the same RMS and determine the length."""
    with floats("float64"), exact_polar_factors():
        model = compiled(skip_layers="logits")
        results = train(model, 0)
    changes = [new for path, _, new in results if path in MATRICES]
    lengths = [rms(change) for change in changes]
    assert lengths[0] > 1e-3
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-4)
    want = sum(0.2**2 * change.size for change in changes)
    assert squared_length(model) == pytest.approx(want)


@pytest.mark.parametrize("rules", [{}, {"only_layers": ["logits", "mix"]}])
def test_other_weights_are_left_to_the_rest_optimizer(rules: Any) -> None:
    """These are vectors, embeddings and excluded layers."""
    rest, rule = keras.optimizers.Adam(2**-8), adam(2**-8, betas=(0.9, 0.999))
    model = compiled(rest_optimizer=rest, **rules)
    is_left = {
        path: path in REST or bool(rules and path.startswith("lstm"))
        for path in (*REST, *MATRICES)
    }
    for path, gradient, change in train(model, 0):
        if path in is_left:
            want = rule(gradient, gradient, {}, 1)
            is_close = np.allclose(change, want, rtol=1e-3, atol=1e-6)
            assert is_close == is_left[path]


@pytest.mark.parametrize(
    ("rate", "updates", "is_short"), [(0.5, 400, False), (4.0, 10**7, True)]
)
def test_rate_of_the_default_rest_optimizer(
    rate: float, updates: int, is_short: bool
) -> None:
    """The factor r of spectral steps, at most 0.1, times their rate."""
    model = compiled(learning_rate=rate)
    optimizer = model.optimizer
    optimizer.begin_run(updates)
    results = train(model, 0)
    factor = optimizer.last_step["clip_factor"]
    assert (factor < 0.1) == is_short
    moved = [np.abs(c).max() for path, _, c in results if path in REST]
    np.testing.assert_allclose(moved, rate * min(factor, 0.1), rtol=0.03)
    copy = tfkfac.KFAC.from_config(optimizer.get_config())
    copy.learning_rate = 3.0
    assert float(copy.rest_optimizer.learning_rate) == pytest.approx(0.03)


class Unrolled(layers.Layer):
    """A loop in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = layers.LSTMCell(3)

    def call(self, x: Any) -> Any:
        states = self.cell.get_initial_state(tf.shape(x)[0])
        for step in range(x.shape[1]):
            output, states = self.cell(x[:, step], states)
        return output


class CellAndLoop(layers.Layer):
    """The cell of a recurrent layer is also an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = layers.SimpleRNNCell(3)
        self.rnn = layers.RNN(self.cell)

    def call(self, x: Any) -> Any:
        return self.rnn(x)


@pytest.mark.parametrize(
    ("layer", "shape", "rules", "is_recurrent"),
    [
        (lambda: layers.RNN([layers.GRUCell(3)]), (4, 2), {}, True),
        (Unrolled, (4, 2), {}, True),
        (CellAndLoop, (4, 2), {}, True),
        (lambda: layers.TimeDistributed(layers.GRU(3)), (2, 4, 2), {}, True),
        (lambda: layers.GRU(3), (4, 2), {"skip_layers": [layers.GRU]}, False),
        (lambda: layers.TimeDistributed(Mix()), (4, 2), {}, False),
    ],
)
def test_recurrent_layers(
    layer: Any, shape: Any, rules: Any, is_recurrent: bool
) -> None:
    """Spectral steps are longer if they train recurrent layers."""
    output = [layers.Flatten(), layers.Dense(2)]
    model = keras.Sequential([keras.Input(shape), layer(), *output])
    model(tf.ones([1, *shape]))
    model.compile(tfkfac.KFAC(**rules), "mse")
    [state] = model.optimizer.method.states
    assert state.length.is_recurrent == is_recurrent


def test_momenta_are_saved(tmp_path: Path) -> None:
    model = compiled()
    train(model, 0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    again.run_eagerly = True
    for candidate in (model, again):
        train(candidate, 1)
    assert_same(everything(again), everything(model))
