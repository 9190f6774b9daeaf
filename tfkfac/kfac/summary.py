"""The table of what is preconditioned and what is not."""

from collections.abc import Sequence

from tfkfac.blocks import Block
from tfkfac.blocks.registry import Leftover, count_weights
from tfkfac.factors import LowRank
from tfkfac.fisher.choice import Choice
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.state import State
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.job import Job

_LEFT = {
    "inner": "Left to the inner optimizer as they are:",
    "quadratic": "Moved along their gradients, by a step size of their own:",
}


def describe(
    placement: Placement,
    states: Sequence[State],
    titles: Sequence[str],
    step: str,
) -> list[str]:
    """Returns the lines of the summary of an optimizer.

    Args:
        placement: The blocks, and which worker does what of them.
        states: What the replicas of this process keep; none before training.
        titles: The first lines.
        step: "inner" or "quadratic".
    """
    lines = [*titles, ""]
    rows = [
        block_row(placement, states, i)
        for i, block in enumerate(placement.blocks)
        if block.left_out is None
    ]
    if rows:
        header = ["Layer", "Block", "A", "G", "Weights", "State"]
        if placement.topology.replicas > 1:
            header += ["Owner", "Gradient workers"]
        lines += table(tuple(header), rows)
    else:
        lines.append("No layer is preconditioned.")
    if placement.registry.left:
        lines += ["", _LEFT[step]]
        rows = [
            row for left in placement.registry.left for row in left_rows(left)
        ]
        lines += table(("Layer", "Variable", "Weights", "Reason"), rows)
    lines += ["", totals(placement)]
    if states and states[0].damping is not None:
        lines.append(states[0].damping.text())
    return lines


def title(job: Job, solver: str, step: str) -> str:
    """The first line.

    Args:
        job: The job.
        solver: Name of the solver.
        step: "inner" or "quadratic".
    """
    inner = type(job.inner_optimizer).__name__
    text = (
        f"K-FAC '{job.name}' of model '{job.model.name}': solver {solver}, "
        f"inner optimizer {inner}"
    )
    return text + ", steps by the quadratic model" * (step == "quadratic")


def fisher_text(wanted: str | None, choice: Choice | None) -> str:
    """What is said of the type of the Fisher matrix.

    Args:
        wanted: What the user wants.
        choice: What was chosen in the last step that was traced, if any.
    """
    if choice is None:
        return f"Fisher matrix: {wanted or 'chosen by the loss when training'}"
    why = f" ({choice.reason})" if choice.reason else ""
    return f"Fisher matrix: {choice.type}{why}"


def block_row(
    placement: Placement, states: Sequence[State], layer: int
) -> tuple[str, ...]:
    """One line of the table of blocks; the bytes are this worker's."""
    block, rank = placement.blocks[layer], placement.topology.local[0]
    state = placement.factor_bytes(rank, layer)
    state += placement.decomposition_bytes(rank, layer)
    row = (
        block.path,
        block.kind,
        *(factor_text(block, name, states) for name in ("A", "G")),
        f"{count_weights(block.variables):,}",
        bytes_text(state),
    )
    if placement.topology.replicas == 1:
        return row
    plan = placement.plan.layers[layer]
    owners = sorted(set(plan.owners.values()))
    names = [
        f"{name}: {owner}" if len(owners) > 1 else str(owner)
        for name, owner in plan.owners.items()
    ]
    return (
        *row,
        ", ".join(dict.fromkeys(names)),
        ", ".join(map(str, plan.gradient_workers)),
    )


def factor_text(block: Block, name: str, states: Sequence[State]) -> str:
    """What one factor is, and how much of it a sketch explains so far."""
    kind = block.factors.get(name)
    if kind is None:
        return "-"
    if isinstance(kind, LowRank):
        for one in (p for state in states for p in state.preconditioners):
            kept = one.factors if one.block is block else None
            if kept is not None and name in kept.names and kept.weight > 0:
                share = float(kind.explained(kept.value(name)))
                return f"{kind.text} ({share:.0%} of trace)"
    return kind.text


def left_rows(left: Leftover) -> list[tuple[str, ...]]:
    """One line for each variable of a layer without a block."""
    return [
        (
            left.path or "(model)",
            variable.name,
            f"{count_weights([variable]):,}",
            left.reason,
        )
        for variable in left.variables
    ]


def totals(placement: Placement) -> str:
    """The line under the tables."""
    covered = placement.registry.covered
    rest = sum(left.weights for left in placement.registry.left)
    topology = placement.topology
    state = placement.state_bytes(topology.local[0])
    where = f" of worker {topology.local[0]}" if topology.replicas > 1 else ""
    return (
        f"Preconditioned weights: {covered:,} of {covered + rest:,}. "
        f"State{where}: factors {bytes_text(state['factors'])}, "
        f"decompositions {bytes_text(state['decompositions'])}."
    )
