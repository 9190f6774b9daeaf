"""Keras optimizer that wraps another: arguments, model checks, saved state."""
