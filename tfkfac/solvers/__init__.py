"""Solvers: how factors become a preconditioner."""

from tfkfac.solvers.base import Solver, most_rows
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.solvers.inverse import InverseSolver
from tfkfac.solvers.printed import OuterEigenSolver, PlainInverseSolver

SOLVERS: dict[str, type[Solver]] = {
    kind.name: kind
    for kind in (
        EigenSolver,
        OuterEigenSolver,
        InverseSolver,
        PlainInverseSolver,
    )
}

__all__ = ["SOLVERS", "Solver", "most_rows"]
