"""What users are told, once, of a model or a setting that will disappoint."""

import keras

from tfkfac.blocks.registry import Registry
from tfkfac.capture.walk import SKIPPED
from tfkfac.solvers import Solver
from tfkfac.solvers.eigen import EigenSolver
from tfkfac.wrapper.support import uses_xla

# Below this share of the weights most of a model is not trained by K-FAC.
_LOW_COVERAGE = 0.5
# Layers named by the warning of it.
_MOST_NAMED = 3


def coverage_warning(registry: Registry, model: str, inner: str) -> str | None:
    """Returns what to say of a model that K-FAC mostly leaves alone, or None.

    Layers of `skip_layers` do not count: that they are left alone is known.

    Args:
        registry: Blocks and leftovers of the model.
        model: Name of the model.
        inner: Name of the class of the inner optimizer.
    """
    left = [one for one in registry.left if one.reason != SKIPPED]
    covered = registry.covered
    total = covered + sum(one.weights for one in left)
    if covered >= _LOW_COVERAGE * total:
        return None
    what = (
        f"K-FAC preconditions {covered / total:.1%} of the weights of model "
        f"'{model}' ({covered:,} of {total:,})"
    )
    if not registry.blocks:
        what = f"Model '{model}' has no layer that K-FAC supports"
    left.sort(key=lambda one: one.weights, reverse=True)
    named = [
        f"{one.path or '(model)'} ({one.weights:,} weights: {one.reason})"
        for one in left[:_MOST_NAMED]
    ]
    named += ["..."] if len(left) > _MOST_NAMED else []
    return (
        f"{what}. Its inner optimizer, {inner}, trains the others alone: "
        f"{', '.join(named)}. See `optimizer.summary()`; for layers of your "
        "own there is `tfkfac.register_block`."
    )


def solver_warning(model: keras.Model, solver: type[Solver]) -> str | None:
    """Returns what to say of a solver that XLA makes slow, or None."""
    if not (issubclass(solver, EigenSolver) and uses_xla(model)):
        return None
    # Measured on a CPU: 45 to 72 times, 1e-6 accurate in float32.
    return (
        f"Model '{model.name}' is compiled by XLA, whose eigen-decompositions "
        "are loops of Jacobi rotations: many times slower than TensorFlow's "
        "and about 1e-6 accurate. Compile the model with jit_compile=False, or "
        "use KFAC(solver='inverse')."
    )
