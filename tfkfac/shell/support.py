"""Settings of a model that an optimizer cannot work with."""

import warnings
from typing import Any

import keras
import tensorflow as tf

from tfkfac.compat.models import compiles_from_config
from tfkfac.compat.strategies import repair
from tfkfac.distributed.topology import check_strategy


def check_settings(model: keras.Model, loss_scaler: Any) -> None:
    """Refuses what a model is compiled with and cannot work.

    Args:
        model: The model.
        loss_scaler: The `LossScaleOptimizer` around the optimizer, if any.

    Raises:
        ValueError: If a setting or the strategy is not supported.
    """
    check_xla(model)
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
    if type(loss_scaler) is keras.optimizers.LossScaleOptimizer:
        raise ValueError(
            "Keras' `LossScaleOptimizer` hangs with several replicas as soon "
            "as one of them has a gradient that is not finite. Compile the "
            "model with `tfkfac.LossScaleOptimizer(optimizer)`, or use the "
            "policy 'mixed_bfloat16', which needs none."
        )


def check_xla(model: keras.Model) -> None:
    """Refuses XLA without a GPU; a loaded model does without, and says so.

    On a machine with a GPU Keras puts `jit_compile=True` into the config of
    every model, its users' choice or not.

    Raises:
        ValueError: If the user asks for it.
    """
    if not uses_xla(model) or tf.config.list_physical_devices("GPU"):
        return
    why = (
        "without a GPU: XLA's decompositions are many times slower on a CPU. "
        "Received: jit_compile=True."
    )
    if not compiles_from_config():
        raise ValueError(
            f"Argument `jit_compile` must not be True {why} Compile the model "
            "with jit_compile=False."
        )
    warnings.warn(
        f"Model '{model.name}' was saved with a `jit_compile` that is of no "
        f"use {why} It trains with jit_compile=False.",
        stacklevel=2,
    )
    model.jit_compile = False


def uses_xla(model: keras.Model) -> bool:
    """True if Keras compiles the training step of a model by XLA."""
    return model.compiled and bool(model.jit_compile)


def repair_keras(strategy: tf.distribute.Strategy) -> None:
    """Makes Keras' `fit` work under a user's own strategy, if it is one."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if isinstance(strategy, kinds):
        repair(strategy)
