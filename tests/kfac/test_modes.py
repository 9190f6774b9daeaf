"""The distribution modes on several processes.

Most cases train in float64. Jobs on several workers and on one process then
differ by rounding (1e-15) and by float32 values (the clip `nu`, a worker's
share of rows). Differences are relative to the distance that all weights moved,
as single weights may not move (the bias of an attention's keys).
"""

import functools
import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support import workers_terms
from tests.support.cluster import Pool
from tests.support.graphs import Collective
from tests.support.jobs import Jobs, replicas_of
from tests.support.mode_cases import (
    CASES,
    EXACT,
    JOBS,
    PARTS,
    TURNS,
    Result,
    alone,
    assert_close,
    by_definition,
    defined,
    plans,
    train_options,
)
from tests.support.weights import assert_same_bits, distance
from tests.support.worker_parts import FEEDS, images, shares, small

Results = Callable[[str], list[Result]]
SINGLE = 1e-5  # float32


@pytest.fixture
def results(pool: Pool) -> Results:
    """The results of a job by worker."""
    return functools.partial(JOBS.results, pool)


# ----------------------------------------------------------------- results
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_same_bits_everywhere(results, name):
    """Weights, moving statistics and slots are bitwise equal on workers.

    Update counts are equal too; in DP-KFAC an owner needs rows to update.
    """
    workers, options = results(name), train_options(name)
    assert_same_bits(workers)
    assert len({(w["iterations"], w["traces"]) for w in workers}) == 1
    skipped = 1 if "poison" in options else 0
    assert {n for w in workers for n in w["skipped"]} == {skipped}
    assert workers[0]["iterations"] == 10 - skipped or "accumulation" in name
    updates = [pair for w in workers for pair in w["updates"]]
    if options["distribution"] == "dp_kfac":
        assert all(bool(factors) == bool(inv) for factors, inv in updates)
    else:
        assert len(set(updates)) == 1
        if "changes" not in options and "accumulation" not in name:
            assert updates[0] == (5, 3)


@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_weights(results, name):
    """Weights equal NumPy's, or those of one process with all rows.

    Some workers have no row in some steps. In half precision, errors are a few
    roundings of the coarser dtype, and not 0.
    """
    workers, options = results(name), train_options(name)
    # Each worker draws its own, or small directions are roundings.
    if name.endswith(("drawn labels", "spectral, half")):
        return
    if options["model"] == "cnn":
        want = defined(name, workers[0])
    else:
        single = alone(name)
        want = single["weights"]
        np.testing.assert_equal(workers[0]["start"], single["start"])
    tolerance = SINGLE if options.get("dtype") == "float32" else EXACT
    for worker in workers:
        if "factor_dtype" not in options:
            assert_close(worker, want, tolerance)
        else:
            assert_close(worker, want, 5 * 2.0**-8)
            assert distance(worker["weights"], want) > 1e-3 * 2.0**-8


@pytest.mark.parametrize("name", JOBS.params(TURNS))
def test_turns_are_those_of_one_process(results, name):
    """The schedule depends on the model only, not on the number of workers."""
    workers = results(name)
    assert_same_bits(workers)
    single = alone(name)
    # The first turn at 1, 5 and 9, the second at 3 and 7, both at the start.
    assert {pair for w in workers for pair in w["updates"]} == {(5, 6)}
    for worker in workers:
        assert_close(worker, single["weights"])


@pytest.mark.parametrize("name", JOBS.params(PARTS))
def test_subsamples_weigh_as_much_as_their_batches(results, name):
    """Subsamples are weighed by the sizes of their batches."""
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


# --------------------------------------------------------- state and plans
@pytest.mark.parametrize("name", JOBS.params(CASES))
def test_the_plan_is_kept(results, name):
    """Workers store, decompose and report what the plan assigns to them."""
    workers = results(name)
    plan = plans(name, workers[0])
    ranks = iter(range(replicas_of(name)))
    for worker in workers:
        mine = set(itertools.islice(ranks, len(worker["kept"])))
        owned = {
            path: {f: shapes[f] for f, o in layer.owners.items() if o in mine}
            for layer, (path, shapes) in zip(
                plan, worker["shapes"], strict=True
            )
        }
        got = {path: [*found] for path, found in worker["factors"].items()}
        want = {path: [*found] for path, found in owned.items() if found}
        assert got == want
        if len(workers) > 1:
            assert worker["state_bytes"] == worker["kept"][0]
            matrices = [
                shape
                for found in owned.values()
                for shape in found.values()
                if len(shape) > 1
            ]
            # Of a sketch twice, to approximate it and then.
            decomposed = sum(1 + (s[-1] != s[-2]) for s in matrices)
            if "eager" not in name:
                assert worker["decompositions"] == decomposed
        lines = [re.split(r" {2,}", x) for x in worker["summary"].splitlines()]
        shown = {cells[0]: cells[-2:] for cells in lines}
        for layer, (path, _) in zip(plan, worker["shapes"], strict=True):
            each = [f"{n}: {o}" for n, o in layer.owners.items()]
            if len({*layer.owners.values()}) == 1:
                each = [each[0].partition(": ")[2]]
            members = ", ".join(map(str, layer.gradient_workers))
            assert shown[path] == [", ".join(each), members]
    assert not [*ranks]


# ----------------------------------------------------------- communication
# The branches of a step, by their functions' names, and the messages of all
# steps; with what is summed in them and what is received.
STAGES = ("move_averages", "decompose_group", "update", "skip")


def stage_of(op: Collective) -> str:
    """The branch of the graph with a collective."""
    found = {s for s in STAGES for name in op.branches if f"_{s}_" in name}
    assert len(found) < 2
    return found.pop() if found else "always"


@pytest.mark.parametrize(
    "name",
    # Replicas of one process share a graph; an eager step has none. What
    # synchronised layers add up for drawn labels is not counted. In stages
    # there are more messages.
    JOBS.params(
        name
        for name in CASES
        if not name.startswith("mirrored:")
        and not name.endswith(("eager", "drawn labels", "labels", "stages"))
    ),
)
def test_reported_bytes_equal_the_messages(results, name):
    """Reported bytes equal those of the graph's messages."""
    workers = results(name)
    share = 2 * (len(workers) - 1) / len(workers)  # of a ring all-reduce
    for worker in workers:
        # TensorFlow's own, for the loss and synchronised layers, are V2.
        ops = [o for o in worker["collectives"] if o.kind != "ReduceV2"]

        def of(stage: str, kind: str, ops=ops) -> list[Collective]:
            return [o for o in ops if (stage_of(o), o.kind) == (stage, kind)]

        def total(found: list[Collective]) -> int:
            return sum(o.bytes for o in found)

        # Rows of all workers, and all gradients at once. What is made of the
        # rows of two layers comes later, with two more numbers for each.
        rows, gradients = of("always", "Reduce")
        assert rows.elements == 1
        late, more = of("update", "Reduce"), 0
        if train_options(name)["model"] == "wide" and late:
            wide, products = late
            assert wide.elements == 51 * 40 + 41 * 40
            assert products.elements == 2
            more = 2 * products.bytes
        assert not of("always", "BcastRecv")
        assert not of("decompose_group", "Reduce")
        # A skipped step asks whether the loss is finite on all workers.
        (lost,) = of("skip", "Reduce")
        assert lost.elements == 1
        for kind, row in worker["communication_bytes"].items():
            summed = gradients.bytes + total(late) - more
            factors = total(of("move_averages", "Reduce"))
            assert row == {
                "gradients": round(share * summed),
                "factors": (kind == "factor") * round(share * factors),
                "decompositions": (kind == "inverse")
                * total(of("decompose_group", "BcastRecv")),
                "preconditioned_gradients": total(of("update", "BcastRecv")),
            }


# ------------------------------------------------------------ ways of training
@pytest.mark.parametrize("name", ["two: fit", "two: loop"])
def test_ways_of_training_are_the_definition(results, name):
    """Ways of training equal NumPy; the last batch is empty on one worker."""
    workers = results(name)
    assert_same_bits(workers)
    steps, options = shares(FEEDS["even"](), 2), {}
    if name == "two: fit":
        steps = [[[*range(8)]], [[*range(8, 16)]], [[16]]]
        options = {"kl_clip": None}
    want = by_definition(workers[0]["start"], steps, None, **options)
    for worker in workers:
        assert_close(worker, want)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["two: disagreements"])
def test_disagreement_is_reported_everywhere(results, name):
    for numbers, modes in results(name):
        assert "All workers must train the same model" in numbers
        assert "argument damping: 1.0 on worker 0, 2.0 on worker 1" in numbers
        assert "argument distribution: 'mem_opt' on worker 0" in modes


def test_central_storage_is_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        model = small()
        with pytest.raises(ValueError, match="must be a `MirroredStrategy`"):
            model.compile(tfkfac.KFAC(), "mse")


# -------------------------------------------------------------- loss terms
TERMS = Jobs(workers_terms)
TERM_NAMES = [f"two: {case}" for case in workers_terms.CASES]
TERM_NAMES.append("mirrored: own sum")
for name_ in TERM_NAMES:
    slow_ = name_ != "two: own capped"
    TERMS.add(name_, "train", name_.split(": ")[1], slow=slow_)


@pytest.mark.parametrize("name", TERMS.params(TERM_NAMES))
def test_tokens_weigh_the_same_on_every_worker(pool, name):
    """Each valid token has the same weight on every worker."""
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
