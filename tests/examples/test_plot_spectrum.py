"""The Ritz values are eigenvalues of the Hessian."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import plot_spectrum


def hessian(model: Any, x: Any, y: Any) -> np.ndarray:
    weights = [v.value for v in model.trainable_variables]
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape() as inner:
            loss = model.compute_loss(y=y, y_pred=model(x))
        slopes = inner.gradient(loss, weights)
        slope = tf.concat([tf.reshape(g, [-1]) for g in slopes], 0)
    columns = outer.jacobian(slope, weights)
    rows = [tf.reshape(c, [slope.shape[0], -1]) for c in columns]
    return np.array(tf.concat(rows, 1))


def test_values_are_those_of_the_current_weights() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 3, 40)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(6, "tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    spectrum = plot_spectrum.Spectrum((tf.constant(x), tf.constant(y)), 2)
    wanted = {0: hessian(model, x, y)}
    model.fit(x, y, 10, callbacks=[spectrum], verbose=0)
    wanted[4] = hessian(model, x, y)
    assert list(spectrum.values) == [0, 2, 4]
    for step, matrix in wanted.items():
        values = np.linalg.eigvalsh(matrix)
        ends = [*values[:5], *values[-5:]]
        np.testing.assert_allclose(spectrum.values[step], ends, atol=1e-4)
