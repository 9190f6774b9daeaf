"""The distribution modes in real clusters.

Most cases train in float64, where a job on several workers and a single
process differ by rounding of 1e-15 and by what K-FAC keeps in float32 (the
clip `nu`, the share of a worker's rows). Differences are measured against the
distance that all weights together have travelled: single weights may not move
at all, as the bias of an attention's keys.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support import definition, workers_modes
from tests.support.cluster import Case, Outcome, run_cases
from tests.support.reference import Array
from tests.support.workers_modes import (
    ADAM_RATE,
    BETAS,
    DEFAULTS,
    FEEDS,
    MOMENTUM,
    RATE,
    Collective,
    images,
    shares,
    small,
)
from tfkfac.distributed.assignment import LayerPlan, plan_layers

Result = Mapping[str, Any]
Results = Callable[[str], list[Result]]

EXACT = 2e-7  # float64, up to a few float32 numbers
SINGLE = 1e-5  # float32

# ------------------------------------------------------------------- cases
# Name: where, and the arguments of `workers_modes.train`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {}
# Processes, devices of each, and the kind of strategy.
CLUSTERS = {
    "two": (2, 1, "multi"),
    "four": (4, 1, "multi"),
    "mirrored": (1, 2, "mirrored"),
}


def add(where: str, what: str, mode: str, **kwargs: Any) -> None:
    """Adds a case; a mode may bear the fraction of gradient workers."""
    distribution, _, fraction = mode.partition(" ")
    kwargs["distribution"] = distribution
    if fraction:
        over, _, under = fraction.partition("/")
        kwargs["gradient_worker_fraction"] = int(over) / int(under or 1)
    assert kwargs.get("model") in workers_modes.MODELS
    CASES[f"{where}: {mode}, {what}"] = where, kwargs


def add_grid(where: str, model: str, rows: Sequence[tuple[str, ...]]) -> None:
    for mode, solver, inner, sharing in rows:
        add(
            where,
            f"{solver}, {inner}, {model}, {sharing}",
            mode,
            model=model,
            solver=solver,
            inner=inner,
            weight_sharing=sharing,
        )


# Both clusters together: every mode with both solvers and inner optimizers.
add_grid(
    "two",
    "vision",
    [
        ("comm_opt", "inverse", "sgd", "expand"),
        ("comm_opt", "eigen", "adam", "reduce"),
        ("mem_opt", "inverse", "adam", "reduce"),
        ("mem_opt", "eigen", "sgd", "expand"),
    ],
)
add_grid(
    "two",
    "text",
    [
        ("comm_opt", "eigen", "sgd", "expand"),
        ("mem_opt", "inverse", "sgd", "reduce"),
    ],
)
add_grid(
    "two",
    "cnn",
    [
        ("dp_kfac", "inverse", "sgd", "expand"),
        ("dp_kfac", "eigen", "adam", "reduce"),
        ("hybrid_opt 1/2", "inverse", "adam", "expand"),
    ],
)
add_grid(
    "four",
    "cnn",
    [
        ("comm_opt", "inverse", "adam", "expand"),
        ("comm_opt", "eigen", "sgd", "reduce"),
        ("mem_opt", "inverse", "sgd", "expand"),
        ("mem_opt", "eigen", "adam", "reduce"),
        ("dp_kfac", "inverse", "adam", "reduce"),
        ("dp_kfac", "eigen", "sgd", "expand"),
        ("hybrid_opt 1/4", "inverse", "sgd", "expand"),
        ("hybrid_opt 1/4", "eigen", "adam", "reduce"),
        ("hybrid_opt 1/2", "eigen", "sgd", "expand"),
        ("hybrid_opt 1", "inverse", "sgd", "expand"),
        ("hybrid_opt 1", "eigen", "adam", "reduce"),
    ],
)
add_grid(
    "mirrored",
    "cnn",
    [
        ("comm_opt", "inverse", "sgd", "expand"),
        ("mem_opt", "eigen", "adam", "reduce"),
        ("hybrid_opt 1/2", "inverse", "sgd", "reduce"),
        ("dp_kfac", "inverse", "adam", "expand"),
    ],
)
EVERY_STEP = {"factor_update_interval": 1, "inverse_update_interval": 1}
for solver_ in ("inverse", "eigen"):
    add(
        "two",
        f"every step, {solver_}",
        "dp_kfac",
        model="cnn",
        solver=solver_,
        assignment="compute",
        **EVERY_STEP,
    )
add("two", "late", "dp_kfac", model="cnn", feed="late")
add("two", "same rows, text", "dp_kfac", model="text", feed="same")
add("two", "float32", "comm_opt", model="vision", feed="some", dtype="float32")
add("two", "float32", "mem_opt", model="small", dtype="float32")
for mode_, what_ in [
    ("comm_opt", "clipnorm, decay"),
    ("mem_opt", "global clipnorm, average"),
    ("comm_opt", "accumulation, clipvalue"),
    ("mem_opt", "accumulation, average, decay"),
]:
    add("two", what_, mode_, model="small", inner=what_)
add(
    "two",
    "schedules",
    "comm_opt",
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
add("two", "even, batch norm", "comm_opt", model="batch_norm", feed="even")
add("mirrored", "even, batch norm", "mem_opt", model="batch_norm", feed="even")
add("two", "eager", "mem_opt", model="small", eager=True)
add(
    "two",
    "triangles",
    "comm_opt",
    model="vision",
    symmetric_communication=True,
)
add(
    "four",
    "triangles, adam",
    "hybrid_opt 1/2",
    model="cnn",
    inner="adam",
    symmetric_communication=True,
)
for solver_, dtype_ in [("inverse", "float16"), ("eigen", "bfloat16")]:
    add(
        "two",
        dtype_,
        "comm_opt",
        model="small",
        solver=solver_,
        factor_dtype=dtype_,
        inverse_dtype=dtype_,
    )
# Step and worker of a batch of NaN.
add("two", "NaN", "comm_opt", model="cnn", poison=(3, 1))
add("two", "NaN", "dp_kfac", model="cnn", poison=(0, 0))

FITS = {
    # A clip would undo a wrong weight of the last row.
    "arrays": {"rows": 17, "policy": None, "kl_clip": None},
    "DATA": {"rows": 13, "policy": "DATA", "distribution": "dp_kfac"},
    "OFF": {"rows": 12, "policy": "OFF"},
}
LOOPS = {"two": ["comm_opt"], "mirrored": ["dp_kfac"]}
MODULE = workers_modes.__name__
TIME_LIMIT = 400.0  # seconds for a cluster; it takes a quarter when quiet


@pytest.fixture(scope="module")
def results() -> Results:
    """Gives the results of a case by worker; starts its cluster if need be."""

    @functools.cache
    def outcomes(where: str) -> dict[str, Outcome]:
        workers, devices, kind = CLUSTERS[where]
        cases = {
            name: Case(f"{MODULE}:train", (kind,), kwargs)
            for name, (place, kwargs) in CASES.items()
            if place == where
        }
        if where == "two":
            for name, kwargs in FITS.items():
                cases[f"two: {name}"] = Case(f"{MODULE}:fit", (kind,), kwargs)
        for mode in LOOPS.get(where, ()):
            name = f"{where}: loop, {mode}"
            cases[name] = Case(f"{MODULE}:loop", (kind, mode))
        last = "disagreement" if devices == 1 else "parameter_server"
        for function in ("refusals", last):
            name = f"{where}: {function}"
            cases[name] = Case(f"{MODULE}:{function}", (kind,))
        return run_cases(cases, workers, devices, time_limit=TIME_LIMIT)

    def get(name: str) -> list[Result]:
        return outcomes(name.partition(":")[0])[name].get()

    return get


def workers_of(name: str) -> int:
    workers, devices, _ = CLUSTERS[name.partition(":")[0]]
    return workers * devices


def options_of(name: str) -> dict[str, Any]:
    return CASES[name][1]


def names(*models: str, **wanted: Any) -> list[str]:
    """Cases with one of the models, all if none, and these arguments."""
    return [
        name
        for name, (_, kwargs) in CASES.items()
        if not models or kwargs["model"] in models
        if all(kwargs.get(k) == v for k, v in wanted.items())
    ]


# ---------------------------------------------------------- single process
_SHARED = {
    "distribution",
    "gradient_worker_fraction",
    "assignment",
    "symmetric_communication",
    "factor_dtype",
    "inverse_dtype",
    "poison",
}


def alone(name: str, **changes: Any) -> Result:
    """What a single process, this one, gets on the same global batches."""
    kwargs = {k: v for k, v in options_of(name).items() if k not in _SHARED}
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
        workers_of(name),
        options["distribution"],
        options.get("gradient_worker_fraction"),
        options.get("assignment"),
    )


def owners_of(plan: Sequence[LayerPlan]) -> list[int]:
    return [next(iter(layer.owners.values())) for layer in plan]


def distance(a: Sequence[Array], b: Sequence[Array]) -> float:
    squares = [
        np.sum((np.asarray(x, float) - y) ** 2)
        for x, y in zip(a, b, strict=True)
    ]
    return float(np.sqrt(np.sum(squares)))


def assert_close(
    got: Result, want: Sequence[Array], tolerance: float = EXACT
) -> None:
    """Compares weights by the distance from the start."""
    travelled = distance(want, got["start"])
    assert travelled > 0.1
    assert distance(got["weights"], want) <= tolerance * travelled


def assert_same_bits(workers: Sequence[Result]) -> None:
    first, *others = [copy for w in workers for copy in w["copies"]]
    assert others
    for other in others:
        for got, want in zip(other, first, strict=True):
            np.testing.assert_array_equal(got, want)


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", CASES)
def test_same_bits_everywhere(results, name):
    """Weights, moving statistics and the inner optimizer's slots."""
    workers = results(name)
    assert_same_bits(workers)
    for key in ("iterations", "traces"):
        assert len({w[key] for w in workers}) == 1
    skipped = 1 if "poison" in options_of(name) else 0
    assert {n for w in workers for n in w["skipped"]} == {skipped}
    assert workers[0]["iterations"] == 10 - skipped or "accumulation" in name


@pytest.mark.parametrize("name", CASES)
def test_updates(results, name):
    """All workers do the same number; alone, an owner needs rows for it."""
    workers = results(name)
    updates = [pair for w in workers for pair in w["updates"]]
    options = options_of(name)
    if options["distribution"] != "dp_kfac":
        assert len(set(updates)) == 1
        if "changes" not in options and "accumulation" not in name:
            assert updates[0] == (5, 3)
        return
    owners = owners_of(plans(name, workers[0]))
    for rank, (factors, inverses) in enumerate(updates):
        assert bool(factors) == bool(inverses) == (rank in owners)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in names("vision", "text", "small", "batch_norm")
        if "factor_dtype" not in options_of(name)
    ],
)
def test_equals_one_process(results, name):
    """On the same global batches, of which some workers may have no row."""
    single = alone(name)
    single_precision = options_of(name).get("dtype") == "float32"
    for worker in results(name):
        np.testing.assert_equal(worker["start"], single["start"])
        assert_close(
            worker, single["weights"], SINGLE if single_precision else EXACT
        )


@pytest.mark.parametrize("name", names("cnn"))
def test_definition(results, name):
    workers = results(name)
    options = dict(options_of(name))
    feed = shares(FEEDS[options.get("feed", "uneven")](), workers_of(name))
    if "poison" in options:
        # All leave out that step, whoever had the NaN.
        step, _ = options["poison"]
        del feed[step]
    owners = None
    if options["distribution"] == "dp_kfac":
        owners = owners_of(plans(name, workers[0]))
        # Another worker's rows would make a difference.
        assert len(set(owners)) > 1
    want = by_definition(workers[0]["start"], feed, owners, **options)
    for worker in workers:
        assert_close(worker, want)


@pytest.mark.parametrize("dtype,bits", [("float16", 11), ("bfloat16", 8)])
def test_half_precision(results, dtype, bits):
    """Off by a few roundings of the dtype, and not by none."""
    (name,) = names(factor_dtype=dtype)
    want = alone(name)["weights"]
    for worker in results(name):
        assert_close(worker, want, 5 * 2.0**-bits)
        assert distance(worker["weights"], want) > 1e-3 * 2.0**-bits


# --------------------------------------------------------- state and plans
@pytest.mark.parametrize("name", CASES)
def test_state_is_what_the_plan_says(results, name):
    workers = results(name)
    plan = plans(name, workers[0])
    options = options_of(name)
    dtype = options.get("factor_dtype", options.get("dtype", "float64"))
    width = tf.as_dtype(dtype).size
    solver = options.get("solver", "inverse")
    for rank, (worker, kept) in enumerate(replicas_of(workers)):
        assert kept["total"] == kept["factors"] + kept["decompositions"]
        expected = {"factors": 0, "decompositions": 0}
        decomposed = 0
        for layer, (_, shapes) in zip(plan, worker["shapes"], strict=True):
            owned = [shapes[f] for f in layer.owned_by(rank)]
            expected["factors"] += width * sum(map(elements, owned))
            decomposed += sum(len(shape) > 1 for shape in owned)
            if rank in layer.gradient_workers:
                size = decomposition_elements(shapes, solver)
                expected["decompositions"] += width * size
        assert kept == expected | {"total": sum(expected.values())}
        if len(workers) > 1:
            assert worker["state_bytes"] == kept
            if "eager" not in options:
                assert worker["decompositions"] == decomposed
            assert {
                path: tuple(factors)
                for path, factors in worker["factors"].items()
            } == {
                path: layer.owned_by(rank)
                for layer, (path, _) in zip(plan, worker["shapes"], strict=True)
                if layer.owned_by(rank)
            }


def replicas_of(
    workers: Sequence[Result],
) -> list[tuple[Result, Mapping[str, int]]]:
    return [(w, kept) for w in workers for kept in w["kept"]]


def elements(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def decomposition_elements(shapes: Mapping[str, Any], solver: str) -> int:
    """Inverses; or eigenvectors and the outer sum of the eigenvalues."""
    if solver == "inverse":
        return sum(map(elements, shapes.values()))
    matrices = [s for s in shapes.values() if len(s) > 1]
    inputs = shapes["A"][-1] if "A" in shapes else 1
    outer = elements(shapes["G"][:-1]) * inputs
    return sum(map(elements, matrices)) + outer


@pytest.mark.parametrize("where", ["two", "four"])
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_dp_kfac_divides_the_state(results, where, solver):
    (name,) = [
        n
        for n in names("cnn", distribution="dp_kfac", solver=solver)
        if n.startswith(f"{where}:") and "every" not in n
    ]
    totals = [w["state_bytes"]["total"] for w in results(name)]
    assert sum(totals) == alone(name)["state_bytes"]["total"]


@pytest.mark.parametrize("name", CASES)
def test_summary_shows_the_plan(results, name):
    for worker in results(name):
        lines = worker["summary"].splitlines()
        assert any("Owner  " in line for line in lines)
        plan = plans(name, worker)
        for layer, (path, _) in zip(plan, worker["shapes"], strict=True):
            (line,) = [li for li in lines if li.split(" ")[0] == path]
            cells = re.split(r"\s{2,}", line)
            members = ", ".join(map(str, layer.gradient_workers))
            assert cells[-1] == members
            owners = set(layer.owners.values())
            single = str(next(iter(owners)))
            each = ", ".join(f"{n}: {o}" for n, o in layer.owners.items())
            assert cells[-2] == (single if len(owners) == 1 else each)


# ----------------------------------------------------------- communication
@pytest.mark.parametrize(
    "name",
    # Replicas of one process share a graph; an eager step has none.
    [n for n in CASES if not n.startswith("mirrored") and "eager" not in n],
)
def test_communication_is_what_the_plan_says(results, name):
    workers = results(name)
    count = len(workers)
    mode = options_of(name)["distribution"]
    for worker in workers:
        # TensorFlow's own, for the loss and synchronised layers, are V2.
        ops = [o for o in worker["collectives"] if o.kind != "ReduceV2"]
        kinds = {
            (depth, kind): [
                o for o in ops if (o.depth, o.kind) == (depth, kind)
            ]
            for depth in (0, 1, 2)
            for kind in ("Reduce", "BcastSend", "BcastRecv")
        }
        assert sum(map(len, kinds.values())) == len(ops)
        # The rows of all workers, and all gradients at once.
        rows, gradients = kinds[0, "Reduce"]
        assert rows.elements == 1
        reported = worker["communication_bytes"]
        for kind, row in reported.items():
            assert row["gradients"] == ring(count, [gradients])
            assert row["preconditioned_gradients"] == total(
                kinds[1, "BcastRecv"]
            )
            assert row["factors"] == (kind == "factor") * ring(
                count, kinds[2, "Reduce"]
            )
            assert row["decompositions"] == (kind == "inverse") * total(
                kinds[2, "BcastRecv"]
            )
        assert not kinds[0, "BcastSend"] + kinds[0, "BcastRecv"]
        assert not kinds[1, "Reduce"]
        fraction = options_of(name).get("gradient_worker_fraction")
        if mode == "comm_opt" or fraction == 1:
            assert not [o for o in ops if o.depth == 1]
            assert reported["plain"]["preconditioned_gradients"] == 0
        if mode == "dp_kfac":
            assert not [o for o in ops if o.depth == 2]
            assert reported["factor"]["factors"] == 0
        else:
            # Counts and sums.
            assert len(kinds[2, "Reduce"]) == 2
        if mode == "mem_opt" or fraction == 1 / count:
            assert not kinds[2, "BcastRecv"]
    for depth in (1, 2):
        ops = [o for w in workers for o in w["collectives"] if o.depth == depth]
        sent = [o for o in ops if o.kind == "BcastSend"]
        received = [o for o in ops if o.kind == "BcastRecv"]
        assert sum(o.bytes * (o.group - 1) for o in sent) == total(received)


def total(ops: Sequence[Collective]) -> int:
    return sum(op.bytes for op in ops)


def ring(workers: int, ops: Sequence[Collective]) -> int:
    """What each worker receives in ring all-reduces."""
    return round(2 * total(ops) * (workers - 1) / workers)


def test_triangles_are_smaller(results):
    squares = "two: comm_opt, inverse, sgd, vision, expand"
    for got, want in zip(
        results("two: comm_opt, triangles"), results(squares), strict=True
    ):
        for kind, what in [
            ("factor", "factors"),
            ("inverse", "decompositions"),
        ]:
            smaller = got["communication_bytes"][kind][what]
            whole = want["communication_bytes"][kind][what]
            assert 0.5 * whole < smaller < 0.65 * whole


# --------------------------------------------------------------------- fit
def test_fit_divides_global_batches(results):
    """Of 8 rows; the last one's single row leaves nothing for a worker."""
    assert seen(results, "arrays") == [
        [[0, 1, 2, 3], [8, 9, 10, 11], [16]],
        [[4, 5, 6, 7], [12, 13, 14, 15], []],
    ]
    assert seen(results, "DATA") == [
        [[0, 1, 2, 3], [8, 9, 10]],
        [[4, 5, 6, 7], [11, 12]],
    ]


def test_fit_without_sharding(results):
    """Both workers take the same rows, for as many steps as are expected."""
    assert seen(results, "OFF") == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


def seen(results: Results, name: str) -> list[Any]:
    return [worker["seen"] for worker in results(f"two: {name}")]


@pytest.mark.parametrize("name", FITS)
def test_fit_is_the_definition(results, name):
    workers = results(f"two: {name}")
    assert_same_bits(workers)
    steps = list(zip(*[w["seen"] for w in workers], strict=True))
    owners = None
    if FITS[name].get("distribution") == "dp_kfac":
        owners = [0, 1, 0]
    want = by_definition(workers[0]["start"], steps, owners, **FITS[name])
    for worker in workers:
        assert_close(worker, want)


@pytest.mark.parametrize("where", LOOPS)
def test_custom_loop(results, where):
    for mode in LOOPS[where]:
        workers = results(f"{where}: loop, {mode}")
        assert_same_bits(workers)
        feed = shares(FEEDS["even"](), workers_of(where))
        owners = [0, 1, 0] if mode == "dp_kfac" else None
        want = by_definition(workers[0]["start"], feed, owners)
        for worker in workers:
            assert_close(worker, want)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("where", CLUSTERS)
def test_refusals(results, where):
    for found in results(f"{where}: refusals"):
        assert "`steps_per_execution` must be 1" in found["steps_per_execution"]
        assert "`jit_compile` must not be True" in found["jit_compile"]
        assert "`LossScaleOptimizer`" in found["LossScaleOptimizer"]


@pytest.mark.parametrize("where", ["two", "four"])
def test_disagreement_is_reported_everywhere(results, where):
    for message in results(f"{where}: disagreement"):
        assert "All workers must train the same model" in message
        assert "argument damping: 1.0 on worker 0, 2.0 on worker 1" in message


def test_parameter_servers_are_refused(results):
    (message,) = results("mirrored: parameter_server")
    assert "must be a `MirroredStrategy`" in message


def test_central_storage_is_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        model = small()
        with pytest.raises(ValueError, match="must be a `MirroredStrategy`"):
            model.compile(tfkfac.KFAC(), "mse")
