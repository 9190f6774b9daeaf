"""How long a step is: by the clip, or by the quadratic model."""

from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks.part import choose_part
from tfkfac.compat.gradients import exact_second_derivatives
from tfkfac.kfac.clip import clip_step
from tfkfac.kfac.damping import AdaptiveDamping
from tfkfac.kfac.precondition import Preconditioned, put_back
from tfkfac.kfac.quadratic import Proposal, propose, total_over
from tfkfac.kfac.sample import Sample
from tfkfac.kfac.state import State
from tfkfac.linalg.tensors import select
from tfkfac.loss.replay import replay_loss
from tfkfac.training.guards import count_events
from tfkfac.training.step import Gradients, Step


def clipped_step(
    step: Step,
    made: Sequence[Preconditioned],
    kl_clip: tf.Tensor | None,
    state: State,
    damping: tf.Tensor,
) -> Gradients:
    """Scales what is preconditioned to the longest step allowed.

    Args:
        step: The step, its gradients reduced.
        made: What is preconditioned of them.
        kl_clip: Largest squared length; None is none.
        state: What this replica keeps.
        damping: The damping.

    Returns:
        All gradients for the inner optimizer.
    """
    if not made:
        return step.gradients
    clip = clip_step(
        [one.product for one in made],
        kl_clip,
        step.job.inner_optimizer.learning_rate,
    )
    state.report.note(clip, damping, step.job.name)
    return put_back(made, clip.factor, step.gradients)


def quadratic_step(
    step: Step,
    made: Sequence[Preconditioned],
    sample: Sample,
    fraction: float | None,
    state: State,
    damping: tf.Tensor,
) -> Gradients:
    """The step that minimises the quadratic model, if it holds what it says.

    Args:
        step: The step, its gradients reduced.
        made: What is preconditioned of them.
        sample: The batch.
        fraction: Share of it that the Gauss-Newton matrix is of, or None.
        state: What this replica keeps.
        damping: The damping.

    Returns:
        The gradients for an inner optimizer that is plain SGD.
    """
    job, previous = step.job, state.previous
    assert previous is not None
    part = choose_part(fraction, job.clock, step.group.size)
    proposal = propose(
        step, made, sample.part(part, job.model.name), previous, damping
    )
    count_events(
        [~proposal.is_finite],
        [state.report.lost],
        [job.name],
        "the quadratic model of a step is not finite, the weights stay.",
    )
    accepted, actual = tf.constant(True), tf.constant(float("nan"), tf.float64)
    if state.damping is not None:
        accepted, actual = look(step, sample, proposal, state.damping)
    changes = [select(accepted, d, tf.zeros_like(d)) for d in proposal.changes]
    for place, change in zip(proposal.places, changes, strict=True):
        own = previous.changes[place]
        own.assign(select(accepted & proposal.is_finite, change, own))
    state.report.note_quadratic(
        proposal.coefficients, proposal.predicted, actual, damping
    )
    rest = iter(changes)
    return [None if g is None else -next(rest) for g in step.gradients]


def look(
    step: Step, sample: Sample, proposal: Proposal, damping: AdaptiveDamping
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the loss at the new weights if that is due.

    Returns:
        Whether the step is accepted, and how much smaller it makes the loss,
        NaN if nobody has looked.
    """
    job = step.job
    weights = job.model.trainable_variables
    variables = [weights[place] for place in proposal.places]
    values = [tf.identity(v.value) for v in variables]
    rate = job.inner_optimizer.learning_rate
    moved = [
        value + tf.cast(rate, value.dtype) * change
        for value, change in zip(values, proposal.changes, strict=True)
    ]

    def compare() -> tuple[tf.Tensor, tf.Tensor]:
        # Both anew, so that they see the same dropout masks. Keras does not
        # reduce the loss of an empty batch.
        with exact_second_derivatives(total_over(step.group)):
            losses = [
                replay_loss(
                    job.model,
                    sample.call,
                    sample.arguments,
                    variables,
                    point,
                    sample.shares,
                )
                for point in (values, moved)
            ]
        before, after = step.group.all_reduce(
            [tf.cast(tf.reduce_sum(x), tf.float64) for x in losses]
        )
        accepted = damping.judge(before, after, proposal.predicted, job.name)
        return accepted, before - after

    def pass_by() -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(True), tf.constant(float("nan"), tf.float64)

    due = damping.is_due(job.clock, proposal.predicted)
    due &= proposal.is_finite
    return tf.cond(due, compare, pass_by)
