"""Records of taps, derivatives through taps, and gradients of two losses."""

import gc
import weakref
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
from tests.support.reference import append_one, factors
from tests.support.small import (
    FEATURES,
    ROWS,
    assert_same,
    compiled_mlp,
    data,
    everything,
    gradients_of,
    loss,
    mlp,
    summary_text,
)
from tfkfac.capture.taps import Record

X, Y = data()


# -------------------------------------------------------------- records
def test_a_saliency_map_leaves_no_records() -> None:
    """A gradient that is never applied does not reach the next step."""
    models = [compiled_mlp(eager=True) for _ in range(2)]
    for model, saliency in zip(models, (False, True), strict=True):
        for _ in range(2):
            if saliency:
                x = tf.constant(X[:3] + 5.0)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    score = tf.reduce_sum(model(x)[:, 0])
                assert np.asarray(tape.gradient(score, x)).any()
            model.train_on_batch(X, Y)
    assert_same(everything(models[1]), everything(models[0]))


def test_unused_records_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten saliency maps keep as many records as one saliency map."""
    records: list[weakref.ref[Record]] = []
    original_init = Record.__init__

    def initialize(self: Record, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        records.append(weakref.ref(self))

    monkeypatch.setattr(Record, "__init__", initialize)
    gc.freeze()  # so that garbage of other tests is not collected here
    model = compiled_mlp(eager=True)

    def count_records() -> int:
        gc.collect()
        return sum(reference() is not None for reference in records)

    gradients_of(model, X, Y)
    num_records = count_records()
    assert num_records == 2
    for _ in range(9):
        gradients_of(model, X, Y)
    assert count_records() <= num_records
    model.train_on_batch(X, Y)
    assert count_records() == 0


# ------------------------------------------------------------- derivatives
def gradient_penalty(model: Any) -> list[Any]:
    """Gradient of an input gradient's norm with respect to the weights."""
    x = tf.constant(X)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            inner.watch(x)
            score = tf.reduce_sum(model(x)[:, 0])
        slope = inner.gradient(score, x)
        penalty = tf.reduce_mean(tf.square(tf.norm(slope, axis=1) - 1))
        value = penalty + tf.reduce_mean(model(x)[:, 1])
    return list(outer.gradient(value, model.trainable_variables))


def hessian_product(model: Any) -> list[Any]:
    values = [v.value for v in model.trainable_variables]
    ones = [tf.ones_like(v) for v in values]
    with tf.autodiff.ForwardAccumulator(values, ones) as accumulator:
        with tf.GradientTape() as tape:
            value = loss()(Y, model(X))
        gradients = tape.gradient(value, values)
    return [accumulator.jvp(g) for g in (value, *gradients)]


@pytest.mark.parametrize("derivative", [gradient_penalty, hessian_product])
def test_taps_are_transparent_to_derivatives(derivative: Any) -> None:
    """Bitwise equal with and without taps."""
    got, want = derivative(compiled_mlp(eager=True)), derivative(mlp())
    assert len(want) in (4, 5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.asarray(b).any()


# -------------------------------------------- two gradients of one forward pass
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(6, 3)).astype("float32")
TARGETS = RNG.normal(size=(2, 6, 2)).astype("float32")


def run(applied: Any, eager: bool, layer: Any) -> Any:
    """Run a step with a weighted sum of the gradients of two losses."""
    model = keras.Sequential([keras.Input((3,)), layer])
    randomize(model)
    optimizer = tfkfac.KFAC(keras.optimizers.SGD(0.0)).attach(model)

    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(INPUTS, training=True)
            losses = [
                tf.reduce_sum(tf.square(outputs - y)) / (2 * len(INPUTS))
                for y in TARGETS
            ]
        variables = model.trainable_variables
        values = [v.value for v in variables]
        grads = [tape.gradient(loss, values) for loss in losses]
        optimizer.apply(
            [
                sum(w * g for w, g in zip(applied, both, strict=True))
                for both in zip(*grads, strict=True)
            ],
            variables,
        )

    (step if eager else tf.function(step))()
    return optimizer


@pytest.mark.parametrize(
    ("applied", "counted", "eager"),
    [
        # Weights of the two gradients in the applied gradient, and in G.
        ((1, 0), (1, 0), True),
        # Scaled as by clipping.
        ((0.1, 0.1), (1, 1), True),
        ((0, 0.1), (0, 1), False),
    ],
)
def test_factors_use_the_applied_gradient(
    applied: Any, counted: Any, eager: bool
) -> None:
    layer = layers.Dense(2, name="block")
    optimizer = run(applied, eager, layer)
    a = append_one(INPUTS.astype(np.float64))
    out = a @ np.vstack(weights_of(layer))
    g = sum(w * (out - y) for w, y in zip(counted, TARGETS, strict=True))
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "block"), *want)


def test_warning_for_another_gradient(capfd: Any) -> None:
    """There is no warning if the tape computed a single gradient."""
    optimizer = run((1, -3), True, layers.Dense(2, name="block"))
    message = "tfkfac: block: the applied gradient is neither"
    assert message in capfd.readouterr().err
    assert "gradients of other passes in block: 1" in summary_text(optimizer)
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    gradients = gradients_of(model, *data())
    optimizer.apply([tf.ones_like(g) for g in gradients], model.weights)
    assert "tfkfac" not in capfd.readouterr().err


def test_derivatives_of_inputs_in_the_loss(capfd: Any) -> None:
    """G is of the gradient of `(u^2 + u_x^2) / 2`, without a warning."""
    x = INPUTS[:, :1]
    hidden = layers.Dense(4, "tanh", name="hidden")
    model = keras.Sequential([keras.Input((1,)), hidden, layers.Dense(1)])
    randomize(model)
    weights = [w.astype(np.float64) for w in model.get_weights()]
    optimizer = tfkfac.KFAC(0.0, only_layers="hidden").attach(model)

    @tf.function
    def step() -> None:
        points = tf.constant(x)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(points)
                u = model(points, training=True)
            squares = tf.square([u, inner.gradient(u, points)])
            value = tf.reduce_sum(squares) / (2 * len(x))
        variables = model.trainable_variables
        optimizer.apply(outer.gradient(value, variables), variables)

    step()
    kernel, bias, second, shift = weights
    t = np.tanh(x @ kernel + bias)
    slope = second[:, 0] * (1 - t**2)
    u, u_x = t @ second + shift, slope @ kernel.T
    g = u * slope - 2 * u_x * kernel * t * slope
    a = append_one(x.astype(np.float64))
    want = factors(a[:, None], g[:, None])
    check_factors(find(optimizer.factors(), "hidden"), *want)
    assert "tfkfac" not in capfd.readouterr().err


# --------------------------------------------------------- adversarial networks
BCE = keras.losses.BinaryCrossentropy(from_logits=True)
NOISE = np.random.default_rng(3).normal(size=(ROWS, 2)).astype("float32")


@pytest.mark.parametrize("generator_first", [False, True])
def test_two_tapes_over_one_forward_pass(generator_first: bool) -> None:
    """As in TensorFlow's GAN tutorial: two gradients, then two steps."""
    keras.utils.set_random_seed(0)
    maker = layers.Dense(FEATURES, name="maker")
    judge = layers.Dense(1, name="judge")
    generator = keras.Sequential([keras.Input((2,)), maker])
    critic = keras.Sequential([keras.Input((FEATURES,)), judge])
    of_generator = tfkfac.KFAC(step="natural").attach(generator)
    of_critic = tfkfac.KFAC(step="natural").attach(critic)
    (kernel, bias), (v, c) = weights_of(generator), weights_of(critic)
    fakes = NOISE @ kernel + bias
    real_score = 1 / (1 + np.exp(-(X @ v + c)))
    fake_score = 1 / (1 + np.exp(-(fakes @ v + c)))

    def step() -> None:
        with tf.GradientTape() as tape_1, tf.GradientTape() as tape_2:
            fake, real = critic(generator(NOISE)), critic(X)
            for_generator = BCE(tf.ones_like(fake), fake)
            for_critic = BCE(tf.ones_like(real), real)
            for_critic += BCE(tf.zeros_like(fake), fake)
        tasks = [
            (tape_1, for_generator, generator.trainable_weights),
            (tape_2, for_critic, critic.trainable_weights),
        ]
        order = (0, 1) if generator_first else (1, 0)
        gradients = {i: tasks[i][0].gradient(*tasks[i][1:]) for i in order}
        of_generator.apply(gradients[0], generator.trainable_weights)
        of_critic.apply(gradients[1], critic.trainable_weights)

    (tf.function(step) if generator_first else step)()
    # The critic has two calls per step; their statistics are averaged.
    a = append_one(np.concatenate([X, fakes]))
    g = np.concatenate([real_score - 1, fake_score])
    block = of_critic.factors()["judge"]
    check_factors(block, a.T @ a / (2 * ROWS), g.T @ g / ROWS)
    g = (fake_score - 1) @ v.T
    block = of_generator.factors()["maker"]
    assert_close(block["G"], g.T @ g / ROWS, 1e-5, "G of the generator")
