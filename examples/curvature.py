"""Find wrong labels of digits by the Kronecker factors of a fitted model.

    python examples/curvature.py --seeds 3

A tenth of the labels is wrong. The program fits a small network and computes
the factors of all examples. For each layer it prints the cosine of `A (x) G`
and the exact block of the Gauss-Newton matrix, the cosine of the gradients that
both precondition, and the share of the trace in the ten largest eigenvalues.
The last lines print how well two scores detect the wrong labels (AUC).
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import tfkfac
from common.arguments import make_parser_of, positive

CLASSES, DAMPING = 10, 0.01
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Inputs, with a 1 for the bias, and output gradients: a row for each example.
Rows = tuple[np.ndarray, np.ndarray]


def fitted(x: np.ndarray, y: np.ndarray) -> keras.Model:
    """Fit a network whose activations are layers."""
    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            layers.Dense(32, name="first"),
            layers.Activation("tanh"),
            layers.Dense(32, name="second"),
            layers.Activation("tanh"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )
    model.compile(tfkfac.KFAC(), loss)
    model.fit(x, y, batch_size=64, epochs=8, verbose=0)
    return model


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
) -> dict[str, Rows]:
    """Rows of each dense layer, for the gradient of `sum(weights * logits)`."""
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


# --8<-- [start:influence]
def self_influence(
    inverses: dict[str, Inverse], rows: dict[str, Rows]
) -> np.ndarray:
    """Squared length of each example's gradient, over all layers."""
    lengths = [inverses[name].squared_lengths(*rows[name]) for name in inverses]
    return np.sum(lengths, axis=0)


# --8<-- [end:influence]


def exact_block(roots: list[Rows]) -> np.ndarray:
    """Gauss-Newton matrix of a layer: mean of `w w^T` of `w = a (x) g`."""
    columns = [
        (a[:, :, None] * g[:, None, :]).reshape(len(a), -1) for a, g in roots
    ]
    return np.sum([w.T @ w / len(w) for w in columns], axis=0)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y))


def main() -> None:
    parser = make_parser_of(__doc__)
    parser.add_argument("--seeds", type=positive, default=1, metavar="N")
    images, digits = load_digits(return_X_y=True)
    x = (images / 16).astype("float32")
    for seed in range(parser.parse_args().seeds):
        keras.utils.set_random_seed(seed)
        random = np.random.default_rng(seed)
        wrong = random.random(len(x)) < 0.1
        shift = random.integers(1, CLASSES, len(x))
        y = np.where(wrong, (digits + shift) % CLASSES, digits)
        model = fitted(x, y)
        factors = factors_of(model, x, y)
        inverses = {
            name: Inverse(pair["A"], pair["G"], DAMPING)
            for name, pair in factors.items()
        }
        probability, units = tf.nn.softmax(model(x)).numpy(), np.eye(CLASSES)
        rows = rows_of(model, x, probability - units[y])
        # Columns of a square root of the Hessian at the logits,
        # diag(p) - p p^T for the probabilities p.
        roots = [
            rows_of(model, x, np.sqrt(p)[:, None] * (unit - probability))
            for p, unit in zip(probability.T, units, strict=True)
        ]
        print(f"seed {seed}")
        for name, inverse in inverses.items():
            a, g = rows[name]
            exact = exact_block([root[name] for root in roots])
            gradient = a.T @ g
            damped = exact + DAMPING * np.eye(len(exact))
            solved = np.linalg.solve(damped, gradient.ravel())
            kronecker = np.kron(factors[name]["A"], factors[name]["G"])
            values = np.sort(inverse.eigenvalues.ravel())
            print(
                f"  {name}: cosine {cosine(kronecker, exact):.2f}, of the "
                f"solves {cosine(inverse.solve(gradient), solved):.2f}; "
                f"{values[-10:].sum() / values.sum():.0%} of the trace in 10 "
                f"of {len(values)} eigenvalues"
            )
        losses = -np.log(probability[np.arange(len(y)), y])
        for score, values in (
            ("self-influence", self_influence(inverses, rows)),
            ("loss", losses),
        ):
            print(f"  AUC of the {score}: {roc_auc_score(wrong, values):.3f}")


if __name__ == "__main__":
    main()
