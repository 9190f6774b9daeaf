"""Checks of a model's settings, and a description that workers compare."""

import math
import re
import types
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.checks import is_number
from tfkfac.compat.models import all_layers
from tfkfac.compat.optimizers import raw_iterations
from tfkfac.compat.strategies import repair
from tfkfac.distributed.topology import check_strategy, find_topology
from tfkfac.training.job import refuse_eager_replicas

# Settings that may differ between workers.
_IGNORED = frozenset({"name", "seed", "rng"})
_COUNT = re.compile(r"_\d+$")  # counter in a Keras layer name
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
# Entries of configs that `describe_model` leaves out.
_SKIPPED = {"class", "layers", "input_layers", "output_layers", "dtype"}


def check_settings(
    model: keras.Model,
    loss_scaler: Any,
    optimizers: Sequence[keras.optimizers.Optimizer],
    takes_float8: bool,
) -> None:
    """Refuse unsupported settings of a compiled model.

    XLA without a GPU is turned off. `loss_scaler` is the `LossScaleOptimizer`
    around the optimizer, or None; `optimizers` are the wrapped optimizers.
    `takes_float8` is True if the method trains layers in float8.
    """
    if not tf.config.list_physical_devices("GPU"):
        train_without_xla(
            model,
            "Argument `jit_compile` of `compile` should not be True without a "
            "GPU: XLA's decompositions are many times slower on a CPU. "
            "Received: jit_compile=True.",
        )
    strategy = model.distribute_strategy
    takes_float8 &= strategy.num_replicas_in_sync == 1 and loss_scaler is None
    check_float8(model.trainable_variables, takes_float8)
    check_strategy(strategy)
    repair(strategy)
    if strategy.num_replicas_in_sync == 1:
        return
    # The condition is equal on all processes: all of them raise, or none.
    if model.run_eagerly and len(find_topology(strategy).local) > 1:
        refuse_eager_replicas()
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
    # With an optimizer of another scope, updates would wait forever.
    for optimizer in optimizers:
        iterations = raw_iterations(optimizer).value
        if not isinstance(iterations, tf.distribute.DistributedValues):
            raise ValueError(
                "Argument `optimizer` of `compile` must be created inside of "
                "`strategy.scope()`, as the model. Received: "
                f"{type(optimizer).__name__} '{optimizer.name}', created "
                "outside"
            )


def check_float8(variables: Sequence[keras.Variable], is_known: bool) -> None:
    """Refuse layers in float8 unless their scales are handled (`is_known`).

    Keras replaces the scales by their gradients, which must not be averaged,
    scaled or changed.
    """
    scales = [
        variable.path
        for variable in variables
        if getattr(variable, "overwrite_with_gradient", False)
    ]
    if scales and not is_known:
        raise ValueError(
            "Layers in float8 train with `KFAC` only, on one replica, without "
            "gradient accumulation and loss scaling: Keras replaces some of "
            f"their variables by the gradient. Received: {scales[0]}"
        )


def train_without_xla(model: keras.Model, reason: str) -> None:
    """Turn XLA off if it is on, with a warning."""
    if uses_xla(model):
        text = f"{reason} Model '{model.name}' trains with jit_compile=False."
        warnings.warn(text, stacklevel=2)
        model.jit_compile = False


def uses_xla(model: keras.Model) -> bool:
    """True if Keras compiles the model's training step with XLA."""
    return model.compiled and bool(model.jit_compile)


# --------------------------------------- a description, which workers compare
def describe_model(model: keras.Model) -> dict[str, Any]:
    """Settings of the layers, loss and metrics of a model, by name."""
    result: dict[str, Any] = {"loss": plain(model.loss)}
    result["metrics"] = sorted(metric.name for metric in model.metrics)
    layers = [layer for layer in all_layers(model) if layer is not model]
    for number, layer in enumerate(layers):
        # Remove Keras' counter, which depends on layers of other models.
        label = f"layer {number} '{_COUNT.sub('', layer.name)}'"
        settings = {"class": type(layer).__name__}
        if isinstance(config := plain(layer), dict):
            # Skip layers in the config of a model: they are in `layers`.
            # Keras' counters are in the names of its inputs and outputs.
            settings |= {k: v for k, v in config.items() if k not in _SKIPPED}
        settings["dtype policy"] = layer.dtype_policy.name
        settings["trainable"] = layer.trainable
        result |= {f"{label}, {key}": x for key, x in settings.items()}
    return result


def plain(value: Any) -> Any:
    """Convert a value to JSON types, equal in all processes.

    Functions, and objects without a config, are replaced by their names.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if is_number(value):
        number = value.item() if isinstance(value, np.generic) else value
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":
            return "<lambda>"  # its code contains the path of the source
        items = ((k, v) for k, v in value.items() if k not in _IGNORED)
        return {str(k): plain(v) for k, v in items}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return [list(value.shape), zlib.crc32(value.tobytes())]
    if isinstance(value, _FUNCTIONS):
        return value.__qualname__
    name = type(value).__name__
    try:
        with warnings.catch_warnings():
            # The config is only compared, never saved: ignore warnings of
            # values that cannot be serialized.
            warnings.simplefilter("ignore")
            config = value.get_config()
    except Exception:  # no config, or `get_config` fails
        return name
    return {"class": name, **plain(config)} if config else name
