"""Where an optimizer can be used."""

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


def repair_keras(strategy: tf.distribute.Strategy) -> None:
    """Makes Keras' `fit` work under a user's own strategy, if it is one."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if isinstance(strategy, kinds):
        repair(strategy)
