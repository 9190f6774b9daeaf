"""Uncovered weights, and layers with gradients but no record."""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.small import (
    CLASSES,
    LateBuilt,
    Scale,
    data,
    gradients_of,
    kfac_of,
    loss,
    mlp,
    summary_text,
)
from tests.support.summaries import leftovers_of, sequential

X, Y = data()


def test_uncovered_weights_take_the_plain_step() -> None:
    """Uncovered weights take the plain step bit for bit.

    The gradient of an embedding stays sparse.
    """
    model = sequential(
        layers.Embedding(7, 2, name="tokens"),
        layers.Flatten(),
        layers.Dense(4, activation="tanh", name="dense"),
        Scale(name="scale"),
        layers.Dense(CLASSES, name="last"),
        shape=(3,),
    )
    variables = model.trainable_variables
    optimizer = tfkfac.KFAC(
        keras.optimizers.SGD(0.1),
        skip_layers=["tokens", "last"],
        kl_clip=1e-6,
        rest_optimizer="inner",
    ).attach(model)
    x, y = np.array([[0, 1, 2], [2, 3, 3]]), np.array([0, 1])

    @tf.function
    def step() -> list[Any]:
        gradients = gradients_of(model, x, y)
        assert isinstance(gradients[0], tf.IndexedSlices)
        optimizer.apply(gradients, variables)
        return list(map(tf.convert_to_tensor, gradients))

    before = [v.numpy() for v in variables]
    steps = [np.float32(0.1) * np.asarray(g) for g in step()]
    plain = [
        np.array_equal(v.numpy(), old - moved)
        for v, old, moved in zip(variables, before, steps, strict=True)
    ]
    names = [v.path.split("/")[-2] for v in variables]
    assert names == ["tokens", "dense", "dense", "scale", "last", "last"]
    assert plain[1:] == [False, False, True, True, True]
    want = before[0] - steps[0]  # added up in another order
    np.testing.assert_allclose(variables[0].numpy(), want, rtol=1e-6)


def test_model_without_a_supported_layer() -> None:
    """Warns that no layer is supported; the inner optimizer trains."""
    model = sequential(Scale(name="scale"))
    with pytest.warns(UserWarning, match=r"has no layer that K-FAC.*Adam"):
        model.compile(tfkfac.KFAC(step="natural"), "mse", run_eagerly=True)
    optimizer = kfac_of(model)
    assert "No layer is preconditioned." in summary_text(optimizer)
    assert list(leftovers_of(optimizer)) == ["scale:gain"]
    assert optimizer.factors() == {}
    assert optimizer.state_bytes()["total"] == 0
    model.train_on_batch(X, 0 * X)
    assert (model.get_weights()[0] < 1).all()


# ------------------------------------------------- layers without a record
def test_weights_used_without_calling_the_layer() -> None:
    """The error names the layer; following its advice works."""

    class Shortcut(LateBuilt):
        def call(self, x: Any) -> Any:
            x = keras.ops.matmul(x, self.hidden.kernel) + self.hidden.bias
            return self.logits(x)

    model = Shortcut()
    model.compile(tfkfac.KFAC(step="natural"), loss())
    with pytest.raises(ValueError, match=r"'hidden'.*no call") as caught:
        model.train_on_batch(X, Y)
    advice = re.search(r"skip_layers=\['(\w+)'\]", str(caught.value))
    assert advice is not None
    model = Shortcut()
    model.build(X.shape)
    optimizer = tfkfac.KFAC(step="natural", skip_layers=[advice[1]])
    model.compile(optimizer, loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    assert list(optimizer.factors()) == ["logits"]


def test_layer_called_in_a_nested_function() -> None:
    """A call in a nested `tf.function` raises an error that names the layer."""
    model = mlp()
    model.layers[0].call = tf.function(model.layers[0].call)
    optimizer = tfkfac.KFAC(step="natural").attach(model)

    @tf.function
    def forward(x: Any) -> Any:
        return model.layers[0](x)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss()(Y, model.layers[1](forward(X)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    with pytest.raises(ValueError, match=r"'hidden'.*`tf\.function`"):
        step()


def test_gradients_for_half_of_a_layer() -> None:
    model = mlp()
    optimizer = tfkfac.KFAC(step="natural").attach(model)
    gradients = gradients_of(model, X, Y)
    gradients[1] = None
    with pytest.raises(ValueError, match=r"'hidden'.*kernel.*bias.*only"):
        optimizer.apply(gradients, model.trainable_variables)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_unused_layer() -> None:
    """An unused layer has no factors; the others are preconditioned."""

    class Unused(LateBuilt):
        def call(self, x: Any) -> Any:
            return self.logits(x[:, :5])

    model = Unused()
    model.compile(tfkfac.KFAC(step="natural"), loss(), run_eagerly=True)
    model.train_on_batch(X, Y)
    before = model.hidden.get_weights()
    model.train_on_batch(X, Y)
    np.testing.assert_equal(model.hidden.get_weights(), before)
    blocks = kfac_of(model).factors()
    assert set(blocks) == {"logits", "hidden"}
    assert blocks["logits"]["A"].any()
    assert not blocks["hidden"]["A"].any()
