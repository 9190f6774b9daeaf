"""What exact Gauss-Newton reaches, what it costs, and where it loses.

python examples/gauss_newton.py                  # all parts, 15 minutes
python examples/gauss_newton.py poisson cost     # some of them
"""

import argparse
import os
import statistics
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import contest
import poisson
import tfkfac

SEEDS = range(5)
# Dimension: seconds, and the error that the median of five seeds should have.
MARKS = {2: {6.0: 1e-5, 20.0: 1e-6}, 5: {60.0: 5e-5}}
# Widths of two hidden layers, and residuals.
WIDTHS, RESIDUALS = (10, 20, 30, 40, 50), (300, 1000, 3000)


def show_poisson() -> None:
    """The errors of five networks, and their medians against the marks."""
    for dimension, marks in MARKS.items():
        races = {
            f"seed {seed}": poisson.solve(
                dimension, "gauss_newton", max(marks), seed
            )
            for seed in SEEDS
        }
        print(f"\nPoisson, {dimension}-D\n{contest.table(races, list(marks))}")
        for seconds, mark in marks.items():
            errors = [race.at(seconds) for race in races.values()]
            median = statistics.median(errors)
            text = "reached" if median <= mark else "MISSED"
            print(f"  median {median:.1e} after {seconds:g} s: {mark:g} {text}")


def show_sine() -> None:
    """A function of one variable by 673 weights, within 6 seconds."""
    x = np.linspace(-1, 1, 1000)[:, None]
    y = np.sin(2 * np.pi * x)
    races = {}
    for name in ("gauss_newton", "adam", "lbfgs"):
        keras.utils.set_random_seed(0)
        model = contest.mlp(1, 24, 24)
        optimizer = poisson.OPTIMIZERS[name]()
        error = contest.relative_error(model, x, y)
        races[name] = contest.run(model, optimizer, (x, y, None), error, 6.0)
    print(f"\nSine, relative L2 error\n{contest.table(races, [2, 6])}")


def show_diabetes() -> None:
    """442 noisy rows: exact steps interpolate them, which nobody wants.

    The error is that of held-out rows, over their deviation.
    """
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    parts = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
    x, x_test, y, y_test = (np.asarray(part, float) for part in parts)
    scale, middle, spread = x.std(0), y.mean(), y.std()
    y, y_test = ((part[:, None] - middle) / spread for part in (y, y_test))
    races = {}
    for name, penalty in (
        ("gauss_newton", 0.0),
        ("gauss_newton", 0.03),
        ("adam", 0.0),
        ("adam", 0.03),
    ):
        keras.utils.set_random_seed(0)
        model = contest.mlp(x.shape[1], 32, penalty=penalty)
        error = contest.relative_error(model, x_test / scale, y_test)
        races[f"{name[:5]} L2 {penalty:g}"] = contest.run(
            model, poisson.OPTIMIZERS[name](), (x / scale, y, None), error, 4.0
        )
    print("\nDiabetes, error on held-out rows over their deviation")
    print(contest.table(races, [0.1, 1, 4]))
    print("  Without weight decay the noise is fitted: stop early, or use L2.")


def show_cost() -> None:
    """CPU milliseconds of a step."""
    print("\nCPU milliseconds of a step, float64")
    print(f"{'weights':>8}" + "".join(f"{m:>7} resid." for m in RESIDUALS))
    for width in WIDTHS:
        cells, size = "", 0
        for count in RESIDUALS:
            model = contest.mlp(4, width, width)
            model.compile(tfkfac.GaussNewton(), "mse")
            size = model.count_params()
            cells += f"{step_ms(model, count):14.0f}"
        print(f"{size:8,}{cells}")


def step_ms(model: Any, count: int, steps: int = 10) -> float:
    """The median of some steps."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, 4)), rng.normal(size=(count, 1))
    spent: list[float] = []
    last = 0.0

    def tick(batch: int, logs: Any) -> None:
        nonlocal last
        spent.append(time.process_time() - last)
        last = time.process_time()

    clock = keras.callbacks.LambdaCallback(on_train_batch_end=tick)
    data = tf.data.Dataset.from_tensors((x, y)).cache().repeat(steps)
    model.fit(data, verbose=0, callbacks=[clock])
    return 1e3 * statistics.median(spent[2:])


PARTS = {
    "poisson": show_poisson,
    "sine": show_sine,
    "diabetes": show_diabetes,
    "cost": show_cost,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    keras.config.set_floatx("float64")
    for part in options.part or PARTS:
        PARTS[part]()
        print("  load: " + ", ".join(f"{v:.1f}" for v in os.getloadavg()))
