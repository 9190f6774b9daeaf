"""The jobs of the distribution modes, and what they should come to."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support import definition, workers_modes
from tests.support.jobs import Jobs, replicas_of
from tests.support.reference import Array
from tests.support.weights import distance
from tests.support.worker_parts import (
    ADAM_RATE,
    BETAS,
    BLOCK,
    DEFAULTS,
    FEEDS,
    MOMENTUM,
    RATE,
    SPECTRAL_MOMENTUM,
    images,
    shares,
    warm_up,
)
from tests.support.worker_parts import (
    SPECTRAL as _SPECTRAL,
)
from tfkfac.distributed.plan import LayerPlan, plan_layers

Result = Mapping[str, Any]
Cases = dict[str, dict[str, Any]]

EXACT = 2e-7  # float64, up to a few float32 numbers

# ------------------------------------------------------------------------ jobs
# By name: the arguments of `workers_modes.train`. After the cluster comes the
# mode, which may bear the fraction of gradient workers.
# The inputs of the hidden layer, 51 with the bias, as a sketch.
SKETCH = {"model": "small", "max_factor_dim": 10, "factor_rank": 3}
ADAM_REDUCED = {"inner": "adam", "weight_sharing": "reduce"}
HALF = {"factor_dtype": "bfloat16", "inverse_dtype": "bfloat16"}
QUICK: Cases = {
    # Step and worker of a batch of NaN.
    "two: comm_opt, NaN": {
        "model": "cnn",
        "symmetric": True,
        "poison": (3, 1),
    },
    "two: dp_kfac, adam": {"model": "cnn", "solver": "eigen", **ADAM_REDUCED},
    "two: comm_opt, rows": {"model": "wide"},
    "two: mem_opt, sketch": {
        **SKETCH,
        "symmetric": True,
        "changes": {
            2: {"learning_rate": RATE / 2, "damping": 1.0, "kl_clip": 2**-9},
            3: {"factor_update_interval": 1, "inverse_update_interval": 2},
        },
    },
    # Drawn labels go back through a normalisation that adds up over the
    # workers.
    "two: comm_opt, given labels": {
        "model": "batch_norm",
        "feed": "some",
        "fisher": "monte_carlo",
        "given_labels": True,
    },
    "two: mem_opt, rest": {
        "model": "small",
        "skip_layers": ("hidden",),
        "rest_optimizer": None,
    },
    "four: hybrid_opt 1/2, in stages": {"model": "cnn", "solver": "eigen"},
}
SLOW: Cases = {
    "four: comm_opt, adam": {"model": "cnn", "inner": "adam"},
    "four: mem_opt, adam": {"model": "cnn", "solver": "eigen", **ADAM_REDUCED},
    "four: dp_kfac, in stages": {"model": "cnn", "solver": "eigen"},
    "four: hybrid_opt 1/4, sketch": {"solver": "eigen", **SKETCH},
    "mirrored: comm_opt, in stages": {"model": "cnn"},
    "mirrored: dp_kfac, adam": {"model": "cnn", "inner": "adam"},
    "mirrored: mem_opt, batch norm": {"model": "batch_norm", "feed": "some"},
    "two: comm_opt, language": {"model": "language"},
    "two: comm_opt, outer": {"model": "cnn", "solver": "eigen_outer"},
    "two: dp_kfac, every step": {
        "model": "cnn",
        "feed": "late",
        "assignment": "compute",
        "factor_update_interval": 1,
        "inverse_update_interval": 1,
    },
    "two: dp_kfac, same rows": {"model": "language", "feed": "same"},
    "two: dp_kfac, sketch": {"feed": "same", **SKETCH},
    "two: mem_opt, text": {"model": "text", **ADAM_REDUCED},
    "two: mem_opt, eager": {"model": "small", "eager": True},
    "two: comm_opt, float32": {
        "model": "vision",
        "feed": "some",
        "dtype": "float32",
        "solver": "eigen",
    },
    "two: mem_opt, accumulation": {
        "model": "small",
        "inner": "accumulation, average, decay",
        "fisher": "type2",
    },
    "two: comm_opt, schedules": {
        "model": "small",
        "inner": "global clipnorm, average",
        "damping": "damping schedule",
        "kl_clip": "clip schedule",
    },
    "two: dp_kfac, drawn labels": {
        "model": "batch_norm",
        "feed": "some",
        "fisher": "monte_carlo",
    },
    "two: comm_opt, half": {
        "model": "small",
        "solver": "eigen",
        **HALF,
        "factor_dtype": "float16",
    },
    "two: hybrid_opt 1/2, half": {**HALF, **SKETCH},
}
# Spectral steps: an embedding, and what is skipped, are the rest optimizer's.
SPECTRAL: Cases = {
    name: {"inner": "multiplier", **_SPECTRAL} | kwargs
    for name, kwargs in {
        "two: mem_opt, spectral": {
            "model": "cnn",
            "skip_layers": ("hidden",),
            "inner": "warm-up",
        },
        "two: dp_kfac, spectral": {"model": "cnn", "poison": (3, 1)},
        "two: comm_opt, spectral, text": {"model": "text", "solver": "eigen"},
        "two: hybrid_opt 1/2, spectral, accumulation": {
            **SKETCH,
            "inner": "multiplier, accumulation",
        },
        "two: mem_opt, spectral, half": {"model": "small", **HALF},
        "four: hybrid_opt 1/2, spectral, in stages": {
            "model": "cnn",
            "rest_optimizer": "warm-up",
            "skip_layers": ("hidden",),
            "inner": "default",
        },
        "four: mem_opt, spectral": {
            "model": "text",
            "inner": "default",
        },
        "mirrored: mem_opt, spectral": {"model": "batch_norm", "feed": "some"},
    }.items()
}
# Decompositions in turns.
TURNS: Cases = {"two: comm_opt, turns": {"model": "vision"}}
# Statistics of a part of uneven batches, of 7 rows and 1 row.
PARTS: Cases = {
    "two: comm_opt, parts": {
        "model": "small",
        "feed": [[[0, 1, 2], [3, 4, 5, 6], [7], []]],
        "factor_batch_fraction": 0.25,
    }
}
CASES = QUICK | SLOW | SPECTRAL
_ALL = CASES | TURNS | PARTS


def train_options(name: str) -> dict[str, Any]:
    """The arguments of `workers_modes.train`, the mode's among them."""
    kwargs = dict(_ALL[name])
    distribution, _, fraction = (
        name.split(": ")[1].partition(",")[0].partition(" ")
    )
    kwargs["distribution"] = distribution
    if fraction:
        over, _, under = fraction.partition("/")
        kwargs["gradient_worker_fraction"] = int(over) / int(under)
    for small in ("turns", "stages"):
        if name.endswith(small):
            kwargs[small] = True
    return kwargs


JOBS = Jobs(workers_modes)
_QUICK = {*QUICK, *TURNS, *PARTS}
_QUICK |= {*itertools.islice(SPECTRAL, 2)}
for name_ in _ALL:
    slow_ = name_ not in _QUICK
    JOBS.add(name_, "train", slow=slow_, **train_options(name_))
for what_ in ("fit", "loop", "disagreements"):
    JOBS.add(f"two: {what_}", what_)


# -------------------------------------------------------------- what is wanted
_SHARED = {
    "distribution",
    "gradient_worker_fraction",
    "assignment",
    "symmetric",
    "factor_dtype",
    "inverse_dtype",
    "poison",
    "stages",
}
_ALONE: dict[str, Result] = {}


def alone(name: str) -> Result:
    """What a single process, this one, gets on the same global batches."""
    options = train_options(name)
    kwargs = {k: v for k, v in options.items() if k not in _SHARED}
    key = repr(sorted(kwargs.items()))
    if key not in _ALONE:
        _ALONE[key] = workers_modes.train(None, **kwargs)
    return _ALONE[key]


LAYERS = "conv", "hidden", "logits"  # of "cnn"


def by_definition(
    start: Sequence[Array],
    steps: Sequence[Sequence[Sequence[int]]],
    owners: Sequence[int] | None,
    inner: str = "sgd",
    solver: str = "inverse",
    weight_sharing: str = "expand",
    step: str = "natural",
    skip_layers: Sequence[str] = (),
    rest_optimizer: str | None = None,
    **options: Any,
) -> list[Array]:
    known = {k: v for k, v in options.items() if k in DEFAULTS}
    update, rate = definition.sgd(RATE, MOMENTUM), RATE
    if inner == "adam":
        update, rate = definition.adam(ADAM_RATE, *BETAS), ADAM_RATE
    # Either optimizer has the schedule.
    has_schedule = "warm-up" in (inner, rest_optimizer)
    shape = (lambda n: float(warm_up(n))) if has_schedule else lambda n: 1.0
    usual = float(np.float32(1e-3))
    rest = definition.adam(lambda n: usual * shape(n), 0.9, 0.999)
    if rest_optimizer is not None:
        rest = definition.adam(lambda n: ADAM_RATE * shape(n), *BETAS)
    spectral = definition.Spectral(SPECTRAL_MOMENTUM, BLOCK, shape)
    settings = definition.Settings(
        solver=solver,
        weight_sharing=weight_sharing,
        learning_rate=rate,
        inner=update,
        owners=owners,
        spectral=spectral if step == "spectral" else None,
        left={LAYERS.index(name): rest for name in skip_layers},
        **(DEFAULTS | known),
    )
    start = [w.astype(float) for w in start]
    return definition.train(start, images(), steps, settings)


def defined(name: str, result: Result) -> list[Array]:
    """The weights of a case of "cnn", in NumPy."""
    options = train_options(name)
    feed = shares(FEEDS[options.get("feed", "uneven")](), replicas_of(name))
    if "poison" in options:
        # All leave out that step, whoever had the NaN.
        del feed[options["poison"][0]]
    owners = None
    if options["distribution"] == "dp_kfac":
        plan = plans(name, result)
        owners = [next(iter(layer.owners.values())) for layer in plan]
        # Another worker's rows would make a difference.
        assert len(set(owners)) > 1
    return by_definition(result["start"], feed, owners, **options)


def plans(name: str, result: Result) -> tuple[LayerPlan, ...]:
    options = train_options(name)
    mode, fraction = result["placed"]
    return plan_layers(
        [shapes for _, shapes in result["shapes"]],
        replicas_of(name),
        mode,
        fraction,
        options.get("assignment"),
        whole_layers=options.get("solver") == "eigen_outer",
    )


def assert_close(
    got: Result, want: Sequence[Array], tolerance: float = EXACT
) -> None:
    """Compares weights by the distance from the start."""
    travelled = distance(want, got["start"])
    assert travelled > 0.1
    assert distance(got["weights"], want) <= tolerance * travelled
