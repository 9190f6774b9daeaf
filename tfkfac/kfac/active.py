"""The blocks that take part in one step, and what is done with each."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.capture.record import Record
from tfkfac.capture.taps import Tap
from tfkfac.factors import Tensors
from tfkfac.kfac.memory import memory_of
from tfkfac.kfac.state import Preconditioner
from tfkfac.solvers import Solver
from tfkfac.wrapper.guards import count_events


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """A block in the trace of one step.

    Attributes:
        position: Its place among all blocks.
        block: The block.
        state: Its factors and decomposition.
        indices: Where its gradients are among those of the step.
        records: What its layer's calls left behind.
    """

    position: int
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

    A block whose weights have no gradient in this step takes no part, nor one
    whose layer did what it does not stand for.

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
    for position, state in enumerate(preconditioners):
        block = state.block
        own = [key_of(v) for v in block.variables]
        present = [key for key in own if key in index]
        if present:
            seen = block.relevant(records[id(block.layer)])
            if block.left_out:
                continue
            _check(block, len(present) == len(own), bool(seen))
            indices = tuple(index[key] for key in own)
            active.append(ActiveBlock(position, block, state, indices, seen))
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


def update_averages(
    active: Sequence[ActiveBlock],
    statistics: Mapping[int, Mapping[str, Statistic]],
    decay: float,
) -> tf.Tensor:
    """Moves the averages that this worker keeps.

    Returns:
        Scalar int64, 0 if there was not a single row, else 1.
    """
    kept = [
        (one, one.state.factors)
        for one in active
        if one.state.factors is not None
    ]
    finite = [
        factors.update(statistics[one.position], decay) for one, factors in kept
    ]
    count_events(
        [tf.logical_not(flag) for flag in finite],
        [factors.rejected for _, factors in kept],
        [one.block.path for one, _ in kept],
        "statistics are not finite, the factors keep their values.",
    )
    counts = [s.count for named in statistics.values() for s in named.values()]
    rows = [tf.cast(count, tf.float32) for count in counts]
    return tf.cast(tf.add_n([*rows, 0.0]) > 0, tf.int64)


def decompose_owned(
    active: Sequence[ActiveBlock], solver: Solver, damping: tf.Tensor
) -> dict[int, Tensors]:
    """Decomposes the factors that this worker keeps."""
    parts: dict[int, Tensors] = {}
    for one in active:
        if one.state.factors is None:
            continue
        values = one.state.factors.values()
        means = one.state.factors.means(values)
        with memory_of(one.block.path):
            parts[one.position] = solver.decompose(
                one.block.factors, values, means, damping
            )
    return parts


def replace_decompositions(
    active: Sequence[ActiveBlock],
    parts: Mapping[int, Mapping[str, tf.Tensor]],
    damping: tf.Tensor,
) -> None:
    """Replaces the decompositions of this worker by new ones that are good."""
    kept = [
        (one, one.state.decomposition)
        for one in active
        if one.state.decomposition is not None
    ]
    good = [
        decomposition.update(parts[one.position], damping)
        for one, decomposition in kept
    ]
    count_events(
        [tf.logical_not(flag) for flag in good],
        [decomposition.failures for _, decomposition in kept],
        [one.block.path for one, _ in kept],
        "the decomposition failed, the last good one stays in use; a larger "
        "damping may help.",
    )
