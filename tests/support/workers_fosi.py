"""What the tests of FOSI under several replicas run, alone and on workers.

`train` runs one small job and returns all there is to know about it. The same
function gives what a single process gets, which sees each step's rows of all
workers as one batch; `reference` is what NumPy makes of the model "network".
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras import layers

import tfkfac
from tests.support import fosi_reference, worker_parts
from tests.support.dtypes import floats
from tests.support.fosi_reference import Fosi, Network
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.worker_parts import (
    CLASSES,
    FEEDS,
    MOMENTUM,
    RATE,
    Feed,
    images,
    sentences,
    shares,
)
from tests.support.workers_modes import Setter, dataset

Changes = Mapping[int, Mapping[str, Any]]

# ------------------------------------------------------------------ models
HIDDEN, SIZE = 3, 17  # weights that neither 2 nor 4 divides


def network() -> keras.Model:
    """The one that the reference knows."""
    return fosi_reference.mlp(hidden=HIDDEN)


def mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Flatten(),
            layers.Dense(3, activation="tanh", name="hidden"),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


def batch_norm() -> keras.Model:
    norm = layers.BatchNormalization(
        momentum=0.5, synchronized=True, name="norm"
    )
    return keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(2, 3, name="conv"),
            norm,
            layers.Activation("tanh"),
            layers.Flatten(),
            layers.Dense(CLASSES, name="logits"),
        ]
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{f.__name__: f for f in (network, mlp, batch_norm)},
    "text": worker_parts.text,
}

# -------------------------------------------------------------- optimizers
INNERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    **worker_parts.INNERS,
    "plain": lambda: keras.optimizers.SGD(RATE),
    "decaying": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PolynomialDecay(RATE, 12, 0.0), MOMENTUM
    ),
}
RULES = {
    "plain": fosi_reference.sgd(RATE),
    "sgd": fosi_reference.sgd(RATE, MOMENTUM),
    "adam": fosi_reference.adam(
        worker_parts.ADAM_RATE, betas=worker_parts.BETAS
    ),
}
DEFAULTS: dict[str, Any] = {
    "num_largest": 2,
    "num_smallest": 1,
    "alpha": 0.25,
    "update_interval": 2,
    "warmup_steps": 2,
    "lanczos_steps": 5,
    "learning_rate_clip": 3.0,
}


# ---------------------------------------------------------------- training
def train(
    kind: str | None,
    model: str,
    inner: str = "sgd",
    feed: str | Feed = "uneven",
    poison: tuple[int, int] | None = None,
    changes: Changes | None = None,
    evaluated: int = 0,
    eager: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains a new model in float64 on the steps of a feed.

    Args:
        kind: "multi", "mirrored", or None for a single process.
        model: One of `MODELS`.
        inner: One of `INNERS`.
        feed: One of `FEEDS`, or the rows of each quarter of the workers.
        poison: Step, and the worker whose rows are NaN in it.
        changes: Values for the optimizer's attributes before a step.
        evaluated: Number of steps whose rows are for `evaluate`.
        eager: Whether to run without a graph.
        **options: Arguments of `FOSI`.
    """
    rows = FEEDS[feed]() if isinstance(feed, str) else feed
    steps = shares(rows, strategy(kind).num_replicas_in_sync)
    with floats("float64"):
        trained = compiled(kind, model, inner, options)
        trained.run_eagerly = eager
        xy = data(model)
        start = [v.numpy() for v in trained.trainable_variables]
        batches = dataset(kind, *xy, steps, poison)
        logs = trained.fit(
            batches,
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
            callbacks=[Setter(changes or {})],
        ).history
        batches = dataset(kind, *xy, steps[:evaluated], None)
        evaluation = evaluated and trained.evaluate(
            batches, steps=evaluated, return_dict=True, verbose=0
        )
    logs = {name: value for name, (value,) in logs.items()}
    found = {"start": start, "logs": logs, "evaluation": evaluation}
    return found | describe(kind, trained)


def data(model: str) -> tuple[Array, Array]:
    if model == "network":
        return fosi_reference.data(160)
    return sentences() if model == "text" else images()


def compiled(
    kind: str | None, model: str, inner: str, options: Mapping[str, Any]
) -> Any:
    with strategy(kind).scope():
        keras.utils.set_random_seed(0)
        made = MODELS[model]()
        made.compile(
            tfkfac.FOSI(INNERS[inner](), **(DEFAULTS | dict(options))),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return made


def reference(
    replicas: int,
    trainers: Iterable[int],
    estimators: Iterable[int],
    inner: str = "sgd",
    poison: tuple[int, int] | None = None,
    changes: Changes | None = None,
    **options: Any,
) -> tuple[Fosi, Array]:
    """The NumPy program of a job with "network", and its path.

    Some replicas train, and the Hessian is that of some.
    """
    options = DEFAULTS | options
    steps = shares(FEEDS["uneven"](), replicas)
    step, bad = poison or (-1, -1)
    intervals = [options["update_interval"]] * (len(steps) + 1)
    for begin, values in (changes or {}).items():
        intervals[begin:] = [values["update_interval"]] * len(intervals)
    beside = set(trainers) != set(estimators)
    program = Fosi(
        RULES[inner],
        options["num_largest"],
        options["num_smallest"],
        lambda t: options["alpha"],
        intervals.__getitem__,
        options["warmup_steps"],
        clip=1.0 if inner == "adam" else options["learning_rate_clip"],
        iterations=options["lanczos_steps"] if beside else 0,
        is_paper=options.get("final_update") == "paper",
        skipped={step} if bad in trainers else (),
    )

    def part(members: Iterable[int]) -> Network | None:
        rows = [row for m in members for row in steps[program.number][m]]
        blind = program.number == step and bad in members
        return None if blind or not rows else Network(x[rows], y[rows], HIDDEN)

    def gradient(w: Array) -> Array:
        known = part(trainers)
        return 0 * w if known is None else known.gradient(w)

    def hessian(w: Array) -> Array | None:
        known = part(estimators)
        return None if known is None else known.hessian(w)

    with floats("float64"):
        x, y = data("network")
        start = fosi_reference.flat(network())
    return program, program.run(gradient, hessian, start, len(steps))


def told(kind: str | None) -> list[int]:
    """The warm-up of each replica, where workers hear other lengths."""
    options = {"warmup_steps": None}
    with strategy(kind).scope():
        optimizer = compiled(kind, "mlp", "sgd", options).optimizer
    optimizer.method.set_run_length(40 * (1 + local_ranks(kind)[0]))
    return [int(state.warmup) for state in optimizer.method.states]


def describe(kind: str | None, model: Any) -> dict[str, Any]:
    """All that the tests want to know of a trained model."""
    optimizer = model.optimizer
    text: list[str] = []
    optimizer.summary(print_fn=text.append)
    states = optimizer.method.states
    kept = [s.subspace for s in states]
    return {
        "ranks": local_ranks(kind),
        "weights": [v.numpy() for v in model.trainable_variables],
        "statistics": [v.numpy() for v in model.non_trainable_variables],
        "variables": copies(kind, model.variables),
        "copies": copies(kind, [*model.variables, *optimizer.variables]),
        "iterations": int(optimizer.iterations.numpy()),
        "skipped": [int(v) for v in optimizer.method.job.skipped],
        "estimations": [int(s.estimations) for s in states],
        "failures": [int(s.failures) for s in states],
        "ritz_values": [s and s.ritz_values.numpy() for s in kept],
        "shapes": [s and tuple(s.directions.shape) for s in kept],
        "spectrum": optimizer.spectrum(),
        "state_bytes": optimizer.state_bytes(),
        "communication_bytes": optimizer.communication_bytes(),
        "summary": [" ".join(li.split()) for li in text[0].splitlines()],
    }
