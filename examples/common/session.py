"""One run after the other: the same model with each of the optimizers."""

import argparse
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf

import tfkfac
from common import report
from common.errors import UsageError
from common.optimizers import Choice
from common.recording import Recorder


class Run:
    """A training that is about to begin."""

    def __init__(self, choice: Choice, session: "Session") -> None:
        options = session.options
        self.name = choice.text
        self.optimizer = choice.make(session.steps, options.defaults.rates)
        self.recorder = Recorder(
            options.defaults.metric,
            options.target,
            options.defaults.lower_is_better,
        )
        self.callbacks = [Introduction(session.strategy), self.recorder]
        if session.log_dir:
            log = session.log_dir / choice.text.replace("/", "_")
            self.recorder.path = log.with_name(f"{log.name}.csv")
            self.callbacks += tensorboard(log)


class Session:
    """Trains with each of the given optimizers, and compares the runs.

    Everything random depends on the seed alone: all begin with the same
    weights and see the same batches. It is made before anything else of
    TensorFlow.

    Args:
        options: The parsed command line.
        title: What is trained.

    Attributes:
        strategy: The job that TF_CONFIG describes, or that of one device.
        steps: Steps of a run.
    """

    def __init__(self, options: argparse.Namespace, title: str) -> None:
        self.options = options
        self.title = title
        self.strategy = make_strategy()
        self.steps = 0
        is_chief = worker_index() == 0
        self.log_dir = options.log_dir if is_chief else None
        self.plot = options.plot if is_chief else None
        if self.plot:
            prepare_plot(self.plot, "--plot")
        for path in (self.log_dir, options.json and options.json.parent):
            if path:
                make_directory(path)

    def runs(self, examples: int) -> Iterator[Run]:
        """Yields the runs, and reports when all are done.

        Args:
            examples: Number of training examples.

        Raises:
            UsageError: Before any training, if an optimizer refuses its
                settings or a batch would be larger than the data.
        """
        options = self.options
        check_size("--batch-size", options.batch_size, examples)
        self.steps = options.epochs * (examples // options.batch_size)
        with self.strategy.scope():
            for choice in options.optimizer:
                self._check(choice)
        done: dict[str, Run] = {}
        for choice in options.optimizer:
            keras.backend.clear_session()
            keras.utils.set_random_seed(options.seed)
            print(f"\n{self.title}: {choice.text}")
            with self.strategy.scope():
                done[choice.text] = Run(choice, self)
            yield done[choice.text]
        self._finish({name: run.recorder for name, run in done.items()})

    def _check(self, choice: Choice) -> None:
        try:
            choice.make(self.steps, self.options.defaults.rates)
        except (TypeError, ValueError) as error:
            raise UsageError(f"--optimizer {choice.text}: {error}") from error

    def _finish(self, runs: Mapping[str, Recorder]) -> None:
        options = self.options
        if options.json:
            records = {name: run.record() for name, run in runs.items()}
            path = record_path(options.json, worker_index())
            path.write_text(json.dumps(records, indent=1))
        if worker_index() > 0:
            return
        title = (
            f"{self.title}, batches of {options.batch_size}, "
            f"{options.epochs} epochs, seed {options.seed}"
        )
        print(f"\n{title}\n\n{report.make_table(runs, options)}")
        if any(len(run.seconds_by_kind) > 1 for run in runs.values()):
            print(f"\n{report.kinds_table(runs)}")
        if self.plot:
            report.save_plot(self.plot, runs, title)
            print(f"Plot: {self.plot}")


class Introduction(keras.callbacks.Callback):
    """Shows what an optimizer of ours covers, before the first step."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self._is_shared = strategy.num_replicas_in_sync > 1

    def on_train_begin(self, logs: Mapping | None = None) -> None:
        optimizer = self.model.optimizer
        if isinstance(optimizer, (tfkfac.KFAC, tfkfac.FOSI)):
            optimizer.summary()
            if self._is_shared:
                print(report.traffic_table(optimizer))

    def on_train_end(self, logs: Mapping | None = None) -> None:
        optimizer = self.model.optimizer
        if isinstance(optimizer, tfkfac.FOSI) and self._is_shared:
            print(report.idle_text(optimizer))


def make_strategy() -> tf.distribute.Strategy:
    """The job that TF_CONFIG describes, or the default of one device."""
    if "TF_CONFIG" in os.environ:
        return tfkfac.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def worker_index() -> int:
    """That of this worker; the first prints the results and writes files."""
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
    return task.get("index", 0)


def record_path(path: pathlib.Path, worker: int) -> pathlib.Path:
    """The file of a worker's measurements."""
    return path.with_name(f"{path.name}.{worker}") if worker else path


def prepare_plot(path: pathlib.Path, argument: str) -> None:
    """Fails before the training rather than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"{argument} needs matplotlib: pip install '.[examples]'"
        )
    make_directory(path.parent)


def make_directory(directory: pathlib.Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error}") from error


def check_size(argument: str, size: int, examples: int) -> None:
    """Refuses batches of more examples than there are."""
    if size > examples:
        raise UsageError(
            f"{argument} {size} is more than the {examples} training examples"
        )


def tensorboard(directory: pathlib.Path) -> list[keras.callbacks.Callback]:
    """Logs for TensorBoard if it is installed."""
    if importlib.util.find_spec("tensorboard"):
        return [keras.callbacks.TensorBoard(directory)]
    print("TensorBoard is not installed: logging to CSV only")
    return []
