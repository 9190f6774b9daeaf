"""The jobs of MR-DHO2 that the tests run, and what they should come to."""

import functools
from typing import Any

import keras

from tests.support import definition, workers_fosi
from tests.support.dtypes import floats
from tests.support.fosi_objective import Objective
from tests.support.fosi_simulation import Settings, Simulation
from tests.support.jobs import Jobs, replicas_of
from tests.support.worker_parts import (
    ADAM_RATE,
    BETAS,
    FEEDS,
    MOMENTUM,
    RATE,
    shares,
)
from tests.support.workers_fosi import DEFAULTS, MODELS, data

# -------------------------------------------------------------------- jobs
JOBS = Jobs(workers_fosi)
# Name: the arguments of `workers_fosi.train`.
CASES: dict[str, dict[str, Any]] = {}
# Estimations begin at updates 2, 5 and 8, with two iterations beside each
# step; their results are in use from update 5 and 8 on.
OPTIONS = {
    "accelerator_fraction": 0.5,
    "update_interval": 3,
    "warmup_steps": 2,
    "lanczos_steps": 5,
}
FITS = ((2, 3), (1, 4))  # epochs and their steps in each call of `fit`
EVALUATED = 2  # steps


def add(
    where: str,
    layout: str,
    final: str,
    model: str,
    inner: str,
    what: str = "",
    slow: bool = False,
    **kwargs: Any,
) -> None:
    parts = (layout, final, model, inner, what)
    name = f"{where}: {', '.join(p for p in parts if p)}"
    if model != "mlp":
        kwargs.setdefault("feed", "some")  # moments of no row are NaN
    kwargs |= {"layout": layout, "final_update": final}
    kwargs |= {"model": model, "inner": inner, "fits": FITS}
    CASES[name] = OPTIONS | kwargs
    JOBS.add(name, "train", slow=slow, **CASES[name])


add("two", "rows", "stale", "mlp", "sgd", slow=True, evaluated=EVALUATED)
add("two", "columns", "paper", "mlp", "adam", slow=True)
add(
    "two",
    "columns",
    "stale",
    "batch_norm",
    "adam",
    slow=True,
    evaluated=EVALUATED,
)
add(
    "two",
    "rows",
    "stale",
    "mlp",
    "adam",
    "long interval",
    slow=True,
    update_interval=4,
    lanczos_steps=3,
)
# The estimation that began at update 2 is not done at the end of the interval,
# which is shorter from update 3 on, and longer from update 5 on.
add(
    "two",
    "columns",
    "stale",
    "mlp",
    "sgd",
    "changed interval",
    slow=True,
    changes={3: {"update_interval": 2}, 5: {"update_interval": 4}},
)
# Step and replica of a batch of NaN. An estimation begins in step 5; if it is
# skipped, then the accelerators still use its batch.
add(
    "two",
    "rows",
    "stale",
    "mlp",
    "sgd",
    "NaN at begin",
    slow=True,
    poison=(5, 0),
)
add("two", "rows", "stale", "mlp", "sgd", "blind", slow=True, poison=(5, 1))
add("four", "rows", "stale", "mlp", "adam", evaluated=EVALUATED)
add(
    "four",
    "columns",
    "stale",
    "plain_norm",
    "sgd",
    slow=True,
    evaluated=EVALUATED,
)
# With batches of different sizes, synchronised moments of several workers
# make a known difference: `test_dho2`.
add(
    "four",
    "rows",
    "stale",
    "batch_norm",
    "sgd",
    slow=True,
    feed="even",
    evaluated=2,
)
add("four", "columns", "paper", "mlp", "sgd", "NaN", slow=True, poison=(3, 1))
for fraction_, layout_, final_ in [
    (0.25, "rows", "paper"),
    (0.75, "columns", "stale"),
]:
    add(
        "four",
        layout_,
        final_,
        "mlp",
        "sgd",
        f"{fraction_} accelerators",
        slow=(fraction_, layout_) != (0.25, "rows"),
        accelerator_fraction=fraction_,
    )
add("mirrored", "columns", "paper", "batch_norm", "adam", slow=True)

REFUSED = {
    "two: refused": (0.1, 0.9),
    "four: refused": (0.1, 0.9),
    "mirrored: refused": (0.2, 0.8),
}
for name_, fractions_ in REFUSED.items():
    is_slow_ = name_ != "two: refused"
    JOBS.add(name_, "fractions_refused", fractions_, slow=is_slow_)


def options_of(name: str) -> dict[str, Any]:
    return CASES[name]


def count_workers(name: str) -> int:
    count = replicas_of(name)
    return count - round(options_of(name)["accelerator_fraction"] * count)


def steps_of(name: str) -> list[list[list[int]]]:
    feed = FEEDS[options_of(name).get("feed", "uneven")]()
    return shares(feed, replicas_of(name))


def names(*wanted: str, poison: bool | None = None) -> list[str]:
    """Cases with an argument, and with or without NaN."""
    return [
        name
        for name in CASES
        if all(options_of(name).get(w) for w in wanted)
        if poison is None or poison == ("poison" in options_of(name))
    ]


# -------------------------------------------------------------- simulation
@functools.cache
def simulated(name: str) -> Simulation:
    options = DEFAULTS | options_of(name)
    count, workers = replicas_of(name), count_workers(name)
    inner = definition.sgd(RATE, MOMENTUM)
    if options["inner"] == "adam":
        inner = definition.adam(ADAM_RATE, *BETAS)
        options["learning_rate_clip"] = 1.0
    step, rank = options.get("poison", (None, None))
    nan = () if step is None else (step,)
    fields = [f for f in Settings.__dataclass_fields__ if f in options]
    settings = Settings(
        **{f: options[f] for f in fields if f != "inner"},
        workers=range(workers),
        accelerators=range(workers, count),
        inner=inner,
        separate=options["model"] == "plain_norm",
        skipped=nan if rank is not None and rank < workers else (),
        blind=nan if rank is not None and rank >= workers else (),
    )
    with floats("float64"):
        return Simulation(objective(options["model"]), settings).run(
            steps_of(name)
        )


def objective(model: str) -> Objective:
    keras.utils.set_random_seed(0)
    network = MODELS[model]()
    network.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return Objective(network, data(model, "float64"))
