"""Each kind of factor against NumPy."""

import math

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
    MatrixPart,
    Part,
    Stack,
)

# name -> (kind, shape, elements, sent as symmetric, operations, text)
KINDS: dict[str, tuple[Factor, tuple[int, ...], int, int, int, str]] = {
    "dense": (Dense(5), (5, 5), 25, 15, 125, "5 x 5"),
    "dense 1": (Dense(1), (1, 1), 1, 1, 1, "1 x 1"),
    "stack": (Stack(3, 4), (3, 4, 4), 48, 30, 192, "3 of 4 x 4"),
    "stack 1": (Stack(1, 2), (1, 2, 2), 4, 3, 8, "1 of 2 x 2"),
    "stack of 1": (Stack(7, 1), (7, 1, 1), 7, 7, 7, "7 of 1 x 1"),
    "diagonal": (Diagonal(7), (7,), 7, 7, 7, "diagonal 7"),
    "diagonal 1": (Diagonal(1), (1,), 1, 1, 1, "diagonal 1"),
}
BY_NAME = pytest.mark.parametrize("name", KINDS)
SIDES = pytest.mark.parametrize("side", ["left", "right"])


class Case:
    """A kind, a random value of it, and the same written out with NumPy."""

    def __init__(self, name: str) -> None:
        self.kind, shape, *_ = KINDS[name]
        rng = np.random.default_rng(len(name))
        self.diagonal = len(shape) == 1
        if self.diagonal:
            self.value = rng.uniform(0.2, 2.0, size=shape)
            self.matrix = np.diag(self.value)
        else:
            rows = rng.normal(size=(*shape[:-1], 2 * shape[-1]))
            self.value = self.matrix = rows @ np.swapaxes(rows, -1, -2)
        self.stack = shape[:-2]
        self.size = shape[-1]
        self.rng = rng

    def tensor(self) -> tf.Tensor:
        return tf.constant(self.value)

    def gradient(self, side: str) -> Array:
        shape = (self.size, 3) if side == "left" else (3, self.size)
        return np.asarray(self.rng.normal(size=(*self.stack, *shape)))

    def damping(self) -> Array:
        """One for each matrix."""
        return np.asarray(self.rng.uniform(0.1, 1.0, size=self.stack))


def product(matrix: Array, gradient: Array, side: str) -> Array:
    pair = (matrix, gradient) if side == "left" else (gradient, matrix)
    return np.asarray(pair[0] @ pair[1])


# ------------------------------------------------------------------- each kind
@BY_NAME
def test_counts(name: str) -> None:
    kind, shape, elements, packed, operations, text = KINDS[name]
    assert kind.shape == kind.storage.shape == shape
    assert kind.elements == kind.storage.elements == elements
    assert math.prod(kind.storage.packed_shape) == packed
    assert kind.operations == operations
    assert kind.text == text
    assert kind.size == shape[-1]
    assert kind.stack_shape == shape[:-2]


def test_kinds_are_values() -> None:
    """A kind is a key: equal to its like only, of whatever shape."""
    assert Dense(3) == Dense(3)
    assert Stack(2, 3) == Stack(count=2, size=3) != Stack(3, 2)
    kinds = {Dense(3), Dense(3), Dense(4), Stack(1, 3), Diagonal(3)}
    assert len(kinds) == 4


@BY_NAME
def test_packing_takes_nothing_away(name: str) -> None:
    case = Case(name)
    for part in (case.kind.storage, *case.kind.inverse_parts().values()):
        packed = part.pack(case.tensor())
        assert packed.shape == part.packed_shape
        np.testing.assert_array_equal(part.unpack(packed), case.value)


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
    for batch, shared in ((4, 3), (1, 1), (0, 3), (2, 0)):
        rows = case.rng.normal(size=(batch, shared, *case.stack, case.size))
        got = case.kind.gram(tf.constant(rows))
        want = np.einsum("bs...i,bs...j->...ij", rows, rows)
        if case.diagonal:
            want = np.diagonal(want)
        assert got.shape == case.kind.shape
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@BY_NAME
def test_written_out(name: str) -> None:
    case = Case(name)
    np.testing.assert_array_equal(
        case.kind.as_matrix(case.tensor()), case.matrix
    )


@BY_NAME
def test_mean_eigenvalue(name: str) -> None:
    case = Case(name)
    got = case.kind.mean_eigenvalue(case.tensor())
    assert got.shape == case.stack
    want = np.linalg.eigvalsh(case.matrix).mean(-1)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@SIDES
@BY_NAME
def test_inverse(name: str, side: str) -> None:
    """With a damping for each matrix, and with one for all."""
    case = Case(name)
    gradient = case.gradient(side)
    for damping in (case.damping(), np.float64(0.3)):
        inverse = case.kind.inverse(case.tensor(), tf.constant(damping))
        parts = case.kind.inverse_parts()
        assert {k: v.shape for k, v in inverse.items()} == {
            k: part.shape for k, part in parts.items()
        }
        shift = np.asarray(damping)[..., None, None] * np.eye(case.size)
        want = product(np.linalg.inv(case.matrix + shift), gradient, side)
        got = case.kind.multiply(inverse, tf.constant(gradient), side)
        assert_close(got, want, 1e-10)


@BY_NAME
def test_inverse_of_zero(name: str) -> None:
    """Without damping the identity, with it the damping's."""
    case = Case(name)
    gradient = case.gradient("left")
    zero = tf.zeros(case.kind.shape, tf.float64)
    for damping, want in ((0.0, gradient), (0.25, 4 * gradient)):
        shift = tf.constant(damping, tf.float64)
        inverse = case.kind.inverse(zero, shift)
        got = case.kind.multiply(inverse, tf.constant(gradient), "left")
        assert_close(got, want, 1e-12)


@BY_NAME
def test_no_inverse_is_not_finite(name: str) -> None:
    """And nothing raises, which would end the training."""
    case = Case(name)
    damping = tf.constant(0.1, tf.float64)
    for parts in (
        case.kind.inverse(case.tensor() * float("nan"), damping),
        case.kind.eigen(case.tensor() * float("nan")),
    ):
        values = [np.isfinite(v.numpy()).all() for v in parts.values()]
        assert not all(values)


@SIDES
@BY_NAME
def test_eigen(name: str, side: str) -> None:
    """In its basis, the factor multiplies by its eigenvalues."""
    case = Case(name)
    gradient = case.gradient(side)
    eigen = case.kind.eigen(case.tensor())
    parts = case.kind.eigen_parts()
    assert {k: v.shape for k, v in eigen.items()} == {
        k: part.shape for k, part in parts.items()
    }
    values = np.asarray(eigen.pop(VALUES))
    want = np.linalg.eigvalsh(case.matrix)
    assert_close(np.sort(values, -1), want, 1e-10)

    kind, matrix = case.kind, tf.constant(gradient)
    rotated = kind.rotate(eigen, matrix, side)
    assert_close(kind.rotate(eigen, rotated, side, back=True), gradient, 1e-10)
    scale = values[..., :, None] if side == "left" else values[..., None, :]
    got = kind.rotate(eigen, rotated * scale, side, back=True)
    assert_close(got, product(case.matrix, gradient, side), 1e-10)


@BY_NAME
def test_no_eigenvalue_below_zero(name: str) -> None:
    case = Case(name)
    values = case.kind.eigen(-case.tensor())[VALUES]
    np.testing.assert_array_equal(values, np.zeros_like(values))


@SIDES
@BY_NAME
def test_parts_of_the_identity_leave_a_gradient(name: str, side: str) -> None:
    case = Case(name)
    kind, gradient = case.kind, tf.constant(case.gradient(side))

    def identity(parts: dict[str, Part]) -> dict[str, tf.Tensor]:
        return {k: part.identity(tf.float64) for k, part in parts.items()}

    inverse, eigen = map(identity, (kind.inverse_parts(), kind.eigen_parts()))
    for got in (
        kind.multiply(inverse, gradient, side),
        kind.rotate(eigen, gradient, side),
        kind.rotate(eigen, gradient, side, back=True),
    ):
        np.testing.assert_array_equal(got, gradient)
