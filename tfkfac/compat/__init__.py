"""All that relies on what Keras and TensorFlow do not promise.

Each function says what it relies on. `tests/compat` holds Keras and TensorFlow
to it: after an upgrade it says what has changed, and for which function.
"""

import keras

# Here, since no module that would fail for it is imported earlier.
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "tfkfac needs Keras' TensorFlow backend. Set the environment variable "
        "KERAS_BACKEND=tensorflow before Keras is imported, or 'backend' in "
        f"~/.keras/keras.json. Received: backend={keras.backend.backend()!r}"
    )
