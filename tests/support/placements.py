"""A small model of factors of all kinds, placed on workers that are threads."""

from typing import Any

import keras
from keras import layers

from tfkfac.blocks.registry import build_registry
from tfkfac.distributed.topology import Topology
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.settings import Distribution
from tfkfac.solvers.registry import make_solver

MODES = ["comm_opt", "mem_opt", "hybrid_opt 1/2", "hybrid_opt 1", "dp_kfac"]
# Layer: input and output size of each of its matrices, and their number. A
# normalisation has no A, an embedding a diagonal one.
SIZES = {
    "embedding": (7, 4, 1),
    "grouped": (5, 3, 2),
    "norm": (1, 2, 6),
    "dense": (7, 3, 1),
}


def model() -> Any:
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, name="embedding")(inputs)
    x = layers.Conv1D(6, 2, groups=2, name="grouped")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(3, name="dense")(x))


def place(mode: str, workers: int, solver: str, **kwargs: Any) -> Placement:
    """Places the model; a mode may bear the fraction of gradient workers."""
    distribution, _, fraction = mode.partition(" ")
    over, _, under = fraction.partition("/")
    chosen = Distribution(
        distribution,
        int(over) / int(under or 1) if fraction else None,
        **kwargs,
    )
    everyone = tuple(range(workers))
    topology = Topology(workers, everyone, (None,) * workers, "auto")
    registry = build_registry(model(), ())
    assert [b.path for b in registry.blocks] == list(SIZES)
    return Placement(registry, topology, make_solver(solver), chosen)
