"""Bytes, memory and operations against real plans and numbers by hand."""

import functools
import itertools
from typing import Any

import keras
import pytest
from keras import layers

import tfkfac
from tests.support.options import kfac as options_kfac
from tests.support.placements import SIZES, model, place
from tfkfac import cost
from tfkfac.cost.batch import Batch, Network
from tfkfac.cost.loads import BlockWork, Loads
from tfkfac.kfac.placement import Placement
from tfkfac.solvers import SOLVERS

WORKERS = 4
FLOAT = 4
MODES = [
    ("comm_opt", "comm_opt"),
    ("mem_opt", "mem_opt"),
    ("hybrid_opt", "hybrid_opt 1/2"),
    ("dp_kfac", "dp_kfac"),
]
MACHINE = cost.Machine.of(1e9, 1e8, 1e-5)


def attached(built: Any, **arguments: Any) -> tfkfac.KFAC:
    return options_kfac(**arguments).attach(built)


@functools.cache
def estimates(workers: int, **arguments: Any) -> dict[str, cost.Estimate]:
    """By mode and solver, those of the model with factors of all kinds."""
    optimizer = attached(model(), **arguments)
    return {
        f"{one.candidate.distribution} {one.candidate.solver}": one
        for one in cost.compare(optimizer, MACHINE, workers, 8)
    }


# -------------------------------------------------------- bytes and memory
@pytest.mark.parametrize(("mode", "placed"), MODES)
@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize("half", [False, True])
def test_as_much_as_the_optimizer_says(
    mode: str, placed: str, solver: str, half: bool
) -> None:
    """The most that any of the workers has or receives."""
    kwargs: dict[str, Any] = {}
    if half:
        kwargs = {"factor_dtype": "bfloat16", "inverse_dtype": "bfloat16"}
    placement = place(placed, WORKERS, solver, symmetric=half, **kwargs)
    found = estimates(WORKERS, symmetric=half, **kwargs)
    one = found[f"{mode} {solver}"]
    weights = sum(v.value.shape.num_elements() for v in model().weights)
    steps = [
        placement.communication_bytes(rank, FLOAT * weights)
        for rank in range(WORKERS)
    ]
    for kind, step in [
        ("gradients", "plain"),
        ("factors", "factor"),
        ("decompositions", "inverse"),
        ("preconditioned_gradients", "plain"),
    ]:
        assert one.received[kind] == max(s[step][kind] for s in steps), kind
    states = [placement.state_bytes(rank) for rank in range(WORKERS)]
    for kind in ("factors", "decompositions", "total"):
        assert one.state[kind] == max(s[kind] for s in states), kind


@pytest.mark.parametrize("workers", [1, 2, 4, 6, 12])
def test_some_workers_stand_for_all(workers: int) -> None:
    """Each of the others has the same as one of them."""
    for _, placed in MODES:
        if placed.startswith("hybrid") and workers % 2:
            continue
        placement = place(placed, workers, "inverse")
        loads = Loads(placement.plan)
        facts = [_facts(placement, rank) for rank in range(workers)]
        assert {facts[w] for w in loads.workers} == set(facts)


def _facts(placement: Placement, rank: int) -> tuple[int, ...]:
    state = placement.state_bytes(rank)
    inverse = placement.communication_bytes(rank, 0)["inverse"]
    return *state.values(), *inverse.values()


def test_one_worker_receives_nothing() -> None:
    for one in estimates(1).values():
        assert set(one.received.values()) == {0}
        assert one.stages["gradients"] == one.stages["reduce_factors"] == 0
        assert one.stages["share_decompositions"] == 0
        assert one.stages["share_gradients"] == 0


def test_the_ends_of_hybrid_opt() -> None:
    """With one gradient worker it is mem_opt, with all comm_opt."""
    for fraction, other in [(1 / WORKERS, "mem_opt"), (1.0, "comm_opt")]:
        text = f"hybrid_opt {fraction:.0f}"
        text = "hybrid_opt 1/4" if fraction < 1 else text
        found = []
        for placed in (text, other):
            placement = place(placed, WORKERS, "inverse")
            loads = Loads(placement.plan)
            sizes = placement.sizes
            found.append((loads.state(sizes), loads.received(sizes, 8)))
        assert found[0] == found[1]


def test_more_gradient_workers_keep_more_and_receive_less() -> None:
    """KAISA, section 3.1: memory against the traffic of every step."""
    optimizer = attached(model())
    found = cost.compare(optimizer, MACHINE, 16, 8, solvers=["inverse"])
    by_name = {one.candidate.text: one for one in found}
    names = ["mem_opt", *(f"hybrid_opt {n / 16:.4g}" for n in (2, 4, 8))]
    line = [by_name[name] for name in [*names, "comm_opt"]]
    for less, more in itertools.pairwise(line):
        assert less.state["total"] <= more.state["total"]
        kind = "preconditioned_gradients"
        assert less.received[kind] >= more.received[kind]
    assert by_name["comm_opt"].received["preconditioned_gradients"] == 0
    assert by_name["dp_kfac"].received["factors"] == 0


# -------------------------------------------------------------- operations
def convolutional() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 5, 3)),
            layers.Conv2D(4, 3, name="conv", use_bias=False),
            layers.Flatten(name="flat"),
            layers.Dense(7, name="dense"),
        ]
    )


def test_rows_and_products_by_hand() -> None:
    """A batch of 2: 4 x 3 positions of 27 x 4, then 49 x 7 with the bias."""
    built = convolutional()
    blocks = attached(built).method.placement.blocks
    network = Network(built, 2)
    assert [network.rows(block) for block in blocks] == [2 * 12, 2]
    forward = 24 * 27 * 4 + 2 * 49 * 7
    assert network.multiplications(blocks) == forward
    assert network.elements == 2 * (48 + 48 + 7)
    batch = Batch.of(network, blocks, 2, 1.0, blocks)
    # Of the dense layer: rows times squares of the sizes.
    assert batch.statistics[1] == 2 * (49**2 + 7**2)
    assert batch.read[1] == 2 * (49 + 7)


def test_rows_of_layers_in_layers() -> None:
    """Two sentences of five tokens; the convolution has four positions."""
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, name="tokens")(tokens)
    x = layers.TimeDistributed(layers.Dense(6), name="each")(x)
    x = layers.MultiHeadAttention(2, 3, name="attention")(x, x)
    x = layers.SeparableConv1D(8, 2, depth_multiplier=3, name="separable")(x)
    built = keras.Model(tokens, layers.GlobalAveragePooling1D()(x))
    blocks = attached(built).method.placement.blocks
    network = Network(built, 2)
    rows = {block.path: network.rows(block) for block in blocks}
    convolution = {p: n for p, n in rows.items() if "separable" in p}
    assert set(convolution.values()) == {2 * 4} and len(convolution) == 2
    assert {n for p, n in rows.items() if p not in convolution} == {2 * 5}
    # An embedding multiplies nothing, and counts its tokens.
    assert network.multiplications(blocks[:1]) == 0
    batch = Batch.of(network, blocks, 2, 1.0, blocks)
    assert batch.statistics[0] == 10 * 4**2


@pytest.mark.parametrize(
    ("fraction", "observers", "share"),
    [(1.0, 1, 1), (0.25, 1, 0.25), (None, 1, 0.5), (None, 8, 0.25)],
)
def test_share_of_the_examples(
    fraction: float | None, observers: int, share: float
) -> None:
    """None is a quarter, but at least 64 of all workers together."""
    batch = Batch(128, fraction, 0, 0, [], [], [])
    assert batch.share(observers) == share


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
def test_work_by_hand(solver: str) -> None:
    """Inverses are multiplied with once, eigenbases there and back."""
    times = {"inverse": 1, "eigen": 2}[solver]
    for block in place("comm_opt", 1, "inverse").blocks:
        work = BlockWork.of(block, SOLVERS[solver](), 1)
        inputs, outputs, count = SIZES[block.path]
        of_a = {"embedding": inputs * outputs, "norm": 0}.get(
            block.path, inputs**2 * outputs
        )
        products = count * (of_a + inputs * outputs**2)
        assert work.precondition == times * products
        a = count * inputs**3, count * inputs**2
        wanted = {"G": (count * outputs**3, count * outputs**2)}
        if block.path != "norm":
            wanted["A"] = (7, 7) if block.path == "embedding" else a
        assert work.decompositions == wanted


def test_few_rows_are_preconditioned_in_place_of_the_matrix() -> None:
    """`N (n^2 + m^2) + N^2 (n + m)` where that is less."""
    built = keras.Sequential([keras.Input((99,)), layers.Dense(100)])
    (block,) = attached(built).method.placement.blocks
    work = BlockWork.of(block, SOLVERS["inverse"](), 1)
    assert work.apply(3) == 3 * 2 * 100**2 + 3**2 * 200
    assert work.apply(10**6) == 2 * 100**3
    assert BlockWork.of(block, SOLVERS["eigen"](), 1).apply(3) == 4 * 100**3


# ---------------------------------------------------------------- arguments
def test_unknown_sizes_are_refused() -> None:
    built = keras.Sequential(
        [
            keras.Input((None, None, 3)),
            layers.Conv2D(2, 3),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )
    optimizer = attached(built)
    with pytest.raises(ValueError, match="must be known"):
        cost.compare(optimizer, MACHINE, 2, 4)
    found = cost.compare(optimizer, MACHINE, 2, 4, size=8)
    assert found[0].stages["first_order"] > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"workers": 0}, ValueError),
        ({"workers": 2.5}, TypeError),
        ({"batch": 0}, ValueError),
        ({"passes": -1}, ValueError),
        ({"solvers": ["qr"]}, ValueError),
    ],
)
def test_hostile_arguments(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    arguments: dict[str, Any] = {"workers": 2, "batch": 4, **changes}
    with pytest.raises(error, match=next(iter(changes))):
        cost.compare(attached(convolutional()), MACHINE, **arguments)
