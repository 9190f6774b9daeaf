"""Models of several studies; all end in logits."""

import functools
from collections.abc import Callable

import keras
from keras import layers

Shape = tuple[int, ...]


def mlp(image_shape: Shape, num_classes: int) -> keras.Model:
    """Two hidden layers of 512 units."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(num_classes),
        ],
        name="mlp",
    )


def cnn(image_shape: Shape, num_classes: int, filters: int = 32) -> keras.Model:
    """Two convolutions, each with pooling, and two dense layers."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Conv2D(filters, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(2 * filters, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4 * filters, activation="relu"),
            layers.Dense(num_classes),
        ],
        name="cnn",
    )


def resnet(
    image_shape: Shape, num_classes: int, depth: int, filters: int = 16
) -> keras.Model:
    """ResNet of He et al. for small images: three stages of blocks.

    `depth` is 6 n + 2 for n blocks per stage; `filters` is the number of
    filters of the first stage, which doubles in each next stage.
    """
    inputs = keras.Input(image_shape)
    outputs = layers.ReLU()(_convolution(inputs, filters, size=3))
    for stage in range(3):
        for block in range((depth - 2) // 6):
            strides = 2 if stage > 0 and block == 0 else 1
            outputs = _residual_block(outputs, filters << stage, strides)
    outputs = layers.GlobalAveragePooling2D()(outputs)
    outputs = layers.Dense(num_classes)(outputs)
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def _residual_block(
    inputs: keras.KerasTensor, filters: int, strides: int
) -> keras.KerasTensor:
    outputs = _convolution(inputs, filters, size=3, strides=strides)
    outputs = _convolution(layers.ReLU()(outputs), filters, size=3)
    shortcut = inputs
    if strides > 1:
        shortcut = _convolution(inputs, filters, size=1, strides=strides)
    return layers.ReLU()(layers.Add()([outputs, shortcut]))


def _convolution(
    inputs: keras.KerasTensor, filters: int, size: int, strides: int = 1
) -> keras.KerasTensor:
    outputs = layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        use_bias=False,  # BatchNormalization adds its own
        kernel_initializer="he_normal",
    )(inputs)
    # Keras' momentum of 0.99 is too slow for a few hundred steps; statistics
    # that are not synchronized differ between workers.
    return layers.BatchNormalization(momentum=0.9, synchronized=True)(outputs)


def application(name: str, image_shape: Shape, num_classes: int) -> keras.Model:
    """A model of keras.applications, with new weights."""
    return getattr(keras.applications, name)(
        weights=None,
        input_shape=image_shape,
        classes=num_classes,
        classifier_activation=None,
    )


CLASSIFIERS: dict[str, Callable[[Shape, int], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet20": functools.partial(resnet, depth=20),
    "resnet32": functools.partial(resnet, depth=32),
    **{
        name: functools.partial(application, name)
        for name in ("VGG16", "ResNet50", "DenseNet121", "MobileNetV2")
    },
}


def autoencoder(shrink: int = 1) -> keras.Model:
    """Autoencoder 784-1000-500-250-30-250-500-1000-784.

    `shrink` divides the widths of the hidden layers, except the code's.
    """
    widths = [units // shrink for units in (1000, 500, 250)]
    return keras.Sequential(
        [
            keras.Input((784,)),
            *(layers.Dense(units, "tanh") for units in widths),
            layers.Dense(30),
            *(layers.Dense(units, "tanh") for units in reversed(widths)),
            layers.Dense(784),
        ]
    )


def transformer_block(
    x: keras.KerasTensor, causal: bool = True
) -> keras.KerasTensor:
    """Attention of four heads and an MLP, each after layer normalisation."""
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(4, width // 4)
    x = layers.Add()([x, attention(y, y, use_causal_mask=causal)])
    y = layers.LayerNormalization()(x)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(y))
    return layers.Add()([x, y])


def transformer(vocabulary: int, length: int, width: int) -> keras.Model:
    """Two causal blocks on embedded characters and positions."""
    inputs = keras.Input((length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(inputs), 1) - 1
    x = layers.Embedding(vocabulary, width)(inputs)
    x = layers.Add()([x, layers.Embedding(length, width)(positions)])
    for _ in range(2):
        x = transformer_block(x)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(vocabulary)(x), name="transformer")
