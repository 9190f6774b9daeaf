"""Blocks of layer classes that users register."""

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
from tests.support.layer_cases import make_input
from tests.support.layer_models import problem, targets
from tests.support.reference import Array, append_one, factors
from tests.support.small import FEATURES, Scale
from tests.support.summaries import bind, blocks_of, leftovers_of, sequential
from tfkfac.blocks import MatrixBlock, Rows, fold_positions, registry
from tfkfac.blocks.dense import DenseBlock

BATCH = 5


@pytest.fixture(autouse=True)
def clean_register(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    yield


class Doubled(layers.Dense):
    """A dense layer with a call of its own."""

    def call(self, x: Any, training: Any = None) -> Any:
        return super().call(x)


class Linear(layers.Layer):
    """Not related to Dense, and without a bias."""

    def __init__(self, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.activation = keras.activations.get(activation)

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight((shape[-1], 3), name="kernel")

    def call(self, x: Any) -> Any:
        return self.activation(x @ self.kernel)


class Square(layers.Dense):
    """A dense layer on squares."""

    def call(self, x: Any) -> Any:
        return super().call(x * x)


class SquareBlock(MatrixBlock):
    kind = "Square"

    def rows(self, record: Any) -> Rows:
        a = fold_positions(tf.square(self.cast(record.inputs)))
        g = fold_positions(self.cast(record.gradient))
        return Rows(self.with_bias(a), g, None)


# -------------------------------------------------------------------- like
def test_a_class_with_the_same_attributes() -> None:
    """Its gradient is taken before its activation; it needs no bias."""
    tfkfac.register_block(Linear, like=layers.Dense)
    model, x, y = problem(Linear("tanh", name="block"), (4,), BATCH)
    (kernel,) = weights_of(model)
    out = np.tanh(x @ kernel)
    g = (out - y) * (1 - out**2)
    step = train_once(model, x, y)
    a = x.astype(np.float64)
    check_factors(step.of("block"), *factors(a[:, None], g[:, None]))


def test_an_own_normalisation() -> None:
    """Its own call is what normalises, and its gain may be a `scale`."""

    class Power(layers.Layer):
        def build(self, shape: Any) -> None:
            self.axis = -1
            self.scale = self.add_weight((shape[-1],), "ones", name="scale")

        def call(self, x: Any) -> Any:
            power = keras.ops.mean(keras.ops.abs(x), -1, keepdims=True)
            return self.scale * x / power

    tfkfac.register_block(Power, like=layers.RMSNormalization)
    model, x, y = problem(Power(name="block"), (3, 4), BATCH)
    (scale,) = weights_of(model)
    hat = x / np.abs(x).mean(-1, keepdims=True)
    u = np.sum(hat * (hat * scale - y), axis=1)
    step = train_once(model, x, y)
    G = np.mean(u**2, axis=0)[:, None, None]
    assert_close(step.of("block")["G"], G, 1e-5, "G")


def test_a_class_without_the_attributes() -> None:
    """The error names the layer, when its model is compiled."""
    tfkfac.register_block(Scale, like=layers.Dense)
    message = r"Layer 'mine' .*DenseBlock, needs: .*'kernel'"
    with pytest.raises(ValueError, match=message):
        bind(sequential(Scale(name="mine")))


# ------------------------------------------------------------------- block
def test_documented_example() -> None:
    """G is the Fisher matrix of the gains, and the step is its inverse's."""
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
    """G is of the gradients of single examples; it is inverted in a step."""
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
    """One Fisher matrix of all of them, in the order of the variables."""

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


# ------------------------------------------------------------- whose it is
def test_whose_blocks_a_layer_has() -> None:
    """The last registration's, before built-in ones; subclasses' too.

    Unless these change the call.
    """

    class Same(Doubled):
        pass

    class Other(Doubled):
        def call(self, x: Any, training: Any = None) -> Any:
            return 2 * super().call(x)

    tfkfac.register_block(Doubled, block=SquareBlock)
    tfkfac.register_block(Doubled, like=layers.Dense)
    tfkfac.register_block(Linear, like=Doubled)
    for layer in (Doubled(2), Linear(), Same(2)):
        assert registry.block_types(layer) == {"": DenseBlock}
    assert registry.block_types(Other(2)) == {}
    tfkfac.register_block(layers.Dense, block=SquareBlock)
    assert registry.block_types(layers.Dense(2)) == {"": SquareBlock}


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
    assert list(blocks_of(optimizer)) == ["late"]
    model.train_on_batch(x, np.zeros((2, 3)))
    assert optimizer.factors()["late"]["A"].any()


# ------------------------------------------------------------------ errors
class Unfinished(tfkfac.blocks.PerExampleBlock):
    """Without its kind and all that is abstract."""


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
    """A dense layer, unless a call says otherwise."""

    def call(self, x: Any, twice: bool = False) -> Any:
        return super().call(super().call(x)) if twice else super().call(x)


class OptionalBlock(DenseBlock):
    kind = "Optional"

    def relevant(self, calls: Any) -> Any:
        twice = any(call[0].kwargs.get("twice") for call in calls)
        self.left_out = "called twice at once" if twice else None
        return calls


def test_a_block_that_does_not_stand_for_a_step() -> None:
    """The gradients stay as they are, and the summary says why."""
    tfkfac.register_block(Optional, block=OptionalBlock)
    inputs = keras.Input((3,))
    layer = Optional(3, name="block")
    for twice, left in [
        (
            True,
            {f"block:{n}": "called twice at once" for n in ("kernel", "bias")},
        ),
        (False, {}),
    ]:
        model = keras.Model(inputs, layer(inputs, twice=twice))
        x = make_input("", (3,), BATCH)
        y = targets(model, x)
        gradients = keras_gradients(model, x, y)
        step = train_once(model, x, y)
        assert leftovers_of(model.optimizer) == left
        plain = [
            np.allclose(delta, gradient, rtol=1e-4, atol=1e-6)
            for delta, gradient in zip(step.delta, gradients, strict=True)
        ]
        assert all(plain) if twice else not any(plain)
