"""Trainings with FOSI on workers, and in the NumPy program."""

from collections.abc import Iterable

from tests.support import fosi_reference, training
from tests.support.dtypes import floats
from tests.support.fosi_reference import Fosi, Network
from tests.support.reference import Array, adam, sgd
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.training import (
    ADAM_RATE,
    BETAS,
    FOSI_DEFAULTS,
    HIDDEN,
    MOMENTUM,
    RATE,
    Result,
    Training,
    shares,
)

RULES = {
    "plain": sgd(RATE),
    "sgd": sgd(RATE, MOMENTUM),
    "adam": adam(ADAM_RATE, betas=BETAS),
}


def train(case: Training, num_evaluated: int = 0) -> Result:
    """Train, evaluate on the rows of some steps, and describe the state."""
    model = training.build(case, metrics=["accuracy"])
    start = [v.numpy() for v in model.trainable_variables]
    logs = training.fit(model, case)
    rows = shares(case.rows, strategy().num_replicas_in_sync)[:num_evaluated]
    evaluation = {}
    if rows:
        with case.context():
            evaluation = model.evaluate(
                training.dataset(case.data, rows),
                steps=len(rows),
                return_dict=True,
                verbose=0,
            )
    optimizer = model.optimizer
    states = optimizer.method.states
    subspaces = [s.subspace for s in states]
    return training.describe(model) | {
        "start": start,
        "logs": {name: values[0] for name, values in logs.items()},
        "evaluation": evaluation,
        "ranks": local_ranks(),
        "weights": [v.numpy() for v in model.trainable_variables],
        "statistics": [v.numpy() for v in model.non_trainable_variables],
        "variables": copies(model.variables),
        "estimations": [int(s.estimations) for s in states],
        "failures": [int(s.failures) for s in states],
        "ritz_values": [s and s.ritz_values.numpy() for s in subspaces],
        "shapes": [s and tuple(s.directions.shape) for s in subspaces],
        "spectrum": optimizer.spectrum(),
    }


def reference(
    case: Training,
    replicas: int,
    trainers: Iterable[int],
    estimators: Iterable[int],
) -> tuple[Fosi, Array]:
    """Return the NumPy program of a training of "network", and its path.

    Args:
        case: The training.
        replicas: Number of replicas.
        trainers: Ranks of the replicas whose rows give the gradients.
        estimators: Ranks of the replicas whose rows give the Hessians.
    """
    options = FOSI_DEFAULTS | dict(case.options)
    steps = shares(case.rows, replicas)
    ((step, bad, _),) = case.faults or ((-1, -1, 0.0),)
    intervals = [options["update_interval"]] * (len(steps) + 1)
    for begin, values in case.changes.items():
        intervals[begin:] = [values["update_interval"]] * len(intervals)
    has_accelerators = set(trainers) != set(estimators)
    program = Fosi(
        RULES[case.inner],
        options["num_largest"],
        options["num_smallest"],
        lambda t: options["alpha"],
        intervals.__getitem__,
        options["warmup_steps"],
        clip=1.0 if case.inner == "adam" else options["learning_rate_clip"],
        iterations=options["lanczos_steps"] if has_accelerators else 0,
        is_paper=options.get("final_update") == "paper",
        skipped={step} if bad in trainers else (),
    )

    def batch(ranks: Iterable[int]) -> Network | None:
        rows = [row for rank in ranks for row in steps[program.number][rank]]
        is_bad = program.number == step and bad in ranks
        return None if is_bad or not rows else Network(x[rows], y[rows], HIDDEN)

    def gradient(w: Array) -> Array:
        network = batch(trainers)
        return 0 * w if network is None else network.gradient(w)

    def hessian(w: Array) -> Array | None:
        network = batch(estimators)
        return None if network is None else network.hessian(w)

    with floats("float64"):
        x, y = case.data
        start = fosi_reference.flat(training.network())
    return program, program.run(gradient, hessian, start, len(steps))
