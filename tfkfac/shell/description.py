"""A job in plain values, which its workers compare."""

import math
import re
import types
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfkfac.checks import is_number
from tfkfac.compat.models import all_layers

# What workers may differ in: labels, and where each draws its own numbers.
_OWN = frozenset({"name", "seed", "rng"})
_COUNT = re.compile(r"_\d+$")
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)


def describe_model(model: keras.Model) -> dict[str, Any]:
    """The layers and the compiled loss of a model, by name."""
    found: dict[str, Any] = {"loss": plain(model.loss)}
    found["metrics"] = sorted(metric.name for metric in model.metrics)
    layers = [layer for layer in all_layers(model) if layer is not model]
    for number, layer in enumerate(layers):
        # Keras counts the layers of a process, which may have made others.
        label = f"layer {number} '{_COUNT.sub('', layer.name)}'"
        for key, value in _settings(layer):
            found[f"{label}, {key}"] = value
    return found


def _settings(layer: keras.layers.Layer) -> Iterator[tuple[str, Any]]:
    """Settings of a layer, as far as it tells them."""
    config = plain(layer)
    yield "class", type(layer).__name__
    if isinstance(config, dict):
        # A model says here what its layers say themselves.
        skipped = {"class", "layers", "dtype"}
        yield from ((k, v) for k, v in config.items() if k not in skipped)
    yield "dtype policy", layer.dtype_policy.name
    yield "trainable", layer.trainable


def plain(value: Any) -> Any:
    """A value in what JSON can hold, the same in all processes that have it.

    Of a function or of an object without a config that is the name.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if is_number(value):
        number = value.item() if isinstance(value, np.generic) else value
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items() if k not in _OWN}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return [list(value.shape), zlib.crc32(value.tobytes())]
    if isinstance(value, _FUNCTIONS):
        return value.__qualname__
    return _of_object(value)


def _of_object(value: Any) -> Any:
    name = type(value).__name__
    try:
        with warnings.catch_warnings():
            # Not for a file: what it cannot hold is of no interest.
            warnings.simplefilter("ignore")
            config = value.get_config()
    except Exception:  # it has none, or a user's own that does anything
        return name
    return {"class": name, **plain(config)} if config else name
