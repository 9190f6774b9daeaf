"""Private attributes of layers and models, and the override of `compile`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.compat import models
from tfkfac.compat.models import (
    after_compile,
    all_layers,
    around_fit,
    call_takes_training,
    children,
    kept_losses,
    last_layers,
    losing_layers,
    loss_takes_training,
    mask_of,
    pass_mask,
    swap_averages_of,
)
from tfkfac.curvature.hessian import layer_name

AFTER_COMPILE = "compat.models.after_compile"
X = np.ones((3, 2), "float32")


def network() -> Any:
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(2, kernel_regularizer="l2"),
            layers.ActivityRegularization(l2=1.0),
        ]
    )


@contract(
    "compat.models.kept_losses",
    "`add_loss` appends to `_losses`, which a new call clears, and a stateless "
    "scope knows a layer's losses by `_loss_ids`.",
)
@pytest.mark.parametrize("stateless", [False, True])
def test_kept_losses(stateless: bool) -> None:
    """`kept_losses` restores the losses of all layers on exit."""
    penalty = layers.ActivityRegularization(l2=1.0)
    model = keras.Sequential([keras.Input((2,)), layers.ReLU(), penalty])
    model(X)
    (before,) = model.losses
    kept = [set(layer._loss_ids) for layer in model._flatten_layers()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_losses(model))
        if stateless:
            scope = keras.StatelessScope(collect_losses=True)
            stack.enter_context(scope)
        model(10 * X)
        (loss,) = model.losses
        assert float(loss) != float(before)
        if stateless:
            assert losing_layers(model, scope) == [penalty.name]
    (loss,) = model.losses
    assert float(loss) == float(before)
    assert [x._loss_ids for x in model._flatten_layers()] == kept


@contract(
    "compat.models.call_takes_training",
    "`_call_has_training_arg` is about the argument of `call`, "
    "`_compute_loss_has_training_arg` about that of `compute_loss`.",
)
def test_call_and_loss_take_training() -> None:
    class Plain(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def compute_loss(  # type: ignore[override]
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
        ) -> Any:
            return y_pred

    for model, takes in ((Plain(), False), (network(), True)):
        assert call_takes_training(model) == takes
        assert loss_takes_training(model) == takes


# ------------------------------------------------------------------ compile
@pytest.fixture
def compiled() -> Iterator[list[Any]]:
    """List of models in the order of `compile`; the hook is removed on exit."""
    seen: list[Any] = []
    override = after_compile(seen.append)
    yield seen
    override.remove()


@contract(
    AFTER_COMPILE,
    "`compile` is a method of a base of `keras.Model`; `load_model` and "
    "`clone_model` call it.",
)
def test_after_compile(compiled: list[Any], tmp_path: Path) -> None:
    """The hook runs once, after `compile`, for every class of models."""

    class Own(keras.Model):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            super().compile(*args, **kwargs)

        def call(self, x: Any) -> Any:
            return x

    inputs = keras.Input((2,))
    functional = keras.Model(inputs, layers.Dense(1)(inputs))
    every = [network(), functional, Own()]
    for model in every:
        model.compile("sgd", "mse")
        assert compiled[-1] is model
        assert model.compiled
    assert len(compiled) == 3
    functional.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(loaded)
    assert compiled[3:] == [loaded, clone]


# ---------------------------------------------------------------------- fit
class Begin(keras.callbacks.Callback):
    """Record the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.seen.append(-1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(epoch)


class Fit:
    """Callbacks and first epochs of the calls of `within`."""

    def __init__(self, model: Any, *ours: Any) -> None:
        self.given: list[Any] = []
        self.ended = 0
        self._ours = ours
        self.override = around_fit(model, self._within)

    @contextlib.contextmanager
    def _within(
        self, callbacks: list[Any], arguments: Any
    ) -> Iterator[list[Any]]:
        self.given.append((callbacks, arguments.get("initial_epoch", 0)))
        yield [*callbacks, *self._ours]
        self.ended += 1


AROUND_FIT = contract(
    "compat.models.around_fit",
    "`fit` has `callbacks` and `initial_epoch`, and flattens callbacks.",
)


@AROUND_FIT
def test_around_fit_adds_callbacks() -> None:
    """To all forms of user callbacks, until the override is removed."""
    model, own, ours = network(), Begin(), Begin()
    model.compile("sgd", "mse", run_eagerly=True)
    fit = Fit(model, ours)
    given = [[own]], keras.callbacks.CallbackList([own]), None
    for callbacks in given:
        model.fit(X, X, 3, 2, 0, callbacks, initial_epoch=1)
        want = [own] if callbacks is not None else []
        assert fit.given.pop() == (want, 1)
    model.fit(X, X, verbose=0, callbacks=[own])
    assert fit.given == [([own], 0)]
    assert fit.ended == len(given) + 1
    assert ours.seen == [-1, 1] * len(given) + [-1, 0]
    fit.override.remove()
    model.fit(X, X, verbose=0)
    assert len(fit.given) == 1


@AROUND_FIT
@pytest.mark.parametrize("kind", ["named", "any", "none"])
def test_around_an_overridden_fit(kind: str) -> None:
    """An overridden `fit` gets callbacks if it has an argument for them."""

    class Named(keras.Sequential):
        def fit(self, data: Any, callbacks: Any = ()) -> Any:
            return super().fit(*data, callbacks=callbacks, verbose=0)

    class Anything(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1:
                args = args[0]
            return super().fit(*args, **kwargs)

    class Nothing(keras.Sequential):
        def fit(self, data: Any) -> Any:
            return super().fit(*data, verbose=0)

    kinds = {"named": Named, "any": Anything, "none": Nothing}
    model, own, ours = kinds[kind]([layers.Dense(2)]), Begin(), Begin()
    model.compile("sgd", "mse", run_eagerly=True)
    fit = Fit(model, ours)
    model.fit((X, X), **({} if kind == "none" else {"callbacks": own}))
    assert fit.given == [([] if kind == "none" else [own], 0)]
    assert ours.seen == ([] if kind == "none" else [-1, 0])
    if kind == "any":
        model.fit(X, X, 2, 1, 0, [own])  # positional, without a name
        assert ours.seen == [-1, 0]


def test_changing_variables() -> None:
    """Moving statistics and seeds, without weights and metrics."""
    frozen = keras.layers.BatchNormalization(trainable=False)
    norm, drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    model = keras.Sequential(
        [keras.Input((2,)), norm, drop, frozen, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    found = models.changing_variables(model)
    seed = drop.seed_generator.state
    want = [*norm.non_trainable_variables, seed]
    assert {id(v) for v in found} == {id(v) for v in want}
    before = [np.array(v) for v in model.variables]
    x = np.ones((4, 2), "float32")
    with tf.GradientTape():
        model.compute_loss(x=x, y=x[:, :1], y_pred=model(x, training=True))
    for variable, old in zip(model.variables, before, strict=True):
        changed = not np.array_equal(np.array(variable), old)
        assert not changed or any(variable is v for v in found)


# ---------------------------------------------------------------------- layers
class Container(layers.Layer):
    """Layers in an attribute, in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.one = layers.Dense(1)
        self.listed = [layers.Dense(1), self.one]
        self.named = {"inside": keras.Sequential([layers.Dense(1)])}


@contract(
    "compat.models.children",
    "`_flatten_layers` are a layer and all below, or its own alone.",
)
def test_layers_in_layers() -> None:
    layer = Container()
    own = layer.one, layer.listed[0], layer.named["inside"]
    assert {id(x) for x in children(layer)} == {id(x) for x in own}
    assert not children(layer.one)
    found = all_layers(layer)
    assert found[0] is layer
    # `Sequential` also has a private list of its layers.
    kinds = {type(x).__name__ for x in found}
    assert kinds == {"Container", "Dense", "Sequential"}
    assert len({id(x) for x in found}) == 1 + 2 + 2


@contract(
    "compat.models.last_layers",
    "`_keras_history` tells the operation, and which of its `_inbound_nodes`.",
)
def test_last_layers() -> None:
    inputs = keras.Input((3,))
    first, second = layers.Dense(3), layers.Dense(3)
    hidden = second(first(inputs))
    # Layers without weights are skipped, in both branches.
    outputs = layers.Softmax()(keras.ops.tanh(hidden) + first(inputs))
    model = keras.Model(inputs, outputs)
    assert {id(x) for x in last_layers(model)} == {id(first)}
    both = keras.Model(inputs, {"a": hidden, "b": outputs})
    assert last_layers(both) == [second, first]
    # The order of calls matters, not the order of creation.
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

    @tf.function(autograph=False)
    def twice(x: Any) -> Any:
        return model(model(x))

    graph = twice.get_concrete_function(tf.zeros((1, 2))).graph
    names = [o.name for o in graph.get_operations() if o.type == "MatMul"]
    assert len(names) == 2
    for name in names:
        assert "last" in [layer_name(part) for part in name.split("/")]


# ------------------------------------------------------------------ averages
@contract(
    "compat.models.swap_averages_of",
    "`SwapEMAWeights` calls `_tf_swap_variables` and `_tf_finalize_ema_values` "
    "with an optimizer, and swaps its averages there.",
)
def test_swap_averages_of() -> None:
    """Swap the averages of two optimizers instead of the model's one."""
    variables = [keras.Variable(value) for value in (1.0, 2.0)]
    optimizers = [keras.optimizers.SGD(use_ema=True) for _ in variables]
    for variable, optimizer in zip(variables, optimizers, strict=True):
        optimizer.build([variable])
    given: list[Any] = []

    def choose(optimizer: Any) -> list[Any]:
        given.append(optimizer)
        return optimizers

    model = network()
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    for _ in range(2):
        swap_averages_of(callback, choose)
    callback.set_model(model)
    callback.set_params({"epochs": 1})
    callback.on_epoch_end(0)
    assert given == [model.optimizer] * 2  # to swap and to keep the averages
    assert [float(v) for v in variables] == [0.0, 0.0]
    for one in optimizers:
        (average,) = one._model_variables_moving_average
        assert float(average) == 0.0
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
