"""Keras with a backend other than TensorFlow."""

import subprocess
import sys

import pytest

# Other backends need other packages, so only replace `backend()`.
PRETENDED = """
import keras
keras.backend.backend = lambda: "jax"
import tfkfac
"""


@pytest.mark.slow
def test_another_backend_is_an_import_error() -> None:
    command = [sys.executable, "-c", PRETENDED]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    error = done.stderr.strip().splitlines()[-1]
    assert error.startswith("ImportError: tfkfac needs Keras' TensorFlow")
