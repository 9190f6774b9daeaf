"""The jobs of the distribution modes, and what they should come to."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support import definition, worker_parts, workers_modes
from tests.support.jobs import Jobs, replicas_of
from tests.support.reference import Array
from tests.support.weights import distance
from tests.support.worker_parts import (
    ADAM_RATE,
    BETAS,
    DEFAULTS,
    MOMENTUM,
    RATE,
    images,
)
from tfkfac.distributed.plan import LayerPlan, plan_layers

Result = Mapping[str, Any]

EXACT = 2e-7  # float64, up to a few float32 numbers

# -------------------------------------------------------------------- jobs
JOBS = Jobs(workers_modes)
# Name: the arguments of `workers_modes.train`.
CASES: dict[str, dict[str, Any]] = {}
# What is not slow has each mode on two workers and on four, and each solver.


def add(
    where: str,
    what: str,
    mode: str,
    slow: bool = False,
    stages: bool = False,
    **kwargs: Any,
) -> None:
    """Adds a case; a mode may bear the fraction of gradient workers."""
    what += ", in stages" * stages
    distribution, _, fraction = mode.partition(" ")
    kwargs["distribution"] = distribution
    if fraction:
        over, _, under = fraction.partition("/")
        kwargs["gradient_worker_fraction"] = int(over) / int(under or 1)
    assert kwargs.get("model") in worker_parts.MODELS
    name = f"{where}: {mode}, {what}"
    CASES[name] = kwargs
    function = "train_in_stages" if stages else "train"
    JOBS.add(name, function, slow=slow, **kwargs)


def add_grid(
    where: str,
    model: str,
    rows: Sequence[tuple[str, str, str, str]],
    slow: bool = False,
    stages: bool = False,
) -> None:
    for mode, solver, inner, sharing in rows:
        add(
            where,
            f"{solver}, {inner}, {model}, {sharing}",
            mode,
            slow,
            stages,
            model=model,
            solver=solver,
            inner=inner,
            weight_sharing=sharing,
        )


# All clusters together: every mode with both solvers and inner optimizers.
add_grid(
    "two",
    "vision",
    [
        ("comm_opt", "inverse", "sgd", "expand"),
        ("mem_opt", "eigen", "sgd", "expand"),
    ],
    slow=True,
)
add_grid(
    "two",
    "text",
    [("mem_opt", "inverse", "sgd", "reduce")],
    slow=True,
)
add_grid(
    "two",
    "cnn",
    [
        ("dp_kfac", "eigen", "adam", "reduce"),
        ("hybrid_opt 1/2", "inverse", "adam", "expand"),
    ],
)
add_grid("two", "language", [("comm_opt", "inverse", "sgd", "expand")])
add_grid(
    "two",
    "language",
    [("hybrid_opt 1/2", "inverse", "adam", "expand")],
    slow=True,
)
add_grid(
    "four",
    "cnn",
    [
        ("comm_opt", "inverse", "adam", "expand"),
        ("hybrid_opt 1/2", "eigen", "sgd", "expand"),
    ],
)
add_grid("four", "cnn", [("dp_kfac", "eigen", "sgd", "expand")], stages=True)
add_grid("four", "cnn", [("mem_opt", "eigen", "adam", "reduce")], slow=True)
add_grid(
    "two", "cnn", [("comm_opt", "eigen_outer", "sgd", "expand")], slow=True
)
add_grid(
    "four",
    "cnn",
    [
        ("comm_opt", "eigen", "sgd", "reduce"),
        ("hybrid_opt 1/2", "eigen_outer", "adam", "reduce"),
        ("dp_kfac", "inverse", "adam", "reduce"),
        ("hybrid_opt 1/4", "inverse", "sgd", "expand"),
    ],
    slow=True,
)
add_grid(
    "mirrored",
    "cnn",
    [("comm_opt", "inverse", "sgd", "expand")],
    slow=True,
    stages=True,
)
add_grid(
    "mirrored",
    "cnn",
    [
        ("dp_kfac", "inverse", "adam", "expand"),
        ("mem_opt", "eigen", "adam", "reduce"),
    ],
    slow=True,
    stages=True,
)
EVERY_STEP = {"factor_update_interval": 1, "inverse_update_interval": 1}
for solver_ in ("inverse", "eigen"):
    add(
        "two",
        f"every step, {solver_}",
        "dp_kfac",
        slow=solver_ == "eigen",
        model="cnn",
        solver=solver_,
        assignment="compute",
        **EVERY_STEP,
    )
for where_, mode_, slow_ in [
    ("two", "comm_opt", False),
    ("two", "mem_opt", True),
    ("four", "hybrid_opt 1", True),
    ("mirrored", "comm_opt", True),
]:
    add(where_, "rows", mode_, slow=slow_, model="wide")
add("two", "rows, NaN", "comm_opt", True, model="wide", poison=(3, 1))
add("two", "late", "dp_kfac", True, model="cnn", feed="late")
add(
    "two",
    "same rows, language",
    "dp_kfac",
    True,
    model="language",
    feed="same",
)
add(
    "two",
    "float32",
    "comm_opt",
    slow=True,
    model="vision",
    feed="some",
    dtype="float32",
)
add("two", "float32", "mem_opt", True, model="small", dtype="float32")
for mode_, what_, slow_ in [
    ("comm_opt", "global clipnorm, average", True),
    ("mem_opt", "accumulation, average, decay", True),
]:
    add("two", what_, mode_, slow=slow_, model="small", inner=what_)
add(
    "two",
    "schedules",
    "comm_opt",
    slow=True,
    model="small",
    damping="damping schedule",
    kl_clip="clip schedule",
)
add(
    "two",
    "changed numbers",
    "mem_opt",
    model="small",
    changes={
        2: {"learning_rate": RATE / 2, "damping": 1.0, "kl_clip": 2**-9},
        3: {"factor_update_interval": 1, "inverse_update_interval": 2},
    },
)
add("two", "batch norm", "comm_opt", model="batch_norm", feed="some")
add(
    "mirrored",
    "batch norm",
    "mem_opt",
    slow=True,
    model="batch_norm",
    feed="some",
)
add("two", "eager", "mem_opt", True, model="small", eager=True)
# Drawn labels go back through a normalisation that adds up over the workers.
for where_, mode_, model_, slow_ in [
    ("two", "comm_opt", "batch_norm", False),
    ("four", "hybrid_opt 1/2", "small", True),
]:
    add(
        where_,
        f"given labels, {model_}",
        mode_,
        slow=slow_,
        model=model_,
        feed="some",
        fisher="monte_carlo",
        given_labels=True,
    )
add("two", "type2", "mem_opt", slow=True, model="small", fisher="type2")
for where_, mode_, model_, slow_ in [
    ("two", "dp_kfac", "batch_norm", True),
    ("mirrored", "comm_opt", "small", True),
]:
    add(
        where_,
        f"drawn labels, {model_}",
        mode_,
        slow=slow_,
        model=model_,
        fisher="monte_carlo",
        feed="some" if model_ == "batch_norm" else "uneven",
    )
add(
    "two",
    "triangles",
    "comm_opt",
    model="vision",
    symmetric=True,
)
add(
    "four",
    "triangles, adam",
    "hybrid_opt 1/2",
    slow=True,
    model="cnn",
    inner="adam",
    symmetric=True,
)
HALF: dict[str, dict[str, Any]] = {
    dtype: {"factor_dtype": dtype, "inverse_dtype": "bfloat16"}
    for dtype in ("bfloat16", "float16")
}
for solver_, dtype_ in [("inverse", "float16"), ("eigen", "bfloat16")]:
    add(
        "two",
        dtype_,
        "comm_opt",
        slow=True,
        model="small",
        solver=solver_,
        **HALF[dtype_],
    )
# The inputs of the hidden layer, 51 with the bias, as a sketch.
for where_, mode_, solver_, slow_, kwargs_ in [
    ("two", "comm_opt", "inverse", False, {"symmetric": True}),
    ("two", "mem_opt", "eigen", True, {}),
    ("two", "dp_kfac", "inverse", False, {"feed": "same"}),
    ("two", "comm_opt", "eigen_outer", True, {}),
    ("four", "hybrid_opt 1/4", "eigen", True, {}),
    ("mirrored", "comm_opt", "inverse", True, {}),
    ("two", "hybrid_opt 1/2", "inverse", True, HALF["bfloat16"]),
    ("two", "mem_opt", "inverse", True, HALF["float16"]),
]:
    add(
        where_,
        f"sketch, {solver_}",
        mode_,
        slow_,
        model="small",
        solver=solver_,
        max_factor_dim=10,
        factor_rank=3,
        **kwargs_,
    )
# Step and worker of a batch of NaN.
add("two", "NaN", "comm_opt", model="cnn", poison=(3, 1))
add("two", "NaN", "dp_kfac", slow=True, model="cnn", poison=(0, 0))


FITS = {
    # A clip would undo a wrong weight of the last row.
    "two: arrays": {"rows": 17, "policy": None, "kl_clip": None},
    "two: DATA": {"rows": 13, "policy": "DATA", "distribution": "dp_kfac"},
    "two: OFF": {"rows": 12, "policy": "OFF"},
}
# Decompositions in turns: the arguments of `workers_modes.train`.
TURNS = {
    "two: turns": {"distribution": "comm_opt"},
    "four: turns": {
        "distribution": "hybrid_opt",
        "gradient_worker_fraction": 0.5,
        "solver": "eigen",
    },
}
# Steps by the quadratic model: the arguments of `workers_modes.train`. A part
# of the batch is made of other rows on several workers than on one.
QUADRATIC: dict[str, dict[str, Any]] = {
    "two: quadratic": {"damping": "adaptive"},
    "two: quadratic, dp_kfac": {
        "distribution": "dp_kfac",
        "feed": "same",
        "skip_layers": ("hidden",),
    },
    "two: quadratic, batch norm": {
        "model": "batch_norm",
        "feed": "some",
        "damping": "adaptive",
        "distribution": "mem_opt",
    },
    "two: quadratic, accumulation": {
        "inner": "multiplier, accumulation",
        "quadratic_batch_fraction": 0.25,
    },
    "two: quadratic, NaN": {"poison": (3, 1), "damping": "adaptive"},
    "four: quadratic": {
        "damping": "adaptive",
        "distribution": "hybrid_opt",
        "gradient_worker_fraction": 0.5,
    },
    "mirrored: quadratic": {"damping": "adaptive", "model": "text"},
}
# Statistics of a part of uneven batches, of 7 rows and 1 row.
PARTS = {"two: parts": [[[0, 1, 2], [3, 4, 5, 6], [7], []]]}
LOOPS = {"two: loop": "comm_opt", "mirrored: loop": "dp_kfac"}
REFUSALS = [f"{where}: refusals" for where in ("two", "four", "mirrored")]
DISAGREEMENTS = ["two: disagreement"]

for name_, kwargs_ in FITS.items():
    JOBS.add(name_, "fit", slow=name_ != "two: arrays", **kwargs_)
for name_, kwargs_ in TURNS.items():
    slow_ = name_.startswith("four")
    JOBS.add(name_, "train_in_turns", slow=slow_, model="vision", **kwargs_)
for name_, kwargs_ in QUADRATIC.items():
    QUADRATIC[name_] = kwargs_ = {
        "model": "small",
        "inner": "multiplier",
        "step": "quadratic",
        "quadratic_batch_fraction": 1.0,
        **kwargs_,
    }
    JOBS.add(name_, "train", slow=name_ != "two: quadratic", **kwargs_)
for name_, feed_ in PARTS.items():
    JOBS.add(
        name_, "train", model="small", feed=feed_, factor_batch_fraction=0.25
    )
for name_, mode_ in LOOPS.items():
    JOBS.add(name_, "loop", mode_, slow=name_.startswith("mirrored"))
for name_ in REFUSALS:
    JOBS.add(name_, "refusals", slow=name_.startswith("four"))
for name_ in DISAGREEMENTS:
    JOBS.add(name_, "disagreement")


def options_of(name: str) -> dict[str, Any]:
    return CASES[name]


def names(*models: str, **wanted: Any) -> list[str]:
    """Cases with one of the models, all if none, and these arguments."""
    return [
        name
        for name, kwargs in CASES.items()
        if not models or kwargs["model"] in models
        if all(kwargs.get(k) == v for k, v in wanted.items())
    ]


# ---------------------------------------------------------- single process
_SHARED = {
    "distribution",
    "gradient_worker_fraction",
    "assignment",
    "symmetric",
    "factor_dtype",
    "inverse_dtype",
    "poison",
}


def alone(name: str, **changes: Any) -> Result:
    """What a single process, this one, gets on the same global batches."""
    options = QUADRATIC.get(name) or options_of(name)
    kwargs = {k: v for k, v in options.items() if k not in _SHARED}
    kwargs |= changes
    key = repr(sorted(kwargs.items()))
    if key not in _ALONE:
        _ALONE[key] = workers_modes.train(None, **kwargs)
    return _ALONE[key]


_ALONE: dict[str, Result] = {}


def by_definition(
    start: Sequence[Array],
    steps: Sequence[Sequence[Sequence[int]]],
    owners: Sequence[int] | None,
    inner: str = "sgd",
    solver: str = "inverse",
    weight_sharing: str = "expand",
    **options: Any,
) -> list[Array]:
    known = {k: v for k, v in options.items() if k in DEFAULTS}
    update, rate = definition.sgd(RATE, MOMENTUM), RATE
    if inner == "adam":
        update, rate = definition.adam(ADAM_RATE, *BETAS), ADAM_RATE
    settings = definition.Settings(
        solver=solver,
        weight_sharing=weight_sharing,
        learning_rate=rate,
        inner=update,
        owners=owners,
        **(DEFAULTS | known),
    )
    start = [w.astype(float) for w in start]
    return definition.train(start, images(), steps, settings)


def plans(name: str, result: Result) -> tuple[LayerPlan, ...]:
    options = options_of(name)
    return plan_layers(
        [shapes for _, shapes in result["shapes"]],
        replicas_of(name),
        options["distribution"],
        options.get("gradient_worker_fraction"),
        options.get("assignment"),
        whole_layers=options.get("solver") == "eigen_outer",
    )


def owners_of(plan: Sequence[LayerPlan]) -> list[int]:
    return [next(iter(layer.owners.values())) for layer in plan]


def assert_close(
    got: Result, want: Sequence[Array], tolerance: float = EXACT
) -> None:
    """Compares weights by the distance from the start."""
    travelled = distance(want, got["start"])
    assert travelled > 0.1
    assert distance(got["weights"], want) <= tolerance * travelled
