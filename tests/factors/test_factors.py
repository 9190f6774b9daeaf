"""Each kind of factor against NumPy."""

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

# name -> (kind, shape, elements, sent as symmetric, operations, text)
KINDS: dict[str, tuple[Any, tuple[int, ...], int, int, int, str]] = {
    "dense": (Dense(5), (5, 5), 25, 15, 125, "5 x 5"),
    "dense 1": (Dense(1), (1, 1), 1, 1, 1, "1 x 1"),
    "stack": (Stack(3, 4), (3, 4, 4), 48, 30, 192, "3 of 4 x 4"),
    "stack of 1": (Stack(7, 1), (7, 1, 1), 7, 7, 7, "7 of 1 x 1"),
    "diagonal": (Diagonal(7), (7,), 7, 7, 7, "diagonal 7"),
    "diagonal 1": (Diagonal(1), (1,), 1, 1, 1, "diagonal 1"),
    # A row more than the matrix has: that of the mean eigenvalue.
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
BY_NAME = pytest.mark.parametrize("name", KINDS)
SIDES = pytest.mark.parametrize("side", ["left", "right"])


class Case:
    """A kind, rows, and the matrix that it makes of them, in NumPy.

    Attributes:
        exact: The sum of outer products.
        value: The tensor that stands for it.
        matrix: What the kind keeps of it, written out.
    """

    def __init__(self, name: str, count: int = 40) -> None:
        self.kind: Any = KINDS[name][0]
        self.rng = np.random.default_rng(len(name) + count)
        self.stack, self.size = self.kind.stack_shape, self.kind.size
        rows = self.rng.normal(size=(count, 2, *self.stack, self.size))
        self.rows = rows / np.sqrt(np.arange(1, self.size + 1))
        self.exact = np.einsum("bs...i,bs...j->...ij", self.rows, self.rows)
        self.value = self.kind.gram(tf.constant(self.rows))
        self.matrix = self.exact
        if isinstance(self.kind, Diagonal):
            self.matrix = self.exact * np.eye(self.size)
        elif isinstance(self.kind, LowRank):
            inside, missing = self.low_rank()
            rest = np.maximum(missing, 0)[..., None, None] / self.size
            self.matrix = inside + rest * np.eye(self.size)

    def low_rank(self) -> tuple[Array, Array]:
        """Nystroem's approximation, and what it lacks of the trace."""
        omega = probes(self.size, self.kind.rank, tf.float64).numpy()
        product = self.exact @ omega
        inside = product @ np.linalg.pinv(omega.T @ product, rcond=1e-12)
        inside = inside @ np.swapaxes(product, -1, -2)
        return inside, np.trace(self.exact - inside, axis1=-2, axis2=-1)

    def gradient(self, side: str) -> Array:
        shape = (self.size, 3) if side == "left" else (3, self.size)
        return np.asarray(self.rng.normal(size=(*self.stack, *shape)))

    def solution(self, damping: Any, gradient: Array, side: str) -> Array:
        """The gradient times the inverse of the damped matrix."""
        shift = np.asarray(damping)[..., None, None] * np.eye(self.size)
        if side == "left":
            return np.asarray(np.linalg.solve(self.matrix + shift, gradient))
        transposed = np.swapaxes(gradient, -1, -2)
        solved = np.linalg.solve(self.matrix + shift, transposed)
        return np.asarray(np.swapaxes(solved, -1, -2))

    def by_inverse(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """The same, by the parts of the inverse."""
        shift = tf.cast(damping, self.value.dtype)
        inverse = self.kind.inverse(self.value, shift)
        assert {k: v.shape for k, v in inverse.items()} == {
            k: part.shape for k, part in self.kind.inverse_parts().items()
        }
        return self.kind.multiply(inverse, tf.constant(gradient), side)

    def by_eigen(self, damping: Any, gradient: Any, side: str) -> tf.Tensor:
        """The same, by the eigenbasis."""
        eigen = self.kind.eigen(self.value)
        assert {k: v.shape for k, v in eigen.items()} == {
            k: part.shape for k, part in self.kind.eigen_parts().items()
        }
        inside = self.kind.rotate(eigen, tf.constant(gradient), side)
        axis = -1 if side == "left" else -2
        scale = tf.expand_dims(1 / (eigen[VALUES] + damping), axis)
        scale = self.kind.widen(scale, side)
        return self.kind.rotate(eigen, inside * scale, side, back=True)


@BY_NAME
def test_counts(name: str) -> None:
    kind, shape, elements, packed, operations, text = KINDS[name]
    assert kind.shape == kind.storage.shape == shape
    assert kind.elements == kind.storage.elements == elements
    assert math.prod(kind.storage.packed_shape) == packed
    assert kind.operations == operations
    assert kind.text == text


def test_kinds_are_values() -> None:
    """A kind is a key: equal to its like only, of whatever shape."""
    assert Stack(2, 3) == Stack(count=2, size=3) != Stack(3, 2)
    kinds: set[Factor] = {Dense(3), Dense(3), Dense(4), Stack(1, 3)}
    kinds |= {Diagonal(3), LowRank(5, 2), LowRank(5, 2), LowRank(5, 3)}
    assert len(kinds) == 6


@BY_NAME
def test_packing_takes_nothing_away(name: str) -> None:
    case = Case(name)
    inverse = case.kind.inverse(case.value, tf.constant(0.1, tf.float64))
    parts = case.kind.inverse_parts()
    for part, value in [
        (case.kind.storage, case.value),
        *((parts[key], inverse[key]) for key in parts),
    ]:
        packed = part.pack(value)
        assert packed.shape == part.packed_shape
        assert_close(part.unpack(packed), value, 1e-14)


def test_parts_that_are_identities() -> None:
    got = Part((2, 3)).identity(tf.float32)
    np.testing.assert_array_equal(got, np.ones((2, 3)))
    for shape in ((3, 3), (2, 3, 3), (4, 2)):
        got = MatrixPart(shape).identity(tf.float64)
        want = np.broadcast_to(np.eye(*shape[-2:]), shape)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == tf.float64


@BY_NAME
def test_gram(name: str) -> None:
    """The sum over batch and positions, with none of either as well."""
    case = Case(name)
    mean = np.trace(case.exact, axis1=-2, axis2=-1) / case.size
    assert_close(case.kind.mean_eigenvalue(case.value), mean, 1e-12)
    assert_close(case.kind.as_matrix(case.value), case.matrix, 1e-9)
    want = case.exact
    if isinstance(case.kind, Diagonal):
        want = np.diagonal(want)
    if isinstance(case.kind, LowRank):
        rank = case.kind.rank
        last = np.broadcast_to(mean[..., None, None], (*case.stack, 1, rank))
        want = want @ probes(case.size, rank, tf.float64)
        want = np.concatenate([want, last], -2)
    assert_close(case.value, want, 1e-12)
    parts = [case.kind.gram(tf.constant(case.rows[i::2])) for i in range(2)]
    assert_close(parts[0] + parts[1], want, 1e-12)
    for empty in (case.rows[:0], case.rows[:, :0]):
        got = case.kind.gram(tf.constant(empty))
        np.testing.assert_array_equal(got, np.zeros(case.kind.shape))


@SIDES
@BY_NAME
def test_solvers(name: str, side: str) -> None:
    """With a damping for each matrix, and the inverse with one for all."""
    case = Case(name)
    gradient = case.gradient(side)
    for damping in (case.rng.uniform(0.1, 1.0, case.stack), np.float64(0.3)):
        want = case.solution(damping, gradient, side)
        assert_close(case.by_inverse(damping, gradient, side), want, 1e-9)
    want = case.solution(np.full(case.stack, 0.1), gradient, side)
    assert_close(case.by_eigen(0.1, gradient, side), want, 1e-8)
    if not isinstance(case.kind, LowRank):
        values = np.sort(case.kind.eigen(case.value)[VALUES], -1)
        assert_close(values, np.linalg.eigvalsh(case.matrix), 1e-10)


@BY_NAME
def test_zero(name: str) -> None:
    """Without damping the identity, with it the damping's."""
    case = Case(name)
    gradient = case.gradient("left")
    case.value = tf.zeros_like(case.value)
    for damping, want in ((0.0, gradient), (0.25, 4 * gradient)):
        assert_close(case.by_inverse(damping, gradient, "left"), want, 1e-12)
    values = case.kind.eigen(case.value)[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


WIDE = [name for name in KINDS if name.startswith("wide")]


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, np.nan) for name in KINDS), *((name, np.inf) for name in WIDE)],
)
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    """And nothing raises, which would end the training."""
    case = Case(name)
    damping = tf.constant(0.1, tf.float64)
    value = case.value.numpy()
    value[..., -1] = bad
    for parts in (
        case.kind.inverse(tf.constant(value), damping),
        case.kind.eigen(tf.constant(value)),
    ):
        assert not all(np.isfinite(v).all() for v in parts.values())


@pytest.mark.parametrize("name", ["dense", "stack", "diagonal"])
def test_no_eigenvalue_below_zero(name: str) -> None:
    case = Case(name)
    values = case.kind.eigen(-case.value)[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


@SIDES
@BY_NAME
def test_parts_of_the_identity_leave_a_gradient(name: str, side: Any) -> None:
    """In every dtype in which they may be kept."""
    kind = KINDS[name][0]
    gradient = tf.constant(Case(name).gradient(side), tf.float32)
    for dtype in (tf.float32, tf.bfloat16):

        def kept(parts: dict[str, Part], dtype: tf.DType = dtype) -> Tensors:
            identity = {k: p.identity(dtype) for k, p in parts.items()}
            return {k: tf.cast(v, tf.float32) for k, v in identity.items()}

        inverse, eigen = kept(kind.inverse_parts()), kept(kind.eigen_parts())
        inside = kind.rotate(eigen, gradient, side)
        for got in (
            kind.multiply(inverse, gradient, side),
            kind.rotate(eigen, inside, side, back=True),
        ):
            np.testing.assert_array_equal(got, gradient)
