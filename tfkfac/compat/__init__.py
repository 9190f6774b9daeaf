"""Code that relies on private or undocumented parts of Keras and TensorFlow.

Each function documents the internals that it relies on. `tests/compat` checks
them: after an upgrade a failing test names the changed internal and the
function that needs it.
"""

import keras

# Check here, before an import that fails with another backend.
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfkfac needs Keras' TensorFlow backend. Set the environment variable "
        "KERAS_BACKEND=tensorflow before Keras is imported, or 'backend' in "
        f"~/.keras/keras.json. Received: backend={keras.backend.backend()!r}"
    )
