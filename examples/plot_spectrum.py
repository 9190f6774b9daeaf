"""Plot the ends of the Hessian's spectrum over the training of an MLP.

    python examples/plot_spectrum.py --epochs 5 --every 20 --output spectrum.png

Compute and print the five largest and the five smallest Ritz values of the
Hessian of the loss on one fixed batch, before the training and every N steps.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

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
        self.on_train_batch_end(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations)
        if step % self.interval == 0:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--output", default="spectrum.png")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    hidden = [layers.Dense(512, "relu"), layers.Dense(512, "relu")]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.008), loss)
    spectrum = Spectrum((x[:500], y[:500]), options.every)
    model.fit(x, y, 64, options.epochs, verbose=0, callbacks=[spectrum])
    figure = Figure(figsize=(7, 6), layout="constrained")
    largest, smallest = figure.subplots(2, 1, sharex=True)
    values = np.stack([*spectrum.values.values()])
    largest.plot([*spectrum.values], values[:, COUNT:], marker=".")
    smallest.plot([*spectrum.values], values[:, :COUNT], marker=".")
    figure.supxlabel("steps")
    figure.supylabel(f"{COUNT} smallest and {COUNT} largest Ritz values")
    figure.savefig(options.output, dpi=150)
    print(f"Plot: {options.output}")


if __name__ == "__main__":
    main()
