"""Blocks of one step: what their layers left behind, and what becomes of it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkfac.blocks import Block, RowGradient, Statistic
from tfkfac.blocks.statistics import View, choose_subsample, records_of
from tfkfac.capture.taps import Record, Tap, is_product
from tfkfac.compat.optimizers import variable_key
from tfkfac.distributed.plan import Plan
from tfkfac.fisher import types
from tfkfac.fisher.types import Choice
from tfkfac.kfac.bank import Counters, Preconditioner, State
from tfkfac.kfac.placement import Placement
from tfkfac.solvers.base import most_rows
from tfkfac.training.guards import count_each
from tfkfac.training.step import Gradients, Step


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """A block in the trace of one step."""

    position: int
    """Its place among all blocks."""
    block: Block
    state: Preconditioner
    indices: tuple[int, ...]
    """Where its gradients are among those of the step."""
    used: Block
    """The block that takes the statistics of the step."""
    records: Sequence[Record]
    """What its layer's calls left behind."""
    explained: tf.Tensor | None = None
    """True if its gradients are of that; None if nothing speaks against it."""
    rows: RowGradient | None = None
    """The rows whose product its gradient is, if it is taken from them."""


def observe(step: Step, state: State, by_rows: bool) -> list[ActiveBlock]:
    """The blocks of a step, with what their layers left behind.

    Gradients may be kept as the rows they are made of if `by_rows` is true.
    """
    layers = active_blocks(step, state)
    report_unexplained(layers, state.counters)
    return [with_rows(one, step) for one in layers] if by_rows else layers


def active_blocks(step: Step, state: State) -> list[ActiveBlock]:
    """Finds the gradients and records of each block in this trace.

    A block whose weights have no gradient in this step takes no part, nor one
    whose layer did what it does not stand for.

    Raises:
        ValueError: If a layer has gradients but no record, or gradients of
            some of its weights only.
    """
    key_of = functools.partial(variable_key, step.job.inner_optimizer)
    pairs = zip(step.variables, step.gradients, strict=True)
    index = {key_of(v): i for i, (v, g) in enumerate(pairs) if g is not None}
    layers = {id(p.block.layer): p.block.layer for p in state.preconditioners}
    calls = {key: Tap.calls(layer) for key, layer in layers.items()}
    active = []
    for position, own in enumerate(state.preconditioners):
        block = own.block
        places = [index.get(key_of(v)) for v in block.variables]
        indices = tuple(place for place in places if place is not None)
        if not indices:
            continue
        used = block.used_as(calls[id(block.layer)])
        seen = used.relevant(calls[id(block.layer)])
        if block.left_out:
            continue
        _check(block, None not in places, bool(seen))
        gradients = [step.gradients[i] for i in indices]
        records, explained = records_of(used, seen, gradients)
        active.append(
            ActiveBlock(position, block, own, indices, used, records, explained)
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
    explained = {one.position: one.explained for one in active}
    if any(flag is not None for flag in explained.values()):
        count_each(
            tf.logical_not(counters.flags(explained)),
            counters.unexplained,
            counters.paths,
            "the gradient that was applied is neither the last one that was "
            "taken of the forward pass, nor the first, nor the sum of all; the "
            "factor G is that of the nearest of them.",
        )


def in_stages(
    active: Sequence[ActiveBlock], placement: Placement
) -> list[list[ActiveBlock]]:
    """The blocks of a step by stage, see `Exchange.stages`."""
    by_position = {one.position: one for one in active}
    return [
        [by_position[i] for i in stage]
        for stage in placement.exchange.stages(list(by_position))
    ]


# A layer for which fewer rows than this would be too many is always taken by
# its matrix: there is little to gain.
_LEAST = 16


def with_rows(one: ActiveBlock, step: Step) -> ActiveBlock:
    """A block with the rows of its gradient, where they may be cheaper.

    A layer's gradient `W = a^T g` has as many rows as the batch has examples.
    If they are few, `(a A^-1)^T (g G^-1)` takes fewer multiplications than
    `A^-1 W G^-1`, and W itself is not needed: the tape's product of it is then
    no part of the graph. That must be sound: the gradient that is applied has
    to be that product and nothing more, see `is_product`; any other is taken
    as it is.

    These gradients, as the tape returned them, are withheld from the step. The
    choice is the same on workers whose batches differ in size.
    """
    rows = _rows_of(one, step.gradients, step.group.size)
    if rows is not None:
        step.withhold(one.indices, bound(rows))
    return dataclasses.replace(one, rows=rows)


def _rows_of(
    one: ActiveBlock, gradients: Gradients, workers: int
) -> RowGradient | None:
    factors = one.block.factors
    if "A" not in factors or factors["G"].stack_shape or len(one.records) != 1:
        return None
    most, (record,) = most_rows(factors, workers), one.records
    own = [gradients[i] for i in one.indices]
    if most < _LEAST or not is_product(own, record.inputs, record.gradient):
        return None
    elements = record.gradient.shape.num_elements()
    if workers == 1 and elements and elements > most * factors["G"].size:
        return None
    rows = one.block.rows(record)
    return RowGradient(
        tf.reshape(rows.a, [-1, factors["A"].size]),
        tf.reshape(rows.g, [-1, factors["G"].size]),
    )


def bound(rows: RowGradient) -> tf.Tensor:
    """A number that is finite only if `a^T g` is.

    No element of it is larger than the product of the sums. (Norms would need
    squares, which overflow where a gradient does not.)
    """
    sums = [tf.reduce_sum(tf.abs(tensor)) for tensor in (rows.a, rows.g)]
    return sums[0] * sums[1]


Statistics = Mapping[int, Mapping[str, Statistic]]


def observed(
    layers: Sequence[ActiveBlock], step: Step, plan: Plan
) -> list[ActiveBlock]:
    """The blocks whose statistics this replica takes."""
    rank = step.group.rank
    return [one for one in layers if plan.observes(rank, one.position)]


def batch_statistics(
    layers: Sequence[ActiveBlock],
    step: Step,
    choice: Choice,
    state: State,
    plan: Plan,
    sharing: str,
    fraction: float | None,
) -> Statistics:
    """Statistics of a fraction of this replica's batch, by position."""
    loss_scale = step.job.scaling.factor()
    view = View(
        sharing,
        step.loss.row_scale,
        step.batch.weightless,
        step.loss.terms,
        choose_subsample(fraction, state.factor_updates, plan.observers),
        step.loss.weights,
        None if loss_scale is None else 1 / loss_scale,
    )
    # In the order in which they are sent, and drawn gradients come.
    own = {
        one.position: (one.used, one.records)
        for one in reversed(observed(layers, step, plan))
    }

    def total(tensor: tf.Tensor) -> tf.Tensor:
        # Factors of one worker's batch alone are of its labels alone.
        if not plan.reduces_factors:
            return tensor
        (sum_,) = step.group.all_reduce([tensor])
        return sum_

    def empirical() -> Statistics:
        return types.empirical(own, view)

    def chosen() -> Statistics:
        likelihood = choice.likelihood
        if likelihood is None:
            return empirical()
        if choice.type == types.TYPE2:
            return types.type2(own, view, likelihood)
        seeds = label_seeds(step, state, len(likelihood.outputs))
        return types.monte_carlo(own, view, likelihood, seeds, total)

    if choice.applies is None:
        made = chosen()
    else:
        made = tf.cond(choice.applies, chosen, empirical)
    return {
        position: {"A": named["G"], "G": named["A"]}
        if own[position][0].swapped
        else named
        for position, named in made.items()
    }


def label_seeds(step: Step, state: State, outputs: int) -> list[tf.Tensor]:
    """The seeds of the labels of each output.

    They are others in each step, for each replica and micro-batch, and the
    same when a job goes on from where it was saved.
    """
    clock = step.job.clock
    batch = tf.constant(step.group.rank, tf.int64)
    if state.pending is not None:
        batch += step.group.size * state.pending.count
    return [tf.stack([clock, batch * outputs + i]) for i in range(outputs)]
