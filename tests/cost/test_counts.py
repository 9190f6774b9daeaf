"""Bytes, memory and operations against real plans and numbers by hand."""

from typing import Any

import keras
import pytest
from keras import layers

import tfkfac
from tests.support.placements import SIZES, place
from tfkfac import cost
from tfkfac.cost.batch import Batch, Network
from tfkfac.cost.loads import BlockCost
from tfkfac.factors.base import Wire
from tfkfac.solvers import SOLVERS

WORKERS = 4
FLOAT = 4
# Mode: number of gradient workers of a layer.
MODES = {"comm_opt": 4, "mem_opt": 1, "hybrid_opt 1/2": 2, "dp_kfac": 1}
MACHINE = cost.Machine.of(1e9, 1e8, 1e-5)


def attached(built: Any) -> tfkfac.KFAC:
    return tfkfac.KFAC().attach(built)


# -------------------------------------------------------- bytes and memory
# Of all layers together: elements of the weights, of the factors, and of what
# comes of them. `SIZES` tells the sizes; the embedding's A is diagonal.
WEIGHTS = 7 * 4 + 2 * 5 * 3 + 6 * 2 + 7 * 3
FACTORS = 7 + 4**2 + 2 * (5**2 + 3**2) + 6 * 2**2 + 7**2 + 3**2
EIGENVALUES = 4 + 2 * (5 + 3) + 6 * 2 + 7 + 3
SENT = {"inverse": FACTORS, "eigen": FACTORS + EIGENVALUES}
# Of eigenvalues the products are kept (KAISA, section 4.4): one a weight.
KEPT = {"inverse": FACTORS, "eigen": FACTORS - 7 + WEIGHTS}


@pytest.mark.parametrize("solver", ["inverse", "eigen"])
@pytest.mark.parametrize(("mode", "gradient_workers"), MODES.items())
def test_bytes_by_hand(mode: str, gradient_workers: int, solver: str) -> None:
    """KAISA, section 3.1: sums over four workers, of which g have a layer.

    Each factor has one owner, a decomposition goes from it to g - 1 others,
    a preconditioned gradient to all that are not among the g.
    """
    placement = place(mode, WORKERS, solver)
    g, ranks = gradient_workers, range(WORKERS)
    states = [placement.state_bytes(rank) for rank in ranks]
    received = [placement.communication_bytes(rank, 400) for rank in ranks]

    def total(step: str, kind: str) -> float:
        return sum(one[step][kind] for one in received) / FLOAT

    assert sum(one["factors"] for one in states) == FLOAT * FACTORS
    kept = sum(one["decompositions"] for one in states)
    assert kept == FLOAT * g * KEPT[solver]
    sent = total("inverse", "decompositions")
    assert sent == (g - 1) * SENT[solver]
    away = total("plain", "preconditioned_gradients")
    assert away == (WORKERS - g) * WEIGHTS
    # An all-reduce: 2 (P - 1) / P of the data at each of P workers. With the
    # seven factors go the numbers of their rows.
    assert total("plain", "gradients") == 2 * (WORKERS - 1) * 100
    reduced = 0 if mode == "dp_kfac" else FACTORS + 7
    assert total("factor", "factors") == 2 * (WORKERS - 1) * reduced


def test_no_layer_is_no_byte() -> None:
    """Of a model that K-FAC leaves alone."""
    built = keras.Sequential([keras.Input((2,)), layers.Activation("tanh")])
    placement = attached(built).method.placement
    assert set(placement.state_bytes(0).values()) == {0}
    assert placement.communication_bytes(0, 0)["plain"]["gradients"] == 0


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
        work = BlockCost.of(block, SOLVERS[solver](), Wire(), 1)
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
    work = BlockCost.of(block, SOLVERS["inverse"](), Wire(), 1)
    assert work.apply(3) == 3 * 2 * 100**2 + 3**2 * 200
    assert work.apply(10**6) == 2 * 100**3
    work = BlockCost.of(block, SOLVERS["eigen"](), Wire(), 1)
    assert work.apply(3) == 4 * 100**3


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
