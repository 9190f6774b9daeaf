"""Tests of Keras' and TensorFlow's internals that tfkfac relies on."""

import contextlib
from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf


@contextlib.contextmanager
def contract(function: str, promise: str) -> Iterator[None]:
    """Decorate a test: a failure names the changed internal and its user.

    Args:
        function: Function of `tfkfac` that relies on the promise.
        promise: The tested behaviour of Keras or TensorFlow, as a sentence.
    """
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(
            f"Not so with Keras {keras.__version__} and TensorFlow "
            f"{tf.__version__}: {promise} `tfkfac.{function}` relies on it. "
            f"{type(error).__name__}: {error}"
        ) from error
