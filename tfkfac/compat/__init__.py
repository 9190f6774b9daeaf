"""All that relies on what Keras and TensorFlow do not promise.

Each function says what it relies on. `tests/compat` holds Keras and TensorFlow
to it: after an upgrade it says what has changed, and for which function.
"""
