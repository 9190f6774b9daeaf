"""Find wrong labels of digits by the Kronecker factors of a fitted model.

A tenth of the labels is wrong. `python examples/curvature.py` fits a small
network, computes the factors of all examples, and prints how well two scores
detect the wrong labels (area under the ROC curve).
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import tfkfac

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# --8<-- [start:factors]
def factors_of(
    model: keras.Model, x: np.ndarray, y: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """Factors A and G of each layer, of all examples."""
    optimizer = tfkfac.KFAC(
        learning_rate=0.0,  # the weights do not move
        factor_decay=0.0,  # no average with earlier batches
        factor_batch_fraction=1.0,
        max_factor_dim=None,  # no approximation of wide factors
        fisher="type2",  # the Gauss-Newton matrix
    )
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=len(x), verbose=0)
    return optimizer.factors()


# --8<-- [end:factors]
# --8<-- [start:solve]
class Inverse:
    """`(A (x) G + damping I)^-1` of a layer."""

    def __init__(self, a: np.ndarray, g: np.ndarray, damping: float) -> None:
        (a_values, self.a), (g_values, self.g) = map(np.linalg.eigh, (a, g))
        self.eigenvalues = np.maximum(np.outer(a_values, g_values), 0.0)
        self.inverse = 1 / (self.eigenvalues + damping)

    def solve(self, gradient: np.ndarray) -> np.ndarray:
        """Solve for a gradient: the kernel, and the bias as its last row."""
        rotated = self.a.T @ gradient @ self.g
        return self.a @ (self.inverse * rotated) @ self.g.T

    def squared_lengths(self, a: np.ndarray, g: np.ndarray) -> np.ndarray:
        """`w^T (A (x) G + damping I)^-1 w` of the gradients `w = a (x) g`."""
        a, g = (a @ self.a) ** 2, (g @ self.g) ** 2
        return np.sum((a @ self.inverse) * g, axis=1)


# --8<-- [end:solve]
# --8<-- [start:rows]
def rows_of(
    model: keras.Model, x: np.ndarray, weights: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rows of each dense layer, for the gradient of `sum(weights * logits)`.

    These are the inputs, with a 1 for the bias, and the output gradients.
    """
    dense = [layer for layer in model.layers if type(layer) is layers.Dense]
    records = [(layer.input, layer.output) for layer in dense]
    probe = keras.Model(model.inputs[0], [model.outputs[0], records])
    with tf.GradientTape() as tape:
        logits, tensors = probe(x)
        total = tf.reduce_sum(logits * weights.astype("float32"))
    gradients = tape.gradient(total, [output for _, output in tensors])
    return {
        layer.name: (np.hstack([inputs, np.ones([len(x), 1])]), g.numpy())
        for layer, (inputs, _), g in zip(dense, tensors, gradients, strict=True)
    }


# --8<-- [end:rows]
if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    images, digits = load_digits(return_X_y=True)
    x = (images / 16).astype("float32")
    wrong = random.random(len(x)) < 0.1
    shift = random.integers(1, 10, len(x))
    y = np.where(wrong, (digits + shift) % 10, digits)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(32, name="first"),
            layers.Activation("tanh"),
            layers.Dense(32, name="second"),
            layers.Activation("tanh"),
            layers.Dense(10, name="logits"),
        ]
    )
    model.compile(tfkfac.KFAC(), loss)
    model.fit(x, y, batch_size=64, epochs=8, verbose=0)
    factors = factors_of(model, x, y)
    probability = tf.nn.softmax(model(x)).numpy()
    rows = rows_of(model, x, probability - np.eye(10)[y])
    # --8<-- [start:influence]
    influence = np.zeros(len(x))
    for name, pair in factors.items():
        inverse = Inverse(pair["A"], pair["G"], damping=0.01)
        influence += inverse.squared_lengths(*rows[name])
    # --8<-- [end:influence]
    losses = -np.log(probability[np.arange(len(y)), y])
    print(f"AUC of the self-influence: {roc_auc_score(wrong, influence):.3f}")
    print(f"AUC of the loss: {roc_auc_score(wrong, losses):.3f}")
