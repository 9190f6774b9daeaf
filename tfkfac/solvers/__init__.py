"""Solvers: decompose Kronecker factors and precondition gradients.

`tfkfac.register_solver` adds a user's subclass of `Solver`, `InverseSolver` or
`EigenSolver`.
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
