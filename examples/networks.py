"""The three models of the example: they end in logits."""

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


def resnet20(
    image_shape: Shape, num_classes: int, filters: int = 16
) -> keras.Model:
    """Three stages of three residual blocks: 16, 32 and 64 filters."""
    inputs = keras.Input(image_shape)
    outputs = layers.ReLU()(_convolution(inputs, filters, size=3))
    for stage in range(3):
        for block in range(3):
            strides = 2 if stage > 0 and block == 0 else 1
            outputs = _residual_block(outputs, filters << stage, strides)
    outputs = layers.GlobalAveragePooling2D()(outputs)
    outputs = layers.Dense(num_classes)(outputs)
    return keras.Model(inputs, outputs, name="resnet20")


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
    # Keras' momentum of 0.99 is too slow for runs of a few hundred steps, and
    # unsynchronized statistics differ between the workers of a job.
    return layers.BatchNormalization(momentum=0.9, synchronized=True)(outputs)


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet20": resnet20}
