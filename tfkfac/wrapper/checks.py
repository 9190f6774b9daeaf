"""What an optimizer can be put around, and where it can be used."""

from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.strategy import repair
from tfkfac.distributed.topology import check_strategy


def check_settings(model: keras.Model, loss_scaler: Any) -> None:
    """Refuses what a model is compiled with and cannot work.

    Args:
        model: The model.
        loss_scaler: The `LossScaleOptimizer` around the optimizer, if any.

    Raises:
        ValueError: If a setting or the strategy is not supported.
    """
    jit = getattr(model, "jit_compile", False)
    if jit is True and not tf.config.list_physical_devices("GPU"):
        raise ValueError(
            "Argument `jit_compile` must not be True without a GPU: XLA's "
            "decompositions are many times slower on a CPU. Received: "
            "jit_compile=True. Compile the model with jit_compile=False."
        )
    strategy = model.distribute_strategy
    check_strategy(strategy)
    repair_keras(strategy)
    if strategy.num_replicas_in_sync == 1:
        return
    if getattr(model, "steps_per_execution", 1) > 1:
        raise ValueError(
            "Argument `steps_per_execution` must be 1 with several "
            "replicas: TensorFlow cannot run more. Received: "
            f"steps_per_execution={model.steps_per_execution}"
        )
    if loss_scaler is not None:
        raise ValueError(
            "A `LossScaleOptimizer` hangs with several replicas as soon "
            "as one of them has a gradient that is not finite. Use the "
            "policy 'mixed_bfloat16', which needs none."
        )


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


def repair_keras(strategy: tf.distribute.Strategy) -> None:
    """Makes Keras' `fit` work under a user's own strategy, if it is one."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if isinstance(strategy, kinds):
        repair(strategy)


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The numbers of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values
    return gradient


def serialize_value(value: Any) -> Any:
    """Serialises a schedule or callable; a number is itself."""
    if value is None or isinstance(value, (int, float)):
        return value
    return keras.saving.serialize_keras_object(value)
