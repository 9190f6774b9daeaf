"""The Ritz values are eigenvalues of the Hessian."""

import keras
import numpy as np
import tensorflow as tf

import plot_spectrum
from tfkfac.curvature import hessian_vector_product


def test_values_are_those_of_the_current_weights() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("float32"), rng.integers(0, 3, 40)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(6, "tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    spectrum = plot_spectrum.Spectrum((tf.constant(x), tf.constant(y)), 2)
    unit = np.eye(model.count_params(), dtype="float32")
    wanted = {0: hessian_vector_product(model, x, y, unit)}
    model.fit(x, y, 10, callbacks=[spectrum], verbose=0)
    wanted[4] = hessian_vector_product(model, x, y, unit)
    assert list(spectrum.values) == [0, 2, 4]
    for step, matrix in wanted.items():
        values = np.linalg.eigvalsh(matrix)
        ends = [*values[:5], *values[-5:]]
        np.testing.assert_allclose(spectrum.values[step], ends, atol=1e-4)
