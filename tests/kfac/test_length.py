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
from tfkfac.kfac import length
from tfkfac.kfac.length import SpectralLength

SQUARES = 2.0, 3.0  # |Q|^2 of two blocks
NAN = float("nan")


class Steps:
    """Steps of the length rule, one for each value of `D^T F D`.

    Attributes:
        computed: Numbers of the steps that computed `D^T F D`.
    """

    def __init__(self, updates: int = 400, is_recurrent: bool = False) -> None:
        self._length = SpectralLength()
        self._length.is_recurrent = is_recurrent
        self._updates = tf.constant(updates, tf.int64)
        self.computed: list[int] = []

    def rates(
        self, forms: Sequence[float], excess: float = 4.0, labels: float = 1.0
    ) -> Array:
        """Return r of each step."""
        return np.array(
            [
                self._rate(step, form, excess, labels)
                for step, form in enumerate(forms, 1)
            ]
        )

    def _rate(
        self, step: int, form: float, excess: float, labels: float
    ) -> float:
        def curvature() -> tf.Tensor:
            self.computed.append(step)
            return tf.constant(form, tf.float64)

        rate = self._length.rate(
            tf.constant(sum(SQUARES), tf.float64),
            tf.constant(excess, tf.float64),
            tf.constant(labels, tf.float64),
            curvature,
            self._updates,
        )
        return float(rate)


@pytest.mark.parametrize(
    ("excess", "labels", "kappa"),
    [
        (4.0, 1, 0.45),
        (4.0, 9, 1.2),
        (0.25, 1, 0.3),
        (0.01, 1, 0.07),
        (-0.5, 1, 0.07),  # L is below H only by rounding
        (NAN, 1, 0.07),
        (np.inf, 1, 0.07),
    ],
)
def test_length_by_loss_and_labels(
    excess: float, labels: int, kappa: float
) -> None:
    """The first ten steps are shorter; r is at least 0.006."""
    rates = Steps().rates([20.0] * 12, excess, labels)
    warmup = np.minimum(np.arange(1, 13) / 10, 1)
    want = np.maximum(0.006, warmup * kappa / np.sqrt(20))
    np.testing.assert_allclose(rates, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("updates", "c"), [(1, 1), (400, 1), (1600, 0.5), (10_000, 0.2)]
)
def test_steps_of_long_runs_are_shorter(updates: int, c: float) -> None:
    """In proportion to c, and to its root where the loss bounds the length."""
    cases = {
        (20.0, 4.0, 1.0): 0.45 * c / np.sqrt(20),
        (20.0, 4.0, 1e4): 0.6 * np.sqrt(4 * c / 20),
        (20.0, 0.0, 1.0): 0.07 * c / np.sqrt(20),
        (2e6, 4.0, 1.0): 0.006 * c,
    }
    for (form, excess, labels), want in cases.items():
        rates = Steps(updates).rates([form] * 10, excess, labels)
        assert rates[-1] == pytest.approx(want)


@pytest.mark.parametrize(
    ("excess", "updates", "least"),
    [
        (4.0, 400, 0.05),
        (4.0, 1600, 0.025),
        (0.01, 400, 0.03),
        (0.01, 1600, 0.015),
        (0.0004, 400, 0.006),
        (-0.5, 400, 0.006),
        (NAN, 400, 0.006),
    ],
)
def test_recurrent_layers_have_longer_steps(
    excess: float, updates: int, least: float
) -> None:
    """`r >= c max(0.006, min(0.05, 0.3 sqrt(L - H)))`."""
    rates = Steps(updates, is_recurrent=True).rates([2e7] * 2, excess)
    np.testing.assert_allclose(rates, least, rtol=1e-12)
    rates = Steps(is_recurrent=True).rates([20.0] * 10)
    assert rates[-1] == pytest.approx(0.45 / np.sqrt(20))


def test_ratio_remembers_large_values() -> None:
    """A form that is not positive is ignored; a ratio is at least 0.001."""
    forms = [5.0, 20.0, 10.0, NAN, 1.0, 0.0, -1.0, 1e-9, 40.0, np.inf, 10.0]
    ratio, want = forms[0] / sum(SQUARES), []
    for step, form in enumerate(forms, 1):
        if np.isfinite(form) and form > 0:
            new = max(form / sum(SQUARES), 1e-3)
            ratio = max(new, 0.9 * ratio + 0.1 * new)
        kappa = min(step / 10, 1) * 0.45
        want.append(kappa / np.sqrt(ratio * sum(SQUARES)))
    np.testing.assert_allclose(Steps().rates(forms), want, rtol=1e-12)


def test_first_form_has_no_predecessor() -> None:
    """Not even the initial ratio, 1."""
    want = 0.1 * 0.45 / np.sqrt(0.1)
    assert Steps().rates([0.1])[0] == pytest.approx(want)


def test_steps_that_compute_the_form() -> None:
    """The first 100, then each tenth."""
    steps = Steps()
    rates = steps.rates([5.0] * 100 + [20.0] * 25)
    assert steps.computed == [*range(1, 101), 110, 120]
    np.testing.assert_allclose(rates[108], rates[99], rtol=1e-12)
    np.testing.assert_allclose(rates[109:], rates[99] / 2, rtol=1e-12)


def test_length_is_bounded_where_predictions_are_saturated() -> None:
    """The curvature is then 0, and the loss may be large."""
    assert Steps().rates([1e-9] * 10, excess=1e4, labels=1e4)[-1] == 1


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


class Even(layers.Layer):
    """Needs an even batch size."""

    def call(self, x: Any) -> Any:
        half = tf.shape(x)[0] // 2
        return tf.reshape(tf.reshape(x, [half, 2, -1]), [2 * half, 4])

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


def compiled(model: Any, eager: bool = True) -> Any:
    keras.utils.set_random_seed(0)
    model.compile(tfkfac.KFAC(), "mse", run_eagerly=eager)
    return model


def ratio_after(model: Any, *batch: Any) -> float:
    """The ratio after a step without a warning; 1 without curvature."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_on_batch(*batch)
    return float(model.optimizer.method.states[0].length.ratio)


@pytest.mark.parametrize("eagerly", [False, True])
def test_one_warning_without_curvature(eagerly: bool) -> None:
    """Also if the reason, with the shape of a tensor, differs per trace."""
    stack = [keras.Input((4,)), layers.Dense(4), LargeBatch()]
    model = compiled(keras.Sequential(stack), eagerly)
    with pytest.warns(
        UserWarning, match="cannot compute the curvature"
    ) as all_:
        for size in (8, 12, 16):
            model.train_on_batch(tf.ones([size, 4]), tf.zeros([size, 4]))
    assert len([w for w in all_ if "curvature" in str(w.message)]) == 1


def test_reason_without_curvature() -> None:
    """It does not advise another optimizer: training continues."""
    model = compiled(NoSecond())
    with pytest.warns(UserWarning, match="has no gradient.$"):
        model.train_on_batch(tf.ones([8, 4]), tf.zeros([8, 4]))


def test_sparse_inputs() -> None:
    """The curvature is that of the whole batch."""
    x = tf.sparse.from_dense(np.eye(8, 4, dtype="float32"))
    model = compiled(
        keras.Sequential([keras.Input((4,), sparse=True), layers.Dense(4)])
    )
    assert ratio_after(model, x, tf.zeros([8, 4])) != 1.0


@pytest.mark.parametrize(
    ("layer", "size", "rows"),
    [(Constant, 32, 32), (Even, 30, 30), (Noise, 32, 8), (None, 32, 8)],
)
def test_examples_of_the_form(
    monkeypatch: pytest.MonkeyPatch, layer: Any, size: int, rows: int
) -> None:
    """A quarter of the batch, unless a layer may need the whole batch."""
    taken = []

    def curvature(model: Any, inputs: Any, *args: Any) -> Any:
        (x,) = inputs.call.args
        tf.py_function(lambda n: taken.append(int(n)), [tf.shape(x)[0]], [])
        return original(model, inputs, *args)

    original = length.directional_curvature
    monkeypatch.setattr(length, "directional_curvature", curvature)
    stack = [keras.Input((4,)), layers.Dense(4)]
    stack += [layer()] if layer else []
    model = compiled(keras.Sequential(stack), eager=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.random.default_rng(0).normal(size=(2 * size, 4))
        model.fit(x, x[:, ::-1], batch_size=size, verbose=0)
    assert taken == [rows] * 2


class AnyArguments(keras.Sequential):
    """Passes `*args` and `**kwargs` of the loss on."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super().compute_loss(x, y, y_pred, *args, **kwargs)


class OnlyArguments(keras.Sequential):
    """Its signature has no name of an argument."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_loss_with_any_arguments() -> None:
    """The curvature is that of Keras' loss, weighted by example."""
    x, weights = tf.random.normal([8, 4], seed=1), tf.range(1.0, 9.0)
    ratios = []
    for model_class in (keras.Sequential, AnyArguments, OnlyArguments):
        dense = layers.Dense(4, kernel_initializer="ones")
        model = compiled(model_class([keras.Input((4,)), dense]))
        ratios.append(ratio_after(model, x, tf.zeros([8, 4]), weights))
    assert ratios[0] == ratios[1] == ratios[2] != 1.0


class WithoutState(keras.Model):
    """Returns None as its second output."""

    def call(self, x: Any, training: Any = None) -> Any:
        return super().call(x, training=training), None

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super().compute_loss(x, y, y_pred[0], *args, **kwargs)


def test_output_that_is_none() -> None:
    """The curvature is known."""
    inputs = keras.Input((4,))
    model = compiled(WithoutState(inputs, layers.Dense(4)(inputs)))
    assert ratio_after(model, tf.ones([8, 4]), tf.zeros([8, 4])) != 1.0


def test_eager_steps_trace_a_custom_layer_once() -> None:
    """Five steps call it 5 times, for `D^T F D` 5 times, for the trace once."""
    calls = []

    class Counted(layers.Layer):
        def call(self, x: Any) -> Any:
            calls.append(1)
            return x

    stack = [keras.Input((4,)), layers.Dense(4), Counted()]
    model = compiled(keras.Sequential(stack))
    calls.clear()
    for _ in range(5):
        model.train_on_batch(tf.ones([8, 4]), tf.zeros([8, 4]))
    assert len(calls) == 11
