"""What Keras keeps to itself of layers and tensors."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat.models import (
    all_layers,
    children,
    last_layers,
    mask_of,
    pass_mask,
)
from tfkfac.curvature.hessian import layer_name


class Container(layers.Layer):
    """Layers in an attribute, in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.one = layers.Dense(1)
        self.listed = [layers.Dense(1), self.one]
        self.named = {"inside": keras.Sequential([layers.Dense(1)])}


@contract(
    "compat.models.children",
    "`_flatten_layers(include_self=False, recursive=False)` are a layer's own.",
)
def test_children() -> None:
    layer = Container()
    inside = layer.named["inside"]
    assert {id(x) for x in children(layer)} == {
        id(x) for x in (layer.one, layer.listed[0], inside)
    }
    assert not children(layer.one)


@contract(
    "compat.models.all_layers", "`_flatten_layers()` are a layer and all below."
)
def test_all_layers() -> None:
    layer = Container()
    found = all_layers(layer)
    assert found[0] is layer
    # `Sequential` keeps its layers in a list of its own as well.
    assert {type(x).__name__ for x in found} == {
        "Container",
        "Dense",
        "Sequential",
    }
    assert len({id(x) for x in found}) == 1 + 2 + 2


@contract(
    "compat.models.last_layers",
    "`_keras_history` tells the operation, and which of its `_inbound_nodes`.",
)
def test_last_layers() -> None:
    inputs = keras.Input((3,))
    first, second = layers.Dense(3), layers.Dense(3)
    hidden = second(first(inputs))
    # What has no weights is passed, in both directions of a branch.
    outputs = layers.Softmax()(keras.ops.tanh(hidden) + first(inputs))
    model = keras.Model(inputs, outputs)
    assert {id(x) for x in last_layers(model)} == {id(first)}
    both = keras.Model(inputs, {"a": hidden, "b": outputs})
    assert last_layers(both) == [second, first]
    # The call counts, and not where the layer was made.
    again = keras.Model(inputs, first(layers.ReLU()(hidden)))
    assert last_layers(again) == [first]
    assert last_layers(keras.Sequential([again, layers.ReLU()])) == [first]
    assert not last_layers(keras.Model(inputs, layers.ReLU()(inputs)))


def test_last_layers_of_other_models() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(2), layers.Dense(3), layers.ReLU()]

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    model = Own()
    model(np.ones((1, 4)))
    assert last_layers(model) == [model.parts[1]]
    unbuilt = keras.Sequential([layers.Dense(1)])
    assert not last_layers(unbuilt)


@contract("compat.models.mask_of", "A tensor has its mask as `_keras_mask`.")
def test_masks() -> None:
    tokens = np.array([[1, 2, 0]])
    outputs = layers.Embedding(3, 2, mask_zero=True)(tokens)
    np.testing.assert_array_equal(mask_of(outputs), tokens != 0)
    other = tf.identity(outputs)
    assert mask_of(other) is None
    pass_mask(other, other)
    assert mask_of(other) is None
    pass_mask(outputs, other)
    seen: list[Any] = []

    class Masked(layers.Layer):
        supports_masking = True

        def call(self, x: Any, mask: Any = None) -> Any:
            seen.append(mask)
            return x

    Masked()(other)
    np.testing.assert_array_equal(seen[0], tokens != 0)


@contract(
    "curvature.hessian.layer_name",
    "Operations are named after their layer, perhaps with a number.",
)
def test_operations_bear_the_names_of_layers() -> None:
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="last")])
    model = keras.Sequential([keras.Input((2,)), inner])

    @tf.function
    def twice(x: Any) -> Any:
        return model(model(x))

    graph = twice.get_concrete_function(tf.zeros((1, 2))).graph
    names = [o.name for o in graph.get_operations() if o.type == "MatMul"]
    assert len(names) == 2
    for name in names:
        assert "last" in [layer_name(part) for part in name.split("/")]
