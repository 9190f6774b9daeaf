"""Each factor type against NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.factors import VALUES, Dense, Diagonal, LowRank
from tfkfac.factors.low_rank import nystroem_half, probes

SIZES = st.integers(1, 7)


@st.composite
def low_rank(draw: Callable[[Any], Any]) -> LowRank:
    size = draw(st.integers(2, 20))
    stack = draw(st.sampled_from([(), (3,)]))
    return LowRank(size, draw(st.integers(1, size - 1)), stack)


FACTORS = st.one_of(
    st.builds(Dense, SIZES, st.sampled_from([(), (1,), (4,)])),
    st.builds(Diagonal, SIZES),
    low_rank(),
)
SIDES = st.sampled_from(["left", "right"])
WIDE, WIDE_STACK = LowRank(20, 6), LowRank(15, 5, (3,))
TYPES = [Dense(5), Dense(4, (3,)), Diagonal(7), WIDE, WIDE_STACK]
few = settings(max_examples=16, deadline=None, derandomize=True)


class Case:
    """A factor type with random rows, and the expected matrix in NumPy.

    Attributes:
        exact: Sum of the outer products of the rows.
        value: Tensor that stores the factor.
        matrix: Matrix that the factor represents: exact, diagonal or low-rank
            plus a multiple of the identity.
    """

    def __init__(self, factor: Any, count: int = 40) -> None:
        self.factor = factor
        self.rng = np.random.default_rng(4 + count)
        self.stack, self.size = factor.stack_shape, factor.size
        rows = self.rng.normal(size=(count, 2, *self.stack, self.size))
        self.rows = rows / np.sqrt(np.arange(1, self.size + 1))
        self.exact = np.einsum("bs...i,bs...j->...ij", self.rows, self.rows)
        self.value = factor.gram(tf.constant(self.rows))
        self.matrix = self.exact
        if isinstance(factor, Diagonal):
            self.matrix = self.exact * np.eye(self.size)
        elif isinstance(factor, LowRank):
            inside, missing = self.low_rank()
            rest = np.maximum(missing, 0)[..., None, None] / self.size
            self.matrix = inside + rest * np.eye(self.size)

    def low_rank(self) -> tuple[Array, Array]:
        """Nystroem approximation, and the trace that it lacks."""
        omega = probes(self.size, self.factor.rank, tf.float64).numpy()
        product = self.exact @ omega
        inside = product @ np.linalg.pinv(omega.T @ product, rcond=1e-12)
        inside = inside @ np.swapaxes(product, -1, -2)
        return inside, np.trace(self.exact - inside, axis1=-2, axis2=-1)

    def gradient(self, side: str) -> Array:
        shape = (self.size, 3) if side == "left" else (3, self.size)
        return np.asarray(self.rng.normal(size=(*self.stack, *shape)))

    def solution(self, damping: Any, gradient: Array, side: str) -> Array:
        """Multiply a gradient by the inverse of the damped matrix."""
        shift = np.asarray(damping)[..., None, None] * np.eye(self.size)
        if side == "left":
            return np.asarray(np.linalg.solve(self.matrix + shift, gradient))
        transposed = np.swapaxes(gradient, -1, -2)
        solved = np.linalg.solve(self.matrix + shift, transposed)
        return np.asarray(np.swapaxes(solved, -1, -2))

    def by_inverse(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """Compute `solution` by `inverse` and `multiply`."""
        shift = tf.cast(damping, self.value.dtype)
        inverse = self.factor.inverse(self.value, shift)
        parts = self.factor.inverse_parts()
        assert {k: v.shape for k, v in inverse.items()} == {
            k: part.shape for k, part in parts.items()
        }
        return self.factor.multiply(inverse, tf.constant(gradient), side)

    def root(self, damping: Any) -> Array:
        """R of the inverse: `L^-T` of a Cholesky factor, else symmetric."""
        shift = np.asarray(damping)[..., None, None] * np.eye(self.size)
        if isinstance(self.factor, Dense):
            inverse = np.linalg.inv(np.linalg.cholesky(self.matrix + shift))
            return np.asarray(np.swapaxes(inverse, -1, -2))
        values, vectors = np.linalg.eigh(self.matrix + shift)
        scaled = vectors / np.sqrt(values)[..., None, :]
        return np.asarray(scaled @ np.swapaxes(vectors, -1, -2))

    def whitened(self, damping: Any, gradient: Array, side: str) -> Array:
        """Multiply a gradient by R, `R^T W` or `W R`."""
        R = self.root(damping)
        left = np.swapaxes(R, -1, -2)
        return left @ gradient if side == "left" else gradient @ R

    def by_root(
        self, damping: Any, gradient: Any, side: str, back: bool = False
    ) -> tf.Tensor:
        """Compute a product with R by `root` and `multiply_root`."""
        shift = tf.cast(damping, self.value.dtype)
        root = self.factor.root(self.value, shift)
        assert {k: v.shape for k, v in root.items()} == {
            k: part.shape for k, part in self.factor.root_parts().items()
        }
        matrix = tf.constant(gradient)
        return self.factor.multiply_root(root, matrix, side, back)

    def undone_root(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """Multiply by R and by its inverse."""
        root = self.factor.root(self.value, tf.cast(damping, self.value.dtype))
        product = self.by_root(damping, gradient, side)
        return self.factor.divide_root(root, product, side)

    def by_both_roots(
        self, damping: Any, gradient: Any, side: str
    ) -> tf.Tensor:
        """Compute `solution` by both products with R."""
        inside = self.by_root(damping, gradient, side)
        return self.by_root(damping, inside, side, back=True)

    def by_eigen(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """Compute `solution` by `eigen` and `rotate`."""
        eigen = self.factor.eigen(self.value)
        assert {k: v.shape for k, v in eigen.items()} == {
            k: part.shape for k, part in self.factor.eigen_parts().items()
        }
        inside = self.factor.rotate(eigen, tf.constant(gradient), side)
        axis = -1 if side == "left" else -2
        scale = tf.expand_dims(1 / (eigen[VALUES] + damping), axis)
        scale = self.factor.widen(scale, side)
        return self.factor.rotate(eigen, inside * scale, side, back=True)


# ------------------------------------------------------------------ all types
@few
@given(FACTORS)
def test_gram(factor: Any) -> None:
    """Sum over batch and positions, each of which may be empty."""
    case = Case(factor)
    mean = np.trace(case.exact, axis1=-2, axis2=-1) / case.size
    assert_close(factor.mean_eigenvalue(case.value), mean, 1e-12)
    assert_close(factor.as_matrix(case.value), case.matrix, 1e-9)
    want = case.exact
    if isinstance(factor, Diagonal):
        want = np.diagonal(want)
    if isinstance(factor, LowRank):
        last = np.broadcast_to(
            mean[..., None, None], (*case.stack, 1, factor.rank)
        )
        want = want @ probes(case.size, factor.rank, tf.float64)
        want = np.concatenate([want, last], -2)
    assert_close(case.value, want, 1e-12)
    halves = [factor.gram(tf.constant(case.rows[i::2])) for i in range(2)]
    assert_close(halves[0] + halves[1], want, 1e-12)
    for empty in (case.rows[:0], case.rows[:, :0]):
        result = factor.gram(tf.constant(empty))
        np.testing.assert_array_equal(result, np.zeros(factor.shape))


@few
@given(FACTORS)
def test_pack_and_unpack(factor: Any) -> None:
    case, damping = Case(factor), tf.constant(0.1, tf.float64)
    inverse = factor.inverse(case.value, damping)
    root = factor.root(case.value, damping)
    for part, value in [
        (factor.storage, case.value),
        *((part, inverse[k]) for k, part in factor.inverse_parts().items()),
        *((part, root[k]) for k, part in factor.root_parts().items()),
    ]:
        packed = part.pack(value)
        assert packed.shape == part.packed_shape
        assert_close(part.unpack(packed), value, 1e-14)


@few
@given(FACTORS, SIDES)
def test_solutions(factor: Any, side: str) -> None:
    """The damping is a scalar or, but for `eigen`, one per matrix."""
    case = Case(factor)
    gradient = case.gradient(side)
    for damping in (case.rng.uniform(0.1, 1.0, case.stack), np.float64(0.3)):
        want = case.solution(damping, gradient, side)
        assert_close(case.by_inverse(damping, gradient, side), want, 1e-9)
        assert_close(case.by_both_roots(damping, gradient, side), want, 1e-9)
        want = case.whitened(damping, gradient, side)
        assert_close(case.by_root(damping, gradient, side), want, 1e-9)
        result = case.undone_root(damping, gradient, side)
        assert_close(result, gradient, 1e-9)
    want = case.solution(np.full(case.stack, 0.1), gradient, side)
    assert_close(case.by_eigen(0.1, gradient, side), want, 1e-8)
    if not isinstance(factor, LowRank):
        values = np.sort(factor.eigen(case.value)[VALUES], -1)
        assert_close(values, np.linalg.eigvalsh(case.matrix), 1e-10)
        # Negative eigenvalues, which only rounding causes, are set to 0.
        assert not np.any(factor.eigen(-case.value)[VALUES])


@pytest.mark.parametrize("factor", TYPES, ids=str)
def test_result_is_not_finite(factor: Any) -> None:
    """A decomposition of NaN or infinity must not raise an error."""
    damping = tf.constant(0.1, tf.float64)
    is_diagonal = isinstance(factor, Diagonal)  # 1 / inf = 0
    for bad in (np.nan,) if is_diagonal else (np.nan, np.inf, -np.inf):
        value = Case(factor).value.numpy()
        value[..., -1] = bad
        for parts in (
            factor.inverse(tf.constant(value), damping),
            factor.root(tf.constant(value), damping),
            factor.eigen(tf.constant(value)),
        ):
            assert not all(np.isfinite(v).all() for v in parts.values())


# --------------------------------------------------------- low-rank sketches
def test_probes_never_change() -> None:
    """Saved and sent products depend on the probes."""
    a, b = 0.601500955, 0.371748034
    want = [[-a, -b], [b, -a], [0, 0], [b, -a], [-a, -b]]
    np.testing.assert_allclose(probes(5, 2, tf.float64), want, atol=1e-8)


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (50, 8), (70_000, 3)])
def test_probes_are_orthonormal(size: int, rank: int) -> None:
    """No coordinate has a large norm."""
    for dtype, tolerance in ((tf.float64, 1e-11), (tf.float32, 1e-6)):
        columns = probes(size, rank, dtype)
        assert (columns.shape, columns.dtype) == ((size, rank), dtype)
        gram = tf.matmul(columns, columns, transpose_a=True)
        np.testing.assert_allclose(gram, np.eye(rank), atol=tolerance)
        assert tf.reduce_max(tf.abs(columns)) <= np.sqrt(2 / size) + 1e-9


@pytest.mark.parametrize("factor", [WIDE, WIDE_STACK], ids=str)
def test_trace_is_restored(factor: Any) -> None:
    """2 or 4 rows, fewer than the rank, are represented exactly."""
    for count in (1, 2):
        case = Case(factor, count)
        assert_close(factor.as_matrix(case.value), case.exact, 1e-9)
    case = Case(factor)
    trace = np.trace(case.exact, axis1=-2, axis2=-1)
    shown = factor.shown(case.value)
    assert_close(np.trace(shown, axis1=-2, axis2=-1), trace, 1e-12)
    _, missing = case.low_rank()
    want = 1 - np.sum(missing) / np.sum(trace)
    assert 0.3 < want < 0.95
    assert float(factor.explained(case.value)) == pytest.approx(want)
    zeros = tf.zeros_like(case.value)
    assert float(factor.explained(zeros)) == 0
    assert not np.any(factor.as_matrix(zeros))
    assert not np.any(factor.eigen(zeros)[VALUES])


def test_multiply_takes_any_number_of_rows() -> None:
    """The number of rows may be dynamic."""
    case, damping = Case(WIDE), tf.constant(0.3, tf.float64)
    inverse = WIDE.inverse(case.value, damping)
    root = WIDE.root(case.value, damping)
    signature = [tf.TensorSpec([None, case.size], tf.float64)]

    @tf.function(input_signature=signature)
    def multiply(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        product = WIDE.multiply(inverse, rows, "right")
        return product, WIDE.multiply_root(root, rows, "right")

    for count in (0, 1, 30):
        rows = case.rng.normal(size=(count, case.size))
        product, whitened = multiply(rows)
        want = case.solution(0.3, rows, "right")
        np.testing.assert_allclose(product, want, atol=1e-9)
        want = rows @ case.root(0.3)
        np.testing.assert_allclose(whitened, want, atol=1e-9)


def test_eigenvectors_are_orthonormal_or_zero() -> None:
    """Two rows have two eigenvectors; the others are zero, not noise."""
    for count, rank in ((1, 2), (40, 6)):
        rows = Case(WIDE, count).rows
        for dtype in (tf.float64, tf.float32):
            vectors = WIDE.eigen(WIDE.gram(tf.cast(rows, dtype)))[""].numpy()
            want = np.diag(np.arange(6) >= 6 - rank)
            np.testing.assert_allclose(vectors.T @ vectors, want, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_rows_than_columns(count: int) -> None:
    """Rounding errors add no directions, in float32 and float64."""
    case = Case(WIDE, count)
    case.matrix = case.exact
    gradient = case.gradient("left")
    damping = np.float64(0.1)  # TensorFlow casts a Python float to float32.
    want = case.solution(damping, gradient, "left")
    for dtype, tolerance in ((tf.float64, 1e-9), (tf.float32, 1e-4)):
        case.value = WIDE.gram(tf.cast(case.rows, dtype))
        cast = gradient.astype(dtype.as_numpy_dtype)
        for result in (
            case.by_eigen(damping, cast, "left"),
            case.by_inverse(damping, cast, "left"),
            case.by_both_roots(damping, cast, "left"),
        ):
            assert result.dtype == dtype
            assert_close(result, want, tolerance)


def test_inverse_in_half_precision() -> None:
    """The relative error is at most 2 %, at any scale of the inverse."""
    for scale in (1e-8, 1e8):
        case = Case(WIDE)
        case.matrix = scale * case.matrix
        damping = np.float64(0.3 * scale)
        value = tf.cast(scale * case.value, tf.float32)
        gradient = case.gradient("left")
        matrix = tf.cast(gradient, tf.float32)
        for decompose, multiply, want in (
            (WIDE.inverse, WIDE.multiply, case.solution),
            (WIDE.root, WIDE.multiply_root, case.whitened),
        ):
            exact = decompose(value, tf.cast(damping, tf.float32))
            half = {k: tf.cast(v, tf.bfloat16) for k, v in exact.items()}
            stored = WIDE.for_products(half, tf.float32)
            result = multiply(stored, matrix, "left")
            assert_close(result, want(damping, gradient, "left"), 0.02)
        result = WIDE.divide_root(stored, result, "left")
        assert_close(result, gradient, 0.02)


def test_inverse_root_beyond_the_least_damping() -> None:
    """A column of length 1, by rounding: the inverse root stays bounded."""
    V = np.zeros((*WIDE.shape[:-2], WIDE.size, WIDE.rank), "float32")
    V[..., 0, 0] = 1.0
    root = {"": tf.constant(V), "_scale": tf.ones([1, 1])}
    matrix = tf.ones([WIDE.size, 2])
    result = WIDE.divide_root(root, matrix, "left").numpy()
    np.testing.assert_allclose(result[0], 2.0**11.5, rtol=1e-3)
    np.testing.assert_array_equal(result[1:], 1.0)


def test_products_in_half_precision() -> None:
    """Rounding noise of a sketch of a matrix of lower rank is removed."""
    rows = np.random.default_rng(0).normal(size=(10, 200))
    columns = probes(200, 40, tf.float64)
    product = tf.cast(rows.T @ (rows @ columns.numpy()), tf.bfloat16)
    half = nystroem_half(tf.cast(product, tf.float64), columns, tf.float32)
    result = tf.matmul(half, half, transpose_b=True)
    assert_close(result, rows.T @ rows, 0.05)
