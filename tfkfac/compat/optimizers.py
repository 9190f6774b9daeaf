"""What Keras optimizers keep to themselves."""

from collections.abc import Hashable
from typing import Any

import keras


def variable_key(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Hashable:
    """Key under which an optimizer knows a variable."""
    return optimizer._var_key(variable)


def knows_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether a built optimizer was built with a variable."""
    key = variable_key(optimizer, variable)
    return key in optimizer._trainable_variables_indices


def trainable_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """The variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def raw_iterations(optimizer: keras.optimizers.Optimizer) -> Any:
    """The variable that counts calls of `apply`, micro-batches included."""
    return optimizer._iterations
