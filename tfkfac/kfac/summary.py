"""The table of what is preconditioned and what is not."""

from tfkfac.blocks.registry import Leftover, count_weights
from tfkfac.kfac.placement import Placement
from tfkfac.wrapper.tables import bytes_text, table


def describe(placement: Placement, title: str) -> list[str]:
    """Returns the lines of the summary of an optimizer.

    Args:
        placement: The blocks, and which worker does what of them.
        title: First line.
    """
    lines = [title, ""]
    rows = [
        block_row(placement, i)
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
        lines += ["", "Left to the inner optimizer as they are:"]
        rows = [
            row for left in placement.registry.left for row in left_rows(left)
        ]
        lines += table(("Layer", "Variable", "Weights", "Reason"), rows)
    return [*lines, "", totals(placement)]


def block_row(placement: Placement, layer: int) -> tuple[str, ...]:
    """One line of the table of blocks; the bytes are this worker's."""
    block, rank = placement.blocks[layer], placement.topology.local[0]
    kinds = block.factors
    state = placement.factor_bytes(rank, layer)
    state += placement.decomposition_bytes(rank, layer)
    row = (
        block.path,
        block.kind,
        *(kinds[name].text if name in kinds else "-" for name in ("A", "G")),
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
