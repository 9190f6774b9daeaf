"""`register_block`: blocks of custom layer classes."""

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.harness import (
    assert_close,
    check_factors,
    flat,
    keras_gradients,
    train_once,
    weights_of,
)
from tests.support.layers import make_input, problem, targets
from tests.support.reference import Array, append_one, factors
from tests.support.small import FEATURES, Scale
from tests.support.summaries import bind, leftovers_of, sequential
from tfkfac.blocks import MatrixBlock, Rows, fold_positions, registry
from tfkfac.blocks.dense import DenseBlock

BATCH = 5


@pytest.fixture(autouse=True)
def clean_register(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield


class Doubled(layers.Dense):
    def call(self, x: Any, training: Any = None) -> Any:
        return super().call(x)


class Linear(layers.Layer):
    """Layer that does not subclass `Dense` and has no bias."""

    def __init__(self, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation = keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 3), name="kernel")

    def call(self, x: Any) -> Any:
        return self.activation(x @ self.kernel)


class Square(layers.Dense):
    def call(self, x: Any) -> Any:
        return super().call(x * x)


class SquareBlock(MatrixBlock):
    """Block of `Square`: a dense layer's factors of squared inputs."""

    kind = "Square"

    def rows(self, record: Any) -> Rows:
        a = fold_positions(tf.square(self.cast(record.inputs)))
        g = fold_positions(self.cast(record.gradient))
        return Rows(self.with_bias(a), g, None)


# -------------------------------------------------------------------- like
def test_like_dense_without_bias() -> None:
    """G is computed before the activation; a bias is optional."""
    tfkfac.register_block(Linear, like=layers.Dense)
    model, x, y = problem(Linear("tanh", name="block"), (4,), BATCH)
    (kernel,) = weights_of(model)
    out = np.tanh(x @ kernel)
    g = (out - y) * (1 - out**2)
    step = train_once(model, x, y)
    a = x.astype(np.float64)
    check_factors(step.of("block"), *factors(a[:, None], g[:, None]))


# ------------------------------------------------------------------- block
def test_documented_example() -> None:
    """G is the Fisher matrix of the gains, and the step uses its inverse."""
    text = inspect.getdoc(tfkfac.register_block)
    assert text is not None
    names: dict[str, Any] = {"keras": keras, "tf": tf, "tfkfac": tfkfac}
    exec(textwrap.dedent(text.split("```python\n")[1].split("```")[0]), names)
    model, x, y = problem(names["Scale"](name="block"), (3, 4), BATCH)
    (gain,) = weights_of(model)
    u = np.sum(x * (x * gain - y), axis=1)
    step = train_once(model, x, y, weight_sharing="reduce", damping=0.1)
    check_fisher(step, u)


def check_fisher(step: Any, u: Array) -> None:
    """G is the second moment of per-example gradients `u`; P = (G + d I)^-1 u.

    Here `P` is the step and `d` the damping, 0.1.
    """
    assert set(step.of("block")) == {"G"}
    fisher = u.T @ u / BATCH
    assert_close(step.of("block")["G"], fisher, 1e-5, "G")
    want = np.linalg.solve(fisher + 0.1 * np.eye(len(fisher)), u.mean(0))
    assert_close(flat(step.delta), want, 1e-4, "step")


def test_block_of_a_kernel() -> None:
    tfkfac.register_block(Square, block=SquareBlock)
    model, x, y = problem(Square(2, name="block"), (3, 4), BATCH)
    a = append_one(x.astype(np.float64) ** 2)
    g = a @ np.vstack(weights_of(model)) - y
    step = train_once(model, x, y)
    check_factors(step.of("block"), *factors(a, g))


def test_several_weights() -> None:
    """All weights share one Fisher matrix, in the order of `variables`."""

    class Affine(Scale):
        def build(self, shape: Any) -> None:
            super().build(shape)
            self.shift = self.add_weight((2, shape[-1]), name="shift")

        def call(self, x: Any) -> Any:
            return super().call(x) + self.shift

    class AffineBlock(tfkfac.blocks.PerExampleBlock):
        kind = "Affine"

        @property
        def variables(self) -> Any:
            return [self.layer.gain, self.layer.shift]

        def example_gradients(self, record: Any) -> list[tf.Tensor]:
            g = record.gradient
            return [tf.reduce_sum(record.inputs * g, 1), g]

    tfkfac.register_block(Affine, block=AffineBlock)
    model, x, y = problem(Affine(name="block"), (2, 3), BATCH)
    gain, shift = weights_of(model)
    g = x * gain + shift - y
    u = np.concatenate([(x * g).sum(1), g.reshape(BATCH, -1)], -1)
    check_fisher(train_once(model, x, y, damping=0.1), u)


# -------------------------------------------------------------- precedence
def test_precedence_of_registrations() -> None:
    """The last registration replaces earlier and built-in ones.

    It includes subclasses, unless they override `call` or `convolution_op`.
    """

    class Same(Doubled):
        pass

    class Standardised(layers.Conv2D):
        def convolution_op(self, inputs: Any, kernel: Any) -> Any:
            return super().convolution_op(
                inputs, kernel / keras.ops.std(kernel)
            )

    class Other(Doubled):
        def call(self, x: Any, training: Any = None) -> Any:
            return 2 * super().call(x)

    tfkfac.register_block(Doubled, block=SquareBlock)
    tfkfac.register_block(Doubled, like=layers.Dense)
    tfkfac.register_block(Linear, like=Doubled)
    for layer in (Doubled(2), Linear(), Same(2)):
        assert registry.block_types(layer) == {"": DenseBlock}
    assert registry.block_types(Other(2)) == {}
    assert registry.block_types(Standardised(2, 3)) == {}
    tfkfac.register_block(layers.Dense, block=SquareBlock)
    assert registry.block_types(layers.Dense(2)) == {"": SquareBlock}


def test_like_without_the_attributes() -> None:
    """Compiling the model raises an error that names the layer."""
    tfkfac.register_block(Scale, like=layers.Dense)
    message = r"Layer 'scale' .*DenseBlock, needs: .*'kernel'"
    with pytest.raises(ValueError, match=message):
        bind(sequential(Scale(name="scale")))


@pytest.mark.filterwarnings("ignore:Model .* has no layer that K-FAC")
def test_late_registration_waits_for_the_next_compile() -> None:
    model = sequential(Doubled(3, name="late"))
    optimizer = bind(model)
    tfkfac.register_block(Doubled, like=layers.Dense)
    assert leftovers_of(optimizer)["late:kernel"] == "no block for Doubled"
    x = np.ones((2, FEATURES), "float32")
    model.train_on_batch(x, np.ones((2, 3)))
    assert optimizer.factors() == {}
    model.compile(optimizer, "mse", run_eagerly=True)
    model.train_on_batch(x, np.zeros((2, 3)))
    assert optimizer.factors()["late"]["A"].any()


# ------------------------------------------------------------------ errors
class Unfinished(tfkfac.blocks.PerExampleBlock):
    """Block without `kind` and the abstract members."""


BOTH = {"like": layers.Dense, "block": SquareBlock}
ONE_OF = r"One of the arguments `like` and `block` must be given"


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        (layers.Dense(2), {}, TypeError, r"`layer_class` .*Received: layer_c"),
        (int, {}, TypeError, r"`layer_class` .*Received: .*<class 'int'>"),
        (Square, {}, ValueError, ONE_OF),
        (Square, BOTH, ValueError, ONE_OF),
        (Square, {"like": layers.LSTM}, ValueError, r"of Dense, .*like=.*LSTM"),
        (Square, {"like": "Dense"}, ValueError, r"`like` .*: like='Dense'"),
        (Square, {"block": layers.Dense}, TypeError, r"`block` must be a sub"),
        (
            Square,
            {"block": Unfinished},
            TypeError,
            r"which lacks example_gradients, variables, kind",
        ),
    ],
)
def test_errors(
    cls: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tfkfac.register_block(cls, **options)
    assert not registry._registered


class Optional(layers.Dense):
    """Dense layer that a call may apply twice."""

    def call(self, x: Any, twice: bool = False) -> Any:
        return super().call(super().call(x)) if twice else super().call(x)


class OptionalBlock(DenseBlock):
    kind = "Optional"

    def relevant(self, calls: Any) -> Any:
        twice = any(call[0].kwargs.get("twice") for call in calls)
        self.skip_reason = "called twice at once" if twice else None
        return calls


def test_block_that_is_skipped_in_a_step() -> None:
    """Its gradients are not preconditioned; the summary states the reason."""
    tfkfac.register_block(Optional, block=OptionalBlock)
    inputs = keras.Input((3,))
    layer = Optional(3, name="block")
    reason = "called twice at once"
    for twice in (True, False):
        model = keras.Model(inputs, layer(inputs, twice=twice))
        x = make_input("", (3,), BATCH)
        y = targets(model, x)
        gradients = keras_gradients(model, x, y)
        step = train_once(model, x, y)
        leftovers = {f"block:{n}": reason for n in ("kernel", "bias")}
        assert leftovers_of(model.optimizer) == (leftovers if twice else {})
        equal = [
            np.allclose(delta, gradient, rtol=1e-4, atol=1e-6)
            for delta, gradient in zip(step.delta, gradients, strict=True)
        ]
        assert all(equal) if twice else not any(equal)
