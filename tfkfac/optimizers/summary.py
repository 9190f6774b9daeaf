"""The table of what is preconditioned and what is not."""

from collections.abc import Sequence

from tfkfac.blocks import Block
from tfkfac.capture.registry import Leftover, Registry
from tfkfac.factors import factor_bytes
from tfkfac.solvers import Solver, decomposition_bytes


def describe(registry: Registry, solver: Solver, title: str) -> str:
    """Returns the summary of an optimizer as text.

    Args:
        registry: Blocks and leftovers of the model.
        solver: The solver, for the size of the decompositions.
        title: First line.
    """
    lines = [title, ""]
    if registry.blocks:
        rows = [block_row(block, solver) for block in registry.blocks]
        header = ("Layer", "Block", "A", "G", "Weights", "State")
        lines += table(header, rows)
    else:
        lines.append("No layer is preconditioned.")
    if registry.leftovers:
        lines += ["", "Left to the inner optimizer as they are:"]
        rows = [row for left in registry.leftovers for row in left_rows(left)]
        lines += table(("Layer", "Variable", "Weights", "Reason"), rows)
    return "\n".join([*lines, "", totals(registry, solver)])


def block_row(block: Block, solver: Solver) -> tuple[str, ...]:
    """One line of the table of blocks."""
    shapes = block.factor_shapes
    weights = sum(v.value.shape.num_elements() for v in block.variables)
    return (
        block.path,
        block.kind,
        shape_text(shapes.get("A")),
        shape_text(shapes.get("G")),
        f"{weights:,}",
        bytes_text(factor_bytes(block) + decomposition_bytes(solver, block)),
    )


def left_rows(left: Leftover) -> list[tuple[str, ...]]:
    """One line for each variable of a layer without a block."""
    return [
        (
            left.path or "(model)",
            variable.name,
            f"{variable.value.shape.num_elements():,}",
            left.reason,
        )
        for variable in left.variables
    ]


def totals(registry: Registry, solver: Solver) -> str:
    """The line under the tables."""
    covered = sum(
        v.value.shape.num_elements()
        for block in registry.blocks
        for v in block.variables
    )
    rest = sum(
        v.value.shape.num_elements()
        for left in registry.leftovers
        for v in left.variables
    )
    factors = sum(factor_bytes(b) for b in registry.blocks)
    inverses = sum(decomposition_bytes(solver, b) for b in registry.blocks)
    return (
        f"Preconditioned weights: {covered:,} of {covered + rest:,}. "
        f"State: factors {bytes_text(factors)}, decompositions "
        f"{bytes_text(inverses)}."
    )


def shape_text(shape: tuple[int, ...] | None) -> str:
    """A factor's shape: `5 x 5`, `3 of 5 x 5`, `diagonal 7` or `-`."""
    if shape is None:
        return "-"
    if len(shape) == 1:
        return f"diagonal {shape[0]}"
    text = f"{shape[-2]} x {shape[-1]}"
    return text if len(shape) == 2 else f"{shape[0]} of {text}"


def bytes_text(count: int) -> str:
    """A number of bytes with a unit."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GB"


def table(
    header: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> list[str]:
    """Lays rows out in columns as wide as they need."""
    widths = [
        max(len(row[i]) for row in (header, *rows)) for i in range(len(header))
    ]

    def line(row: tuple[str, ...]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(text.ljust(width) for text, width in cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [rule, line(header), rule, *(line(row) for row in rows), rule]
