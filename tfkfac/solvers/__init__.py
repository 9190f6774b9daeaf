"""Solvers: how factors become a preconditioner."""

from tfkfac.solvers.base import Decomposition, Solver, most_rows
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.solvers.inverse import InverseSolver
from tfkfac.solvers.printed import OuterEigenSolver, PlainInverseSolver

SOLVERS: dict[str, type[Solver]] = {
    "eigen": EigenSolver,
    "eigen_outer": OuterEigenSolver,
    "inverse": InverseSolver,
    "plain_inverse": PlainInverseSolver,
}

__all__ = ["SOLVERS", "Decomposition", "Solver", "most_rows"]
