"""Train the models of the examples in new processes, for the experiments."""

import importlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

EXAMPLES = pathlib.Path(__file__).parents[1]
TOOLS = EXAMPLES.parent / "tools"
# Default environment: few threads, because trainings run side by side.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": os.pathsep.join(map(str, (EXAMPLES, TOOLS, EXAMPLES.parent))),
}
Case = Mapping[str, Any]
Record = Mapping[str, Any]  # measurements of a worker, see `train`
# Learning rates, unless the script has others.
RATES = {
    "kfac": 0.1, "sgd": 0.05, "adam": 0.002, "rmsprop": 0.001, "lamb": 0.03
}  # fmt: skip


class Training(NamedTuple):
    """A model and data of the examples, with an optimizer."""

    optimizer: str  # "kfac", "fosi", "sgd", ...
    arguments: Mapping[str, Any]  # of its constructor
    script: str = "classification"
    model: str = "cnn"  # of the classification
    dataset: str = "digits"  # of the classification
    examples: int = 1024  # of the training, in other scripts
    epochs: int = 20
    batch_size: int = 64  # of all workers together
    target: float = 0.98  # metric whose cost is measured
    workers: int = 1
    second: str = ""  # optimizer of as many more epochs, of masked_language

    def run(self) -> list[Record]:
        """Train; return the measurements of each worker."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder, json.dumps(self)]
            if self.workers > 1:
                launch = [TOOLS / "launch.py", str(self.workers), "--"]
                command = [sys.executable, *map(str, launch), *command]
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                sys.exit(f"a training has failed:\n{done.stdout[-1500:]}")
            files = sorted(pathlib.Path(folder).iterdir())
            return [json.loads(file.read_text()) for file in files]


class Experiment(NamedTuple):
    """A table or figure of a paper."""

    source: str
    question: str
    quick: Mapping[str, Sequence[Any]]  # values with `--quick`, all combined
    full: Mapping[str, Sequence[Any]]  # values that differ without `--quick`
    training: Callable[[Case, bool], Training]  # of a case and of `--quick`
    measures: Sequence[str]  # names of `MEASURES`
    elsewhere: str  # parts of the paper that need other machines

    def cases(self, quick: bool) -> list[Case]:
        """Return all combinations of the parameters."""
        values = self.quick if quick else {**self.quick, **self.full}
        return [
            dict(zip(values, combination, strict=True))
            for combination in itertools.product(*values.values())
        ]


# ------------------------------------------------------ the process of a worker
def problem(training: Training) -> tuple[Any, Any, Callable[[Any], Any], str]:
    """Return both data sets, a function for the model, and a metric."""
    import keras

    script: Any = importlib.import_module(training.script)
    if training.script in ("segmentation", "detection"):
        is_one = training.script == "segmentation"
        load = script.canvases if is_one else script.load
        data = load(training.examples, 0), load(256, 1)
        return *data, script.build, "iou" if is_one else "masks_iou"

    def build(optimizer: Any) -> Any:
        if training.script == "masked_language":
            model = script.pretrained(training.examples)
            loss, metrics = script.LOSS, {"weighted_metrics": ["accuracy"]}
        else:
            from common.networks import CLASSIFIERS

            labels = train[1]
            make = CLASSIFIERS[training.model]
            model = make(train[0].shape[1:], int(labels.max()) + 1)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            metrics = {"metrics": ["accuracy"]}
        model.compile(optimizer, loss, **metrics)
        return model

    if training.script == "masked_language":
        train, test = script.load(training.examples)
    elif training.dataset == "moved_digits":
        x, y = importlib.import_module("autoencoder").moved_digits(25_000)
        train, test = (x[:20_000], y[:20_000]), (x[20_000:], y[20_000:])
    else:
        train, test = script.load(training.dataset)
    return train, test, build, "accuracy"


def make_optimizer(training: Training, name: str, steps: int) -> Any:
    """Return an optimizer whose rate falls linearly to 0."""
    import keras

    import tfkfac

    script: Any = importlib.import_module(training.script)
    rates = RATES | getattr(script, "RATES", {})
    rate = keras.optimizers.schedules.PolynomialDecay(rates[name], steps, 0.0)
    if name == "kfac":
        return tfkfac.KFAC(rate, **training.arguments)
    if name == "fosi":
        return tfkfac.FOSI(keras.optimizers.Adam(rate), **training.arguments)
    if name == "sgd":
        return keras.optimizers.SGD(rate, momentum=0.9)
    first_order = {"adam": "Adam", "rmsprop": "RMSprop", "lamb": "Lamb"}[name]
    return getattr(keras.optimizers, first_order)(rate)


def work(training: Training, folder: pathlib.Path) -> None:
    """Train as one worker; write its measurements."""
    import keras
    import numpy as np

    import tfkfac

    strategy = tfkfac.MultiWorkerMirroredStrategy()
    (x, y, *weights), test, build, metric = problem(training)
    steps = -(-len(keras.tree.flatten(y)[0]) // training.batch_size)
    start, times, tests = [0.0, 0.0], [], []

    def before_step(batch: int, logs: Any) -> None:
        start[:] = time.perf_counter(), time.process_time()

    def after_step(batch: int, logs: Any) -> None:
        float(logs["loss"])  # waits for the step
        wall, processor = start
        now = time.perf_counter(), time.process_time()
        times.append((now[0] - wall, now[1] - processor))

    def after_epoch(epoch: int, logs: Any) -> None:
        tests.append((len(times), logs[f"val_{metric}"]))

    keras.utils.set_random_seed(0)
    steps *= training.epochs

    def train() -> None:
        first = len(times)
        model.fit(
            x,
            y,
            training.batch_size,
            training.epochs,
            verbose=0,
            sample_weight=weights[0] if weights else None,
            validation_data=test,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_train_batch_begin=before_step,
                    on_train_batch_end=after_step,
                    on_epoch_end=after_epoch,
                )
            ],
        )
        # The first step traces the graph: take the slowest of the next ten.
        others = np.array(times)[first + 1 : first + 11]
        times[first] = tuple(others.max(0, initial=0.0))

    with strategy.scope():
        model = build(make_optimizer(training, training.optimizer, steps))
    train()
    if training.second:
        with strategy.scope():
            optimizer = make_optimizer(training, training.second, steps)
            model.compile(optimizer, model.loss, weighted_metrics=[metric])
        train()
    wall, processor = np.cumsum(times, 0).T
    reached = [step for step, value in tests if value >= training.target]
    record = {
        "metric": tests[-1][1],
        "seconds": wall[-1],
        "cpu_seconds": processor[-1],
        "steps_to_target": reached[0] if reached else None,
        "cpu_to_target": processor[reached[0] - 1] if reached else None,
    }
    if isinstance(model.optimizer, tfkfac.KFAC | tfkfac.FOSI):
        record["state_bytes"] = model.optimizer.state_bytes()
        record["communication_bytes"] = model.optimizer.communication_bytes()
    worker = strategy.cluster_resolver.task_id or 0
    (folder / f"{worker}.json").write_text(json.dumps(record))


def _state(name: str) -> Callable[[Sequence[Record]], float]:
    """Return a measure: the largest state `name` of a worker, in MB."""
    return lambda w: max(x["state_bytes"].get(name, 0) for x in w) / 1e6


def _received(step: str) -> Callable[[Sequence[Record]], float]:
    """Return a measure: the most MB that a worker receives in a step."""
    key = "communication_bytes"
    return lambda w: max(sum(x[key][step].values()) for x in w) / 1e6


# Functions of the records of all workers; the first worker is the chief.
MEASURES: Mapping[str, Callable[[Sequence[Record]], float | None]] = {
    "metric": lambda workers: workers[0]["metric"],
    "seconds": lambda workers: workers[0]["seconds"],
    "CPU seconds": lambda workers: workers[0]["cpu_seconds"],
    "steps to target": lambda workers: workers[0]["steps_to_target"],
    "CPU s to target": lambda workers: workers[0]["cpu_to_target"],
    "state, MB": _state("total"),
    "factors, MB": _state("factors"),
    "decompositions, MB": _state("decompositions"),
    "directions, MB": _state("directions"),
    "plain step, MB": _received("plain"),
    "factor step, MB": _received("factor"),
    "inverse step, MB": _received("inverse"),
}

if __name__ == "__main__":
    work(Training(*json.loads(sys.argv[2])), pathlib.Path(sys.argv[1]))
