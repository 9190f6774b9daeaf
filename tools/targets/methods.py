"""The optimizers, their learning rates decaying linearly to 0."""

from typing import Any

import keras

from benchmarks.keras_training import FIRST_ORDER_TYPES
from benchmarks.variants import Variant
from targets.problems import Problem


def make_optimizer(
    method: Variant, problem: Problem, rate: float | None, steps: int
) -> Any:
    """Makes an optimizer for a training of so many steps.

    Args:
        method: Its name and arguments.
        problem: What is trained.
        rate: First learning rate; None is K-FAC's own.
        steps: Number of steps of the training.
    """
    if method.name in FIRST_ORDER_TYPES:
        return FIRST_ORDER_TYPES[method.name](
            _decaying(rate, steps), **method.arguments
        )
    import tfkfac

    if method.name == "kfac":
        default = float(tfkfac.KFAC().learning_rate)
        arguments = {**problem.kfac, **method.arguments}
        return tfkfac.KFAC(_decaying(rate or default, steps), **arguments)
    if method.name == "kfac-quadratic":
        arguments = {
            "damping": tfkfac.LevenbergMarquardt(),
            **method.arguments,
        }
        return tfkfac.KFAC(step="quadratic", **arguments)
    _, _, base = method.name.partition("-")
    inner = FIRST_ORDER_TYPES[base](_decaying(rate, steps))
    return tfkfac.FOSI(inner, **method.arguments)


def _decaying(
    rate: float | None, steps: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    assert rate is not None
    return keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=0.0
    )
