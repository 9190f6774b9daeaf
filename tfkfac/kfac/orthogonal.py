"""Orthogonalisation, and spectral steps of matrices without a block.

With the identity in place of both factors, the direction of a matrix is the
polar factor of its Nesterov momentum, as in Muon (Jordan et al., 2024). All
workers have the gradient, and compute the direction.
"""

import math
import weakref
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfkfac.blocks.registry import EXCLUDED, Leftover
from tfkfac.capture.walk import SKIPPED
from tfkfac.compat.functions import shared_call
from tfkfac.compat.optimizers import variable_key
from tfkfac.kfac.averages import SPECTRAL, add_momentum, clear_unused
from tfkfac.linalg.polar import polar_factors
from tfkfac.linalg.tensors import all_finite, select
from tfkfac.saving.slots import Slots
from tfkfac.training.step import Gradients, Step

# Maximum number of columns that are orthogonalised together. Without this
# limit: 0.95 times the final loss for 1.05 times the CPU seconds (geometric
# means of seven tiny problems); on the VAE 1.6 times the CPU seconds.
BLOCK = 32
# Number of polynomials: 5 bring all singular values above 1e-3 of the norm to
# within 12.5 % of 1, 7 to within 0.2 % (tests/linalg/test_polar.py).
ITERATIONS = 5


def orthogonal_factors(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the polar factors of blocks of columns of matrices."""
    return shared_call(
        ("polar", BLOCK, ITERATIONS),
        lambda *values: polar_factors(values, BLOCK, ITERATIONS),
        *matrices,
        placed=True,  # oneDNN kernels are faster for batched products
    )


def plain_matrices(
    leftovers: Sequence[Leftover],
) -> list[tuple[str, keras.Variable]]:
    """Return the layer path and the variable of each uncovered matrix.

    Vectors and embedding tables are not included: an example uses only some
    rows of a table.
    """
    return [
        (left.path, variable)
        for left in leftovers
        if left.reason not in (SKIPPED, EXCLUDED)
        for variable in left.variables
        if _is_matrix(variable)
    ]


def _is_matrix(variable: keras.Variable) -> bool:
    axes = sum(size > 1 for size in variable.shape)
    return axes > 1 and "embedding" not in variable.path.lower()


def _momentum_dtype(variable: keras.Variable) -> tf.DType:
    dtype = tf.as_dtype(variable.dtype)
    return tf.float32 if dtype.size < 4 else dtype


def plain_bytes(leftovers: Sequence[Leftover]) -> int:
    """Return the bytes of the momenta of uncovered matrices."""
    return sum(
        math.prod(variable.shape) * _momentum_dtype(variable).size
        for _, variable in plain_matrices(leftovers)
    )


class PlainMatrix(Slots):
    """Momentum of a variable, as a matrix with its last axis as columns."""

    def __init__(self, path: str, variable: keras.Variable) -> None:
        super().__init__("plain", section=SPECTRAL)
        # A variable would become a dependency in checkpoints.
        self._variable = weakref.ref(variable)
        columns = variable.shape[-1]
        self.shape = (math.prod(variable.shape[:-1]), columns)
        self._dtype = _momentum_dtype(variable)
        self.value = self.slot(
            f"momentum_{variable.name}", self.shape, self._dtype, layer=path
        )

    @property
    def variable(self) -> keras.Variable | None:
        """The variable; None if it has been deleted."""
        return self._variable()

    def add(
        self, gradient: tf.Tensor, scale: tf.Tensor, decay: float
    ) -> tf.Tensor:
        """Update the momentum; return N as a matrix."""
        W = tf.cast(tf.reshape(gradient, self.shape), self._dtype)
        return add_momentum(self.value, W * tf.cast(scale, W.dtype), decay)


def plain_directions(
    step: Step,
    matrices: Sequence[PlainMatrix],
    decay: float,
    rms: float,
) -> Gradients:
    """Return the direction of each variable of a step that is a plain matrix.

    Args:
        step: The step, with reduced gradients.
        matrices: The momenta.
        decay: Decay mu of the momentum.
        rms: Root mean square of each direction.
    """
    inner = step.job.inner_optimizer
    places = {variable_key(inner, v): i for i, v in enumerate(step.variables)}
    scale = tf.math.divide_no_nan(tf.ones_like(step.loss.unit), step.loss.unit)
    momenta: dict[int, tf.Tensor] = {}
    for matrix in matrices:
        variable = matrix.variable
        if variable is None:
            continue
        place = places.get(variable_key(inner, variable))
        gradient = None if place is None else step.gradients[place]
        if place is not None and gradient is not None:
            dense = tf.convert_to_tensor(gradient)
            momenta[place] = matrix.add(dense, scale, decay)
    factors = orthogonal_factors(list(momenta.values()))
    result: Gradients = [None] * len(step.gradients)
    for (place, N), Q in zip(momenta.items(), factors, strict=True):
        D = shared_call("plain", _scaled, Q, N, rms, any_size=True)
        result[place] = tf.reshape(D, step.variables[place].shape)
    return result


def _scaled(Q: tf.Tensor, N: tf.Tensor, rms: float) -> tf.Tensor:
    """Return a direction of a root mean square; zero if not finite."""
    D = clear_unused(Q, N)
    norm = rms * tf.sqrt(tf.cast(tf.size(D), D.dtype))
    D *= tf.math.divide_no_nan(norm, tf.norm(D))
    return select(all_finite([D]), D, tf.zeros_like(D))
