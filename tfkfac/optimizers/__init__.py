"""Optimizers: the algorithms, each around an inner Keras optimizer."""
