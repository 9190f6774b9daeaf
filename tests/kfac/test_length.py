"""The length rule of spectral steps against its formulas."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.reference import Array
from tfkfac.kfac import scales
from tfkfac.kfac.length import SpectralLength

SQUARES = 2.0, 3.0  # |Q|^2 of two blocks
NAN = float("nan")


def take_steps(
    forms: Sequence[float],
    excess: float = 4.0,
    labels: float = 1.0,
    updates: int = 400,
    is_recurrent: bool = False,
    q: float = 0.0,
    **options: Any,
) -> tuple[Array, list[int]]:
    """Take a step for each value of `D^T F D`.

    Returns:
        The factor r of each step, and the numbers of the steps that computed
        `D^T F D`.
    """
    rule, rates, computed = SpectralLength(), [], []
    rule.is_recurrent = is_recurrent
    numbers = [
        tf.constant(x, "float64") for x in (sum(SQUARES), excess, labels)
    ]
    for step, form in enumerate(forms, 1):

        def curvature(step: int = step, form: float = form) -> Any:
            computed.append(step)
            return tf.constant(form, tf.float64), tf.constant(q, tf.float64)

        total = tf.constant(updates, tf.int64)
        rate = rule.rate(*numbers, curvature, total, **options)
        rates.append(float(rate))
    return np.array(rates), computed


FORM = 20.0  # D^T F D, for which rho sum |Q|^2 is 20


@pytest.mark.parametrize(
    ("options", "form", "excess", "labels", "length"),
    [
        ({}, FORM, 4.0, 1, 0.45 / np.sqrt(FORM)),
        ({}, FORM, 4.0, 9, 1.2 / np.sqrt(FORM)),
        ({}, FORM, 0.25, 1, 0.3 / np.sqrt(FORM)),
        ({}, FORM, 0.01, 1, 0.07 / np.sqrt(FORM)),
        ({}, FORM, -0.5, 1, 0.07 / np.sqrt(FORM)),  # L < H by rounding
        ({}, FORM, NAN, 1, 0.07 / np.sqrt(FORM)),
        ({}, 2e6, 4.0, 1, 0.006),
        # Saturated predictions: the curvature is 0, the loss may be large.
        ({}, 1e-9, 1e4, 1e4, 1),
        # In proportion to c, and to its root where the loss bounds the length.
        ({"updates": 1}, FORM, 4.0, 1, 0.45 / np.sqrt(FORM)),
        ({"updates": 1600}, FORM, 4.0, 1, 0.225 / np.sqrt(FORM)),
        ({"updates": 10_000}, FORM, 4.0, 1, 0.09 / np.sqrt(FORM)),
        ({"updates": 1600}, FORM, 4.0, 1e4, 0.6 * np.sqrt(2 / FORM)),
        ({"updates": 1600}, FORM, 0.0, 1, 0.035 / np.sqrt(FORM)),
        # With recurrent layers, at least c max(0.006, min(0.05, 0.3 root)).
        ({"is_recurrent": True}, FORM, 4.0, 1, 0.45 / np.sqrt(FORM)),
        ({"is_recurrent": True}, 2e7, 4.0, 1, 0.05),
        ({"is_recurrent": True}, 2e7, 0.01, 1, 0.03),
        ({"is_recurrent": True}, 2e7, NAN, 1, 0.006),
        ({"is_recurrent": True, "updates": 1600}, 2e7, 0.01, 1, 0.015),
        # Residuals of several standard deviations allow longer steps.
        ({"power": 0.5}, FORM, 4.0, 1, 1.2 / np.sqrt(FORM)),
        ({"power": 1.0}, FORM, 1.44, 1, 0.45 * 1.44 / np.sqrt(FORM)),
        # Cross-entropies: shorter below 1e-5 nats of a label; rho keeps 1.
        ({"vanishes": True}, FORM, 0.01, 1, 0.07 / np.sqrt(FORM)),
        ({"vanishes": True}, FORM, 2e-6, 1, 0.2 * 0.07 / np.sqrt(5)),
        ({"vanishes": True}, FORM, 2e-6, 4, 0.05 * 0.07 / np.sqrt(5)),
        ({"vanishes": True}, FORM, 0, 1, 0),
        ({"vanishes": True}, FORM, -2e-6, 1, 0.2 * 0.07 / np.sqrt(5)),
        ({"vanishes": True}, FORM, NAN, 1, 0.07 / np.sqrt(FORM)),
    ],
)
def test_length(
    options: Any, form: float, excess: float, labels: float, length: float
) -> None:
    """The length of the tenth step; the first steps are shorter."""
    rates, _ = take_steps([form] * 12, excess, labels, **options)
    np.testing.assert_allclose(rates[9:], length, rtol=1e-12)
    if form == FORM and length > 0.02:
        warmup = np.arange(1, 11) / 10
        np.testing.assert_allclose(rates[4:10], length * warmup[4:], rtol=1e-12)


def test_ratio_remembers_large_values() -> None:
    """A form of 0 and signs are ignored; a ratio is at least 0.001.

    The first form has no predecessor, not even the initial ratio, 1.
    """
    forms = [0.1, 20.0, 10.0, NAN, 1.0, 0.0, -1.0, 1e-9, 40.0, np.inf, 10.0]
    ratio, want = forms[0] / sum(SQUARES), []
    for step, form in enumerate(forms, 1):
        if np.isfinite(form) and form != 0:
            new = max(abs(form) / sum(SQUARES), 1e-3)
            ratio = max(new, 0.9 * ratio + 0.1 * new)
        kappa = min(step / 10, 1) * 0.45
        want.append(kappa / np.sqrt(ratio * sum(SQUARES)))
    np.testing.assert_allclose(take_steps(forms)[0], want, rtol=1e-12)


def test_losses_that_are_linear_in_the_outputs() -> None:
    """rho is the form over `sum |Q|^2`, plus q, which is 1 for such losses.

    Penalties and the losses of other outputs have a far smaller form here.
    """
    rates, _ = take_steps([0.0, 0.5 * sum(SQUARES)], q=0.75)
    want = 0.45 / np.sqrt(np.array([0.75, 1.25]) * sum(SQUARES))
    np.testing.assert_allclose(rates, want * [0.1, 0.2], rtol=1e-12)
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    for penalty, scale in ((None, None), (1e-6, None), (None, 1e4)):
        regularizer = penalty and keras.regularizers.L2(penalty)
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, "tanh", kernel_regularizer=regularizer)(inputs)
        outputs, losses, y = [layers.Dense(1)(hidden)], ["mae"], [x[:, :1]]
        if scale is not None:
            outputs.append(layers.Dense(2)(hidden))
            losses.append(
                keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
            y = [scale * y[0], np.arange(8) % 2]
        model = keras.Model(inputs, outputs)
        model.compile(tfkfac.KFAC(), losses, run_eagerly=True)
        model.train_on_batch(x, y)
        [state] = model.optimizer.method.states
        ratio = float(state.length.ratio)
        if penalty is None and scale is None:
            assert ratio == 1
        else:
            assert ratio == pytest.approx(1, abs=0.01) and ratio != 1


def test_steps_that_compute_the_form() -> None:
    """The first 100, then each tenth."""
    rates, computed = take_steps([5.0] * 100 + [20.0] * 25)
    assert computed == [*range(1, 101), 110, 120]
    np.testing.assert_allclose(rates[108], rates[99], rtol=1e-12)
    np.testing.assert_allclose(rates[109:], rates[99] / 2, rtol=1e-12)


CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BITS = keras.losses.BinaryCrossentropy(from_logits=True)


class WithPenalty(keras.Sequential):
    """A model whose loss has a term of its own."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        kernel = self.layers[0].kernel
        penalty = 1e-5 * keras.ops.sum(keras.ops.square(kernel))
        return super().compute_loss(*args, **kwargs) + penalty


class WithStep(keras.Sequential):
    """A model whose training step may add any loss."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    ("loss", "kind", "penalty", "vanishes"),
    [
        (CLASSES, keras.Sequential, None, True),
        (BITS, keras.Sequential, None, True),
        ("mse", keras.Sequential, None, False),
        (CLASSES, keras.Sequential, "l2", False),
        (CLASSES, WithPenalty, None, False),
        (CLASSES, WithStep, None, False),
    ],
)
def test_certain_predictions(
    loss: Any, kind: Any, penalty: str | None, vanishes: bool
) -> None:
    """Steps vanish with a cross-entropy, not with losses beside it."""
    x = np.eye(4, dtype="float32")
    dense = layers.Dense(4, kernel_regularizer=penalty)
    model = kind([keras.Input((4,)), dense])
    dense.set_weights([100 * x, np.full(4, -50, "float32")])
    model.compile(tfkfac.KFAC(), loss, run_eagerly=True)
    model.train_on_batch(x, np.arange(4) if loss is CLASSES else x)
    factor = model.optimizer.last_step["clip_factor"]
    assert (factor < 1e-6) == vanishes
    assert (factor >= 0.006) != vanishes


def test_negative_weights_of_examples() -> None:
    """The weights are the rewards of a policy gradient."""
    rng = np.random.default_rng(0)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16, "tanh"), layers.Dense(3)]
    )
    model.compile(tfkfac.KFAC(), CLASSES, run_eagerly=True)
    x = rng.normal(size=(64, 4)).astype("float32")
    actions = rng.integers(0, 3, 64)
    rewards = np.where(actions == np.argmax(x[:, :3], 1), 0.5, -1.0)
    moved = []
    for _ in range(5):
        before = model.get_weights()[0]
        model.train_on_batch(x, actions, sample_weight=rewards)
        moved.append(np.abs(model.get_weights()[0] - before).max())
    assert min(moved) > 1e-6


def test_counts_of_any_size() -> None:
    """Poisson's loss is negative for large counts; its least value is not 0."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 4)).astype("float32")
    counts = rng.poisson(300 * np.exp(np.tanh(x[:, :1]))).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(32, "relu"),
            layers.Dense(1, "exponential"),
        ]
    )
    model.compile(tfkfac.KFAC(), "poisson")
    model.fit(x, counts, 32, 12, verbose=0)
    least = np.mean(counts - counts * np.log(counts))
    # Nats above the least value; the best constant has 65, Adam 1,058.
    assert model.evaluate(x, counts, verbose=0) - least < 10


class LargeBatch(layers.Layer):
    """Refuses a batch of less than 6 examples."""

    def call(self, x: Any) -> Any:
        if x.shape[0] is not None and x.shape[0] < 6:
            raise ValueError(f"Too small: {x.shape}")
        return x


class Constant(layers.Layer):
    """Contains the batch size 32."""

    def call(self, x: Any) -> Any:
        return tf.reshape(tf.reshape(x, [8, 4, -1]), [32, -1])

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class Noise(layers.Layer):
    """Takes any batch size."""

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=1)


class NoSecond(keras.Model):
    """Has an operation without a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return tf.nn.softsign(self.dense(x))


def compiled(model: Any) -> Any:
    keras.utils.set_random_seed(0)
    model.compile(tfkfac.KFAC(), "mse", run_eagerly=True)
    return model


def test_one_warning_without_curvature() -> None:
    """Also if the reason, with the shape of a tensor, differs."""
    stack = [keras.Input((4,)), layers.Dense(4), LargeBatch()]
    model = compiled(keras.Sequential(stack))
    with pytest.warns(
        UserWarning, match="cannot compute the curvature"
    ) as all_:
        for size in (8, 12):
            model.train_on_batch(tf.ones([size, 4]), tf.zeros([size, 4]))
    assert len([w for w in all_ if "curvature" in str(w.message)]) == 1


def test_reason_without_curvature() -> None:
    """It does not advise another optimizer: training continues."""
    model = compiled(NoSecond())
    with pytest.warns(UserWarning, match="has no gradient.$"):
        model.train_on_batch(tf.ones([8, 4]), tf.zeros([8, 4]))


def test_loss_whose_second_derivative_cannot_run() -> None:
    """TensorFlow traces the second derivative once, but cannot compute it."""
    x, y = np.ones([4, 6, 3], "float32"), np.array([[1, 2]] * 4)
    for name in "traced", "not_traced_again":
        model = keras.Sequential([keras.Input((6, 3)), layers.Dense(4)])
        model.compile(tfkfac.KFAC(), keras.losses.CTC(name=name))
        with pytest.warns(UserWarning, match="A loop .* cannot run.$"):
            losses = model.fit(x, y, epochs=4, verbose=0).history["loss"]
        assert losses[-1] < losses[0]


class WithState(keras.Model):
    """Has None as its second output, and `*args` in the signature."""

    def call(self, x: Any, training: Any = None) -> Any:
        return super().call(x, training=training), None

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super().compute_loss(x, y, y_pred[0], *args, **kwargs)


def test_curvature_of_other_models() -> None:
    """The ratio is that of `keras.Model`; without curvature it is 1."""
    x, ratios = np.eye(8, 4, dtype="float32"), []
    for make, is_sparse in (
        (keras.Model, False),
        (WithState, False),
        (keras.Model, True),
    ):
        i = keras.Input((4,), sparse=is_sparse)
        dense = layers.Dense(4, kernel_initializer="ones")
        model = compiled(make(i, dense(i)))
        inputs = tf.sparse.from_dense(x) if is_sparse else tf.constant(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.train_on_batch(inputs, tf.zeros([8, 4]), tf.range(1.0, 9.0))
        [state] = model.optimizer.method.states
        ratios.append(float(state.length.ratio))
    dense_ratio, *others, sparse_ratio = ratios
    assert others == [dense_ratio]
    assert 1.0 not in (dense_ratio, sparse_ratio)


class Scaled(keras.Sequential):
    """The loss is that of 100 times the outputs."""

    def train_step(self, data: Any) -> Any:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=100 * self(x))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {}


def test_loss_of_other_outputs() -> None:
    """The curvature of the model's own outputs would be another one."""
    model = compiled(Scaled([keras.Input((4,)), layers.Dense(4)]))
    x = tf.constant(np.eye(8, 4, dtype="float32"))
    with pytest.warns(UserWarning, match="with the result of the model, not"):
        model.train_on_batch(x, tf.zeros([8, 4]))
    [state] = model.optimizer.method.states
    assert float(state.length.ratio) == 1.0
    model.compile(tfkfac.FOSI(), "mse")
    with pytest.raises(ValueError, match="with the result of the model, not"):
        model.train_on_batch(x, tf.zeros([8, 4]))


@pytest.mark.parametrize(("layer", "rows"), [(Constant(), 32), (Noise(), 8)])
def test_examples_of_the_form(
    monkeypatch: pytest.MonkeyPatch, layer: Any, rows: int
) -> None:
    """A quarter of the batch, unless a layer may need the whole batch."""
    taken = []

    def curvature(model: Any, inputs: Any, *args: Any) -> Any:
        (x,) = inputs.call.args
        tf.py_function(lambda n: taken.append(int(n)), [tf.shape(x)[0]], [])
        return original(model, inputs, *args)

    original = scales.directional_curvature
    monkeypatch.setattr(scales, "directional_curvature", curvature)
    stack = [keras.Input((4,)), layers.Dense(4), layer]
    model = compiled(keras.Sequential(stack))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.random.default_rng(0).normal(size=(32, 4))
        model.train_on_batch(x, x[:, ::-1])
    assert taken == [rows]
