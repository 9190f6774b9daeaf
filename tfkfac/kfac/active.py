"""The blocks that take part in one step, and what is done with each."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfkfac.blocks import Block, RowGradient, Statistic
from tfkfac.blocks.passes import records_of
from tfkfac.capture.record import Record
from tfkfac.capture.taps import Tap
from tfkfac.compat.branches import when
from tfkfac.compat.together import together
from tfkfac.factors import Tensors
from tfkfac.kfac.averages import quality
from tfkfac.kfac.counters import Counters
from tfkfac.kfac.memory import memory_of
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.state import Preconditioner
from tfkfac.solvers import Solver
from tfkfac.training.guards import count_each
from tfkfac.training.step import Step


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """A block in the trace of one step.

    Attributes:
        position: Its place among all blocks.
        block: The block.
        state: Its factors and decomposition.
        indices: Where its gradients are among those of the step.
        used: The block that takes the statistics of the step.
        records: What its layer's calls left behind.
        explained: Whether its gradients are of what was recorded; None if
            nothing speaks against it.
        rows: The rows that its gradient is the product of, if it is taken
            from them.
    """

    position: int
    block: Block
    state: Preconditioner
    indices: tuple[int, ...]
    used: Block
    records: Sequence[Record]
    explained: tf.Tensor | None = None
    rows: RowGradient | None = None


# Decomposes some blocks, if it is time, and says whether it was.
Renewal = Callable[[Sequence[ActiveBlock]], tf.Tensor]


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
        gradients: Gradients of the step, of this replica alone.
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
    calls = {key: Tap.calls(layer) for key, layer in layers.items()}
    active = []
    for position, state in enumerate(preconditioners):
        block = state.block
        own = [key_of(v) for v in block.variables]
        present = [key for key in own if key in index]
        if present:
            used = block.used_as(calls[id(block.layer)])
            seen = used.relevant(calls[id(block.layer)])
            if block.left_out:
                continue
            _check(block, len(present) == len(own), bool(seen))
            indices = tuple(index[key] for key in own)
            records, explained = records_of(
                used, seen, [gradients[i] for i in indices]
            )
            active.append(
                ActiveBlock(
                    position, block, state, indices, used, records, explained
                )
            )
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


def report_unexplained(
    active: Sequence[ActiveBlock], counters: Counters
) -> None:
    """Counts gradients that are not of the recorded backward passes."""
    explained = {
        one.position: one.explained
        for one in active
        if one.explained is not None
    }
    if explained:
        count_each(
            tf.logical_not(counters.by_position(explained, otherwise=True)),
            counters.unexplained,
            counters.paths,
            "the gradient that was applied is not the sum of gradients that "
            "were taken of the last forward pass; the factor G is that of the "
            "nearest of them.",
        )


def update_averages(
    active: Sequence[ActiveBlock],
    counters: Counters,
    statistics: Mapping[int, Mapping[str, Statistic]],
    decay: float,
    due: tf.Tensor,
) -> tf.Tensor:
    """Moves the averages that this worker keeps.

    Args:
        active: The blocks of the step.
        counters: What has happened to all blocks.
        statistics: Their statistics by position.
        decay: Weight of the old averages.
        due: Whether an interval ends here. A block that has no statistics yet
            takes its first ones in any case.

    Returns:
        Scalar int64, 0 if no block has taken any, else 1.
    """
    every = tf.logical_or(due, counters.without_statistics())
    wanted = tf.unstack(every)
    taken, finite, healthy = {}, {}, {}
    moved = {}
    for one in active:
        if one.position not in statistics:
            continue
        named, factors = statistics[one.position], one.state.factors
        if factors is None:
            full, good = quality(one.block.factors, named)
            taken[one.position] = wanted[one.position] & full & good
        else:
            i = one.position
            moved[i] = factors.updating(named, decay, wanted[i])
    for i, flags in zip(moved, together(list(moved.values())), strict=True):
        taken[i], finite[i], healthy[i] = flags
    count_each(
        every & ~counters.by_position(finite, otherwise=True),
        counters.rejected,
        counters.paths,
        "statistics are not finite, the factors keep their values.",
    )
    dropped = tf.logical_not(counters.by_position(healthy, otherwise=True))
    count_each(
        dropped,
        counters.dropped,
        counters.paths,
        "the factors are not finite, they are gathered anew.",
    )
    counters.ask(dropped)
    new = tf.cast(counters.by_position(taken, otherwise=False), tf.int64)
    counters.observed.assign_add(new)
    return tf.minimum(tf.reduce_sum(new), 1)


def in_stages(
    active: Sequence[ActiveBlock], placement: Placement
) -> list[list[ActiveBlock]]:
    """The blocks of a step by stage, see `Exchange.stages`."""
    by_position = {one.position: one for one in active}
    return [
        [by_position[i] for i in stage]
        for stage in placement.exchange.stages(list(by_position))
    ]


def renew_in_turns(
    active: Sequence[ActiveBlock],
    counters: Counters,
    placement: Placement,
    step: Step,
    damping: tf.Tensor,
    due: Sequence[tf.Tensor],
    asked: tf.Tensor,
) -> tf.Tensor:
    """Decomposes the blocks whose turn has come, see `renew_decompositions`.

    Args:
        active: The blocks of the step.
        counters: What has happened to all blocks.
        placement: Who does what of them, and the turn of each.
        step: The step.
        damping: The damping.
        due: Which turns have come.
        asked: Which blocks do not wait for theirs, on all workers the same.

    Returns:
        Scalar bool, whether any block was decomposed.
    """
    turns: dict[int, list[ActiveBlock]] = {}
    for one in active:
        turns.setdefault(placement.turns[one.position], []).append(one)
    return any_of(
        [
            renew_decompositions(
                blocks, counters, placement, step, damping, due[turn], asked
            )
            for turn, blocks in sorted(turns.items())
        ]
    )


def renew_decompositions(
    active: Sequence[ActiveBlock],
    counters: Counters,
    placement: Placement,
    step: Step,
    damping: tf.Tensor,
    due: tf.Tensor,
    asked: tf.Tensor,
) -> tf.Tensor:
    """Owners decompose -> gradient workers receive, if that is due.

    Args:
        active: The blocks of one turn.
        counters: What has happened to all blocks.
        placement: Who does what of them.
        step: The step.
        damping: The damping.
        due: Whether their turn has come.
        asked: Which blocks do not wait for it.

    Returns:
        Scalar bool, whether any block was decomposed.
    """

    def renew() -> None:
        made = decompose_owned(active, placement.solver, damping)
        parts = placement.exchange.share_decompositions(
            step.group, made, [one.position for one in active]
        )
        replace_decompositions(active, counters, parts, damping, wanted)

    turn = {one.position for one in active}
    mine = tf.constant([i in turn for i in range(len(counters.paths))])
    wanted = counters.to_decompose(due, asked) & mine & step.finite
    any_wanted = tf.reduce_any(wanted)
    when(any_wanted, renew)
    return any_wanted


def decompose_owned(
    active: Sequence[ActiveBlock], solver: Solver, damping: tf.Tensor
) -> dict[int, Tensors]:
    """Decomposes the factors that this worker keeps.

    Args:
        active: The blocks.
        solver: The solver.
        damping: The damping.

    Returns:
        The parts of each block, by position.
    """
    parts: dict[int, Tensors] = {}
    for one in active:
        factors = one.state.factors
        if factors is None:
            continue
        with memory_of(one.block.path):
            parts[one.position] = factors.decompose(solver, damping)
    return parts


def replace_decompositions(
    active: Sequence[ActiveBlock],
    counters: Counters,
    parts: Mapping[int, Mapping[str, tf.Tensor]],
    damping: tf.Tensor,
    wanted: tf.Tensor,
) -> None:
    """Replaces the decompositions of this worker by new ones that are good.

    Args:
        active: The blocks of the step.
        counters: What has happened to all blocks.
        parts: What was made of their factors, by position.
        damping: The damping.
        wanted: Whether each of all blocks is to have a new one.
    """
    flags = tf.unstack(wanted)
    renewed = {
        one.position: one.state.decomposition.updating(
            parts[one.position], damping, flags[one.position]
        )
        for one in active
        if one.state.decomposition is not None
    }
    good = dict(zip(renewed, together(list(renewed.values())), strict=True))
    count_each(
        wanted & ~counters.by_position(good, otherwise=True),
        counters.failures,
        counters.paths,
        "the decomposition failed, the last good one stays in use; a larger "
        "damping may help.",
    )
    counters.decomposed.assign_add(tf.cast(wanted, tf.int64))


def any_of(flags: Sequence[tf.Tensor]) -> tf.Tensor:
    """Whether any flag is set; of none, none is."""
    return tf.reduce_any(tf.stack([tf.constant(False), *flags]))
