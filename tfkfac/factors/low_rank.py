"""Low-rank approximation of large factors by a Nystroem sketch.

`Limit` defines the size above which a factor `M` is approximated. Only the
sketch `Y = M Omega` with a fixed random matrix `Omega` is stored. The Nystroem
approximation `Y (Omega^T Y)^-1 Y^T` recovers the leading part of the spectrum
(Halko, Martinsson & Tropp, 2011, section 5.4; Tropp et al., 2017).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.compat.graphs import once_per_graph
from tfkfac.factors.base import VALUES, Factor, MatrixPart, Part, Side, Tensors
from tfkfac.factors.matrices import Dense
from tfkfac.linalg.symmetric import eigh, symmetrize
from tfkfac.linalg.tensors import nan_unless, rounding


def probes(size: int, rank: int, dtype: tf.DType) -> tf.Tensor:
    """Fixed random orthonormal test matrix `Omega`, `(size, rank)`.

    A subsampled cosine transform with random signs (Halko, Martinsson & Tropp,
    2011, section 4.6), equal on all workers and in all runs. The graph stores
    only signs and frequencies and computes the matrix.
    """

    def compute() -> tf.Tensor:
        signs, frequencies = _random_transform(size, rank)
        # Compute the angles in integers: float32 cannot represent the products.
        odd = tf.expand_dims(tf.range(1, 2 * size, 2, tf.int64), 1)
        steps = odd * frequencies
        angles = tf.cast(steps % (4 * size), dtype) * (math.pi / (2 * size))
        scale = tf.cast(signs[:, None], dtype) * math.sqrt(2 / size)
        return scale * tf.cos(angles)

    return once_per_graph(("probes", size, rank, dtype), compute)


@functools.lru_cache(maxsize=256)
def _random_transform(size: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw a sign per row and a frequency per column of the test matrix."""
    # Use the legacy generator: its numbers are equal in all NumPy versions.
    rng = np.random.RandomState(0)
    signs = 2 * rng.randint(2, size=size) - 1
    frequencies = 1 + rng.permutation(size - 1)[:rank]
    return signs.astype(np.int8), frequencies.astype(np.int64)


def nystroem_half(
    product: tf.Tensor, columns: tf.Tensor, precision: tf.DType
) -> tf.Tensor:
    """Compute `F` with `F F^T` close to a positive semidefinite M.

    `columns` is Omega, `(n, r)`, and `product` is `M Omega`. `F F^T <= M`, with
    equality up to rounding if the rank of M is at most r. The result is not
    finite if the product is not, or if no positive semidefinite matrix has a
    similar product. `precision` is the dtype in which the product was computed.
    """
    core = tf.matmul(columns, product, transpose_a=True)
    # Shift by the noise level: rounding errors, plus the asymmetry of the core
    # as a measure of other errors.
    skew = core - tf.linalg.matrix_transpose(core)
    noise = tf.norm(skew, axis=[-2, -1])
    noise += 4 * rounding(precision) * tf.linalg.trace(core)
    # For M = 0, avoid a division by zero; the result is F = 0.
    noise = tf.where(tf.equal(noise, 0), tf.ones_like(noise), noise)
    identity = tf.eye(columns.shape[-1], dtype=core.dtype)
    root = tf.linalg.cholesky(
        symmetrize(core) + noise[..., None, None] * identity
    )
    product_transposed = tf.linalg.matrix_transpose(product)
    F_transposed = tf.linalg.triangular_solve(root, product_transposed)
    return tf.linalg.matrix_transpose(F_transposed)


# Suffix of the scalar `c` of an inverse `c (I - V V^T)`.
_SCALE = "_scale"
# Eigenvectors with smaller relative eigenvalues are set to zero (float32 eps).
_NEGLIGIBLE = 2.0**-23


@dataclasses.dataclass(frozen=True)
class LowRank(Factor):
    """Large matrix `M` as a low-rank matrix plus a multiple of the identity.

    `M` itself is never computed. The stored tensor is the sketch `Y = M Omega`
    with fixed orthonormal columns `Omega`, and a last row with the mean
    eigenvalue. Both are linear in `M`. The decomposition approximates

        M ~ F F^T + rest I,

    where `F` is the Nystroem approximation and `rest` restores the trace.

    Attributes:
        size: Number of rows of the matrix.
        rank: Number of columns of the sketch, less than `size`.
        stack_shape: Shape of a stack of matrices. Defaults to a single matrix.
    """

    size: int
    rank: int
    stack_shape: tuple[int, ...] = ()

    @property
    def _basis_shape(self) -> tuple[int, ...]:
        return (*self.stack_shape, self.size, self.rank)

    # --------------------------------------------------------------- storage
    @property
    @override
    def storage(self) -> Part:
        return MatrixPart((*self.stack_shape, self.size + 1, self.rank))

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

    # ---------------------------------------------------------------- values
    @override
    def gram(self, rows: tf.Tensor) -> tf.Tensor:
        return self.repeated_gram(rows.dtype)(rows)

    @override
    def repeated_gram(
        self, dtype: tf.DType
    ) -> Callable[[tf.Tensor], tf.Tensor]:
        columns = probes(self.size, self.rank, dtype)

        def gram(rows: tf.Tensor) -> tf.Tensor:
            rows = tf.reshape(rows, [-1, *self.stack_shape, self.size])
            if self.stack_shape:
                rows = tf.transpose(rows, [1, 0, 2])
            projected = tf.matmul(rows, columns)
            sketch = tf.matmul(rows, projected, transpose_a=True)
            mean = tf.reduce_sum(tf.square(rows), [-2, -1]) / self.size
            last = tf.broadcast_to(
                mean[..., None, None], (*self.stack_shape, 1, self.rank)
            )
            return tf.concat([sketch, last], -2)

        return gram

    @override
    def mean_eigenvalue(self, value: tf.Tensor) -> tf.Tensor:
        return value[..., -1, 0]

    @override
    def as_matrix(self, value: tf.Tensor) -> tf.Tensor:
        F, rest = self._split(value)
        low_rank = tf.matmul(F, F, transpose_b=True)
        identity = tf.eye(self.size, dtype=F.dtype)
        return tf.cast(low_rank + rest * identity, value.dtype)

    def explained(self, value: tf.Tensor) -> tf.Tensor:
        """Fraction of the trace in the low-rank matrix `F F^T`."""
        F, rest = self._split(value)
        low_rank = tf.reduce_sum(tf.square(F))
        trace = low_rank + self.size * tf.reduce_sum(rest)
        return tf.math.divide_no_nan(low_rank, trace)

    @override
    def shown(self, value: tf.Tensor) -> tf.Tensor:
        return self.as_matrix(value)

    def _split(self, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return `F` and `rest` in float64; `rest` has shape `(..., 1, 1)`."""
        # Make a whole matrix NaN: `tf.maximum` below may hide a single NaN.
        finite = tf.math.is_finite(
            tf.reduce_sum(value, [-2, -1], keepdims=True)
        )
        wide = nan_unless(finite, tf.cast(value, tf.float64))
        F = nystroem_half(
            wide[..., :-1, :],
            probes(self.size, self.rank, tf.float64),
            value.dtype,
        )
        low_rank = tf.reduce_sum(tf.square(F), [-2, -1]) / self.size
        return F, tf.maximum(wide[..., -1, 0] - low_rank, 0)[..., None, None]

    # ------------------------------------------------------ solver="inverse"
    @override
    def inverse_parts(self) -> dict[str, Part]:
        return {
            "": _Correction(self._basis_shape),
            _SCALE: MatrixPart((*self.stack_shape, 1, 1)),
        }

    @override
    def inverse(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        """Compute `V` and `c` of `(M + damping I)^-1 = c (I - V V^T)`."""
        return _stored(*self._correction(value, damping), value.dtype)

    def _correction(
        self, value: tf.Tensor, damping: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return `V` and `c` of `inverse`, in float64."""
        F, rest = self._split(value)
        trace = self.size * self.mean_eigenvalue(value)
        floor = tf.cast(4 * rounding(value.dtype) * trace, F.dtype)
        damping = tf.maximum(tf.cast(damping, F.dtype), floor)
        shift = rest + damping[..., None, None]
        # Use c = 1, the identity, for M = 0 and damping 0.
        shift = tf.where(shift > 0, shift, tf.ones_like(shift))
        # (F F^T + s I)^-1 = 1/s (I - F (F^T F + s I)^-1 F^T)
        core = tf.matmul(F, F, transpose_a=True)
        core += shift * tf.eye(self.rank, dtype=F.dtype)
        root = tf.linalg.cholesky(core)
        F_transposed = tf.linalg.matrix_transpose(F)
        correction = tf.linalg.triangular_solve(root, F_transposed)
        return tf.linalg.matrix_transpose(correction), 1 / shift

    @override
    def root(self, value: tf.Tensor, damping: tf.Tensor) -> Tensors:
        """Compute `V` and `c` of the symmetric root `c (I - V V^T)`."""
        # The inverse is `c (I - V V^T)`. With `V^T V = E e E^T`, its root is
        # `sqrt(c) (I - V' V'^T)`, `V' = V E sqrt((1 - sqrt(1 - e)) / e)`.
        V, scale = self._correction(value, damping)
        e, E = eigh(tf.matmul(V, V, transpose_a=True))
        # (1 - sqrt(1 - e)) / e = 1 / (1 + sqrt(1 - e)), without cancellation.
        lengths = tf.math.rsqrt(1 + tf.sqrt(tf.maximum(1 - e, 0)))
        V = tf.matmul(V, E) * lengths[..., None, :]
        return _stored(V, tf.sqrt(scale), value.dtype)

    @override
    def multiply(
        self, inverse: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        basis = inverse[""]
        coordinates = _project(basis, matrix, side)
        return (matrix - _expand(basis, coordinates, side)) * inverse[_SCALE]

    @override
    def divide_root(
        self, root: Tensors, matrix: tf.Tensor, side: Side
    ) -> tf.Tensor:
        # V has orthogonal columns of the squared lengths d:
        # (I - V V^T)^-1 = I + V diag(1 / (1 - d)) V^T. The least damping keeps
        # 1 - d above the bound, but rounding to bfloat16 does not.
        V = root[""]
        gaps = 1 - tf.reduce_sum(tf.square(V), -2, keepdims=True)
        gaps = tf.maximum(gaps, math.sqrt(rounding(V.dtype)))
        coordinates = _project(V, matrix, side)
        return (matrix + _expand(V / gaps, coordinates, side)) / root[_SCALE]

    # -------------------------------------------------------- solver="eigen"
    @override
    def eigen_parts(self) -> dict[str, Part]:
        return {
            "": MatrixPart(self._basis_shape),
            VALUES: Part((*self.stack_shape, self.rank + 1)),
        }

    @override
    def eigen(self, value: tf.Tensor) -> Tensors:
        """Decompose `F F^T + rest I`; the last of the eigenvalues is `rest`."""
        F, rest = self._split(value)
        squares, rotation = eigh(tf.matmul(F, F, transpose_a=True))
        is_large = squares > _NEGLIGIBLE * squares[..., -1:]
        lengths = tf.where(is_large, tf.sqrt(squares), tf.zeros_like(squares))
        vectors = tf.math.divide_no_nan(
            tf.matmul(F, rotation), lengths[..., None, :]
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
        """Concatenate `rank` coordinates and a residual of `size` elements."""
        basis = eigen[""]
        axis = -2 if side == "left" else -1
        if back:
            inside, residual = tf.split(matrix, [self.rank, self.size], axis)
            return residual + _expand(basis, inside, side)
        inside = _project(basis, matrix, side)
        residual = matrix - _expand(basis, inside, side)
        return tf.concat([inside, residual], axis)

    @override
    def widen(self, values: tf.Tensor, side: Side) -> tf.Tensor:
        axis, shape = -2, [self.size, 1]
        if side == "right":
            axis, shape = -1, [self.size]
        inside, rest = tf.split(values, [self.rank, 1], axis)
        return tf.concat([inside, rest * tf.ones(shape, rest.dtype)], axis)


def _stored(V: tf.Tensor, scale: tf.Tensor, dtype: tf.DType) -> Tensors:
    """Return the tensors `V` and `c` of `c (I - V V^T)` by suffix."""
    return {"": tf.cast(V, dtype), _SCALE: tf.cast(scale, dtype)}


class _Correction(MatrixPart):
    """Spec of `V` in an inverse `c (I - V V^T)`, initially zero."""

    @override
    def identity(self, dtype: tf.DType) -> tf.Tensor:
        return tf.zeros(self.shape, dtype)


def _project(basis: tf.Tensor, matrix: tf.Tensor, side: Side) -> tf.Tensor:
    """Compute the coordinates of a gradient matrix in a basis."""
    if side == "left":
        return tf.matmul(basis, matrix, transpose_a=True)
    return tf.matmul(matrix, basis)


def _expand(basis: tf.Tensor, inside: tf.Tensor, side: Side) -> tf.Tensor:
    """Compute a gradient matrix from its coordinates in a basis."""
    if side == "left":
        return tf.matmul(basis, inside)
    return tf.matmul(inside, basis, transpose_b=True)


@dataclasses.dataclass(frozen=True)
class Limit:
    """Limit on the size of dense matrices, and rank of larger ones.

    Attributes:
        size: Maximum number of rows of a dense matrix. Defaults to None, for
            no limit.
        rank: Rank of the approximation of larger matrices. Defaults to 64.
    """

    size: int | None = None
    rank: int = 64

    def matrix(self, size: int, stack_shape: tuple[int, ...] = ()) -> Factor:
        """Create the factor type of one matrix with `size` rows, or a stack."""
        if self.exceeded(size):
            return LowRank(size, min(self.rank, size - 1), stack_shape)
        return Dense(size, stack_shape)

    def exceeded(self, size: int) -> bool:
        """True if a matrix of this size is approximated."""
        return self.size is not None and size > self.size
