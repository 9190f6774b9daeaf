"""The distribution modes on several processes, compared with one process.

Trainings are in float64. Those on several workers and on one process differ by
rounding (1e-15) and by float32 values (the clip `nu`, a worker's share of
rows). Differences are relative to the distance that all weights moved, as
single weights may not move (the bias of an attention's keys).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support import training
from tests.support.cluster import SHAPES
from tests.support.definition import by_definition
from tests.support.dtypes import floats
from tests.support.graphs import Collective, collectives, count_ops
from tests.support.marks import with_slow
from tests.support.strategies import local_ranks, strategy
from tests.support.training import (
    DEFAULTS,
    INNERS,
    RATE,
    SPECTRAL,
    Result,
    Training,
    assert_close,
    assert_same_bits,
    distance,
    shares,
)
from tfkfac.distributed.plan import LayerPlan, plan_layers

NAN = float("nan")
HALF = {"factor_dtype": "float16", "inverse_dtype": "bfloat16"}
# The hidden layer has 51 inputs with the bias; its A is approximated.
SKETCH: dict[str, Any] = {"max_factor_dim": 10}
DISTRIBUTION = {
    "distribution",
    "gradient_worker_fraction",
    "assignment",
    "symmetric",
    *HALF,
}


def case(distribution: str, model: str, **options: Any) -> Training:
    """Split the fields of a `Training` from the arguments of `KFAC`."""
    names = {field.name for field in dataclasses.fields(Training)}
    fields = {k: options.pop(k) for k in names & options.keys()}
    options["distribution"] = distribution
    return Training(model=model, options=options, **fields)


SKETCHED = functools.partial(case, model="small", patches=("rank 3",), **SKETCH)
CASES = {
    "two: comm_opt, NaN": case(
        "comm_opt", "cnn", symmetric=True, faults=((3, 1, NAN),)
    ),
    "two: dp_kfac, adam": case(
        "dp_kfac",
        "cnn",
        feed="late",
        assignment="compute",
        solver="eigen",
        inner="adam",
        weight_decay=0.5,
        weight_sharing="reduce",
    ),
    "two: comm_opt, rows": case("comm_opt", "wide"),
    "two: mem_opt, sketch": SKETCHED(
        "mem_opt",
        symmetric=True,
        changes={
            2: {"learning_rate": RATE / 2, "damping": 1.0, "kl_clip": 2**-9},
            3: {"factor_update_interval": 1, "inverse_update_interval": 2},
        },
    ),
    # Gradients of sampled labels pass a normalization over all workers.
    "two: comm_opt, given labels": case(
        "comm_opt",
        "batch_norm",
        feed="some",
        fisher="monte_carlo",
        patches=("least likely labels",),
    ),
    "two: comm_opt, groups": case("comm_opt", "vision", patches=("groups",)),
    "two: mem_opt, spectral": case(
        "mem_opt",
        "cnn",
        skip_layers=("hidden",),
        inner="warm-up",
        weight_decay=0.5,
        **SPECTRAL,
    ),
    "two: dp_kfac, spectral": case(
        "dp_kfac", "cnn", inner="multiplier", faults=((3, 1, NAN),), **SPECTRAL
    ),
    "four: hybrid_opt, buckets": case(
        "hybrid_opt",
        "cnn",
        gradient_worker_fraction=0.5,
        solver="eigen",
        patches=("small buckets",),
    ),
    "two: mem_opt, eager": case("mem_opt", "small", eager=True),
    "two: mem_opt, accumulation": case(
        "mem_opt",
        "small",
        inner="accumulation, average, decay",
        fisher="type2",
        damping="damping schedule",
        kl_clip="clip schedule",
    ),
    "two: hybrid_opt, half": SKETCHED(
        "hybrid_opt", gradient_worker_fraction=0.5, solver="eigen", **HALF
    ),
    "two: hybrid_opt, spectral, accumulation": case(
        "hybrid_opt",
        "small",
        patches=("rank 3", "whole batches"),
        gradient_worker_fraction=0.5,
        inner="multiplier, accumulation",
        **SKETCH,
        **SPECTRAL,
    ),
    "four: mem_opt, spectral": case(
        "mem_opt",
        "text",
        inner="default",
        patches=("whole batches",),
        **SPECTRAL,
    ),
    "mirrored: mem_opt, spectral": case(
        "mem_opt",
        "recurrent",  # the rest optimizer follows the length
        feed="some",
        inner="default",
        patches=("whole batches",),
        **SPECTRAL,
    ),
}
QUICK = (
    "two: comm_opt, rows",
    "two: mem_opt, spectral",
    "two: dp_kfac, adam",
    "two: dp_kfac, spectral",
)
SLOW = tuple(name for name in CASES if name not in QUICK)


def where(name: str) -> str:
    return name.partition(":")[0]


def replicas_of(name: str) -> int:
    shape = SHAPES[where(name)]
    return shape.workers * shape.devices


# -------------------------------------------------------------- on a worker
def train(case: Training) -> Result:
    """Train, and describe graphs, factors and placement."""
    graphs: list[Any] = []
    apply = tfkfac.KFAC.apply

    def recorded(*args: Any, **kwargs: Any) -> None:
        graphs.append(tf.compat.v1.get_default_graph())
        apply(*args, **kwargs)

    with mock.patch.object(tfkfac.KFAC, "apply", recorded):
        model = training.build(case)
        start = model.get_weights()
        training.fit(model, case)
    optimizer = model.optimizer
    graph = graphs[-1].as_graph_def(add_shapes=True)
    states, placement = optimizer.method.states, optimizer.method.placement
    placed = placement.distribution
    return training.describe(model) | {
        "start": start,
        "updates": [
            (int(s.factor_updates), int(s.inverse_updates)) for s in states
        ],
        "factors": optimizer.factors(),
        "shapes": [(b.path, dict(b.factor_shapes)) for b in placement.blocks],
        "kept": [kept_bytes(state) for state in states],
        "collectives": collectives(graph),
        "decompositions": count_ops(graph, ("Cholesky", "SelfAdjointEigV2")),
        "placed": (placed.mode, placed.gradient_worker_fraction),
        "traces": len(graphs),
    }


def kept_bytes(state: Any) -> dict[str, int]:
    """Bytes of the variables with a rank, but for numbers of blocks."""

    def size(variables: Sequence[tf.Variable]) -> int:
        kept = [v for v in variables if v.shape.rank]
        return sum((v.shape.num_elements() or 0) * v.dtype.size for v in kept)

    numbers = [
        v
        for group in state.averages
        for v in (group.weight, *group.other_means)
        if v.shape.rank == 1
    ]
    total = size(state.variables) - size(state.counters.variables)
    return {
        "factors": sum(size(group.averages) for group in state.averages),
        "decompositions": sum(
            size(group.tensors) for group in state.preconditioners
        ),
        "total": total - size(numbers),
    }


# ----------------------------------------------------------------- results
@functools.cache
def alone(name: str) -> Result:
    """Return the results of this process on the same global batches."""
    case = CASES[name]
    kept = case.options.keys() - DISTRIBUTION
    options = {key: case.options[key] for key in kept}
    return train(dataclasses.replace(case, options=options))


def defined(name: str, result: Result) -> list[Any]:
    """Return the weights of a case of "cnn" by the definition."""
    case = CASES[name]
    feed = shares(case.rows, replicas_of(name))
    for step, *_ in case.faults:  # all workers skip the step
        del feed[step]
    owners = None
    if case.options["distribution"] == "dp_kfac":
        plan = plan_of(name, result)
        owners = [next(iter(layer.owners.values())) for layer in plan]
        assert len(set(owners)) > 1
    options = {"inner": case.inner, **case.options}
    return by_definition(result["start"], feed, owners, **options)


def plan_of(name: str, result: Result) -> tuple[LayerPlan, ...]:
    shapes = [shapes for _, shapes in result["shapes"]]
    assignment = CASES[name].options.get("assignment")
    return plan_layers(shapes, replicas_of(name), *result["placed"], assignment)


@pytest.mark.parametrize("name", with_slow(CASES, *SLOW))
def test_training(on_workers: Any, name: str) -> None:
    workers = on_workers(where(name), train, CASES[name])
    assert_same_bits(workers)
    check_updates(name, workers)
    check_weights(name, workers)
    check_plan(name, workers)
    # Replicas of one process share a graph; an eager step has none. Sums of
    # synchronized layers for sampled labels are not counted.
    skipped = ("mirrored", "eager", "labels", "buckets")
    if not any(word in name for word in skipped):
        check_bytes(name, workers)


def check_updates(name: str, workers: list[Result]) -> None:
    """Counts are equal; in DP-KFAC an owner without rows updates nothing."""
    case = CASES[name]
    assert len({(w["iterations"], w["traces"]) for w in workers}) == 1
    skipped = len(case.faults)
    assert {n for w in workers for n in w["skipped"]} == {skipped}
    assert workers[0]["iterations"] == 10 - skipped or "accumulation" in name
    updates = [pair for w in workers for pair in w["updates"]]
    if case.options["distribution"] == "dp_kfac":
        assert all(bool(factors) == bool(inv) for factors, inv in updates)
        return
    assert len(set(updates)) == 1
    if "groups" in name:
        # First group at 0, 1, 5 and 9, second group at 0, 3 and 7.
        assert updates[0] == (5, 6)
    elif not case.changes and "accumulation" not in name:
        assert updates[0] == (5, 3)


def check_weights(name: str, workers: list[Result]) -> None:
    """Weights equal NumPy's, or those of one process with all rows.

    Some workers have no row in some steps. In half precision, errors are a few
    roundings of the coarser dtype, and not 0.
    """
    first = workers[0]
    if CASES[name].model == "cnn":
        want = defined(name, first)
    else:
        want = alone(name)["weights"]
        np.testing.assert_equal(first["start"], alone(name)["start"])
    for worker in workers:
        if "half" not in name:
            assert_close(worker, want)
        else:
            assert_close(worker, want, 5 * 2.0**-8)
            assert distance(worker["weights"], want) > 1e-3 * 2.0**-8


def check_plan(name: str, workers: list[Result]) -> None:
    """Workers store, decompose and report what the plan assigns to them."""
    plan = plan_of(name, workers[0])
    ranks = iter(range(replicas_of(name)))
    for worker in workers:
        mine = set(itertools.islice(ranks, len(worker["kept"])))
        owned = {
            path: {f: shapes[f] for f, o in layer.owners.items() if o in mine}
            for layer, (path, shapes) in zip(
                plan, worker["shapes"], strict=True
            )
        }
        got = {path: [*names] for path, names in worker["factors"].items()}
        assert got == {path: [*names] for path, names in owned.items() if names}
        if len(workers) > 1:
            assert worker["state_bytes"].items() >= worker["kept"][0].items()
            matrices = [
                shape
                for shapes in owned.values()
                for shape in shapes.values()
                if len(shape) > 1
            ]
            # A sketch is decomposed twice: its approximation first. Its root
            # needs eigenvectors, too.
            is_spectral = CASES[name].options.get("step") == "spectral"
            decomposed = sum(
                1 if s[-1] == s[-2] else 2 + is_spectral for s in matrices
            )
            if "eager" not in name:
                assert worker["decompositions"] == decomposed
        lines = [re.split(r" {2,}", x) for x in worker["summary"].splitlines()]
        shown = {cells[0]: cells[-2:] for cells in lines}
        for layer, (path, _) in zip(plan, worker["shapes"], strict=True):
            owners = [f"{n}: {o}" for n, o in layer.owners.items()]
            if len({*layer.owners.values()}) == 1:
                owners = [owners[0].partition(": ")[2]]
            members = ", ".join(map(str, layer.gradient_workers))
            assert shown[path] == [", ".join(owners), members]
    assert not [*ranks]


# Branches of the graph of a step, by the names of their functions.
STAGES = ("move_averages", "decompose_group", "update", "skip")


def stage_of(op: Collective) -> str:
    """The branch of the graph with a collective."""
    names = {s for s in STAGES for name in op.branches if f"_{s}_" in name}
    assert len(names) < 2
    return names.pop() if names else "always"


def check_bytes(name: str, workers: list[Result]) -> None:
    """Reported bytes equal those of the graph's messages."""
    share = 2 * (len(workers) - 1) / len(workers)  # of a ring all-reduce
    for worker in workers:
        # Those of Keras, for the loss and synchronized layers, are V2.
        ops = [o for o in worker["collectives"] if o.kind != "ReduceV2"]

        def of(stage: str, kind: str, ops=ops) -> list[Collective]:
            return [o for o in ops if (stage_of(o), o.kind) == (stage, kind)]

        def total(ops: list[Collective]) -> int:
            return sum(o.bytes for o in ops)

        # The number of rows of all workers, and all gradients. Gradients by
        # rows of two layers follow, with a scalar of each layer.
        rows, gradients = of("always", "Reduce")
        assert rows.elements == 1
        late, more = of("update", "Reduce"), 0
        if CASES[name].model == "wide" and late:
            wide, products = late
            assert wide.elements == 51 * 40 + 41 * 40
            assert products.elements == 2
            more = 2 * products.bytes
        if CASES[name].options.get("step") == "spectral":
            # `D^T F D`, and two sums of an output and of its logits. Not
            # reported: some steps do not compute them.
            (form,) = late
            assert form.elements == 5
            more = form.bytes
        assert not of("always", "BcastRecv")
        assert not of("decompose_group", "Reduce")
        # A skipped step sums whether the loss is finite.
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


# ---------------------------------------------------------------- refusals
def disagree() -> list[str]:
    """Return errors if the last worker has other arguments."""
    last = max(local_ranks())
    errors = []
    for options in (
        {"damping": 1.0 + last, "distribution": "dp_kfac"},
        {"distribution": "comm_opt" if last else "mem_opt"},
    ):
        try:
            training.train(Training(options=options))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_disagreement_is_reported_everywhere(on_workers: Any) -> None:
    for numbers, modes in on_workers("two", disagree):
        assert "All workers must train the same model" in numbers
        assert "argument damping: 1.0 on worker 0, 2.0 on worker 1" in numbers
        assert "argument distribution: 'mem_opt' on worker 0" in modes


def test_central_storage_is_refused() -> None:
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"])
    with strategy.scope():
        model = training.small()
        with pytest.raises(ValueError, match="must be a `MirroredStrategy`"):
            model.compile(tfkfac.KFAC(step="natural"), "mse")


# -------------------------------------------------------------- loss terms
def capped(y: Any, p: Any) -> Any:
    """Constant for some tokens: some steps of a worker have no gradient."""
    return tf.minimum(tf.reduce_sum(tf.square(y - p), -1), 7.0)


def train_tokens() -> Result:
    """Train on tokens, some of which are masked or have the weight 0.

    Only one of two outputs is masked.
    """
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 3, 4)), rng.normal(size=(24, 3, 2))
    valid = rng.integers(0, 2, size=(24, 3))
    valid[:, 0] = 1
    x *= valid[..., None]
    weights = rng.integers(0, 3, size=(24, 3)) + 0.0
    counts = [(3, 2, 1, 0), (0, 1, 0, 3), (2, 2, 2, 0), (0, 0, 1, 1)]
    feed = training.rows_of(counts)
    with floats("float64"):
        with strategy().scope():
            keras.utils.set_random_seed(0)
            inputs = keras.Input((3, 4))
            hidden = layers.Dense(5, activation="tanh", name="hidden")
            masked = hidden(layers.Masking()(inputs))
            first = layers.Dense(2, name="first")(masked)
            second = layers.Dense(2, name="second")(hidden(inputs))
            model = keras.Model(inputs, [first, second])
            options = {**DEFAULTS, "fisher": "empirical"}
            optimizer = tfkfac.KFAC(INNERS["sgd"](), **options)
            mean = keras.losses.MeanSquaredError("mean_with_sample_weight")
            model.compile(optimizer, [capped, mean])
        start = model.get_weights()
        steps = shares(feed, strategy().num_replicas_in_sync)
        data = (x, (y, y[::-1]), (np.ones_like(weights), weights))
        model.fit(
            training.dataset(data, steps),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
        )
    return training.describe(model) | {
        "start": start,
        "factors": optimizer.factors(),
    }


@pytest.mark.slow
def test_tokens_weigh_the_same_on_every_worker(on_workers: Any) -> None:
    single = train_tokens()
    for worker in on_workers("two", train_tokens):
        np.testing.assert_equal(worker["start"], single["start"])
        assert_close(worker, single["weights"])
        assert worker["events"] == single["events"]
        assert worker["factors"]
        for path, block in worker["factors"].items():
            for key, value in block.items():
                want = single["factors"][path][key]
                np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-9)
