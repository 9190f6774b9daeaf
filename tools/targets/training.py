"""One training in a process of its own, told by its command line.

Its record goes to the standard output as a line of JSON; what else is written
there goes to the standard error.
"""

import json
import os
import pathlib
import sys
from typing import Any

import keras
import tensorflow as tf

from targets import models
from targets.data import Data, load
from targets.methods import make_optimizer
from targets.problems import PROBLEMS, SIZES
from targets.recording import Recorder
from targets.run import Run

EVALUATIONS = 24


def train(run: Run, directory: pathlib.Path | None) -> dict[str, Any]:
    """Trains as a study does.

    Args:
        run: What is trained, and how.
        directory: Where the idx files of its images are, if there are any.

    Returns:
        The curve, and what the first step took.
    """
    problem = PROBLEMS[run.problem]
    data = load(problem.data, directory, problem.count_examples(run.size))
    _, recorder = fit(run, data, run.count_steps(), EVALUATIONS)
    return {"first_step": recorder.first_step, "curve": recorder.curve}


def fit(
    run: Run, data: Data, steps: int, evaluations: int
) -> tuple[keras.Model, Recorder]:
    """Trains a new model; everything random depends on the seed alone."""
    problem = PROBLEMS[run.problem]
    keras.utils.set_random_seed(run.seed)
    model = models.build(run.problem, SIZES[run.size])
    optimizer = make_optimizer(run.variant, problem, run.rate, steps)
    model.compile(optimizer, models.loss_of(run.problem))
    # Variables made in the first trace would cost Keras' optimizers a second.
    optimizer.build(model.trainable_variables)
    measure = models.make_measure(run.problem, model, data)
    measure()  # traces it
    recorder = Recorder(measure, steps, evaluations, run.batch)
    model.fit(
        batches(run, data),
        steps_per_epoch=steps,
        shuffle=False,  # they are already
        callbacks=[recorder],
        verbose=0,
    )
    return model, recorder


def batches(run: Run, data: Data) -> tf.data.Dataset:
    """Full batches without end, in an order that only the seed determines."""
    x, y = tf.constant(data.x), tf.constant(data.y)
    order = tf.data.Dataset.range(len(data.x))
    order = order.shuffle(len(data.x), seed=run.seed).repeat()

    def batch(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs, labels = tf.gather(x, indices), tf.gather(y, indices)
        return inputs, models.targets_of(run.problem, inputs, labels)

    return order.batch(run.batch, drop_remainder=True).map(batch).prefetch(2)


def main() -> None:
    """Trains as the command line says."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run, directory = json.loads(sys.argv[1])
    path = pathlib.Path(directory) if directory else None
    print(json.dumps(train(Run(**run), path)), file=answers, flush=True)


if __name__ == "__main__":
    main()
