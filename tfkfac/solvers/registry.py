"""Registry of solvers by name."""

import inspect

from tfkfac.solvers.base import Solver
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.solvers.inverse import InverseSolver
from tfkfac.solvers.stacks import BlockByBlock

_BUILT_IN: dict[str, type[Solver]] = {
    "eigen": EigenSolver,
    "inverse": InverseSolver,
}
SOLVERS = dict(_BUILT_IN)
"""Solver classes by name, registered ones too."""

# Sections of saved state; no solver may have these names.
RESERVED = ("format", "share", "state")


def register_solver(name: str, solver_class: type[Solver]) -> None:
    """Make a solver available as `KFAC(solver=name)`.

    Register it on all workers, and before a model that was saved with it is
    loaded.

    >>> class Undamped(tfkfac.solvers.InverseSolver):
    ...     def share(self, name, means, damping):
    ...         return tf.zeros_like(damping)
    >>> tfkfac.register_solver("undamped", Undamped)
    >>> optimizer = tfkfac.KFAC(solver="undamped")

    Args:
        name: Value of the argument `solver` of `KFAC`, also the name of the
            solver's section in saved state. The class replaces an earlier
            registration of the same name.
        solver_class: A subclass of `tfkfac.solvers.Solver` without abstract
            methods.

    Raises:
        TypeError: If `solver_class` is not such a class.
        ValueError: If `name` is not an identifier, is the name of a built-in
            solver, or of another section of saved state.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(
            f"Argument `name` must be an identifier. Received: name={name!r}"
        )
    if name in (*_BUILT_IN, *RESERVED):
        raise ValueError(
            "Argument `name` must not be the name of a built-in solver or one "
            f"of {RESERVED}. Received: name={name!r}"
        )
    is_solver = isinstance(solver_class, type) and issubclass(
        solver_class, Solver
    )
    if not is_solver or inspect.isabstract(solver_class):
        raise TypeError(
            "Argument `solver_class` must be a subclass of "
            "`tfkfac.solvers.Solver` without abstract methods. "
            f"Received: solver_class={solver_class!r}"
        )
    SOLVERS[name] = solver_class


def make_solver(name: str, by_roots: bool = False) -> Solver:
    """Create an instance of a registered solver."""
    solver_class = SOLVERS[name]
    if by_roots and solver_class.apply_back is Solver.apply_back:
        raise ValueError(
            "Argument `solver` must be the name of a solver with the method "
            f"`apply_back` for step='spectral'. Received: solver={name!r}"
        )
    solver = solver_class(name, by_roots)
    return solver if name in _BUILT_IN else BlockByBlock(solver)
