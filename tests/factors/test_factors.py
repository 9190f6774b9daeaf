"""Each factor type against NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support.harness import assert_close
from tests.support.reference import Array
from tfkfac.factors import (
    VALUES,
    Dense,
    Diagonal,
    Factor,
    LowRank,
    MatrixPart,
    Part,
    Stack,
    Tensors,
)
from tfkfac.factors.low_rank import probes

# name -> (factor, shape, elements, packed elements, operations, text)
FACTORS: dict[str, tuple[Any, tuple[int, ...], int, int, int, str]] = {
    "dense": (Dense(5), (5, 5), 25, 15, 125, "5 x 5"),
    "dense 1": (Dense(1), (1, 1), 1, 1, 1, "1 x 1"),
    "stack": (Stack(3, 4), (3, 4, 4), 48, 30, 192, "3 of 4 x 4"),
    "stack of 1": (Stack(7, 1), (7, 1, 1), 7, 7, 7, "7 of 1 x 1"),
    "diagonal": (Diagonal(7), (7,), 7, 7, 7, "diagonal 7"),
    "diagonal 1": (Diagonal(1), (1,), 1, 1, 1, "diagonal 1"),
    # One row more than the matrix, for the mean eigenvalue.
    "wide": (LowRank(20, 6), (21, 6), 126, 126, 756, "20 x 20, rank 6"),
    "wide stack": (
        LowRank(15, 5, (3,)),
        (3, 16, 5),
        240,
        240,
        1200,
        "3 of 15 x 15, rank 5",
    ),
    "wide, all but one": (LowRank(8, 7), (9, 7), 63, 63, 441, "8 x 8, rank 7"),
    "wide, smallest": (LowRank(2, 1), (3, 1), 3, 3, 3, "2 x 2, rank 1"),
}
BY_NAME = pytest.mark.parametrize("name", FACTORS)
SIDES = pytest.mark.parametrize("side", ["left", "right"])


class Case:
    """A factor type with random rows, and the expected matrix in NumPy.

    Attributes:
        exact: Sum of the outer products of the rows.
        value: Tensor that stores the factor.
        matrix: Matrix that the factor represents: exact, diagonal or low-rank
            plus a multiple of the identity.
    """

    def __init__(self, name: str, count: int = 40) -> None:
        self.factor: Any = FACTORS[name][0]
        self.rng = np.random.default_rng(len(name) + count)
        self.stack, self.size = self.factor.stack_shape, self.factor.size
        rows = self.rng.normal(size=(count, 2, *self.stack, self.size))
        self.rows = rows / np.sqrt(np.arange(1, self.size + 1))
        self.exact = np.einsum("bs...i,bs...j->...ij", self.rows, self.rows)
        self.value = self.factor.gram(tf.constant(self.rows))
        self.matrix = self.exact
        if isinstance(self.factor, Diagonal):
            self.matrix = self.exact * np.eye(self.size)
        elif isinstance(self.factor, LowRank):
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
        """Multiplies a gradient by the inverse of the damped matrix."""
        shift = np.asarray(damping)[..., None, None] * np.eye(self.size)
        if side == "left":
            return np.asarray(np.linalg.solve(self.matrix + shift, gradient))
        transposed = np.swapaxes(gradient, -1, -2)
        solved = np.linalg.solve(self.matrix + shift, transposed)
        return np.asarray(np.swapaxes(solved, -1, -2))

    def by_inverse(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """Computes `solution` by `inverse` and `multiply`."""
        shift = tf.cast(damping, self.value.dtype)
        inverse = self.factor.inverse(self.value, shift)
        assert {k: v.shape for k, v in inverse.items()} == {
            k: part.shape for k, part in self.factor.inverse_parts().items()
        }
        return self.factor.multiply(inverse, tf.constant(gradient), side)

    def by_eigen(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """Computes `solution` by `eigen` and `rotate`."""
        eigen = self.factor.eigen(self.value)
        assert {k: v.shape for k, v in eigen.items()} == {
            k: part.shape for k, part in self.factor.eigen_parts().items()
        }
        inside = self.factor.rotate(eigen, tf.constant(gradient), side)
        axis = -1 if side == "left" else -2
        scale = tf.expand_dims(1 / (eigen[VALUES] + damping), axis)
        scale = self.factor.widen(scale, side)
        return self.factor.rotate(eigen, inside * scale, side, back=True)


@BY_NAME
def test_counts(name: str) -> None:
    factor, shape, elements, packed, operations, text = FACTORS[name]
    assert factor.shape == factor.storage.shape == shape
    assert factor.elements == factor.storage.elements == elements
    assert math.prod(factor.storage.packed_shape) == packed
    assert factor.operations == operations
    assert factor.text == text


def test_factors_are_hashable_values() -> None:
    assert Stack(2, 3) == Stack(count=2, size=3) != Stack(3, 2)
    factors: set[Factor] = {Dense(3), Dense(3), Dense(4), Stack(1, 3)}
    factors |= {Diagonal(3), LowRank(5, 2), LowRank(5, 2), LowRank(5, 3)}
    assert len(factors) == 6


@BY_NAME
def test_pack_and_unpack(name: str) -> None:
    case = Case(name)
    inverse = case.factor.inverse(case.value, tf.constant(0.1, tf.float64))
    parts = case.factor.inverse_parts()
    for part, value in [
        (case.factor.storage, case.value),
        *((parts[key], inverse[key]) for key in parts),
    ]:
        packed = part.pack(value)
        assert packed.shape == part.packed_shape
        assert_close(part.unpack(packed), value, 1e-14)


def test_identity() -> None:
    got = Part((2, 3)).identity(tf.float32)
    np.testing.assert_array_equal(got, np.ones((2, 3)))
    for shape in ((3, 3), (2, 3, 3), (4, 2)):
        got = MatrixPart(shape).identity(tf.float64)
        want = np.broadcast_to(np.eye(*shape[-2:]), shape)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == tf.float64


@BY_NAME
def test_gram(name: str) -> None:
    """Sum over batch and positions, each of which may be empty."""
    case = Case(name)
    mean = np.trace(case.exact, axis1=-2, axis2=-1) / case.size
    assert_close(case.factor.mean_eigenvalue(case.value), mean, 1e-12)
    assert_close(case.factor.as_matrix(case.value), case.matrix, 1e-9)
    want = case.exact
    if isinstance(case.factor, Diagonal):
        want = np.diagonal(want)
    if isinstance(case.factor, LowRank):
        rank = case.factor.rank
        last = np.broadcast_to(mean[..., None, None], (*case.stack, 1, rank))
        want = want @ probes(case.size, rank, tf.float64)
        want = np.concatenate([want, last], -2)
    assert_close(case.value, want, 1e-12)
    halves = [case.factor.gram(tf.constant(case.rows[i::2])) for i in range(2)]
    assert_close(halves[0] + halves[1], want, 1e-12)
    for empty in (case.rows[:0], case.rows[:, :0]):
        got = case.factor.gram(tf.constant(empty))
        np.testing.assert_array_equal(got, np.zeros(case.factor.shape))


@SIDES
@BY_NAME
def test_solvers(name: str, side: str) -> None:
    """The damping may be a scalar; for `inverse` also one per matrix."""
    case = Case(name)
    gradient = case.gradient(side)
    for damping in (case.rng.uniform(0.1, 1.0, case.stack), np.float64(0.3)):
        want = case.solution(damping, gradient, side)
        assert_close(case.by_inverse(damping, gradient, side), want, 1e-9)
    want = case.solution(np.full(case.stack, 0.1), gradient, side)
    assert_close(case.by_eigen(0.1, gradient, side), want, 1e-8)
    if not isinstance(case.factor, LowRank):
        values = np.sort(case.factor.eigen(case.value)[VALUES], -1)
        assert_close(values, np.linalg.eigvalsh(case.matrix), 1e-10)


@BY_NAME
def test_zero_matrix(name: str) -> None:
    """The inverse is I for damping 0, else I / damping."""
    case = Case(name)
    gradient = case.gradient("left")
    case.value = tf.zeros_like(case.value)
    for damping, want in ((0.0, gradient), (0.25, 4 * gradient)):
        assert_close(case.by_inverse(damping, gradient, "left"), want, 1e-12)
    values = case.factor.eigen(case.value)[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


WIDE = [name for name in FACTORS if name.startswith("wide")]


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, np.nan) for name in FACTORS), *((name, np.inf) for name in WIDE)],
)
def test_result_is_not_finite(name: str, bad: float) -> None:
    """A decomposition of NaN or infinity must not raise an error."""
    case = Case(name)
    damping = tf.constant(0.1, tf.float64)
    value = case.value.numpy()
    value[..., -1] = bad
    for parts in (
        case.factor.inverse(tf.constant(value), damping),
        case.factor.eigen(tf.constant(value)),
    ):
        assert not all(np.isfinite(v).all() for v in parts.values())


@pytest.mark.parametrize("name", ["dense", "stack", "diagonal"])
def test_no_eigenvalue_below_zero(name: str) -> None:
    case = Case(name)
    values = case.factor.eigen(-case.value)[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


@SIDES
@BY_NAME
def test_initial_values_keep_a_gradient(name: str, side: Any) -> None:
    """In each dtype in which decompositions may be stored."""
    factor = FACTORS[name][0]
    gradient = tf.constant(Case(name).gradient(side), tf.float32)
    for dtype in (tf.float32, tf.bfloat16):

        def initial(parts: dict[str, Part], dtype: tf.DType = dtype) -> Tensors:
            identity = {k: p.identity(dtype) for k, p in parts.items()}
            return {k: tf.cast(v, tf.float32) for k, v in identity.items()}

        inverse = initial(factor.inverse_parts())
        eigen = initial(factor.eigen_parts())
        inside = factor.rotate(eigen, gradient, side)
        for got in (
            factor.multiply(inverse, gradient, side),
            factor.rotate(eigen, inside, side, back=True),
        ):
            np.testing.assert_array_equal(got, gradient)
