"""Count the steps to a fixed loss over the size of the batches.

    python tools/studies/large_batches.py  # 1 CPU hour, with the chart

The rate of a training of T steps falls to 0. T is halved or doubled to the
smallest T that reaches the target; the count is interpolated between T / 2 and
T, on logarithmic scales. Adam and Muon have the best rate of each batch and T
with seed 0, and that rate with the other seeds. `KFAC()` has no setting.

With `--steps` one training prints its loss. Workers share its batches:

    python tools/launch.py 4 -- python tools/studies/large_batches.py \
        --problem arm --optimizer kfac --batch 256 --steps 80
"""

import functools
import itertools
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import command  # isort: skip, sets the module path
import tfkfac
from common.arguments import make_parser_of, positive
from targets.data import arm
from targets.training import Resettable

BATCHES, SEEDS = (16, 64, 256, 1024, 4096), (0, 1, 2)
RATES = (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
TITLES = {"kfac": "KFAC()", "muon": "Muon, tuned", "adam": "Adam, tuned"}
TARGETS = {"digits": 0.3, "arm": 0.01, "cnn": 0.5}
EXAMPLES, MEASURED = 40_000, 4096
FIRST_STEPS, MOST_STEPS = 400, 25_600
FIRST_RATE, LARGE = 2, 1e9  # an index; a loss that is not finite
RECORDS = command.ROOT / "docs" / "large_batches.json"
CHART = command.ROOT / "docs" / "pages" / "images" / "large_batches.svg"


def load(problem: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the arm of time_to_target.py, or noisy digits in 12x12 pixels."""
    if problem == "arm":
        examples = arm(EXAMPLES + MEASURED).train
        return examples.x, examples.y
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    rng, count = np.random.default_rng(0), EXAMPLES + MEASURED
    images = 0.1 * rng.normal(size=(count, 12, 12, 1)).astype("float32")
    rows, *places = rng.integers([[len(x)], [5], [5]], size=(3, count))
    for image, row, top, left in zip(images, rows, *places, strict=True):
        image[top : top + 8, left : left + 8, 0] += x[row].reshape(8, 8) / 16
    return images, y[rows].astype("int32")


def build(problem: str) -> keras.Model:
    """Return the model of a problem."""
    dense = functools.partial(layers.Dense, 64)
    if problem == "arm":
        hidden = [dense("tanh"), dense("tanh"), dense("tanh")]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(2)])
    hidden = [layers.Flatten(), dense("relu"), dense("relu")]
    if problem == "cnn":
        first, last = (layers.Conv2D(n, 3, activation="relu") for n in (8, 16))
        pools = layers.MaxPooling2D(), layers.MaxPooling2D()
        hidden = [first, pools[0], last, pools[1], layers.Flatten()]
    inputs = keras.Input((12, 12, 1))
    return keras.Sequential([inputs, *hidden, layers.Dense(10)])


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that falls to 0; its values are variables of the traced step."""

    def __init__(self) -> None:
        self.rate, self.steps = tf.Variable(0.0), tf.Variable(1.0)

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step."""
        return self.rate * (1 - tf.cast(step, "float32") / self.steps)


class Trainer:
    """Train on a problem with an optimizer."""

    def __init__(self, problem: str, name: str) -> None:
        parts = (np.split(rows, [EXAMPLES]) for rows in load(problem))
        self._train, self._test = zip(*parts, strict=True)
        self._falling = Falling()

        def make(model: keras.Model) -> keras.optimizers.Optimizer:
            if name == "kfac":
                return tfkfac.KFAC()
            if name == "adam":
                return keras.optimizers.Adam(self._falling)
            last = [f"^{model.layers[-1].path}/"]
            muon = keras.optimizers.Muon
            return muon(self._falling, exclude_layers=last)

        loss: Any = "mse"
        if problem != "arm":
            cross_entropy = keras.losses.SparseCategoricalCrossentropy
            loss = cross_entropy(from_logits=True)
        self._resettable = Resettable(lambda: build(problem), make, loss)

    @functools.cache  # noqa: B019, one trainer at a time
    def loss(self, seed: int, batch: int, steps: int, rate: float) -> float:
        """Train; return the loss of new examples."""
        self._resettable.reset(seed)
        self._falling.rate.assign(rate)
        self._falling.steps.assign(steps)
        x, y = map(tf.constant, self._train)
        order = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed).repeat()
        batches = order.batch(batch).map(
            lambda rows: (tf.gather(x, rows), tf.gather(y, rows))
        )
        options = {"steps_per_epoch": steps, "shuffle": False, "verbose": 0}
        model = self._resettable.model
        model.fit(batches, **options)
        loss = model.evaluate(*self._test, MEASURED, verbose=0)
        return float(loss) if math.isfinite(loss) else LARGE


def count(
    loss: Callable[[int, int], float],
    target: float,
    steps: int,
    rate: int,
    tune: bool,
) -> tuple[float | None, int, int]:
    """Count the steps to the target; return the last T and rate, too.

    `loss` is a function of T and of the index of the rate. `steps` and `rate`
    are those of the first training.
    """

    def reach(steps: int, rate: int, climb: bool = False) -> tuple[float, int]:
        """Return loss and rate: the best one if the first one is too high."""
        if tune and (climb or loss(steps, rate) > target):
            near = range(max(rate - 1, 0), min(rate + 2, len(RATES)))
            best = min(near, key=lambda i: (loss(steps, i), i != rate))
            if best != rate:
                return reach(steps, best, True)
        return loss(steps, rate), rate

    (end, rate), above = reach(steps, rate), 0.0
    while end > target and steps < MOST_STEPS:
        steps *= 2
        end, rate = reach(steps, rate)
    while above <= target and steps > 2:
        above, lower_rate = reach(steps // 2, rate)
        if above <= target:
            steps, rate = steps // 2, lower_rate
    end, rate = reach(steps, rate, True)
    if not end <= target < above:
        return None, steps, rate
    part = math.log(above / target) / math.log(above / end)
    return steps / 2 * 2**part, steps, rate


def measure(problem: str, optimizer: str) -> Iterator[dict[str, Any]]:
    """Yield the counts of an optimizer on a problem."""
    trainer, tuned = Trainer(problem, optimizer), optimizer != "kfac"
    steps, rate = FIRST_STEPS, FIRST_RATE
    for batch, seed in itertools.product(BATCHES, SEEDS):

        def loss(steps: int, rate: int) -> float:
            return trainer.loss(seed, batch, steps, RATES[rate])  # noqa: B023

        tune = tuned and seed == SEEDS[0]
        result, *ends = count(loss, TARGETS[problem], steps, rate, tune)
        if seed == SEEDS[0]:
            steps, rate = ends
        record = {"problem": problem, "optimizer": optimizer, "batch": batch}
        record |= {"rate": RATES[rate] if tuned else None, "seed": seed}
        yield record | {"steps": result}


def means(records: Sequence[Any], *key: str) -> dict[int, float]:
    """Return the mean count of each batch, by problem and optimizer."""
    counts: dict[int, list[float]] = {}
    for record in records:
        if key == (record["problem"], record["optimizer"]) and record["steps"]:
            counts.setdefault(record["batch"], []).append(record["steps"])
    return {batch: statistics.fmean(found) for batch, found in counts.items()}


def draw(records: Sequence[Any], path: pathlib.Path) -> None:
    """Draw the mean counts over the batches."""
    from matplotlib import pyplot

    shown = [name for name in TARGETS if means(records, name, "kfac")]
    size = 4 * len(shown), 3
    figure, axes = pyplot.subplots(1, len(shown), figsize=size, squeeze=False)
    for axis, problem in zip(axes[0], shown, strict=True):
        for optimizer, label in TITLES.items():
            line = means(records, problem, optimizer)
            axis.loglog(line.keys(), line.values(), "o-", base=2, label=label)
        axis.set(title=f"{problem}: loss {TARGETS[problem]:g}")
        axis.set_xlabel("examples of a batch")
        axis.set_xticks(BATCHES, [*map(str, BATCHES)])
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0][0].set_ylabel("steps")
    axes[0][0].legend(frameon=False)
    command.save_chart(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser_of(__doc__)
    add = parser.add_argument
    add("--problem", choices=TARGETS, help="default: all")
    add("--optimizer", choices=TITLES, help="default: all")
    add("--steps", type=positive, help="train once")
    add("--batch", type=positive, default=64, help="with --steps")
    add("--json", type=pathlib.Path, default=RECORDS, metavar="FILE")
    add("--chart", type=pathlib.Path, default=CHART, metavar="FILE")
    options = parser.parse_args(arguments)
    problems = [options.problem] if options.problem else [*TARGETS]
    optimizers = [options.optimizer] if options.optimizer else [*TITLES]
    if options.steps:
        strategy = tf.distribute.get_strategy()
        if "TF_CONFIG" in os.environ:
            strategy = tfkfac.MultiWorkerMirroredStrategy()
        with strategy.scope():
            trainer = Trainer(problems[0], optimizers[0])
            loss = trainer.loss(0, options.batch, options.steps, RATES[2])
        print(f"loss {loss:.6g} after {options.steps} steps")
        return
    records = command.read_records(options.json)
    for pair in itertools.product(problems, optimizers):
        if not means(records, *pair):
            for record in measure(*pair):
                print(json.dumps(record), flush=True)
                records.append(record)
            command.write_records(options.json, records)
    draw(records, options.chart)


if __name__ == "__main__":
    main()
