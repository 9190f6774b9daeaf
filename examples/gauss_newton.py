"""Compare Gauss-Newton steps with other optimizers, also where they lose.

python examples/gauss_newton.py table --threads 1 --json docs/gauss_newton.json
python examples/gauss_newton.py table --threads 1 --problems "Poisson 2-D" \\
    --optimizers gauss_newton lbfgs --seeds 3 --seconds 20
python examples/gauss_newton.py digits diabetes --threads 1

`table` writes a row for each problem of equations.py and optimizer.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac
from contest import (
    LBFGS,
    LEAST_SQUARES,
    MAX_STEPS,
    Clock,
    Race,
    least_squares,
    train,
)
from equations import PROBLEMS, Problem, mlp, relative_error

MARKS_S = (6.0, 20.0, 60.0)
GAUSS_NEWTON, TF_LM = "gauss_newton", "tf_levenberg_marquardt"
OPTIMIZERS = (GAUSS_NEWTON, "adam", LBFGS, LEAST_SQUARES, TF_LM)
ADAM_RATE = 3e-3


class Whole(keras.Model):
    """Model whose outputs are the residuals of all conditions, for `fit`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.network, self.problem = problem.network, problem
        self.unknowns = list(problem.unknowns)

    def call(self, points: Any) -> Any:
        outputs = {}
        for name, x in points.items():
            residual = self.problem.residuals[name](x)
            outputs[name] = tf.reshape(residual, [tf.shape(residual)[0], -1])
        return outputs


class Mixed(keras.Model):
    """Model of one residual per row (index of the condition, factor, point)."""

    def __init__(self, problem: Problem, widths: list[int]) -> None:
        super().__init__()
        self.network, self.problem = problem.network, problem
        self.unknowns, self.widths = list(problem.unknowns), widths

    def call(self, rows: Any, training: Any = None, mask: Any = None) -> Any:
        total: Any = 0.0
        pairs = zip(self.problem.residuals.values(), self.widths, strict=True)
        for number, (residual, width) in enumerate(pairs):
            r = tf.reshape(residual(rows[:, 2 : 2 + width]), [-1])
            total += tf.where(rows[:, 0] == number, rows[:, 1] * r, 0)
        return total[:, None]


def race(problem: Problem, name: str, seconds: float) -> Race | None:
    """Run an optimizer; return None if it cannot solve the problem."""
    clock = Clock(problem.error, seconds)
    if name == GAUSS_NEWTON:
        tfkfac.GaussNewton().minimize(
            problem.residuals,
            problem.variables,
            problem.points,
            weights=problem.weights,
            steps=MAX_STEPS,
            every=problem.every,
            callbacks=[clock],
        )
        return clock.race
    points = {n: p(0) if callable(p) else p for n, p in problem.points.items()}
    weights = {n: problem.weights.get(n, 1.0) for n in points}
    residuals = problem.residuals
    sizes = {n: np.size(residuals[n](tf.constant(points[n]))) for n in points}
    roots = {n: np.sqrt(weights[n] / sizes[n]) for n in points}
    if name == LEAST_SQUARES:
        least_squares(residuals, points, roots, problem.variables, clock)
        return clock.race
    if name == TF_LM:
        # tf-levenberg-marquardt supports one residual per point.
        if any(sizes[n] > len(points[n]) for n in points):
            return None
        return tf_levenberg_marquardt(problem, points, roots, clock)
    zeros = {n: np.zeros([len(p), 1]) for n, p in points.items()}
    optimizer = LBFGS if name == LBFGS else keras.optimizers.Adam(ADAM_RATE)
    losses = dict.fromkeys(points, "mse")
    whole = Whole(problem)
    return train(whole, optimizer, (points, zeros), clock, losses, weights)


def tf_levenberg_marquardt(
    problem: Problem, points: Any, roots: Any, clock: Clock
) -> Race | None:
    """Run `fit` of tf-levenberg-marquardt, by Cholesky, if installed."""
    if importlib.util.find_spec(TF_LM) is None:
        return None
    from tf_levenberg_marquardt.model import ModelWrapper

    widths = [p.shape[1] for p in points.values()]
    parts = []
    for number, (name, p) in enumerate(points.items()):
        head = np.full([len(p), 2], (number, roots[name]))
        fill = np.zeros([len(p), max(widths) - p.shape[1]])
        parts.append(np.concatenate([head, p, fill], 1))
    rows = np.concatenate(parts)
    model = ModelWrapper(Mixed(problem, widths))
    model(rows[:1])
    # All models would share the package's default optimizer.
    model.compile(
        optimizer=keras.optimizers.SGD(1.0),
        solve_method="cholesky",
        jacobian_max_num_rows=300,
    )
    data = tf.data.Dataset.from_tensors((rows, np.zeros([len(rows), 1])))
    model.fit(
        data.repeat(MAX_STEPS),
        steps_per_epoch=MAX_STEPS,
        verbose=0,
        callbacks=[clock],
    )
    return clock.race


def table(options: argparse.Namespace) -> None:
    """Print median errors by problem and optimizer; add rows to a file."""
    marks = [mark for mark in MARKS_S if mark <= options.seconds]
    path = options.json
    rows = json.loads(path.read_text()) if path.exists() else []
    for title in options.problems:
        for name in options.optimizers:
            races = []
            for seed in range(options.seeds):
                keras.utils.set_random_seed(11 + seed)
                result = race(PROBLEMS[title](), name, options.seconds)
                races += [] if result is None else [result]
            errors = {
                f"{mark:g} s": [float(f"{r.at(mark):.2e}") for r in races]
                for mark in marks
            }
            key = {"problem": title, "optimizer": name}
            rows = [r for r in rows if not key.items() <= r.items()]
            steps = [r.steps[-1] for r in races]
            rows.append(key | {"errors": errors, "steps": steps})
            text = ",\n ".join(map(json.dumps, rows))
            path.write_text(f"[{text}]\n")
            medians = (statistics.median(e) for e in errors.values() if e)
            print(f"{title:16}{name:24}", *(f"{m:10.1e}" for m in medians))


def show(title: str, races: Mapping[str, Race], marks: list[float]) -> None:
    """Print the errors of optimizers after some seconds."""
    print(f"\n{title}, after {marks} CPU s")
    for name, result in races.items():
        errors = "".join(f"{result.at(mark):11.1e}" for mark in marks)
        print(f"{name:22}{errors}{result.steps[-1]:9,} steps")


def diabetes(options: argparse.Namespace) -> None:
    """Train on 442 noisy rows, which exact steps interpolate."""
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    parts = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
    x, x_test, y, y_test = (np.asarray(part, float) for part in parts)
    scale, middle, spread = x.std(0), y.mean(), y.std()
    y, y_test = ((part[:, None] - middle) / spread for part in (y, y_test))
    races = {}
    for name in (GAUSS_NEWTON, "adam"):
        for penalty in (0.0, 0.03):
            keras.utils.set_random_seed(0)
            model = mlp(x.shape[1], 32, penalty=penalty)
            error = relative_error(model, x_test / scale, y_test)
            races[f"{name}, L2 {penalty:g}"] = train(
                model, new_optimizer(name), (x / scale, y), Clock(error, 4.0)
            )
    show("Diabetes: error over the targets' deviation", races, [0.1, 1, 4])


def digits(options: argparse.Namespace) -> None:
    """Classify 1,797 digits with 2,410 weights, in whole batches."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, random_state=0)
    x, x_test, y, y_test = (np.asarray(part) for part in parts)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    races = {}
    for name in (GAUSS_NEWTON, "kfac", "adam"):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        logits = tf.function(model)

        def error(logits: Any = logits) -> float:
            return float(np.mean(np.argmax(logits(x_test), 1) != y_test))

        clock = Clock(error, 20.0)
        races[name] = train(model, new_optimizer(name), (x, y), clock, loss)
    show("Digits: share of wrong held-out digits", races, [2, 6, 20])


def new_optimizer(name: str) -> Any:
    if name == "adam":
        return keras.optimizers.Adam(ADAM_RATE)
    return tfkfac.GaussNewton() if name == GAUSS_NEWTON else tfkfac.KFAC()


PARTS = {"table": table, "diabetes": diabetes, "digits": digits}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--optimizers", nargs="+", default=OPTIMIZERS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=MARKS_S[-1])
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("gauss_newton.json")
    )
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    keras.config.set_floatx("float64")
    for part in options.parts:
        PARTS[part](options)
