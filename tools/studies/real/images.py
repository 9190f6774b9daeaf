"""Programs that classify, segment or score images and series."""

from typing import Any

import keras
from keras import layers, ops

from real.data import (
    Losses,
    Make,
    daily_windows,
    digits,
    losses,
    pixel_classes,
    split,
)


def convnet(make: Make, options: dict[str, Any]) -> Losses:
    """Convolutional classifier with dropout; one-hot targets."""
    train, test = ((x, keras.utils.to_categorical(y)) for x, y in digits())
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10, "softmax"),
        ]
    )
    model.compile(make(), "categorical_crossentropy", metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=20, **options)
    return losses(model, train, test)


def distillation(make: Make, options: dict[str, Any]) -> Losses:
    """A small network learns from the predictions of a larger one."""

    def network(width: int) -> keras.Model:
        convolution = {"strides": 2, "padding": "same", "activation": "relu"}
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(width, 3, **convolution),
                layers.Conv2D(2 * width, 3, **convolution),
                layers.Flatten(),
                layers.Dense(10),
            ]
        )

    class Distiller(keras.Model):
        def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
            super().__init__()
            self.student, self.teacher = student, teacher
            teacher.trainable = False

        def call(self, x: Any, training: bool = False) -> Any:
            return self.student(x, training=training)

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any) -> Any:
            own = keras.losses.sparse_categorical_crossentropy(y, y_pred, True)
            soft = ops.softmax(self.teacher(x, training=False) / 3.0)
            terms = keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0))
            return 0.1 * ops.mean(own) + 0.9 * 3.0**2 * ops.mean(terms)

    train, test = digits()
    teacher = network(64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(make(), loss)
    teacher.fit(*train, batch_size=64, epochs=8, **options)
    model = Distiller(network(16), teacher)
    model.compile(make(), metrics=["sparse_categorical_accuracy"])
    model.fit(*train, batch_size=64, epochs=12, **options)
    return losses(model, train, test)


def patches(x: Any, width: int) -> Any:
    """Cut 8x8 images into 16 patches; project each to a vector."""
    return layers.Reshape((16, width))(layers.Conv2D(width, 2, strides=2)(x))


def mixer(make: Make, options: dict[str, Any]) -> Losses:
    """MLP-Mixer: dense layers over the patches and over the channels."""

    def mlp(x: Any, hidden: int) -> Any:
        width = x.shape[-1]
        return layers.Dense(width)(layers.Dense(hidden, "gelu")(x))

    train, test = digits()
    inputs = keras.Input((8, 8, 1))
    x = patches(inputs, 64)
    for _ in range(3):
        mixed = mlp(layers.Permute((2, 1))(layers.LayerNormalization()(x)), 32)
        x = layers.Add()([x, layers.Permute((2, 1))(mixed)])
        x = layers.Add()([x, mlp(layers.LayerNormalization()(x), 128)])
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(10, "softmax")(x))
    model.compile(
        make(), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(*train, batch_size=64, epochs=15, **options)
    return losses(model, train, test)


def vision_transformer(make: Make, options: dict[str, Any]) -> Losses:
    """Transformer encoder over patches with learned positions."""

    class Positions(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(16, 48)

        def call(self, x: Any) -> Any:
            return x + self.table(ops.arange(16))

    train, test = digits()
    inputs = keras.Input((8, 8, 1))
    x = Positions()(patches(inputs, 48))
    for _ in range(2):
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        y = layers.MultiHeadAttention(4, 12, dropout=0.1)(y, y)
        x = layers.Add()([y, x])
        y = layers.LayerNormalization(epsilon=1e-6)(x)
        for units in (96, 48):
            y = layers.Dropout(0.1)(layers.Dense(units, "gelu")(y))
        x = layers.Add()([y, x])
    x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Dropout(0.5)(layers.Dense(64, "gelu")(layers.Dropout(0.5)(x)))
    model = keras.Model(inputs, layers.Dense(10)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make(), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=64, epochs=15, **options)
    return losses(model, train, test)


def segmentation(make: Make, options: dict[str, Any]) -> Losses:
    """U-Net of separable convolutions; a class for each pixel."""

    def normalized(layer: Any, x: Any) -> Any:
        return layers.BatchNormalization(momentum=0.9)(layer(layers.ReLU()(x)))

    train, test = pixel_classes(480)
    inputs = keras.Input((48, 48, 1))
    x = layers.Conv2D(16, 3, strides=2, padding="same")(inputs)
    x = previous = layers.BatchNormalization(momentum=0.9)(x)
    for width in (32, 48):
        for _ in range(2):
            x = normalized(layers.SeparableConv2D(width, 3, padding="same"), x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        shortcut = layers.Conv2D(width, 1, strides=2, padding="same")(previous)
        x = previous = layers.Add()([x, shortcut])
    for width in (48, 32, 16):
        for _ in range(2):
            x = normalized(layers.Conv2DTranspose(width, 3, padding="same"), x)
        x = layers.UpSampling2D()(x)
        shortcut = layers.UpSampling2D()(previous)
        shortcut = layers.Conv2D(width, 1, padding="same")(shortcut)
        x = previous = layers.Add()([x, shortcut])
    outputs = layers.Conv2D(11, 3, activation="softmax", padding="same")(x)
    model = keras.Model(inputs, outputs)
    model.compile(make(), "sparse_categorical_crossentropy")
    model.fit(*train, batch_size=32, epochs=6, **options)
    return losses(model, train, test)


def fine_tuning(make: Make, options: dict[str, Any]) -> Losses:
    """Train a new head on a frozen network, then all of it."""
    (x, y), (test_x, test_y) = digits()
    base = keras.Sequential([keras.Input((8, 8, 1))])
    for width in (32, 64):
        base.add(layers.Conv2D(width, 3, padding="same", use_bias=False))
        base.add(layers.BatchNormalization())
        base.add(layers.ReLU())
        base.add(layers.MaxPooling2D())
    source = keras.Sequential([base, layers.Flatten(), layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    source.compile("adam", loss)
    source.fit(x[y < 5], y[y < 5], batch_size=64, epochs=5, verbose=0)
    train = x[y >= 5][:400], y[y >= 5][:400] - 5
    test = test_x[test_y >= 5], test_y[test_y >= 5] - 5
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    x = layers.GlobalAveragePooling2D()(base(inputs, training=False))
    model = keras.Model(inputs, layers.Dense(5)(layers.Dropout(0.2)(x)))
    model.compile(make(), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=32, epochs=15, **options)
    base.trainable = True
    for layer in base.layers:
        # Keras ignores `training=False` of a nested model in `fit`.
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
    model.compile(make(), loss, metrics=["accuracy"])
    model.fit(*train, batch_size=32, epochs=15, **options)
    return losses(model, train, test)


def anomaly_autoencoder(make: Make, options: dict[str, Any]) -> Losses:
    """Reconstruct windows of a series; anomalies have a large error."""
    train, test = split(daily_windows(96, 1200))
    model = keras.Sequential([keras.Input((96, 1))])
    settings = {"padding": "same", "strides": 2, "activation": "relu"}
    model.add(layers.Conv1D(32, 7, **settings))
    model.add(layers.Dropout(0.2))
    model.add(layers.Conv1D(16, 7, **settings))
    model.add(layers.Conv1DTranspose(16, 7, **settings))
    model.add(layers.Dropout(0.2))
    model.add(layers.Conv1DTranspose(32, 7, **settings))
    model.add(layers.Conv1DTranspose(1, 7, padding="same"))
    model.compile(make(), "mse")
    model.fit(train, train, batch_size=64, epochs=25, **options)
    return losses(model, (train, train), (test, test))
