"""The state of one block, and the blocks that take part in a step."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from tfkfac.blocks import Block, Record
from tfkfac.capture.taps import Tap
from tfkfac.factors import Factors
from tfkfac.solvers import SOLVERS, Decomposition


class Preconditioner(tf.Module):
    """Factors and decomposition of one block.

    Args:
        block: The block.
        solver: Name of the solver.
    """

    def __init__(self, block: Block, solver: str) -> None:
        super().__init__(name="preconditioner")
        self.block = block
        self.factors = Factors(block)
        self.decomposition = Decomposition(SOLVERS[solver](), block)

    def named(self) -> dict[str, tf.Variable]:
        """All variables by name, for saving."""
        factors, decomposition = self.factors, self.decomposition
        averages = zip(factors.names, factors.averages, strict=True)
        tensors = zip(decomposition.names, decomposition.tensors, strict=True)
        return {
            **{f"factor_{name}": variable for name, variable in averages},
            **{f"solver_{name}": variable for name, variable in tensors},
            "weight": factors.weight,
            "rejected": factors.rejected,
            "failures": decomposition.failures,
        }


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """A block in the trace of one step.

    Attributes:
        block: The block.
        state: Its factors and decomposition.
        indices: Where its gradients are among those of the step.
        records: What its layer's calls left behind.
    """

    block: Block
    state: Preconditioner
    indices: tuple[int, ...]
    records: Sequence[Record]


def active_blocks(
    preconditioners: Sequence[Preconditioner],
    gradients: Sequence[tf.Tensor | None],
    keys: Sequence[Hashable],
    key_of: Callable[[Any], Hashable],
) -> list[ActiveBlock]:
    """Finds the gradients and records of each block in this trace.

    A block whose weights have no gradient in this step takes no part.

    Args:
        preconditioners: State of all blocks.
        gradients: Gradients of the step.
        keys: Key of each gradient's variable.
        key_of: Function that gives the key of a variable.

    Raises:
        ValueError: If a layer has gradients but no record, or gradients of
            some of its weights only.
    """
    index = {
        key: i
        for i, (key, gradient) in enumerate(zip(keys, gradients, strict=True))
        if gradient is not None
    }
    layers = {id(p.block.layer): p.block.layer for p in preconditioners}
    records = {key: Tap.records(layer) for key, layer in layers.items()}
    active = []
    for state in preconditioners:
        block = state.block
        own = [key_of(v) for v in block.variables]
        present = [key for key in own if key in index]
        if present:
            seen = records[id(block.layer)]
            _check(block, len(present) == len(own), bool(seen))
            indices = tuple(index[key] for key in own)
            active.append(ActiveBlock(block, state, indices, seen))
    return active


def _check(block: Block, complete: bool, recorded: bool) -> None:
    if not complete:
        names = [v.name for v in block.variables]
        raise ValueError(
            f"Layer '{block.path}' has gradients for some of its weights "
            f"{names} only. Pass all of them, or leave the layer to the inner "
            f"optimizer with skip_layers=['{block.path}']."
        )
    if not recorded:
        raise ValueError(
            f"Layer '{block.path}' has a gradient, but no call of it was "
            "recorded in this training step. Its weights are used without "
            "calling the layer, or inside a loop or a `tf.function` of their "
            "own; or the optimizer was attached after the forward pass. "
            "Leave the layer to the inner optimizer with "
            f"skip_layers=['{block.path}']."
        )


def same_shape_key(block: Block) -> Hashable:
    """Key under which a block's state can be kept over a new `attach`."""
    shapes = tuple(sorted(block.factor_shapes.items()))
    return (id(block.layer), block.kind, shapes)
