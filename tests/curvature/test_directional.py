"""Gauss-Newton form and directional curvature against dense matrices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.dtypes import floats
from tests.support.gauss_newton_reference import (
    get_flat,
    outputs_and_jacobians,
)
from tests.support.harness import randomize
from tests.support.reference import Array
from tests.support.summaries import sequential
from tfkfac.blocks.statistics import Examples, Subsample
from tfkfac.capture.model_taps import ForwardCall
from tfkfac.curvature.directional import LossInputs, directional_curvature
from tfkfac.loss.batch import training_call

ROWS, FEATURES, OUTPUTS = 12, 4, 3
RNG = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, its labels, and its Hessian for one row.

    The Hessian is a function of the outputs and labels, with respect to the
    inputs of the loss: the logits if `reads_logits`, else the outputs.
    """

    loss: Any
    activation: str | None
    labels: Callable[[], Array]
    hessian: Callable[[Array, Array], Array]
    reads_logits: bool = False
    summed: bool = False


def sparse(reduction: str = "sum_over_batch_size") -> Any:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, dtype="float64"
    )


def real() -> Array:
    return RNG.normal(size=(ROWS, OUTPUTS))


def classes() -> Array:
    return RNG.integers(0, OUTPUTS, ROWS)


def softmax(z: Array, _: Array) -> Array:
    p = np.exp(z - z.max())
    p /= p.sum()
    return np.diag(p) - np.outer(p, p)


CASES = {
    "mse": Case("mse", None, real, lambda _, __: 2 / OUTPUTS * np.eye(OUTPUTS)),
    "binary": Case(
        "binary_crossentropy",
        "sigmoid",
        lambda: RNG.integers(0, 2, (ROWS, OUTPUTS)).astype(float),
        lambda p, _: np.diag(p * (1 - p)) / OUTPUTS,
        reads_logits=True,
    ),
    "categorical": Case(
        keras.losses.CategoricalCrossentropy(dtype="float64"),
        "softmax",
        lambda: np.eye(OUTPUTS)[classes()],
        lambda p, _: np.diag(p) - np.outer(p, p),
        reads_logits=True,
    ),
    "sparse": Case(sparse(), None, classes, softmax),
    "sum": Case(sparse("sum"), None, classes, softmax, summed=True),
    "poisson": Case(
        "poisson",
        "softplus",
        lambda: RNG.poisson(2.0, (ROWS, OUTPUTS)).astype(float),
        lambda p, y: np.diag(y / (p + 1e-7) ** 2) / OUTPUTS,  # as in Keras
    ),
}


def network(activation: str | None, **options: Any) -> Any:
    model = sequential(
        layers.Dense(5, activation="tanh", name="hidden", **options),
        layers.Dense(OUTPUTS, activation=activation, name="out"),
        shape=(FEATURES,),
    )
    randomize(model)
    return model


def dense_matrix(model: Any, case: Case, x: Array, y: Array) -> Array:
    """The Gauss-Newton matrix of the mean over the rows."""
    outputs, reader = np.asarray(model(x)), model
    if case.reads_logits:
        reader = network(None)
        reader.set_weights(model.get_weights())
    ((_, J),) = outputs_and_jacobians(reader, x, get_flat(reader))
    H = [case.hessian(p, label) for p, label in zip(outputs, y, strict=True)]
    return np.einsum("rai,rab,rbj->ij", J, np.stack(H), J) / len(x)


def directions_of(model: Any, count: int = 2) -> list[list[Array]]:
    return [
        [RNG.normal(size=v.shape) for v in model.trainable_variables]
        for _ in range(count)
    ]


def flat(directions: list[list[Array]]) -> Array:
    return np.stack(
        [np.concatenate(list(map(np.ravel, d))) for d in directions]
    )


def compiled(model: Any, case: Case, x: Array, y: Array) -> LossInputs:
    model.compile(loss=case.loss)
    model.compute_loss(x, y, model(x))  # builds the loss
    call = training_call(model, tf.constant(x))
    arguments = {"x": tf.constant(x), "y": tf.constant(y)}
    return LossInputs(call, arguments, (), [case.summed])


@pytest.mark.parametrize(
    ("name", "offset"),
    [*((name, None) for name in CASES), ("sparse", 0), ("sum", 1)],
)
def test_against_dense_matrices(name: str, offset: int | None) -> None:
    """All rows, or a quarter of them, which represents all rows of a sum.

    The term of one of three replicas; the penalty of weights counts once.
    """
    case = CASES[name]
    with floats("float64"):
        penalty = keras.regularizers.L2(0.3)
        model = network(case.activation, kernel_regularizer=penalty)
        x, y = RNG.normal(size=(ROWS, FEATURES)), case.labels()
        inputs, rows = compiled(model, case, x, y), np.arange(ROWS)
        if offset is not None:
            part = Subsample(0.25, tf.constant(offset, tf.int64))
            inputs = inputs.select(lambda size: Examples(size, part))
            rows = (3 * offset + np.arange(3) * ROWS) // 3
        directions = directions_of(model)
        got = directional_curvature(
            model,
            inputs,
            model.trainable_variables,
            [[tf.constant(p) for p in d] for d in directions],
            tf.constant(2.0),
            replicas=3,
        )
        matrix = dense_matrix(model, case, x[rows], y[rows])
    D, terms = flat(directions), ROWS if case.summed else 1
    kernels = np.stack([d[0].ravel() for d in directions])
    want = terms * D @ matrix @ D.T + 0.6 / 3 * kernels @ kernels.T
    np.testing.assert_allclose(got.matrix, want / 2, rtol=1e-6)


N = 8
SEPARATE = {
    "rows": (True, [tf.ones([N, 3]), tf.ones([N])]),
    "a scalar": (True, [tf.ones([N, 3]), tf.ones([])]),
    "a list of edges": (False, [tf.ones([N, 3]), tf.ones([20, 2])]),
    "a square matrix": (False, [tf.ones([N, 3]), tf.ones([N, N])]),
    "sparse": (False, [tf.sparse.eye(N)]),
}


@pytest.mark.parametrize(
    ("name", "known"), zip(SEPARATE, [False, True] * 3, strict=False)
)
def test_related_examples_stay_together(name: str, known: bool) -> None:
    """The whole batch is used then, and the weight of a sum is 1."""
    separate, tensors = SEPARATE[name]
    part = Subsample(0.25, tf.constant(0, tf.int64))

    def select(*tensors: Any) -> Any:
        inputs = LossInputs(ForwardCall(tensors, {}, None), {}, (), [True])
        selected = inputs.select(lambda size: Examples(size, part))
        return [*selected.call.args], [*selected.shares]

    specs = [
        tf.TensorSpec([None] * t.shape.rank, t.dtype)
        for t in tensors
        if tf.is_tensor(t) and not isinstance(t, tf.SparseTensor)
    ]
    function = tf.function(select)
    if not known and len(specs) == len(tensors):
        function = tf.function(select, input_signature=specs)
    chosen, shares = function(*tensors)
    assert chosen[0].shape[0] == (N // 4 if separate else N)
    assert [x.shape for x in chosen[1:]] == [
        [N // 4] if separate and x.shape.rank else x.shape for x in tensors[1:]
    ]
    # A sparse input is found before the shares are written.
    assert {float(share) for share in shares} <= {4.0 if separate else 1.0}
