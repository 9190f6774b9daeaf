"""The models, losses and metrics of the problems."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from common import networks
from common.data import Split
from common.text import CHARACTERS
from targets.data import SEQUENCE, SIDE
from targets.problems import SIZES, TINY, Problem
from targets.tiny import WORDS

CLASSES = 10
IMAGE = (SIDE, SIDE, 1)
CHUNK = 512  # rows of a batch of a measurement


def build(problem: str, size: str) -> keras.Model:
    """Build the model of a problem."""
    if size == TINY:
        return _TINY[problem]()
    return _FULL[problem](SIZES[size])


def output_layer(model: keras.Model) -> keras.layers.Layer:
    """Return the last layer of a model."""
    layer = model.layers[-1]
    return output_layer(layer) if isinstance(layer, keras.Model) else layer


# ----------------------------------------------------------------- full size
def _stack(shape: Sequence[int], *hidden: Any, outputs: int) -> keras.Model:
    last = layers.Dense(outputs)
    return keras.Sequential([keras.Input(shape), *hidden, last])


def _dense(count: int, units: int, activation: str) -> list[layers.Layer]:
    return [layers.Dense(units, activation) for _ in range(count)]


def _image_autoencoder(shrink: int) -> keras.Model:
    inputs = keras.Input(IMAGE)
    outputs = networks.autoencoder(shrink)(layers.Flatten()(inputs))
    return keras.Model(inputs, outputs)


def _llama(words: int, width: int, tied: bool = False) -> keras.Model:
    """Two blocks with four heads and two pairs of keys and values."""
    from keras_hub import models

    backbone = models.Llama3Backbone(
        vocabulary_size=words,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=2 * width,
        tie_word_embeddings=tied,
    )
    return models.Llama3CausalLM(backbone=backbone, preprocessor=None)


class Sampling(layers.Layer):
    """Sample a normal distribution; add its KL divergence to the loss.

    The inputs are the concatenated means and logarithms of variances.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        """Return the sample."""
        mean, log_variance = ops.split(inputs, 2, axis=-1)
        variance = ops.exp(log_variance)
        nats = (variance + ops.square(mean) - 1 - log_variance) / 2
        self.add_loss(ops.mean(ops.sum(nats, -1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        # The gradient of `sqrt(variance)` is not finite where it underflows.
        return mean + ops.exp(log_variance / 2) * noise


def _variational(width: int, code: int) -> list[layers.Layer]:
    """Return the hidden layers of a variational autoencoder."""
    return [
        layers.Dense(width, "relu"),
        layers.Dense(2 * code),
        Sampling(),
        layers.Dense(width, "relu"),
    ]


_FULL: Mapping[str, Callable[[int], keras.Model]] = {
    "autoencoder": _image_autoencoder,
    "mlp": lambda shrink: _stack(
        IMAGE,
        layers.Flatten(),
        *_dense(8, 256 // shrink, "tanh"),
        outputs=CLASSES,
    ),
    "cnn": lambda shrink: networks.cnn(IMAGE, CLASSES, 32 // shrink),
    "resnet20": lambda shrink: networks.resnet(
        IMAGE, CLASSES, 20, 16 // shrink
    ),
    "transformer": lambda shrink: networks.transformer(
        CHARACTERS, SEQUENCE, 128 // shrink
    ),
    "llama": lambda shrink: _llama(CHARACTERS, 128 // shrink),
    "regression": lambda shrink: _stack(
        (6,), *_dense(4, 128 // shrink, "tanh"), outputs=2
    ),
    "vae": lambda shrink: _stack(
        IMAGE,
        layers.Flatten(),
        *_variational(400 // shrink, 20),
        outputs=SIDE * SIDE,
    ),
}


# ---------------------------------------------------------------------- tiny
def _tiny_cnn() -> keras.Model:
    return _stack(
        (16, 16, 1),
        layers.Conv2D(12, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(24, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(48, "relu"),
        outputs=CLASSES,
    )


def _tiny_autoencoder() -> keras.Model:
    first = [layers.Dense(units, "tanh") for units in (64, 32)]
    last = [layers.Dense(units, "tanh") for units in (32, 64)]
    return _stack((64,), *first, layers.Dense(8), *last, outputs=64)


def _siamese() -> keras.Model:
    """Classify pairs by the distance of their codes."""
    code = keras.Sequential([layers.Dense(64, "relu"), layers.Dense(16)])
    inputs = [keras.Input((64,)), keras.Input((64,))]
    square = ops.square(code(inputs[0]) - code(inputs[1]))
    distance = ops.sqrt(ops.sum(square, -1, keepdims=True) + 1e-6)
    return keras.Model(inputs, layers.Dense(1)(distance))


def _vit() -> keras.Model:
    from keras_hub import models

    backbone = models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=64,
        mlp_dim=128,
    )
    return models.ViTImageClassifier(
        backbone=backbone, num_classes=CLASSES, preprocessor=None
    )


def _bert() -> keras.Model:
    from keras_hub import models

    backbone = models.BertBackbone(vocabulary_size=60, **_SMALL_BLOCKS)
    return models.BertTextClassifier(
        backbone=backbone, num_classes=3, preprocessor=None, dropout=0.0
    )


def _gpt2() -> keras.Model:
    from keras_hub import models

    backbone = models.GPT2Backbone(vocabulary_size=100, **_SMALL_BLOCKS)
    return models.GPT2CausalLM(backbone=backbone, preprocessor=None)


_SMALL_BLOCKS = {
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 64,
    "intermediate_dim": 128,
    "max_sequence_length": 32,
    "dropout": 0.0,
}


def _mobilenet() -> keras.Model:
    base = keras.applications.MobileNetV3Small(
        (32, 32, 3),
        include_top=False,
        weights=None,
        include_preprocessing=False,
        pooling="avg",
    )
    return keras.Sequential([base, layers.Dense(CLASSES)])


_TINY: Mapping[str, Callable[[], keras.Model]] = {
    "cnn": _tiny_cnn,
    "autoencoder": _tiny_autoencoder,
    "regression": lambda: _stack((6,), *_dense(2, 64, "relu"), outputs=1),
    "mlp": lambda: _stack(
        IMAGE, layers.Flatten(), *_dense(4, 96, "relu"), outputs=CLASSES
    ),
    "siamese": _siamese,
    "vae": lambda: _stack((64,), *_variational(64, 8), outputs=64),
    "lstm": lambda: _stack(
        (20,),
        layers.Embedding(50, 16, mask_zero=True),
        layers.LSTM(24),
        outputs=2,
    ),
    "vit": _vit,
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": lambda: _llama(WORDS, 64),
    "llama-tied": lambda: _llama(WORDS, 64, tied=True),
    "mobilenet": _mobilenet,
}


# -------------------------------------------------------- losses and metrics
@keras.saving.register_keras_serializable(package="targets")
def summed_pixels(y: Any, logits: Any) -> Any:
    """Return the binary cross-entropy of each image, in nats."""
    return ops.sum(ops.binary_crossentropy(y, logits, from_logits=True), -1)


LOSSES: Mapping[str, Callable[[], Any]] = {
    "classes": lambda: keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    ),
    "smoothed classes": lambda: keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1
    ),
    "pixels": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "pairs": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "summed pixels": lambda: summed_pixels,
    "squares": keras.losses.MeanSquaredError,
}


def targets_of(loss: str, x: Any, y: Any) -> Any:
    """Return the targets of a batch for a loss."""
    if loss.endswith("pixels"):
        return tf.reshape(x, [tf.shape(x)[0], -1])
    return tf.one_hot(y, CLASSES) if loss.startswith("smoothed") else y


def make_measure(
    model: keras.Model, problem: Problem, score: str, split: Split
) -> Callable[[], float]:
    """Return a function that measures a model on all examples of `split`.

    `Model.evaluate` would reset the metrics of `fit`. `score` is "accuracy",
    "loss", or "pixels", the squared error of an image.
    """
    examples = tf.data.Dataset.from_tensor_slices((split.x, split.y))
    rows = examples.batch(CHUNK).cache()
    loss = LOSSES[problem.loss]()

    def mean(x: Any, y: Any) -> tf.Tensor:
        outputs = model(x, training=problem.batch_statistics)
        targets = targets_of(problem.loss, x, y)
        if score == "accuracy":
            correct = tf.equal(tf.argmax(outputs, -1, tf.int32), y)
            return tf.reduce_mean(tf.cast(correct, tf.float32))
        if score == "pixels":
            errors = tf.square(tf.sigmoid(outputs) - targets)
            return tf.reduce_mean(tf.reduce_sum(errors, -1))
        added = tf.add_n([*model.losses, tf.constant(0.0)])
        return tf.reduce_mean(loss(targets, outputs)) + added

    @tf.function
    def measure() -> tf.Tensor:
        total, count = tf.constant(0.0), tf.constant(0.0)
        for x, y in rows:
            weight = tf.cast(tf.shape(y)[0], tf.float32)
            total += weight * mean(x, y)
            count += weight
        return total / count

    return lambda: float(measure())
