"""Count the steps to a fixed loss over the size of the batches.

    python tools/studies/large_batches.py  # and draw the chart, 1 CPU hour

A training of T steps has a learning rate that falls to 0 in these steps. T is
halved or doubled to the smallest T that reaches the target; the count is
interpolated between T / 2 and T, on logarithmic scales. Adam and Muon have the
best rate of each batch and T with seed 0, and that rate with the other seeds.
`KFAC()` has no setting. The loss is that of new examples.

With `--steps` one training prints its loss. Workers share its batches:

    python tools/launch.py 4 -- python tools/studies/large_batches.py \
        --problem arm --optimizer kfac --batches 256 --steps 80
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
from targets.training import parts_of

BATCHES = (16, 64, 256, 1024, 4096)
RATES = (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
TITLES = {"kfac": "KFAC()", "muon": "Muon, tuned", "adam": "Adam, tuned"}
# The title of a problem, and its target.
PROBLEMS = {
    "digits": ("MLP, digits", 0.3),
    "arm": ("MLP, robot arm", 0.01),
    "cnn": ("CNN, digits", 0.5),
}
EXAMPLES, MEASURED = 40_000, 4096
FIRST_STEPS, MOST_STEPS = 400, 25_600
LARGE = 1e9  # a loss that is not finite
RECORDS = command.ROOT / "docs" / "large_batches.json"
CHART = command.ROOT / "docs" / "pages" / "images" / "large_batches.svg"
Record = dict[str, Any]


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
    if problem == "arm":
        hidden = [layers.Dense(64, "tanh") for _ in range(3)]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(2)])
    first = [layers.Flatten()]
    last = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    if problem == "cnn":
        convolutions = [layers.Conv2D(n, 3, activation="relu") for n in (8, 16)]
        pools = [layers.MaxPooling2D() for _ in convolutions]
        first, last = (
            [*itertools.chain(*zip(convolutions, pools, strict=True))],
            first,
        )
    inputs = keras.Input((12, 12, 1))
    return keras.Sequential([inputs, *first, *last, layers.Dense(10)])


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that falls to 0; its values are variables of the traced step."""

    def __init__(self) -> None:
        self.rate, self.steps = tf.Variable(0.0), tf.Variable(1.0)

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step."""
        return self.rate * (1 - tf.cast(step, "float32") / self.steps)

    def get_config(self) -> dict[str, Any]:
        """Return nothing: the schedule is not saved."""
        return {}


class Trainer:
    """A compiled model; its variables are reset for each training."""

    def __init__(self, problem: str, optimizer: str) -> None:
        self._problem, self._falling = problem, Falling()
        (x, test_x), (y, test_y) = (
            np.split(rows, [EXAMPLES]) for rows in load(problem)
        )
        self._test, self._train = (test_x, test_y), (x, y)
        self._model = build(problem)
        last = f"^{self._model.layers[-1].path}/"
        make: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
            "kfac": lambda: tfkfac.KFAC(),
            "adam": lambda: keras.optimizers.Adam(self._falling),
            "muon": lambda: keras.optimizers.Muon(
                self._falling, exclude_layers=[last]
            ),
        }
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(
            make[optimizer](), "mse" if problem == "arm" else loss
        )
        self._model.optimizer.build(self._model.trainable_variables)
        self._states: list[tuple[Any, dict[str, Any]]] = []
        for part in parts_of(self._model.optimizer):
            self._states.append((part, {}))
            part.save_own_variables(self._states[-1][1])

    @functools.cache  # noqa: B019, one trainer at a time
    def loss(self, seed: int, batch: int, steps: int, rate: float) -> float:
        """Train; return the loss of new examples."""
        keras.utils.set_random_seed(seed)
        for part, state in self._states:
            part.load_own_variables(state)
        initial = build(self._problem).variables
        for variable, value in zip(self._model.variables, initial, strict=True):
            variable.assign(value)
        self._falling.rate.assign(rate)
        self._falling.steps.assign(steps)
        x, y = map(tf.constant, self._train)
        order = tf.data.Dataset.range(EXAMPLES).shuffle(EXAMPLES, seed).repeat()
        batches = order.batch(batch).map(
            lambda rows: (tf.gather(x, rows), tf.gather(y, rows))
        )
        self._model.fit(
            batches, steps_per_epoch=steps, shuffle=False, verbose=0
        )
        loss = self._model.evaluate(*self._test, MEASURED, verbose=0)
        return float(loss) if math.isfinite(loss) else LARGE


def count(
    loss: Callable[[int, int], float],
    target: float,
    steps: int,
    rate: int,
    tune: bool,
) -> tuple[float | None, int, int]:
    """Count the steps to the target, from a first number and rate.

    `loss` is a function of the steps and the index of the rate.

    Returns:
        The count, or None; the steps of the last training, and its rate.
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


def measure(
    problem: str, optimizer: str, batches: Sequence[int], seeds: Sequence[int]
) -> Iterator[Record]:
    """Yield the counts of an optimizer on a problem."""
    trainer, steps, rate = Trainer(problem, optimizer), FIRST_STEPS, 2
    tuned = optimizer != "kfac"
    for batch, seed in itertools.product(batches, seeds):

        def loss(steps: int, rate: int) -> float:
            return trainer.loss(seed, batch, steps, RATES[rate])  # noqa: B023

        tune = tuned and seed == seeds[0]
        result, *ends = count(loss, PROBLEMS[problem][1], steps, rate, tune)
        if seed == seeds[0]:
            steps, rate = ends
        record = {"problem": problem, "optimizer": optimizer, "batch": batch}
        record |= {"rate": RATES[rate] if tuned else None, "seed": seed}
        yield record | {"steps": result}


def means(records: Sequence[Record], *key: str) -> dict[int, float]:
    """Return the mean count of each batch, by problem and optimizer."""
    counts: dict[int, list[float]] = {}
    for record in records:
        if key == (record["problem"], record["optimizer"]) and record["steps"]:
            counts.setdefault(record["batch"], []).append(record["steps"])
    return {batch: statistics.fmean(found) for batch, found in counts.items()}


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draw the mean counts over the batches."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "", "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(1, len(PROBLEMS), figsize=(9, 3))
    for axis, (problem, (title, _)) in zip(axes, PROBLEMS.items(), strict=True):
        for optimizer, label in TITLES.items():
            line = means(records, problem, optimizer)
            axis.loglog(line.keys(), line.values(), "o-", base=2, label=label)
        axis.set(title=title, xlabel="examples of a batch")
        axis.set_xticks(BATCHES, [*map(str, BATCHES)])
        axis.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("steps")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser_of(__doc__)
    add = parser.add_argument
    add("--problem", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    add("--optimizer", nargs="+", choices=TITLES, default=[*TITLES])
    add("--batches", nargs="+", type=positive, default=BATCHES, metavar="N")
    add("--seeds", nargs="+", type=int, default=range(3), metavar="N")
    add("--steps", type=positive, help="train once")
    add("--json", type=pathlib.Path, default=RECORDS, metavar="FILE")
    add("--chart", type=pathlib.Path, default=CHART, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.steps:
        strategy = tf.distribute.get_strategy()
        if "TF_CONFIG" in os.environ:
            strategy = tfkfac.MultiWorkerMirroredStrategy()
        with strategy.scope():
            trainer = Trainer(options.problem[0], options.optimizer[0])
            loss = trainer.loss(0, options.batches[0], options.steps, RATES[2])
        print(f"loss {loss:.6g} after {options.steps} steps")
        return
    known = options.json.exists() and json.loads(options.json.read_text())
    records = known["records"] if known else []
    for pair in itertools.product(options.problem, options.optimizer):
        if means(records, *pair):
            continue
        for record in measure(*pair, options.batches, options.seeds):
            print(json.dumps(record), flush=True)
            records.append(record)
        lines = ",\n".join(map(json.dumps, records))
        here = json.dumps(command.machine())
        text = f'{{"machine": {here},\n"records": [\n{lines}\n]}}\n'
        options.json.write_text(text)
    draw(records, options.chart)


if __name__ == "__main__":
    main()
