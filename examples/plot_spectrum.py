"""Plot the ends of the Hessian's spectrum over the training of an MLP.

    python examples/plot_spectrum.py --epochs 5 --every 20 --output spectrum.png

Compute and print the five largest and the five smallest Ritz values of the
Hessian of the loss on one fixed batch, before the training and every N steps.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from common import data, networks
from common.arguments import make_parser_of
from tfkfac import curvature

COUNT = 5  # values at each end
LANCZOS_STEPS = 40


class Spectrum(keras.callbacks.Callback):
    """Compute Ritz values of the loss's Hessian on a batch, every few steps.

    Attributes:
        values: Ritz values in ascending order, by the number of steps.
    """

    def __init__(self, batch: tuple[Any, Any], interval: int) -> None:
        super().__init__()
        self.batch, self.interval = batch, interval
        self.values: dict[int, np.ndarray] = {}
        # Traced once: it reads the current weights in each call.
        self.compute = tf.function(self._compute, autograph=False)

    def on_train_begin(self, logs: Any = None) -> None:
        self.record()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) % self.interval == 0:
            self.record()

    def record(self) -> None:
        step = int(self.model.optimizer.iterations)
        values = self.values[step] = self.compute().numpy()
        print(f"{step:6}", "".join(f"{value:11.3g}" for value in values))

    def _compute(self) -> tf.Tensor:
        values, _ = curvature.lanczos(
            lambda vector: curvature.hessian_vector_product(
                self.model, *self.batch, vector
            ),
            self.model.count_params(),
            LANCZOS_STEPS,
            num_largest=COUNT,
            num_smallest=COUNT,
        )
        return values


def plot(values: dict[int, np.ndarray], path: str) -> None:
    """Plot the largest Ritz values in a panel above the smallest."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    lines = np.stack([*values.values()])
    for axes, name, part in zip(
        figure.subplots(2, 1, sharex=True),
        ("largest", "smallest"),
        (lines[:, COUNT:], lines[:, :COUNT]),
        strict=True,
    ):
        axes.plot([*values], part, linewidth=1, marker=".")
        axes.set(ylabel=f"{name} {COUNT} Ritz values", xlabel="steps")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


def main() -> None:
    parser = make_parser_of(__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--output", default="spectrum.png")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    digits = data.digits()
    model = networks.mlp(digits.image_shape, digits.num_classes)
    model.compile(
        keras.optimizers.Adam(0.008),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    batch = next(iter(digits.train_batches(500, seed=0)))
    spectrum = Spectrum(batch, options.every)
    model.fit(
        digits.train_batches(64, seed=0),
        epochs=options.epochs,
        validation_data=digits.test_batches(),
        verbose=0,
        callbacks=[spectrum],
    )
    plot(spectrum.values, options.output)


if __name__ == "__main__":
    main()
