"""Private modules that are at one place in some versions, at another later."""

import importlib
from types import ModuleType

KERAS_NN = (
    "keras.src.backend.tensorflow.nn",
    "keras.src.backend.tensorflow.ops.nn",  # from Keras 3.16 on
)


def module_at(*places: str) -> ModuleType:
    """The module that is at one of several places.

    Args:
        places: Its names, the oldest first.

    Raises:
        ImportError: If it is at none of them.
    """
    for place in places:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            # What the module itself may miss is another matter.
            if not f"{place}.".startswith(f"{error.name}."):
                raise
    raise ImportError(
        f"There is none of the modules {list(places)} that tfkfac knows of. "
        "Install a version of Keras that tfkfac's metadata allow."
    )
