"""Operations of a block: statistics, decompositions, preconditioning."""

import dataclasses
from collections.abc import Mapping

from tfkfac.blocks import Block
from tfkfac.solvers import Solver, most_rows


@dataclasses.dataclass(frozen=True)
class BlockWork:
    """What is done with one block, in multiplications.

    Attributes:
        decompositions: About n^3 for each factor, and its elements, by name.
        precondition: To multiply the gradient with the decomposition.
        largest_rows: Up to how many rows they are preconditioned in its place;
            0 if never.
        row: What one such row takes, beside the products with other rows.
        width: What two rows take that meet in `<P, W>`.
    """

    decompositions: Mapping[str, tuple[int, int]]
    precondition: int
    largest_rows: int
    row: int
    width: int

    @classmethod
    def of(cls, block: Block, solver: Solver, workers: int) -> "BlockWork":
        """Counts the work of a block.

        Args:
            block: The block.
            solver: The solver.
            workers: Number of workers that add up their gradients.
        """
        factors = block.factors
        *stack, inputs, outputs = block.gradient_shape
        times = {"A": outputs, "G": inputs}
        one = {n: f.multiplications for n, f in factors.items()}
        matrix = sum(one[name] * times[name] for name in factors)
        rows = 0
        if solver.takes_rows and not stack and "A" in factors:
            rows = most_rows(factors, workers)
        return cls(
            {n: (f.operations, f.elements) for n, f in factors.items()},
            # To the eigenbasis and back.
            matrix if solver.is_explicit else 2 * matrix,
            rows,
            sum(one.values()) + (inputs * outputs if workers > 1 else 0),
            inputs + outputs if workers == 1 else 0,
        )

    def apply(self, rows: float) -> float:
        """Multiplications that precondition a gradient of so many rows."""
        if 0 < rows <= self.largest_rows:
            return rows * self.row + rows**2 * self.width
        return self.precondition
