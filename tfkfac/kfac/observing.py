"""What a step has of each block, before anything is done with it."""

from tfkfac.compat.optimizers import variable_key
from tfkfac.kfac.active import (
    ActiveBlock,
    active_blocks,
    report_unexplained,
)
from tfkfac.kfac.rows import with_rows
from tfkfac.kfac.state import State
from tfkfac.training.step import Step


def observe(step: Step, state: State, by_rows: bool) -> list[ActiveBlock]:
    """The blocks of a step, with what their layers left behind.

    Args:
        step: The step.
        state: What this replica keeps.
        by_rows: Whether gradients may be kept as the rows they are made of.
    """
    inner = step.job.inner_optimizer
    layers = active_blocks(
        state.preconditioners,
        step.gradients,
        [variable_key(inner, v) for v in step.variables],
        lambda variable: variable_key(inner, variable),
    )
    report_unexplained(layers, state.counters)
    return with_rows(layers, step) if by_rows else layers
