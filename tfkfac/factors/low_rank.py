"""A wide factor, kept as its product with a few fixed columns.

`Limit` says from which size on a factor is wide. Of a wide matrix `M` only the
product `Y = M Omega` is known. It says most of the leading part of the
spectrum: Nystroem's approximation `Y (Omega^T Y)^-1 Y^T` (Halko, Martinsson &
Tropp, 2011, section 5.4; Tropp et al., 2017).
"""

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.functions import shared_call
from tfkfac.factors.base import VALUES, Factor, MatrixPart, Part, Side, Tensors
from tfkfac.factors.matrices import Dense, Stack
from tfkfac.linalg.symmetric import eigh, symmetrize
from tfkfac.linalg.tensors import all_finite, rounding


def probes(size: int, rank: int, dtype: tf.DType) -> tf.Tensor:
    """Orthonormal columns that are alike to every matrix: `Omega`.

    Random rows of the cosine transform of a vector with random signs (Halko,
    Martinsson & Tropp, 2011, section 4.6). They are the same on every worker
    and in every run. A graph holds the few random numbers; the matrix, of
    `(size, rank)` with fewer columns than rows, is computed.
    """
    signs, frequencies = _random_transform(size, rank)
    # As whole numbers: a float32 knows no angle of a million turns.
    odd = tf.expand_dims(tf.range(1, 2 * size, 2, tf.int64), 1)
    steps = odd * frequencies
    angles = tf.cast(steps % (4 * size), dtype) * (math.pi / (2 * size))
    scale = tf.cast(signs[:, None], dtype) * math.sqrt(2 / size)
    return scale * tf.cos(angles)


@functools.lru_cache(maxsize=256)
def _random_transform(size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A sign for each row, and a frequency for each column of `probes`."""
    # The legacy generator: its numbers are the same in all NumPy versions.
    rng = np.random.RandomState(0)
    signs = 2 * rng.randint(2, size=size) - 1
    frequencies = 1 + rng.permutation(size - 1)[:rank]
    return signs.astype(np.int8), frequencies.astype(np.int64)


def nystroem_half(
    product: tf.Tensor, columns: tf.Tensor, precision: tf.DType
) -> tf.Tensor:
    """A matrix `F` with `F F^T` near the positive semi-definite `M`.

    If the rank of `M` is no larger than the number of columns, `F F^T` is `M`
    to rounding; in any case it is not above `M`. It is not finite if the
    product is not, or far from that with a positive semi-definite matrix.

    Args:
        product: `M Omega`, `(..., n, r)`.
        columns: `Omega`, `(n, r)`.
        precision: Dtype in which the product was made.
    """
    core = tf.matmul(columns, product, transpose_a=True)
    # Directions below the noise are left out: that of rounding, and that of
    # what the product has gone through, which shows as asymmetry.
    skew = core - tf.linalg.matrix_transpose(core)
    noise = tf.norm(skew, axis=[-2, -1])
    noise += 4 * rounding(precision) * tf.linalg.trace(core)
    # A matrix of zeros has the half zero.
    noise = tf.where(tf.equal(noise, 0), tf.ones_like(noise), noise)
    identity = tf.eye(columns.shape[-1], dtype=core.dtype)
    root = tf.linalg.cholesky(
        symmetrize(core) + noise[..., None, None] * identity
    )
    transposed = tf.linalg.matrix_transpose(product)
    half = tf.linalg.triangular_solve(root, transposed)
    return tf.linalg.matrix_transpose(half)


# Suffix of the number by which an inverse multiplies all directions.
_SCALE = "_scale"
# Directions below this share of the largest eigenvalue are like the others.
_NEGLIGIBLE = 2.0**-23


@dataclasses.dataclass(frozen=True)
class LowRank(Factor):
    """A wide matrix `M`, as a low rank matrix and a multiple of the identity.

    `M` is never made. It is kept as the sketch `Y = M Omega` with
    fixed orthonormal columns `Omega`, and under it a row that holds the mean
    eigenvalue. Both are linear in `M`. When it is decomposed, Nystroem's
    approximation gives `F`, and what that lacks of the trace is spread evenly
    over all directions:

        M ~ F F^T + rest I.

    Attributes:
        size: Number of rows of the matrix.
        rank: Number of columns of the sketch, less than `size`.
        stack_shape: Shape of the stack of matrices if this is one.
    """

    size: int
    rank: int
    stack_shape: tuple[int, ...] = ()

    any_size: ClassVar[bool] = False  # its probes are constants

    @property
    def _basis_shape(self) -> tuple[int, ...]:
        return (*self.stack_shape, self.size, self.rank)

    # -------------------------------------------------------- how it is kept
    @property
    @override
    def storage(self) -> Part:
        return MatrixPart((*self.stack_shape, self.size + 1, self.rank))

    @property
    @override
    def whole_size(self) -> int:
        return 0

    @property
    @override
    def operations(self) -> int:
        return self.elements * self.rank

    @property
    @override
    def multiplications(self) -> int:
        return 2 * math.prod(self._basis_shape)

    @property
    @override
    def text(self) -> str:
        return f"{super().text}, rank {self.rank}"

    # ------------------------------------------------------------- what it is
    @override
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(rows, [-1, *self.stack_shape, self.size])
        return shared_call(("sketch", self), self._sketch, rows)

    def _sketch(self, rows: tf.Tensor) -> tf.Tensor:
        """Sketch and mean eigenvalue of the sum, of rows in one axis."""
        if self.stack_shape:
            rows = tf.transpose(rows, [1, 0, 2])
        inside = tf.matmul(rows, probes(self.size, self.rank, rows.dtype))
        sketch = tf.matmul(rows, inside, transpose_a=True)
        mean = tf.reduce_sum(tf.square(rows), [-2, -1]) / self.size
        last = tf.broadcast_to(
            mean[..., None, None], (*self.stack_shape, 1, self.rank)
        )
        return tf.concat([sketch, last], -2)

    @override
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return value[..., -1, 0]

    @override
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        half, rest = self._split(value)
        low_rank = tf.matmul(half, half, transpose_b=True)
        identity = tf.eye(self.size, dtype=half.dtype)
        return tf.cast(low_rank + rest * identity, value.dtype)

    def explained(self, value: tf.Tensor) -> tf.Tensor:
        """Share of the trace that is in `F F^T`."""
        half, rest = self._split(value)
        low_rank = tf.reduce_sum(tf.square(half))
        whole = low_rank + self.size * tf.reduce_sum(rest)
        return tf.math.divide_no_nan(low_rank, whole)

    @override
    def shown(self, value: tf.Tensor) -> tf.Tensor:
        return self.as_matrix(value)

    def _split(self, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """`F`, and `rest` in a shape to multiply it with, in float64."""
        # `tf.maximum` and comparisons below would hide what is not finite.
        finite = all_finite([value])
        wide = tf.where(finite, tf.cast(value, tf.float64), float("nan"))
        half = nystroem_half(
            wide[..., :-1, :],
            probes(self.size, self.rank, tf.float64),
            value.dtype,
        )
        low_rank = tf.reduce_sum(tf.square(half), [-2, -1]) / self.size
        rest = tf.maximum(wide[..., -1, 0] - low_rank, 0)
        return half, rest[..., None, None]

    # ---------------------------------------------------- the explicit solver
    @override
    def inverse_parts(self) -> dict[str, Part]:
        return {
            "": _Correction(self._basis_shape),
            _SCALE: MatrixPart((*self.stack_shape, 1, 1)),
        }

    @override
    def inverse(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Parts `V` and `c` of `(M + damping I)^-1 = c (I - V V^T)`."""
        key = "sketch's inverse", self
        return shared_call(key, self._inverse, value, damping)

    def _inverse(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        half, rest = self._split(value)
        trace = self.size * self.mean_eigenvalue(value)
        floor = tf.cast(4 * rounding(value.dtype) * trace, half.dtype)
        damping = tf.maximum(tf.cast(damping, half.dtype), floor)
        shift = rest + damping[..., None, None]
        # A matrix of zeros without damping is inverted as the identity.
        shift = tf.where(shift > 0, shift, tf.ones_like(shift))
        # (F F^T + s I)^-1 = 1/s (I - F (F^T F + s I)^-1 F^T)
        core = tf.matmul(half, half, transpose_a=True)
        core += shift * tf.eye(self.rank, dtype=half.dtype)
        root = tf.linalg.cholesky(core)
        transposed = tf.linalg.matrix_transpose(half)
        correction = tf.linalg.triangular_solve(root, transposed)
        return {
            "": tf.cast(tf.linalg.matrix_transpose(correction), value.dtype),
            _SCALE: tf.cast(1 / shift, value.dtype),
        }

    @override
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        basis = inverse[""]
        inside = _coordinates(basis, matrix, side)
        return (matrix - _combined(basis, inside, side)) * inverse[_SCALE]

    # ---------------------------------------------------- the implicit solver
    @override
    def eigen_parts(self) -> dict[str, Part]:
        return {
            "": MatrixPart(self._basis_shape),
            VALUES: Part((*self.stack_shape, self.rank + 1)),
        }

    @override
    def eigen(self, value: tf.Tensor) -> dict[str, tf.Tensor]:
        """The eigenvectors of `F F^T` and their eigenvalues, then `rest`."""
        half, rest = self._split(value)
        squares, turn = eigh(tf.matmul(half, half, transpose_a=True))
        clear = squares > _NEGLIGIBLE * squares[..., -1:]
        lengths = tf.where(clear, tf.sqrt(squares), tf.zeros_like(squares))
        vectors = tf.math.divide_no_nan(
            tf.matmul(half, turn), lengths[..., None, :]
        )
        values = tf.concat([squares + rest[..., 0], rest[..., 0]], -1)
        return {
            "": tf.cast(vectors, value.dtype),
            VALUES: tf.cast(values, value.dtype),
        }

    @override
    def rotate(
        self, eigen: Tensors, matrix: tf.Tensor, side: Side, back: bool = False
    ) -> tf.Tensor:
        """To `rank` coordinates, and the `size` of what is outside of them."""
        basis = eigen[""]
        axis = -2 if side == "left" else -1
        if back:
            inside, outside = tf.split(matrix, [self.rank, self.size], axis)
            return outside + _combined(basis, inside, side)
        inside = _coordinates(basis, matrix, side)
        outside = matrix - _combined(basis, inside, side)
        return tf.concat([inside, outside], axis)

    @override
    def widen(self, values: tf.Tensor, side: Side) -> tf.Tensor:
        axis, shape = (-2, [self.size, 1])
        if side == "right":
            axis, shape = -1, [self.size]
        inside, rest = tf.split(values, [self.rank, 1], axis)
        return tf.concat([inside, rest * tf.ones(shape, rest.dtype)], axis)


class _Correction(MatrixPart):
    """The `V` of an inverse `c (I - V V^T)`: zero at first."""

    @override
    def identity(self, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros(self.shape, dtype)


def _coordinates(basis: tf.Tensor, matrix: tf.Tensor, side: Side) -> tf.Tensor:
    """A gradient matrix times the columns of a basis."""
    if side == "left":
        return tf.matmul(basis, matrix, transpose_a=True)
    return tf.matmul(matrix, basis)


def _combined(basis: tf.Tensor, inside: tf.Tensor, side: Side) -> tf.Tensor:
    """The columns of a basis, added up with some coordinates."""
    if side == "left":
        return tf.matmul(basis, inside)
    return tf.matmul(inside, basis, transpose_b=True)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Largest size of a symmetric matrix that is kept whole.

    Attributes:
        size: Most rows of a matrix that is kept whole, or None for any.
        rank: Rank to which a wider one is approximated, if it has as many
            rows.
    """

    size: int | None = None
    rank: int = 64

    def matrix(self, size: int) -> Factor:
        """The kind of one matrix."""
        return self._low_rank(size) if self.exceeded(size) else Dense(size)

    def stack(self, count: int, size: int) -> Factor:
        """The kind of one matrix for each of `count` independent parts."""
        if self.exceeded(size):
            return self._low_rank(size, count)
        return Stack(count, size)

    def exceeded(self, size: int) -> bool:
        """True if a matrix of this size is not kept whole."""
        return self.size is not None and size > self.size

    def _low_rank(self, size: int, *stack_shape: int) -> LowRank:
        return LowRank(size, min(self.rank, size - 1), stack_shape)
