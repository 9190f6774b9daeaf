"""Curvature of Keras models: Hessian-vector products and spectra."""

from tfkfac.curvature.products import hessian_vector_product, lanczos

__all__ = ["hessian_vector_product", "lanczos"]
