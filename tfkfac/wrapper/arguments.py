"""An inner optimizer as an argument, and values in a config."""

from typing import Any

import keras


def check_inner(identifier: Any) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer that an argument stands for.

    Raises:
        ValueError: If it is not an optimizer or one that cannot be inside.
    """
    message = (
        "Argument `inner_optimizer` must be a Keras optimizer, its name or "
        "config, or a float learning rate. Received: inner_optimizer="
        f"{identifier!r} (of type {type(identifier)})"
    )
    try:
        inner = keras.optimizers.get(identifier)
    except (ValueError, TypeError) as error:
        raise ValueError(message) from error
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise ValueError(message)
    wraps = isinstance(inner, keras.optimizers.LossScaleOptimizer)
    if wraps or hasattr(inner, "inner_optimizer"):
        raise ValueError(
            "Argument `inner_optimizer` must be a plain optimizer; put a "
            "`LossScaleOptimizer` around this one, not inside. Received: "
            f"inner_optimizer={inner}"
        )
    if inner.loss_scale_factor is not None:
        raise ValueError(
            "Argument `inner_optimizer` must not have a `loss_scale_factor`; "
            "put a `LossScaleOptimizer` around this optimizer. Received: "
            f"loss_scale_factor={inner.loss_scale_factor}"
        )
    return inner


def serialize_value(value: Any) -> Any:
    """Serialises a schedule or callable; a number is itself."""
    if value is None or isinstance(value, (int, float)):
        return value
    return keras.saving.serialize_keras_object(value)
