"""Capture of layer inputs and output gradients from the user's own tape."""
