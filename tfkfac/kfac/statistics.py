"""What a step's batch says of the factors."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkfac.blocks import Statistic
from tfkfac.blocks.part import choose_part
from tfkfac.distributed.plan import Plan
from tfkfac.fisher import types
from tfkfac.fisher.choice import Choice
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.advice import looks_summed
from tfkfac.kfac.state import State
from tfkfac.training.step import Step

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
    """Statistics of this replica's batch, by position.

    Args:
        layers: The blocks of the step.
        step: The step.
        choice: The type of the Fisher matrix.
        state: This replica's state.
        plan: Who observes what.
        sharing: "expand", "reduce" or "average".
        fraction: Share of the examples to take, or None.
    """
    if step.loss.terms is None:
        summed = looks_summed(layers, step.row_scale())
        state.report.note_sum(summed, step.job.name)
    loss_scale = step.job.scaling.factor()
    view = types.View(
        sharing,
        step.loss.row_scale,
        step.batch.weightless,
        step.loss.terms,
        choose_part(fraction, state.factor_updates, plan.observers),
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
