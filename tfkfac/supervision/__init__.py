"""Code that runs before, during and after `fit`, on one or several workers."""
