"""Generative adversarial networks."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import assert_close
from tests.support.reference import append_one, factors
from tests.support.small import FEATURES, ROWS, data

X, _ = data()
BCE = keras.losses.BinaryCrossentropy(from_logits=True)
NOISE = np.random.default_rng(3).normal(size=(ROWS, 2)).astype("float32")


class Gan:
    """A generator and a discriminator, one dense layer each.

    The optimizers are attached to the submodels.
    """

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        maker = layers.Dense(FEATURES, name="maker")
        judge = layers.Dense(1, name="judge")
        self.generator = keras.Sequential([keras.Input((2,)), maker])
        self.critic = keras.Sequential([keras.Input((FEATURES,)), judge])
        self.of_generator = tfkfac.KFAC(step="natural").attach(self.generator)
        self.of_critic = tfkfac.KFAC(step="natural").attach(self.critic)
        weights = self.generator.get_weights()
        kernel, bias = (w.astype(np.float64) for w in weights)
        v, c = (w.astype(np.float64) for w in self.critic.get_weights())
        fake = NOISE @ kernel + bias
        real_score = 1 / (1 + np.exp(-(X @ v + c)))
        fake_score = 1 / (1 + np.exp(-(fake @ v + c)))
        # The critic has two calls per step; their statistics are averaged.
        rows = append_one(np.concatenate([X, fake]))
        g = np.concatenate([real_score - 1, fake_score])
        self.critic_a = rows.T @ rows / (2 * ROWS)
        self.critic_g = g.T @ g / ROWS
        _, self.generator_g = factors(
            append_one(NOISE)[:, None], ((fake_score - 1) @ v.T)[:, None]
        )

    def critic_loss(self, x: Any) -> Any:
        real, fake = self.critic(x), self.critic(self.generator(NOISE))
        ones, zeros = tf.ones_like(real), tf.zeros_like(fake)
        return BCE(ones, real) + BCE(zeros, fake)

    def generator_loss(self) -> Any:
        fake = self.critic(self.generator(NOISE))
        return BCE(tf.ones_like(fake), fake)

    def train_critic(self, x: Any) -> None:
        with tf.GradientTape() as tape:
            value = self.critic_loss(x)
        weights = self.critic.trainable_weights
        self.of_critic.apply(tape.gradient(value, weights), weights)

    def train_generator(self) -> None:
        with tf.GradientTape() as tape:
            value = self.generator_loss()
        weights = self.generator.trainable_weights
        self.of_generator.apply(tape.gradient(value, weights), weights)

    def check(self) -> None:
        block = self.of_critic.factors()["judge"]
        assert_close(block["A"], self.critic_a, 1e-5, "A of the critic")
        assert_close(block["G"], self.critic_g, 1e-5, "G of the critic")
        block = self.of_generator.factors()["maker"]
        assert_close(block["G"], self.generator_g, 1e-5, "G of the generator")


def test_critic_learns_from_its_own_loss() -> None:
    """The generator's backward pass through the critic is not recorded."""
    gan = Gan()
    initial = gan.critic.get_weights()

    def step() -> None:
        # The generator's step comes first; its records of the critic are stale.
        gan.train_generator()
        gan.train_critic(X)

    # Learning rate 0, so that both steps have the same weights.
    gan.of_generator.learning_rate = 0.0
    gan.of_critic.learning_rate = 0.0
    tf.function(step)()
    gan.check()
    for value, want in zip(gan.critic.get_weights(), initial, strict=True):
        np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("generator_first", [False, True])
def test_two_tapes_over_one_forward_pass(generator_first: bool) -> None:
    """As in TensorFlow's GAN tutorial: two gradients, then two steps."""
    gan = Gan()

    def step() -> None:
        fakes, critics = (
            model.trainable_weights for model in (gan.generator, gan.critic)
        )
        with tf.GradientTape() as tape_1, tf.GradientTape() as tape_2:
            fake = gan.critic(gan.generator(NOISE))
            real = gan.critic(X)
            for_generator = BCE(tf.ones_like(fake), fake)
            for_critic = BCE(tf.ones_like(real), real)
            for_critic += BCE(tf.zeros_like(fake), fake)
        pairs = [(tape_1, for_generator, fakes), (tape_2, for_critic, critics)]
        order = (0, 1) if generator_first else (1, 0)
        gradients = {i: pairs[i][0].gradient(*pairs[i][1:]) for i in order}
        gan.of_generator.apply(gradients[0], fakes)
        gan.of_critic.apply(gradients[1], critics)

    (tf.function(step) if generator_first else step)()
    gan.check()
