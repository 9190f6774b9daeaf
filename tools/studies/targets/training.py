"""Train one setting with several seeds, in this process.

The command line has the runs as JSON. Each result is a line of JSON on the
standard output; other output goes to the standard error.
"""

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from common.data import Data
from targets import data as large
from targets import models, tiny
from targets.methods import make_optimizer
from targets.problems import TINY
from targets.recording import Recorder
from targets.run import FINAL, SEARCH, Run

EVALUATIONS = 24  # of a final run; other runs are measured at the end
MEASURED = 1024  # training examples in measurements of tiny problems
SHIFT = 2  # maximal shift of augmented images, pixels


def main() -> None:
    """Train the runs of the command line."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.argv[1])
    runs = [Run(**run) for run in task["runs"]]
    directory = task["directory"] and pathlib.Path(task["directory"])
    for record in train(runs, directory, task["file"]):
        print(json.dumps(record), file=answers, flush=True)


def train(
    runs: Sequence[Run], directory: pathlib.Path | None, file: str | None
) -> Iterator[dict[str, Any]]:
    """Yield the result of each run; runs differ in their seeds only.

    `directory` has idx files; `file` defines an optimizer, see
    `methods.outside`. Both may be None.
    """
    training = Training(runs[0], load(runs[0], directory), file)
    for run in runs:
        yield training.run(run.seed)


def load(run: Run, directory: pathlib.Path | None) -> Data:
    """Load the data of a run."""
    examples = run.row.count_examples(run.size)
    if run.size == TINY:
        return tiny.load(run.problem, directory, examples)
    data = large.load(run.row.data, directory, examples)
    return large.hold_out(data.train) if run.phase == SEARCH else data


class Resettable:
    """A compiled model whose variables can be reset to initial values.

    Tracing a step takes longer than a tiny training, so the variables are reset
    in place for each seed. `make` returns the optimizer of a model.

    Attributes:
        model: The model.
    """

    def __init__(
        self,
        build: Callable[[], keras.Model],
        make: Callable[[keras.Model], keras.optimizers.Optimizer],
        loss: Any,
    ) -> None:
        self._build, self.model = build, build()
        optimizer = make(self.model)
        self.model.compile(optimizer, loss)
        # Variables that are created in the first trace cost Keras' optimizers
        # a second trace.
        optimizer.build(self.model.trainable_variables)
        inner = vars(optimizer).values()
        base = keras.optimizers.Optimizer
        parts = [optimizer, *(x for x in inner if isinstance(x, base))]
        self._states: list[tuple[Any, dict[str, Any]]] = []
        for part in parts:
            self._states.append((part, {}))
            part.save_own_variables(self._states[-1][1])

    def reset(self, seed: int) -> None:
        """Set all variables to the initial values of a seed."""
        keras.utils.set_random_seed(seed)
        fresh = self._build().variables
        for part, state in self._states:
            part.load_own_variables(state)
        for variable, initial in zip(self.model.variables, fresh, strict=True):
            variable.assign(initial)


class Training:
    """A compiled model that is trained from the start for each seed.

    `steps` and `evaluations` replace the numbers of steps and measurements of
    the run; `file`: see `train`.

    Attributes:
        model: The model.
        measure: Function that returns the metric of the model.
    """

    def __init__(
        self,
        run: Run,
        data: Data,
        file: str | None = None,
        steps: int | None = None,
        evaluations: int | None = None,
    ) -> None:
        self._run, self._data = run, data
        self._steps = steps or run.count_steps()
        is_curve = run.phase == FINAL and run.size != TINY
        self._evaluations = evaluations or (EVALUATIONS if is_curve else 1)
        steps = self._steps
        self._resettable = Resettable(
            lambda: models.build(run.problem, run.size),
            lambda model: make_optimizer(run, steps, model, file),
            models.LOSSES[run.row.loss](),
        )
        self.model = self._resettable.model
        problem = run.row
        measured = data.test
        self._validate = None
        if problem.validation:
            self._validate = models.make_measure(
                self.model, problem, problem.validation, data.test
            )
            measured = data.train.first(MEASURED)
        self.measure = models.make_measure(
            self.model, problem, problem.score, measured
        )

    def run(
        self, seed: int, recorder: Recorder | None = None
    ) -> dict[str, Any]:
        """Train; only the seed determines random numbers.

        `recorder` records the curve; None measures at regular steps.

        Returns:
            The curve, the time of the first step, and for tiny problems the
            metric on test examples.
        """
        self.measure()  # trace the graph of the measurement
        self._resettable.reset(seed)
        if recorder is None:
            recorder = Recorder(self.measure, self._steps, self._evaluations)
        self.model.fit(
            batches(self._run, self._data, seed),
            steps_per_epoch=self._steps,
            shuffle=False,  # the batches are shuffled
            callbacks=[recorder],
            verbose=0,
        )
        record = {"first_step": recorder.first_step, "curve": recorder.curve}
        if self._validate:
            record["validation"] = self._validate()
        return record


def batches(run: Run, data: Data, seed: int) -> tf.data.Dataset:
    """Return an infinite set of full batches, shuffled by the seed."""
    train = data.train
    x, y = tree.map_structure(tf.constant, (train.x, train.y))
    order = tf.data.Dataset.range(len(train))
    order = order.shuffle(len(train), seed=seed).repeat()
    order = order.batch(run.batch, drop_remainder=True)

    def batch(number: tf.Tensor, rows: tf.Tensor) -> tuple[Any, tf.Tensor]:
        inputs, labels = tree.map_structure(
            lambda a: tf.gather(a, rows), (x, y)
        )
        if run.row.augmented:
            inputs = moved(inputs, tf.stack([tf.cast(seed, tf.int64), number]))
        return inputs, models.targets_of(run.row.loss, inputs, labels)

    return order.enumerate().map(batch).prefetch(2)


def moved(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Shift images by up to `SHIFT` pixels; flip half of the images."""
    count, rows, columns, _ = images.shape
    draws = tf.random.stateless_uniform(
        [count, 2], seed, 0, 2 * SHIFT + 1, tf.int32
    )
    flips = tf.random.stateless_uniform([count, 1, 1, 1], seed + 1) < 0.5
    edge = [SHIFT, SHIFT]
    images = tf.pad(images, [[0, 0], edge, edge, [0, 0]])
    down = draws[:, :1] + tf.range(rows)
    right = draws[:, 1:] + tf.range(columns)
    images = tf.gather(images, down, axis=1, batch_dims=1)
    images = tf.gather(images, right, axis=2, batch_dims=1)
    return tf.where(flips, images[:, :, ::-1], images)


if __name__ == "__main__":
    main()
