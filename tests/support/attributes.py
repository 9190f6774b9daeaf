"""Attributes of Keras that the import of tfkfac changes."""

import importlib
from typing import Any

import keras
from keras.src import backend, optimizers, saving
from keras.src.legacy.saving import legacy_h5_format, saving_utils
from keras.src.saving import saving_api, saving_lib, serialization_lib


def attributes() -> dict[str, Any]:
    """Return the attributes of classes and modules, and a table."""
    classes = [*keras.Model.__mro__, *keras.Sequential.__mro__]
    classes += [*keras.optimizers.LossScaleOptimizer.__mro__]
    classes += [keras.callbacks.CallbackList, *keras.layers.Dense.__mro__]
    modules = [legacy_h5_format, saving_utils, saving_api, saving_lib]
    modules += [serialization_lib, optimizers, keras.optimizers, keras.saving]
    modules += [keras.models, keras.losses, keras.metrics, backend, saving]
    values = {
        f"{owner.__name__}.{name}": value
        for owner in (*classes, *modules)
        for name, value in vars(owner).items()
    }
    table = optimizers.ALL_OBJECTS_DICT
    return values | {f"optimizers[{k}]": v for k, v in table.items()}


def import_tfkfac() -> list[str]:
    """Import tfkfac; return the names of the attributes that this changes."""
    before = attributes()
    importlib.import_module("tfkfac")
    after = attributes()
    names = sorted(before | after)
    return [n for n in names if before.get(n) is not after.get(n)]
