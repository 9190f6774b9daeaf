"""All that relies on what Keras and TensorFlow do not promise."""
