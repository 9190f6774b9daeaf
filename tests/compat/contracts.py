"""What tfkfac relies on in Keras and TensorFlow, said when it is no more so."""

import contextlib
from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf


@contextlib.contextmanager
def contract(function: str, promise: str) -> Iterator[None]:
    """Decorates a test: whatever it raises says what has changed for whom.

    Args:
        function: The function of `tfkfac` that relies on it.
        promise: What is tested, a sentence on Keras or TensorFlow.
    """
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        raise AssertionError(
            f"Not so with Keras {keras.__version__} and TensorFlow "
            f"{tf.__version__}: {promise} `tfkfac.{function}` relies on it. "
            f"{type(error).__name__}: {error}"
        ) from error
