"""Wide factors, kept as sketches, against NumPy."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.factors import (
    VALUES,
    Dense,
    Limit,
    LowRank,
    Part,
    Stack,
    Tensors,
)
from tfkfac.factors.low_rank import probes

KINDS = {
    "one": LowRank(20, 6),
    "stack": LowRank(15, 5, (3,)),
    "rank 1": LowRank(4, 1),
    "all but one": LowRank(8, 7),
    "smallest": LowRank(2, 1),
}
BY_NAME = pytest.mark.parametrize("name", KINDS)
SIDES = pytest.mark.parametrize("side", ["left", "right"])


class Case:
    """A kind, rows, and the matrix that it makes of them, in NumPy."""

    def __init__(self, name: str, count: int = 40) -> None:
        self.kind = KINDS[name]
        self.rng = np.random.default_rng(len(name) + count)
        self.stack, self.size = self.kind.stack_shape, self.kind.size
        rows = self.rng.normal(size=(count, 2, *self.stack, self.size))
        self.rows = rows / np.sqrt(np.arange(1, self.size + 1))
        self.exact = np.einsum("bs...i,bs...j->...ij", self.rows, self.rows)
        self.value = self.kind.gram(tf.constant(self.rows))
        self.matrix = self.approximated()

    def approximated(self) -> Array:
        """Nystroem, and the rest of the trace on the whole diagonal."""
        omega = probes(self.size, self.kind.rank, tf.float64).numpy()
        product = self.exact @ omega
        low_rank = product @ np.linalg.pinv(omega.T @ product, rcond=1e-12)
        low_rank = low_rank @ np.swapaxes(product, -1, -2)
        missing = np.trace(self.exact - low_rank, axis1=-2, axis2=-1)
        rest = np.maximum(missing, 0)[..., None, None] / self.size
        return np.asarray(low_rank + rest * np.eye(self.size))

    def gradient(self, side: str) -> Array:
        shape = (self.size, 3) if side == "left" else (3, self.size)
        return np.asarray(self.rng.normal(size=(*self.stack, *shape)))

    def solution(self, damping: Array, gradient: Array, side: str) -> Array:
        shift = np.asarray(damping)[..., None, None] * np.eye(self.size)
        if side == "left":
            return np.asarray(np.linalg.solve(self.matrix + shift, gradient))
        transposed = np.swapaxes(gradient, -1, -2)
        solved = np.linalg.solve(self.matrix + shift, transposed)
        return np.asarray(np.swapaxes(solved, -1, -2))


# ------------------------------------------------------------------- the kind
def test_counts() -> None:
    """A row more than the matrix has: that of the mean eigenvalue."""
    one, stack = KINDS["one"], KINDS["stack"]
    assert one.shape == one.storage.packed_shape == (21, 6)
    assert stack.shape == stack.storage.packed_shape == (3, 16, 5)
    assert (one.elements, stack.elements) == (126, 240)
    assert (one.operations, stack.operations) == (126 * 6, 240 * 5)
    assert (one.multiplications, stack.multiplications) == (240, 450)
    assert one.text == "20 x 20, rank 6"
    assert stack.text == "3 of 15 x 15, rank 5"
    assert (one.whole_size, stack.whole_size) == (0, 0)
    assert LowRank(5, 2) == LowRank(5, 2) != LowRank(5, 3)


def test_limit() -> None:
    """Wider than the limit, and of as many rows as are left."""
    limit = Limit(10, 4)
    assert limit.matrix(10) == Dense(10)
    assert limit.matrix(11) == LowRank(11, 4)
    assert limit.stack(3, 10) == Stack(3, 10)
    assert limit.stack(3, 11) == LowRank(11, 4, (3,))
    assert Limit(1, 64).matrix(2) == LowRank(2, 1)
    assert Limit(None, 4).matrix(10**6) == Dense(10**6)
    assert Limit().stack(2, 10**6) == Stack(2, 10**6)


# --------------------------------------------------------------------- values
@BY_NAME
def test_gram_is_the_product_with_the_probes(name: str) -> None:
    """And linear in the rows, of which there may be none."""
    case = Case(name)
    omega = probes(case.size, case.kind.rank, tf.float64).numpy()
    mean = np.trace(case.exact, axis1=-2, axis2=-1) / case.size
    last = np.broadcast_to(
        mean[..., None, None], (*case.stack, 1, case.kind.rank)
    )
    assert case.value.shape == case.kind.shape
    want = np.concatenate([case.exact @ omega, last], -2)
    assert_close(case.value, want, 1e-12)
    assert_close(case.kind.mean_eigenvalue(case.value), mean, 1e-12)
    parts = [case.kind.gram(tf.constant(case.rows[i::2])) for i in range(2)]
    assert_close(parts[0] + parts[1], want, 1e-12)
    empty = case.kind.gram(tf.constant(case.rows[:0]))
    np.testing.assert_array_equal(empty, np.zeros(case.kind.shape))


@BY_NAME
def test_written_out(name: str) -> None:
    case = Case(name)
    got = case.kind.as_matrix(case.value)
    assert_close(got, case.matrix, 1e-9)
    np.testing.assert_array_equal(case.kind.shown(case.value), got)
    # It keeps the trace.
    traces = [np.trace(m, axis1=-2, axis2=-1) for m in (got, case.exact)]
    assert_close(*traces, 1e-12)


@pytest.mark.parametrize("name", ["one", "stack"])
def test_exact_up_to_its_rank(name: str) -> None:
    """Of 2 or 4 rows nothing is lost: they span no more than that."""
    for count in (1, 2):
        case = Case(name, count)
        got = case.kind.as_matrix(case.value)
        assert_close(got, case.exact, 1e-9)
        share = case.kind.explained(case.value)
        assert float(share) == pytest.approx(1)


@pytest.mark.parametrize("name", ["one", "stack"])
def test_explained(name: str) -> None:
    case = Case(name)
    trace = np.trace(case.exact, axis1=-2, axis2=-1)
    omega = probes(case.size, case.kind.rank, tf.float64).numpy()
    product = case.exact @ omega
    low_rank = np.linalg.solve(omega.T @ product, np.swapaxes(product, -1, -2))
    inside = np.trace(product @ low_rank, axis1=-2, axis2=-1)
    want = np.sum(inside) / np.sum(trace)
    assert 0.3 < want < 0.95
    assert float(case.kind.explained(case.value)) == pytest.approx(want)
    assert float(case.kind.explained(tf.zeros_like(case.value))) == 0


# ------------------------------------------------------------------- solvers
@SIDES
@BY_NAME
def test_inverse(name: str, side: Any) -> None:
    """With a damping for each matrix, and with one for all."""
    case = Case(name)
    gradient = case.gradient(side)
    for damping in (case.rng.uniform(0.1, 1.0, case.stack), np.float64(0.3)):
        inverse = case.kind.inverse(case.value, tf.constant(damping))
        parts = case.kind.inverse_parts()
        assert {k: v.shape for k, v in inverse.items()} == {
            k: part.shape for k, part in parts.items()
        }
        got = case.kind.multiply(inverse, tf.constant(gradient), side)
        assert_close(got, case.solution(damping, gradient, side), 1e-9)


def test_multiply_takes_any_number_of_rows() -> None:
    """Also in a graph that does not know it."""
    case = Case("one")
    damping = np.float64(0.3)
    inverse = case.kind.inverse(case.value, tf.constant(damping))
    signature = [tf.TensorSpec([None, case.size], tf.float64)]

    @tf.function(input_signature=signature)
    def multiply(rows: tf.Tensor) -> tf.Tensor:
        return case.kind.multiply(inverse, rows, "right")

    for count in (0, 1, 30):
        rows = case.rng.normal(size=(count, case.size))
        want = case.solution(damping, rows, "right")
        np.testing.assert_allclose(multiply(rows), want, atol=1e-9)


def damped_eigen(
    case: Case, gradient: Array, side: Any, damping: float
) -> tf.Tensor:
    """The solution by the eigenbasis, beside an identity."""
    eigen = case.kind.eigen(case.value)
    parts = case.kind.eigen_parts()
    assert {k: v.shape for k, v in eigen.items()} == {
        k: part.shape for k, part in parts.items()
    }
    inside = case.kind.rotate(eigen, tf.constant(gradient), side)
    values = eigen[VALUES] + damping
    axis = -1 if side == "left" else -2
    scale = case.kind.widen(tf.expand_dims(1 / values, axis), side)
    return case.kind.rotate(eigen, inside * scale, side, back=True)


@SIDES
@BY_NAME
def test_eigen(name: str, side: Any) -> None:
    """Outside of the leading directions all have one eigenvalue."""
    case = Case(name)
    gradient = case.gradient(side)
    got = damped_eigen(case, gradient, side, 0.1)
    want = case.solution(np.full(case.stack, 0.1), gradient, side)
    assert_close(got, want, 1e-8)
    assert (case.kind.eigen(case.value)[VALUES].numpy() >= 0).all()


def test_eigenvectors_are_orthonormal_or_zero() -> None:
    """Of two rows there are two; the others are not made of noise."""
    for count, found in ((1, 2), (40, 6)):
        case = Case("one", count)
        for dtype in (tf.float64, tf.float32):
            value = case.kind.gram(tf.cast(case.rows, dtype))
            vectors = case.kind.eigen(value)[""].numpy()
            want = np.diag(np.arange(6) >= 6 - found)
            np.testing.assert_allclose(vectors.T @ vectors, want, atol=1e-6)


@SIDES
@pytest.mark.parametrize("solve", ["inverse", "eigen"])
def test_fewer_rows_than_columns(solve: str, side: Any) -> None:
    """No direction is made of rounding errors, in single precision too."""
    for count in (1, 2):
        case = Case("one", count)
        case.matrix = case.exact
        gradient = case.gradient(side)
        want = case.solution(np.float64(0.1), gradient, side)
        for dtype, tolerance in ((tf.float64, 1e-9), (tf.float32, 1e-4)):
            case.value = case.kind.gram(tf.cast(case.rows, dtype))
            cast = gradient.astype(dtype.as_numpy_dtype)
            if solve == "eigen":
                got = damped_eigen(case, cast, side, 0.1)
            else:
                damping = tf.constant(0.1, dtype)
                inverse = case.kind.inverse(case.value, damping)
                got = case.kind.multiply(inverse, tf.constant(cast), side)
            assert got.dtype == dtype
            assert_close(got, want, tolerance)


@BY_NAME
def test_zero(name: str) -> None:
    """Without damping the identity, with it the damping's."""
    case = Case(name)
    gradient = case.gradient("left")
    zero = tf.zeros_like(case.value)
    for damping, want in ((0.0, gradient), (0.25, 4 * gradient)):
        shift = tf.constant(damping, tf.float64)
        inverse = case.kind.inverse(zero, shift)
        got = case.kind.multiply(inverse, tf.constant(gradient), "left")
        assert_close(got, want, 1e-12)
    values = case.kind.eigen(zero)[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@BY_NAME
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """And nothing raises, which would end the training."""
    case = Case(name)
    damping = tf.constant(0.1, tf.float64)
    for row in (0, -1):
        value = case.value.numpy()
        value[..., row, 0] = bad
        for parts in (
            case.kind.inverse(tf.constant(value), damping),
            case.kind.eigen(tf.constant(value)),
        ):
            finite = [np.isfinite(v).all() for v in parts.values()]
            assert not all(finite)


def rounded(tensors: Tensors, dtype: tf.DType) -> dict[str, tf.Tensor]:
    """Tensors in float32 that were kept in another dtype."""
    return {
        k: tf.cast(tf.cast(v, dtype), tf.float32) for k, v in tensors.items()
    }


@SIDES
@BY_NAME
def test_parts_of_the_identity_leave_a_gradient(name: str, side: Any) -> None:
    """In every dtype in which they may be kept."""
    case = Case(name)
    kind = case.kind
    gradient = tf.constant(case.gradient(side), tf.float32)

    def kept(parts: dict[str, Part], dtype: tf.DType) -> dict[str, tf.Tensor]:
        identity = {k: p.identity(tf.float32) for k, p in parts.items()}
        return rounded(identity, dtype)

    for dtype in (tf.float32, tf.bfloat16):
        inverse = kept(kind.inverse_parts(), dtype)
        eigen = kept(kind.eigen_parts(), dtype)
        for got in (
            kind.multiply(inverse, gradient, side),
            kind.rotate(
                eigen, kind.rotate(eigen, gradient, side), side, back=True
            ),
        ):
            np.testing.assert_array_equal(got, gradient)


def test_inverse_in_half_precision() -> None:
    """Off by its roundings, of whatever size the inverse is."""
    for scale in (1e-8, 1.0, 1e8):
        case = Case("one")
        case.value = tf.cast(scale * case.value, tf.float32)
        case.matrix = scale * case.matrix
        damping = np.float64(0.3 * scale)
        shift = tf.constant(damping, tf.float32)
        inverse = case.kind.inverse(case.value, shift)
        kept = rounded(inverse, tf.bfloat16)
        gradient = case.gradient("left")
        want = case.solution(damping, gradient, "left")
        got = case.kind.multiply(
            kept, tf.constant(gradient, tf.float32), "left"
        )
        assert_close(got, want, 0.02)
