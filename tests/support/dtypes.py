"""Keras' default dtype, for a while."""

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def floats(dtype: str) -> Iterator[None]:
    """Makes a dtype or a policy the default of Keras for a while."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    if not dtype.startswith("mixed"):
        keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
