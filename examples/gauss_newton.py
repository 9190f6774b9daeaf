"""What bent Gauss-Newton steps reach, what they cost, and where they lose.

python examples/gauss_newton.py --threads 1            # hours: all parts
python examples/gauss_newton.py table --threads 1 --problems "Poisson 2-D" \\
    --optimizers gauss_newton lbfgs --seeds 3 --seconds 20
python examples/gauss_newton.py digits cost            # minutes
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import contest
import poisson
import tfkfac
from equations import PROBLEMS, Problem

MARKS = (6.0, 20.0, 60.0)
GAUSS_NEWTON, TF_LM = "gauss_newton", "tf_levenberg_marquardt"
OPTIMIZERS: dict[str, Any] = {
    GAUSS_NEWTON: None,
    "adam": lambda: keras.optimizers.Adam(3e-3),
    contest.LBFGS: lambda: contest.LBFGS,
    contest.LEAST_SQUARES: None,
    TF_LM: None,
}
# Widths of two hidden layers, and residuals.
WIDTHS, RESIDUALS = (10, 20, 30, 40, 50), (300, 1000, 3000)


class Whole(keras.Model):
    """All conditions as outputs of a model, for who has no `minimize`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.network, self.problem = problem.network, problem
        self.unknowns = list(problem.unknowns)

    def call(self, points: Any) -> Any:
        of = self.problem.residuals
        found = {name: of[name](x) for name, x in points.items()}
        return {
            n: tf.reshape(r, [tf.shape(r)[0], -1]) for n, r in found.items()
        }


class Mixed(keras.Model):
    """Residuals of rows that begin with a condition's number and a factor."""

    def __init__(self, problem: Problem, widths: list[int]) -> None:
        super().__init__()
        self.network, self.problem = problem.network, problem
        self.unknowns, self.widths = list(problem.unknowns), widths

    def call(self, rows: Any, training: Any = None, mask: Any = None) -> Any:
        total: Any = 0.0
        of = zip(self.problem.residuals.values(), self.widths, strict=True)
        for number, (residual, width) in enumerate(of):
            r = tf.reshape(residual(rows[:, 2 : 2 + width]), [-1])
            total += tf.where(rows[:, 0] == number, rows[:, 1] * r, 0)
        return total[:, None]


def race(problem: Problem, name: str, seconds: float) -> contest.Race | None:
    """What an optimizer makes of a problem; None if it cannot."""
    clock = contest.Clock(problem.error, seconds)
    if name == GAUSS_NEWTON:
        tfkfac.GaussNewton().minimize(
            problem.residuals,
            problem.variables,
            problem.points,
            weights=problem.weights,
            steps=contest.MOST_STEPS,
            every=problem.every,
            callbacks=[clock],
        )
        return clock.race
    points = {n: p(0) if callable(p) else p for n, p in problem.points.items()}
    weights = {n: problem.weights.get(n, 1.0) for n in points}
    of = problem.residuals
    sizes = {n: np.size(of[n](tf.constant(p))) for n, p in points.items()}
    roots = {n: np.sqrt(weights[n] / sizes[n]) for n in points}
    if name == contest.LEAST_SQUARES:
        contest.least_squares(of, points, roots, problem.variables, clock)
        return clock.race
    if name == TF_LM and any(sizes[n] > len(points[n]) for n in points):
        return None  # it knows one output alone
    if name == TF_LM:
        return tf_levenberg_marquardt(problem, points, roots, clock)
    zeros = {n: np.zeros([len(p), 1]) for n, p in points.items()}
    batch = points, zeros, None
    losses = dict.fromkeys(points, "mse")
    whole, optimizer = Whole(problem), OPTIMIZERS[name]()
    return contest.run(
        whole, optimizer, batch, problem.error, seconds, losses, weights
    )


def tf_levenberg_marquardt(
    problem: Problem, points: Any, roots: Any, clock: contest.Clock
) -> contest.Race | None:
    """That package's `fit`, by Cholesky, on rows of one residual each."""
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
    # Its default optimizer is one for all models, and knows those of the first.
    model.compile(
        optimizer=keras.optimizers.SGD(1.0),
        solve_method="cholesky",
        jacobian_max_num_rows=300,
    )
    data = tf.data.Dataset.from_tensors((rows, np.zeros([len(rows), 1])))
    model.fit(
        data.repeat(contest.MOST_STEPS),
        steps_per_epoch=contest.MOST_STEPS,
        verbose=0,
        callbacks=[clock],
    )
    return clock.race


def show_table(options: argparse.Namespace) -> None:
    """Errors of networks by problem and optimizer, in CPU seconds."""
    marks = [mark for mark in MARKS if mark <= options.seconds]
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    for title in options.problems:
        for name in options.optimizers:
            races = []
            for seed in range(options.seeds):
                keras.utils.set_random_seed(11 + seed)
                found = race(PROBLEMS[title](), name, options.seconds)
                races += [] if found is None else [found]
            row = {
                "problem": title,
                "optimizer": name,
                "errors": {
                    f"{mark:g} s": [float(f"{r.at(mark):.2e}") for r in races]
                    for mark in marks
                },
                "steps": [r.steps[-1] for r in races],
            }
            key = "problem", "optimizer"
            rows = [o for o in rows if any(o[k] != row[k] for k in key)]
            rows.append(row)
            medians = [
                f"{statistics.median(e):.1e}" if e else "-"
                for e in row["errors"].values()
            ]
            print(f"{title:16}{name:24}" + "".join(f"{m:>10}" for m in medians))
            text = ",\n ".join(json.dumps(row) for row in rows)
            options.json.write_text(f"[{text}]\n")


def show_diabetes(options: argparse.Namespace) -> None:
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


def show_cost(options: argparse.Namespace) -> None:
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


def show_digits(options: argparse.Namespace) -> None:
    """A classifier of 1,797 digits, 2,410 weights, against K-FAC and Adam."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16, y, random_state=0)
    x, x_test, y, y_test = (np.asarray(part) for part in parts)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    races = {}
    for name, make in (
        ("gauss_newton", tfkfac.GaussNewton),
        ("kfac", tfkfac.KFAC),
        ("adam", lambda: keras.optimizers.Adam(3e-3)),
    ):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        logits = tf.function(model)

        def error(logits: Any = logits) -> float:
            return float(np.mean(np.argmax(logits(x_test), 1) != y_test))

        races[name] = contest.run(
            model, make(), (x, y, None), error, 20.0, loss
        )
    print("\nDigits, part of 450 held-out ones that is wrong, whole batches")
    print(contest.table(races, [2, 6, 20]))


PARTS = {
    "table": show_table,
    "diabetes": show_diabetes,
    "digits": show_digits,
    "cost": show_cost,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=MARKS[-1])
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        default=pathlib.Path("gauss_newton.json"),
        help="where rows of the table are added",
    )
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    keras.config.set_floatx("float64")
    for part in options.part or PARTS:
        PARTS[part](options)
        print("  load: " + ", ".join(f"{v:.1f}" for v in os.getloadavg()))
