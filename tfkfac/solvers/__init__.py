"""Solvers: how factors become a preconditioner."""

from tfkfac.solvers.base import Decomposition, Solver
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.solvers.inverse import InverseSolver

SOLVERS: dict[str, type[Solver]] = {
    "eigen": EigenSolver,
    "inverse": InverseSolver,
}

__all__ = ["SOLVERS", "Decomposition", "Solver"]
