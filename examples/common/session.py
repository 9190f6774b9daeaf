"""Train a model with several optimizers, one after the other, and compare.

All runs have the same initial weights and batches. If `TF_CONFIG` is set, the
process is one worker of a job.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac
from common.arguments import (
    Variant,
    make_parser_of,
    parse_variant,
    positive,
)
from common.tables import table

SGD_MOMENTUM = 0.9
FIRST_ORDER = {
    "sgd": keras.optimizers.SGD,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": keras.optimizers.RMSprop,
}
# Inner optimizers, which get the learning rate.
FOSI = {"fosi": "adam", "fosi_adam": "adam", "fosi_sgd": "sgd"}
NAMES = ("kfac", *FIRST_ORDER, *FOSI)
RATES = {"kfac": 0.1, "sgd": 0.05, "adam": 1e-3, "adamw": 1e-3, "rmsprop": 1e-3}
HEADING = (
    "optimizer",
    "rate",
    "test metric",
    "test loss",
    "steps to target",
    "s to target",
    "s per step",
    "total s",
)
NOTE = """
Metric of the test data: {}. Target: {}, checked after each epoch. All learning
rates decay linearly to 0. Wall seconds of the training steps, without
evaluation; the first step counts as the slowest of the next ten."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of an example.

    Attributes:
        epochs: Epochs; 1 with `--quick`.
        batch_size: Examples of a batch, of all workers together.
        metric: Test metric, by its name in `compile`.
        target: Value of the metric whose cost is reported.
        lower_is_better: True if a smaller metric is better.
        rates: Learning rates, by optimizer.
        optimizers: Optimizers to compare.
    """

    epochs: int
    batch_size: int
    metric: str = "accuracy"
    target: float | None = None
    lower_is_better: bool = False
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    optimizers: Sequence[str] = ("kfac", "adam")


def make_parser(
    description: str | None, defaults: Defaults, dataset: str = "digits"
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all examples have."""
    parser = make_parser_of(description)
    add = parser.add_argument
    add(
        "--optimizer",
        nargs="+",
        type=parse_optimizer,
        default=[parse_optimizer(text) for text in defaults.optimizers],
        metavar="NAME[:KEY=VALUE...]",
        help=f"{', '.join(NAMES)}, with arguments of the constructor, as in "
        "kfac:damping=0.03 adam:learning_rate=0.002 (default: "
        f"{' '.join(defaults.optimizers)})",
    )
    add("--epochs", type=positive, metavar="N")
    add("--batch-size", type=positive, default=defaults.batch_size, metavar="N")
    add("--seed", type=int, default=0, metavar="N")
    add("--quick", action="store_true", help="little data, a small model")
    add("--target", type=float, default=defaults.target, metavar="METRIC")
    add("--dataset", default=dataset, metavar="NAME", help="see README.md")
    add(
        "--data-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="idx files (mnist, fashion_mnist, kmnist), or TFDS' data",
    )
    add("--plot", type=pathlib.Path, metavar="FILE")
    add(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="writes a CSV file per optimizer, and logs for TensorBoard",
    )
    add(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="writes all measurements; worker N > 0 appends .N to the name",
    )
    parser.set_defaults(defaults=defaults)
    return parser


def parse_optimizer(text: str) -> Variant:
    """Parse NAME[:KEY=VALUE...] with a name of `NAMES`."""
    variant = parse_variant(text)
    if variant.name not in NAMES:
        raise argparse.ArgumentTypeError(
            f"{variant.name!r} is none of {', '.join(NAMES)}"
        )
    return variant


def first_rate(variant: Variant, rates: Mapping[str, float]) -> float:
    """Return the initial learning rate of an optimizer."""
    name = FOSI.get(variant.name, variant.name)
    default = rates.get(name, RATES[name])
    return float(variant.arguments.get("learning_rate", default))


def make_optimizer(
    variant: Variant, steps: int, rates: Mapping[str, float]
) -> keras.optimizers.Optimizer:
    """Return an optimizer whose rate decays linearly to 0 over `steps`."""
    rate = keras.optimizers.schedules.PolynomialDecay(
        first_rate(variant, rates), steps, end_learning_rate=0.0
    )
    name, arguments = variant.name, dict(variant.arguments)
    arguments.pop("learning_rate", None)
    if name == "kfac":
        return tfkfac.KFAC(rate, **arguments)
    base = FOSI.get(name, name)
    inner = {"momentum": SGD_MOMENTUM} if base == "sgd" else {}
    if name in FOSI:
        return tfkfac.FOSI(FIRST_ORDER[base](rate, **inner), **arguments)
    return FIRST_ORDER[name](rate, **(inner | arguments))


class Run(keras.callbacks.Callback):
    """Callback of a training: record its losses, times and metrics.

    Attributes:
        name: The optimizer, as on the command line.
        optimizer: The optimizer.
        callbacks: Callbacks of `fit`.
        losses: Loss of each step.
        evaluations: Step, metric and loss of the test data, by epoch.
    """

    def __init__(self, variant: Variant, session: "Session") -> None:
        super().__init__()
        options = session.options
        self.name = variant.text
        self.options, self.defaults = options, options.defaults
        self.rate = first_rate(variant, self.defaults.rates)
        self.optimizer = make_optimizer(
            variant, session.steps, self.defaults.rates
        )
        self.callbacks: list[keras.callbacks.Callback] = [self]
        if options.log_dir and session.worker == 0:
            options.log_dir.mkdir(parents=True, exist_ok=True)
            log = options.log_dir / variant.text.replace("/", "_")
            self.callbacks.append(keras.callbacks.CSVLogger(f"{log}.csv"))
            if importlib.util.find_spec("tensorboard"):
                self.callbacks.append(keras.callbacks.TensorBoard(log))
        self.losses: list[float] = []
        self.evaluations: list[dict[str, float]] = []
        self._times: list[tuple[float, float]] = []
        self._start = (0.0, 0.0)
        self._sum = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        if isinstance(self.optimizer, tfkfac.KFAC | tfkfac.FOSI):
            self.optimizer.summary()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._sum = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The loss of the logs is the mean over the epoch so far. Fetching it
        # waits for the step.
        total = float(logs["loss"]) * (batch + 1)
        wall, processor = self._start
        self._times.append(
            (time.perf_counter() - wall, time.process_time() - processor)
        )
        self.losses.append(total - self._sum)
        self._sum = total

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        metric, loss = logs[f"val_{self.defaults.metric}"], logs["val_loss"]
        step = len(self.losses)
        self.evaluations.append({"step": step, "metric": metric, "loss": loss})

    def seconds(self, clock: int = 0) -> np.ndarray:
        """Return wall (clock 0) or processor seconds up to each step.

        The first step traces the graph: take the slowest of the next ten
        steps in its place.
        """
        times = np.array(self._times)[:, clock]
        if len(times) > 1:
            times[0] = times[1:11].max()
        return np.cumsum(times)

    @property
    def steps_to_target(self) -> int | None:
        """Number of steps until the test metric reached the target."""
        sign = -1 if self.defaults.lower_is_better else 1
        target = self.options.target
        for test in self.evaluations if target is not None else ():
            if sign * test["metric"] >= sign * target:
                return int(test["step"])
        return None

    def record(self) -> dict[str, Any]:
        """Return all measurements."""
        record: dict[str, Any] = {
            "evaluations": self.evaluations,
            "steps_to_target": self.steps_to_target,
            "losses": self.losses,
            "seconds": self.seconds().tolist(),
            "cpu_seconds": self.seconds(clock=1).tolist(),
        }
        if isinstance(self.optimizer, tfkfac.KFAC | tfkfac.FOSI):
            record["state_bytes"] = self.optimizer.state_bytes()
            record["communication_bytes"] = self.optimizer.communication_bytes()
        return record

    def row(self) -> list[str]:
        """Return a line of the table."""
        seconds, steps = self.seconds(), self.steps_to_target
        last = self.evaluations[-1]
        return [
            self.name,
            f"{self.rate:g}",
            f"{last['metric']:.4f}",
            f"{last['loss']:.4f}",
            str(steps or "-"),
            f"{seconds[steps - 1]:.1f}" if steps else "-",
            f"{np.median([wall for wall, _ in self._times]):.4f}",
            f"{seconds[-1]:.1f}",
        ]


class Session:
    """The runs of a script, one for each optimizer of the command line.

    Create a session before any other use of TensorFlow.

    Attributes:
        strategy: The strategy of the job of `TF_CONFIG`, or of one device.
        worker: Index of this worker.
        steps: Number of steps of a run.
    """

    def __init__(self, options: argparse.Namespace, title: str) -> None:
        self.options, self.title, self.steps = options, title, 0
        options.epochs = options.epochs or (
            1 if options.quick else options.defaults.epochs
        )
        config = json.loads(os.environ.get("TF_CONFIG", "{}"))
        self.worker = config.get("task", {}).get("index", 0)
        self.strategy = (
            tfkfac.MultiWorkerMirroredStrategy()
            if config
            else tf.distribute.get_strategy()
        )
        if options.plot:
            importlib.import_module("matplotlib.figure")  # fail early
        for path in (options.plot, options.json):
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)

    def runs(self, examples: int) -> Iterator[Run]:
        """Yield a run for each optimizer; print the comparison at the end.

        `examples` is the number of training examples.
        """
        options = self.options
        if options.batch_size > examples:
            sys.exit(f"--batch-size must be at most {examples}, all examples")
        self.steps = options.epochs * (examples // options.batch_size)
        with self.strategy.scope():
            for variant in options.optimizer:  # fail before the first run
                make_optimizer(variant, self.steps, options.defaults.rates)
        runs = []
        for variant in options.optimizer:
            keras.backend.clear_session()
            keras.utils.set_random_seed(options.seed)
            print(f"\n{self.title}: {variant.text}")
            with self.strategy.scope():
                runs.append(Run(variant, self))
            yield runs[-1]
        if options.json:
            suffix = f".{self.worker}" if self.worker else ""
            path = options.json.with_name(f"{options.json.name}{suffix}")
            records = {run.name: run.record() for run in runs}
            path.write_text(json.dumps(records, indent=1))
        if self.worker == 0:
            self._report(runs)

    def _report(self, runs: Sequence[Run]) -> None:
        options = self.options
        title = (
            f"{self.title}, batches of {options.batch_size}, "
            f"{options.epochs} epochs, seed {options.seed}"
        )
        print(f"\n{title}\n\n{table(HEADING, [run.row() for run in runs])}")
        print(NOTE.format(options.defaults.metric, options.target))
        if options.plot:
            save_plot(options.plot, runs, title)
            print(f"Plot: {options.plot}")


def save_plot(path: pathlib.Path, runs: Sequence[Run], title: str) -> None:
    """Plot the training losses against steps and against wall seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for run in runs:
        width = max(1, len(run.losses) // 40)  # of the running mean
        mean = np.convolve(run.losses, np.full(width, 1 / width), "valid")
        by_steps.plot(range(width, len(run.losses) + 1), mean, label=run.name)
        by_seconds.plot(run.seconds()[width - 1 :], mean, label=run.name)
    by_steps.set(xlabel="steps", ylabel="training loss", yscale="log")
    by_seconds.set(xlabel="seconds of training")
    for axes in (by_steps, by_seconds):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
