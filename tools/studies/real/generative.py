"""Programs with a `train_step` of their own, which make digits."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from real.data import Losses, Make, digits


def variational_autoencoder(make: Make, options: dict[str, Any]) -> Losses:
    """Sum of a reconstruction loss and a divergence, in `train_step`."""

    class Sampling(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, inputs: Any) -> Any:
            mean, log_variance = inputs
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
            return mean + ops.exp(0.5 * log_variance) * noise

    class Autoencoder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            settings = {"strides": 2, "padding": "same", "activation": "relu"}
            inputs = keras.Input((8, 8, 1))
            x = layers.Conv2D(32, 3, **settings)(inputs)
            x = layers.Flatten()(layers.Conv2D(64, 3, **settings)(x))
            x = layers.Dense(16, "relu")(x)
            code = layers.Dense(4)(x), layers.Dense(4)(x)
            self.encoder = keras.Model(inputs, [*code, Sampling()(code)])
            self.decoder = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Dense(2 * 2 * 64, "relu"),
                    layers.Reshape((2, 2, 64)),
                    layers.Conv2DTranspose(64, 3, **settings),
                    layers.Conv2DTranspose(32, 3, **settings),
                    layers.Conv2DTranspose(1, 3, padding="same"),
                    layers.Activation("sigmoid"),
                ]
            )

        def total_loss(self, x: Any) -> Any:
            mean, log_variance, code = self.encoder(x)
            terms = keras.losses.binary_crossentropy(x, self.decoder(code))
            nats = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
            return ops.mean(ops.sum(terms, (1, 2)) + ops.sum(nats, 1) / 2)

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.total_loss(x)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"total_loss": loss}

    (x, _), (test_x, _) = digits()
    model = Autoencoder()
    model.compile(make())
    model.fit(x, batch_size=128, epochs=40, **options)
    return float(model.total_loss(x)), float(model.total_loss(test_x))


def gan(make: Make, options: dict[str, Any]) -> Losses:
    """Two networks with an optimizer each.

    Returns the Frechet distances of 1,000 samples to the images.
    """

    class Adversaries(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            half = {"strides": 2, "padding": "same"}
            self.discriminator = keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    layers.Conv2D(32, 3, **half),
                    layers.LeakyReLU(0.2),
                    layers.Conv2D(64, 3, **half),
                    layers.LeakyReLU(0.2),
                    layers.GlobalMaxPooling2D(),
                    layers.Dense(1),
                ]
            )
            self.generator = keras.Sequential(
                [
                    keras.Input((16,)),
                    layers.Dense(2 * 2 * 32),
                    layers.LeakyReLU(0.2),
                    layers.Reshape((2, 2, 32)),
                    layers.Conv2DTranspose(64, 4, **half),
                    layers.LeakyReLU(0.2),
                    layers.Conv2DTranspose(64, 4, **half),
                    layers.LeakyReLU(0.2),
                    layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
                ]
            )
            self.seeds = keras.random.SeedGenerator(1)

        def compile(self, first: Any, second: Any, loss: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer = first, second
            self.loss_fn = loss

        def samples(self, count: Any) -> Any:
            noise = keras.random.normal((count, 16), seed=self.seeds)
            return self.generator(noise)

        def train_step(self, x: Any) -> dict[str, Any]:
            count = tf.shape(x)[0]
            images = tf.concat([self.samples(count), x], 0)
            labels = tf.repeat([[1.0], [0.0]], count, 0)
            labels += 0.05 * tf.random.uniform(tf.shape(labels))
            model, weights = self.discriminator, self.discriminator.weights
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, model(images))
            gradients = tape.gradient(d_loss, weights)
            self.d_optimizer.apply(gradients, weights)
            weights = self.generator.trainable_weights
            with tf.GradientTape() as tape:
                guesses = model(self.samples(count))
                g_loss = self.loss_fn(tf.zeros((count, 1)), guesses)
            gradients = tape.gradient(g_loss, weights)
            self.g_optimizer.apply(gradients, weights)
            return {"d_loss": d_loss, "g_loss": g_loss}

    (x, _), (test_x, _) = digits()
    model = Adversaries()
    first, second = make(), make()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(first, second, loss)
    if hasattr(first, "attach"):  # an optimizer of tfkfac
        first.attach(model.discriminator)
        second.attach(model.generator)
    model.fit(x, batch_size=64, epochs=30, **options)
    samples = model.samples(1000).numpy()
    return frechet(x, samples), frechet(test_x, samples)


def frechet(first: np.ndarray, second: np.ndarray) -> float:
    """Return the Frechet distance of normal distributions of the pixels."""
    from scipy.linalg import sqrtm

    means, covariances = [], []
    for images in (first, second):
        rows = images.reshape(len(images), -1).astype("float64")
        means.append(rows.mean(0))
        covariances.append(np.cov(rows.T) + 1e-6 * np.eye(rows.shape[1]))
    a, b = covariances
    distance = np.square(means[0] - means[1]).sum()
    return float(distance + np.trace(a + b - 2 * sqrtm(a @ b).real))


def denoising_diffusion(make: Make, options: dict[str, Any]) -> Losses:
    """Predict the noise in images; the averaged network is measured."""
    frequencies = np.exp(np.linspace(0, np.log(1000), 8)).astype("float32")

    def network() -> keras.Model:
        def residual(x: Any, width: int) -> Any:
            shortcut = layers.Conv2D(width, 1)(x)
            x = layers.BatchNormalization(center=False, scale=False)(x)
            x = layers.Conv2D(width, 3, padding="same", activation="swish")(x)
            x = layers.Conv2D(width, 3, padding="same")(x)
            return layers.Add()([x, shortcut])

        inputs = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
        angles = inputs[1] * (2 * np.pi * frequencies)
        waves = ops.concatenate([ops.sin(angles), ops.cos(angles)], 3)
        waves = layers.UpSampling2D(8)(waves)
        x = layers.concatenate([layers.Conv2D(16, 1)(inputs[0]), waves])
        skip = residual(x, 24)
        x = residual(layers.AveragePooling2D(2)(skip), 48)
        x = layers.concatenate([layers.UpSampling2D()(x), skip])
        x = residual(x, 24)
        x = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
        return keras.Model(inputs, x)

    class Diffusion(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.averaged = network(), network()
            self.averaged.set_weights(self.network.get_weights())

        def noise_loss(self, images: Any, network: Any, training: bool) -> Any:
            noises = tf.random.normal(tf.shape(images))
            times = tf.random.uniform((tf.shape(images)[0], 1, 1, 1))
            angles = np.arccos(0.95) * (1 - times) + np.arccos(0.02) * times
            noisy = tf.cos(angles) * images + tf.sin(angles) * noises
            inputs = [noisy, tf.sin(angles) ** 2]
            return self.loss(noises, network(inputs, training=training))

        def train_step(self, x: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = self.noise_loss(x, self.network, True)
            weights = self.network.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply(gradients, weights)
            pairs = zip(
                self.averaged.weights, self.network.weights, strict=True
            )
            for average, weight in pairs:
                average.assign(0.99 * average + 0.01 * weight)
            return {"n_loss": loss}

    x, test_x = ((x - 0.3) / 0.38 for x, _ in digits())
    model = Diffusion()
    model.compile(make(), loss=keras.losses.MeanAbsoluteError())
    model.fit(x, batch_size=64, epochs=25, **options)
    first, second = (
        float(model.noise_loss(np.tile(a, (4, 1, 1, 1)), model.averaged, False))
        for a in (x, test_x)
    )
    return first, second
