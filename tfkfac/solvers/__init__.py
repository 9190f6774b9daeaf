"""Solvers: how factors become a preconditioner.

`tfkfac.register_solver` adds a solver of one's own: a subclass of `Solver`, or
of `InverseSolver` or `EigenSolver`.
"""

from tfkfac.solvers.base import Factors, Solver
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.solvers.inverse import InverseSolver
from tfkfac.solvers.registry import SOLVERS, register_solver

__all__ = [
    "SOLVERS",
    "EigenSolver",
    "Factors",
    "InverseSolver",
    "Solver",
    "register_solver",
]
