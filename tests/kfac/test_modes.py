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
from tests.support import cluster, workers_modes, workers_terms
from tests.support.cluster import Pool
from tests.support.graphs import Collective
from tests.support.jobs import Jobs, replicas_of
from tests.support.mode_cases import (
    CASES,
    DISAGREEMENTS,
    EXACT,
    FITS,
    JOBS,
    LOOPS,
    PARTS,
    QUADRATIC,
    REFUSALS,
    TURNS,
    Result,
    alone,
    assert_close,
    by_definition,
    names,
    options_of,
    owners_of,
    plans,
)
from tests.support.weights import assert_same_bits, distance
from tests.support.worker_parts import FEEDS, MODELS, images, shares, small

Results = Callable[[str], list[Result]]
SINGLE = 1e-5  # float32


@pytest.fixture
def results(pool: Pool) -> Results:
    """Gives the results of a job by worker."""
    return functools.partial(JOBS.results, pool)


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_same_bits_everywhere(results, name):
    """Weights, moving statistics and the inner optimizer's slots."""
    workers = results(name)
    assert_same_bits(workers)
    for key in ("iterations", "traces"):
        assert len({w[key] for w in workers}) == 1
    skipped = 1 if "poison" in options_of(name) else 0
    assert {n for w in workers for n in w["skipped"]} == {skipped}
    assert workers[0]["iterations"] == 10 - skipped or "accumulation" in name


@pytest.mark.parametrize("name", JOBS.params(CASES))
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
    JOBS.params(
        name
        for name in names(*(set(MODELS) - {"cnn"}))
        if not {"factor_dtype", "poison"} & set(options_of(name))
        if "drawn labels" not in name
    ),
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


@pytest.mark.parametrize("name", JOBS.params(TURNS))
def test_turns_are_those_of_one_process(results, name):
    """Whatever the workers: steps and turns are of the model alone."""
    workers = results(name)
    assert_same_bits(workers)
    solver = TURNS[name].get("solver", "inverse")
    single = workers_modes.train_in_turns(None, model="vision", solver=solver)
    same = [n for n in names("vision", solver=solver) if n.startswith("two")]
    at_once = alone(same[0])
    # The first turn at 1, 5 and 9, the second at 3 and 7, both at the start.
    assert {pair for w in workers for pair in w["updates"]} == {(5, 6)}
    for worker in workers:
        assert_close(worker, single["weights"])
        assert distance(worker["weights"], at_once["weights"]) > 1e-4


@pytest.mark.parametrize("name", JOBS.params(QUADRATIC))
def test_quadratic_steps(results, name):
    """The same on all workers, and as in one process on the same examples."""
    workers = results(name)
    assert_same_bits(workers)
    options, found = QUADRATIC[name], [w["last_step"] for w in workers]
    assert found.count(found[0]) == len(found)
    assert found[0]["predicted_reduction"] > 0
    if options.get("damping") == "adaptive" and "poison" not in options:
        assert "actual_reduction" in found[0]
    if options["quadratic_batch_fraction"] == 1 and "poison" not in options:
        single = alone(name)
        for worker in workers:
            assert_close(worker, single["weights"])


@pytest.mark.parametrize("name", JOBS.params(PARTS))
def test_parts_weigh_as_much_as_their_batches(results, name):
    """Two of the one worker's rows stand for seven, the other's for itself."""
    workers = results(name)
    assert_same_bits(workers)
    x, _ = images()
    rows = np.concatenate([x.reshape(len(x), -1), np.ones((len(x), 1))], 1)
    weights = np.zeros(len(x))
    weights[[0, 3, 7]] = 3.5, 3.5, 1
    want = (rows * weights[:, None]).T @ rows / 8
    (got,) = (
        kept["A"]
        for worker in workers
        for path, kept in worker["factors"].items()
        if path.endswith("hidden") and "A" in kept
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", JOBS.params(names("cnn")))
def test_definition(results, name):
    workers = results(name)
    options = dict(options_of(name))
    feed = shares(FEEDS[options.get("feed", "uneven")](), replicas_of(name))
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


@pytest.mark.parametrize(
    "name",
    JOBS.params(n for n in CASES if "factor_dtype" in options_of(n)),
)
def test_half_precision(results, name):
    """Off by a few roundings of the coarser dtype, and not by none."""
    options = options_of(name)
    dtypes = [options["factor_dtype"], options["inverse_dtype"]]
    bits = min({"float16": 11, "bfloat16": 8}[dtype] for dtype in dtypes)
    want = alone(name)["weights"]
    for worker in results(name):
        assert_close(worker, want, 5 * 2.0**-bits)
        assert distance(worker["weights"], want) > 1e-3 * 2.0**-bits


# --------------------------------------------------------- state and plans
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_state_is_what_the_plan_says(results, name):
    workers = results(name)
    plan = plans(name, workers[0])
    options = options_of(name)
    dtype = options.get("dtype", "float64")
    width = tf.as_dtype(dtype).size
    inverse_width = tf.as_dtype(options.get("inverse_dtype", dtype)).size
    solver = options.get("solver", "inverse")
    for rank, (worker, kept) in enumerate(kept_by(workers)):
        assert kept["total"] == sum(kept.values()) - kept["total"]
        expected = {"factors": 0, "decompositions": 0}
        if "accumulation" in name:
            # Of the weights, and of all factors with their numbers of rows.
            sizes = [w.size for w in worker["weights"]]
            for _, shapes in worker["shapes"]:
                sizes += [elements(shape) + 1 for shape in shapes.values()]
            expected["accumulation"] = width * sum(sizes)
        decomposed = 0
        for layer, (_, shapes) in zip(plan, worker["shapes"], strict=True):
            owned = [shapes[f] for f in layer.owned_by(rank)]
            expected["factors"] += width * sum(map(elements, owned))
            # Of a sketch twice, to approximate it and then.
            decomposed += sum(
                (len(shape) > 1) + is_sketch(shape) for shape in owned
            )
            if rank in layer.gradient_workers:
                size = decomposition_elements(shapes, solver)
                expected["decompositions"] += inverse_width * size
        assert kept == expected | {"total": sum(expected.values())}
        if len(workers) > 1:
            assert worker["state_bytes"] == kept
            if "eager" not in options:
                assert worker["decompositions"] == decomposed


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_factors_are_those_of_the_replicas_of_a_process(results, name):
    workers = results(name)
    plan = plans(name, workers[0])
    first = 0
    for worker in workers:
        ranks = range(first, first + len(worker["kept"]))
        first = ranks.stop
        kept = {
            path: [f for f in layer.owners if layer.owners[f] in ranks]
            for layer, (path, _) in zip(plan, worker["shapes"], strict=True)
        }
        got = {path: list(found) for path, found in worker["factors"].items()}
        assert got == {path: found for path, found in kept.items() if found}
        assert list(got) == [path for path in kept if path in got]
    assert first == replicas_of(name)


@pytest.mark.parametrize(
    "name",
    JOBS.params(
        n
        for n in names("cnn", distribution="comm_opt")
        if "poison" not in options_of(n)
    ),
)
def test_factors_equal_those_of_one_process(results, name):
    want = alone(name)["factors"]
    for worker in results(name):
        for path, found in worker["factors"].items():
            for factor, value in found.items():
                np.testing.assert_allclose(
                    value, want[path][factor], rtol=1e-5, atol=1e-6
                )


def kept_by(
    workers: Sequence[Result],
) -> list[tuple[Result, Mapping[str, int]]]:
    return [(w, kept) for w in workers for kept in w["kept"]]


def elements(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def decomposition_elements(shapes: Mapping[str, Any], solver: str) -> int:
    """Inverses; or eigenvectors and the outer sum of the eigenvalues.

    Of a sketch, which has a row more, as many vectors; and their number of
    eigenvalues and one, or one number.
    """
    total = sum(
        elements(shape) - is_sketch(shape) * shape[-1]
        for shape in shapes.values()
        if solver == "inverse" or len(shape) > 1
    )
    if solver == "inverse":
        return total + sum(map(is_sketch, shapes.values()))
    inputs, outputs = (
        shapes[name][-1] + is_sketch(shapes[name]) if name in shapes else 1
        for name in ("A", "G")
    )
    return total + elements(shapes["G"][:-2]) * inputs * outputs


def is_sketch(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and shape[-1] != shape[-2]


@pytest.mark.parametrize(
    "name",
    JOBS.params(
        name
        for solver in ("inverse", "eigen")
        for name in names("cnn", distribution="dp_kfac", solver=solver)
        if not name.startswith("mirrored:") and "every" not in name
    ),
)
def test_dp_kfac_divides_the_state(results, name):
    totals = [w["state_bytes"]["total"] for w in results(name)]
    assert sum(totals) == alone(name)["state_bytes"]["total"]


@pytest.mark.parametrize("name", JOBS.params(CASES))
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
    # Replicas of one process share a graph; an eager step has none. What
    # synchronised layers add up for drawn labels is not counted. In stages
    # there are more messages.
    JOBS.params(
        name
        for name in CASES
        if not name.startswith("mirrored:")
        and "eager" not in name
        and not name.endswith(("labels, batch_norm", "in stages"))
    ),
)
def test_communication_is_what_the_plan_says(results, name):
    workers = results(name)
    count = len(workers)
    mode = options_of(name)["distribution"]
    for worker in workers:
        # TensorFlow's own, for the loss and synchronised layers, are V2.
        ops = [o for o in worker["collectives"] if o.kind != "ReduceV2"]
        kinds = {
            (stage, kind): [
                o for o in ops if (stage_of(o), o.kind) == (stage, kind)
            ]
            for stage in ("always", *STAGES)
            for kind in ("Reduce", "BcastSend", "BcastRecv")
        }
        assert sum(map(len, kinds.values())) == len(ops)
        # Rows of all workers, and all gradients at once. What is
        # made of the rows of two layers comes later, with two more numbers for
        # each.
        rows, gradients = kinds["always", "Reduce"]
        late = kinds["update", "Reduce"]
        more = 0
        if options_of(name)["model"] == "wide" and mode != "mem_opt":
            wide, products = late
            assert wide.elements == 51 * 40 + 41 * 40
            assert products.elements == 2
            more = ring(count, [products, products])
        else:
            assert not late
        assert rows.elements == 1
        reported = worker["communication_bytes"]
        for kind, row in reported.items():
            sums = ring(count, [gradients, *late])
            assert row["gradients"] == sums - more
            assert row["preconditioned_gradients"] == total(
                kinds["update", "BcastRecv"]
            )
            assert row["factors"] == (kind == "factor") * ring(
                count, kinds["move_averages", "Reduce"]
            )
            assert row["decompositions"] == (kind == "inverse") * total(
                kinds["renew", "BcastRecv"]
            )
        assert not kinds["always", "BcastSend"] + kinds["always", "BcastRecv"]
        assert not kinds["renew", "Reduce"]
        fraction = options_of(name).get("gradient_worker_fraction")
        if mode == "comm_opt" or fraction == 1:
            assert late == [o for o in ops if stage_of(o) == "update"]
            assert reported["plain"]["preconditioned_gradients"] == 0
        if mode == "dp_kfac":
            early = ("move_averages", "renew")
            assert not [o for o in ops if stage_of(o) in early]
            assert reported["factor"]["factors"] == 0
        else:
            # Sums with their counts; in half precision these and units.
            messages = 2 if "factor_dtype" in options_of(name) else 1
            assert len(kinds["move_averages", "Reduce"]) == messages
        if mode == "mem_opt" or fraction == 1 / count:
            assert not kinds["renew", "BcastRecv"]
    every = [o for worker in workers for o in worker["collectives"]]
    for stage in STAGES:
        ops = [o for o in every if stage_of(o) == stage]
        sent = [o for o in ops if o.kind == "BcastSend"]
        received = [o for o in ops if o.kind == "BcastRecv"]
        assert sum(o.bytes * (o.group - 1) for o in sent) == total(received)


# The branches of a step, by their functions' names.
STAGES = ("move_averages", "renew", "update")


def stage_of(op: Collective) -> str:
    """The branch that a collective is in."""
    found = {s for s in STAGES for name in op.branches if f"_{s}_" in name}
    assert len(found) < 2
    return found.pop() if found else "always"


def total(ops: Sequence[Collective]) -> int:
    return sum(op.bytes for op in ops)


def ring(workers: int, ops: Sequence[Collective]) -> int:
    """What each worker receives in ring all-reduces."""
    return round(2 * total(ops) * (workers - 1) / workers)


@pytest.mark.parametrize("name", JOBS.params(["two: comm_opt, triangles"]))
def test_triangles_are_smaller(results, name):
    squares = "two: comm_opt, inverse, sgd, vision, expand"
    for got, want in zip(results(name), results(squares), strict=True):
        for kind, what in [
            ("factor", "factors"),
            ("inverse", "decompositions"),
        ]:
            smaller = got["communication_bytes"][kind][what]
            whole = want["communication_bytes"][kind][what]
            assert 0.5 * whole < smaller < 0.65 * whole


# --------------------------------------------------------------------- fit
# Global batches of 8 rows; the last one's single row leaves nothing for a
# worker. Without sharding, both take the same rows, for as many steps as are
# expected.
SEEN = {
    "two: arrays": [
        [[0, 1, 2, 3], [8, 9, 10, 11], [16]],
        [[4, 5, 6, 7], [12, 13, 14, 15], []],
    ],
    "two: DATA": [
        [[0, 1, 2, 3], [8, 9, 10]],
        [[4, 5, 6, 7], [11, 12]],
    ],
    "two: OFF": [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2,
}


@pytest.mark.parametrize("name", JOBS.params(FITS))
def test_fit_divides_global_batches(results, name):
    assert [worker["seen"] for worker in results(name)] == SEEN[name]


@pytest.mark.parametrize("name", JOBS.params(FITS))
def test_fit_is_the_definition(results, name):
    workers = results(name)
    assert_same_bits(workers)
    steps = list(zip(*[w["seen"] for w in workers], strict=True))
    owners = None
    if FITS[name].get("distribution") == "dp_kfac":
        owners = [0, 1, 0]
    want = by_definition(workers[0]["start"], steps, owners, **FITS[name])
    for worker in workers:
        assert_close(worker, want)


@pytest.mark.parametrize("name", JOBS.params(LOOPS))
def test_custom_loop(results, name):
    workers = results(name)
    assert_same_bits(workers)
    feed = shares(FEEDS["even"](), replicas_of(name))
    owners = [0, 1, 0] if LOOPS[name] == "dp_kfac" else None
    want = by_definition(workers[0]["start"], feed, owners)
    for worker in workers:
        assert_close(worker, want)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", JOBS.params(REFUSALS))
def test_refusals(results, name):
    for found in results(name):
        assert "`steps_per_execution` must be 1" in found["steps_per_execution"]
        assert "`jit_compile` must not be True" in found["jit_compile"]
        assert "tfkfac.LossScaleOptimizer" in found["LossScaleOptimizer"]


@pytest.mark.parametrize("name", JOBS.params(DISAGREEMENTS))
def test_disagreement_is_reported_everywhere(results, name):
    for message in results(name):
        assert "All workers must train the same model" in message
        assert "argument damping: 1.0 on worker 0, 2.0 on worker 1" in message


@pytest.mark.slow
def test_parameter_servers_are_refused():
    target = f"{workers_modes.__name__}:parameter_server"
    (message,) = cluster.run(target, workers=1)
    assert "must be a `MirroredStrategy`" in message


def test_central_storage_is_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        model = small()
        with pytest.raises(ValueError, match="must be a `MirroredStrategy`"):
            model.compile(tfkfac.KFAC(), "mse")


# -------------------------------------------------------------- loss terms
TERMS = Jobs(workers_terms)
TERM_NAMES = [
    *(f"mirrored: {case}" for case in ("mask", "own sum")),
    *(
        f"two: {case}"
        for case in (
            *("mask", "weights", "sum", "outputs"),
            *("own", "own mean", "own sum", "own capped"),
        )
    ),
]
for name_ in TERM_NAMES:
    where_, _, case_ = name_.partition(": ")
    slow_ = where_ == "mirrored" or case_ not in ("mask", "own capped")
    TERMS.add(name_, "train", case_, slow=slow_)


@pytest.mark.parametrize("name", TERMS.params(TERM_NAMES))
def test_tokens_weigh_the_same_on_every_worker(pool, name):
    """Each of the valid ones, whatever their number on a worker."""
    single = workers_terms.train(None, name.split(": ")[1])
    for worker in TERMS.results(pool, name):
        np.testing.assert_equal(worker["start"], single["start"])
        assert_close(worker, single["weights"], EXACT)
        assert worker["events"] == single["events"]
        assert bool(worker["events"]) == name.endswith("capped")
        assert worker["factors"]
        for path, block in worker["factors"].items():
            for key, value in block.items():
                want = single["factors"][path][key]
                np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-9)
