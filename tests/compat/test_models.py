"""Private attributes of layers and models, and the override of `compile`."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compat.contracts import contract
from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import in_xla
from tfkfac.compat.models import (
    after_compile,
    all_layers,
    call_takes_training,
    children,
    has_keras_call,
    input_specs,
    kept_losses,
    loss_layers,
    loss_takes_training,
    mask_of,
    override_averages,
    pass_mask,
    wrap_compiled_steps,
    wrap_fit,
)
from tfkfac.curvature.directional import takes_any_batch
from tfkfac.curvature.hessian import layer_name
from tfkfac.loss.batch import stateless

X = np.ones((3, 2), "float32")


def network() -> Any:
    return keras.Sequential(
        [
            keras.Input((2,)),
            layers.Dense(2, kernel_regularizer="l2"),
            layers.ActivityRegularization(l2=1.0),
        ]
    )


class Doubled(keras.Model):
    def call(self, x: Any) -> Any:
        return 2 * x


@contract(
    "compat.models.input_specs",
    "`get_input_signature` knows the inputs of functional and sequential "
    "models, `_infer_input_signature_from_model` those of other models.",
)
def test_input_specs() -> None:
    ids = keras.Input((4,), dtype="int32", name="ids")
    functional = keras.Model({"ids": ids}, layers.Embedding(3, 2)(ids))
    (named,) = input_specs(functional) or ()
    assert named == {"ids": tf.TensorSpec([None, 4], tf.int32)}
    doubled = Doubled()
    assert input_specs(doubled) is None
    doubled(X)
    for model in (network(), doubled):
        assert input_specs(model) == [tf.TensorSpec([None, 2], tf.float32)]


@contract(
    "compat.models.wrap_compiled_steps",
    "`make_train_function` passes the compiled function of a step to "
    "`_autoconvert_optionals`, and calls the result without XLA in each step.",
)
def test_wrap_compiled_steps() -> None:
    places = []
    steps = tf.Variable(0)

    class Observed(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            places.append(("layer", in_xla()))
            return x

    def wrapper(below: Any, data: Any) -> Any:
        results = below(data)
        places.append(("wrapper", in_xla()))
        steps.assign_add(1)
        return results

    model = keras.Sequential([keras.Input((2,)), Observed(), layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=True, steps_per_execution=2)
    places.clear()
    wrap_compiled_steps(model, wrapper)
    model.fit(X, X, batch_size=1, epochs=2, verbose=0)
    assert set(places) == {("layer", True), ("wrapper", False)}
    model.train_on_batch(X, X)
    model.evaluate(X, X, verbose=0)
    assert int(steps) == 7


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
    before = [float(loss) for loss in model.losses]
    kept = [set(layer._loss_ids) for layer in model._flatten_layers()]
    scope = keras.StatelessScope(collect_losses=True)
    with kept_losses(model), scope if stateless else contextlib.nullcontext():
        model(10 * X)
        assert [float(loss) for loss in model.losses] != before
        if stateless:
            assert loss_layers(model, scope) == [penalty.name]
    assert [float(loss) for loss in model.losses] == before
    assert [x._loss_ids for x in model._flatten_layers()] == kept


@contract(
    "loss.batch.stateless",
    "`LSTM` and `GRU` read `use_cudnn` in each call.",
)
def test_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, recurrent layers use cuDNN, but not in repeated passes."""
    # `keras.src.backend.tensorflow.rnn` is also the name of a function.
    backend = sys.modules["keras.src.backend.tensorflow.rnn"]
    monkeypatch.setattr(backend, "_is_gpu_available", lambda: True)
    both = layers.Bidirectional(layers.LSTM(2, return_sequences=True))
    inner = keras.Sequential([keras.Input((3, 2)), both, layers.GRU(2)])
    model = keras.Sequential([keras.Input((3, 2)), inner])

    def count_cudnn() -> int:
        traced = tf.function(model).get_concrete_function(tf.ones([1, 3, 2]))
        operations = traced.graph.as_graph_def()
        return str(operations).count('op: "CudnnRNNV3"')

    with pytest.raises(LookupError), stateless(model):
        assert count_cudnn() == 0
        raise LookupError
    assert count_cudnn() == 3


@contract(
    "compat.models.call_takes_training",
    "`_call_has_training_arg` is about the argument of `call`, "
    "`_compute_loss_has_training_arg` about that of `compute_loss`.",
)
def test_call_and_loss_take_training() -> None:
    class Plain(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def compute_loss(self, x: Any, y: Any, y_pred: Any) -> Any:  # type: ignore[override]
            return y_pred

    for model, takes in ((Plain(), False), (network(), True)):
        assert call_takes_training(model) == takes
        assert loss_takes_training(model) == takes


@contract(
    "compat.models.after_compile",
    "`compile` is a method of a base of `keras.Model`; `load_model` and "
    "`clone_model` call it.",
)
def test_after_compile(tmp_path: Path) -> None:
    """The hook runs once, after `compile`, for every class of models."""

    class Subclassed(keras.Model):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            super().compile(*args, **kwargs)

        def call(self, x: Any) -> Any:
            return x

    inputs = keras.Input((2,))
    functional = keras.Model(inputs, layers.Dense(1)(inputs))
    compiled: list[Any] = []
    override = after_compile(compiled.append)
    try:
        for model in (network(), Subclassed(), functional):
            model.compile("sgd", "mse")
            assert compiled[-1] is model
            assert model.compiled
        functional.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        clone = keras.models.clone_model(loaded)
    finally:
        override.remove()
    assert compiled[3:] == [loaded, clone]


# ---------------------------------------------------------------------- fit
class Fit:
    """Add a callback to each `fit`; record callbacks and first epochs."""

    def __init__(self, model: Any) -> None:
        self.given: list[Any] = []
        self.epochs: list[int] = []
        self._added = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: self.epochs.append(epoch)
        )
        self.override = wrap_fit(model, self._within)

    @contextlib.contextmanager
    def _within(
        self, callbacks: list[Any], arguments: Any
    ) -> Iterator[list[Any]]:
        self.given.append((callbacks, arguments.get("initial_epoch", 0)))
        yield [*callbacks, self._added]


AROUND_FIT = contract(
    "compat.models.wrap_fit",
    "`fit` has `callbacks` and `initial_epoch`, and flattens callbacks.",
)
THEIRS = keras.callbacks.LambdaCallback()


@AROUND_FIT
def test_wrap_fit_adds_callbacks() -> None:
    """To all forms of user callbacks, until the override is removed."""
    model = network()
    model.compile("sgd", "mse", run_eagerly=True)
    fit = Fit(model)
    for callbacks in ([THEIRS], keras.callbacks.CallbackList([THEIRS]), None):
        model.fit(X, X, 3, 2, 0, callbacks, initial_epoch=1)
        assert fit.given.pop() == ([THEIRS] if callbacks else [], 1)
    assert fit.epochs == [1, 1, 1]
    fit.override.remove()
    model.fit(X, X, verbose=0)
    assert not fit.given


@AROUND_FIT
def test_around_an_overridden_fit() -> None:
    """An overridden `fit` gets callbacks if it has an argument for them."""

    class Named(keras.Sequential):
        def fit(self, data: Any, callbacks: Any = ()) -> Any:
            return super().fit(*data, callbacks=callbacks, verbose=0)

    class Anything(keras.Sequential):
        def fit(self, *args: Any, **kwargs: Any) -> Any:
            data = args[0] if len(args) == 1 else args
            return super().fit(*data, **kwargs)

    class Nothing(keras.Sequential):
        def fit(self, data: Any) -> Any:
            return super().fit(*data, verbose=0)

    for model_class in (Named, Anything, Nothing):
        model = model_class([layers.Dense(2)])
        model.compile("sgd", "mse", run_eagerly=True)
        fit, gets = Fit(model), model_class is not Nothing
        model.fit((X, X), **({"callbacks": THEIRS} if gets else {}))
        assert fit.given == [([THEIRS] if gets else [], 0)]
        assert fit.epochs == ([0] if gets else [])
        if model_class is Anything:
            model.fit(X, X, 2, 1, 0, [THEIRS])  # positional, without a name
            assert fit.epochs == [0]


# ---------------------------------------------------------------------- layers
class Container(layers.Layer):
    """Layers in an attribute, in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first = layers.Dense(1)
        self.listed = [layers.Dense(1), self.first]
        self.named = {"inside": keras.Sequential([layers.Dense(1)])}


@contract(
    "compat.models.children",
    "`_flatten_layers` are a layer and all below, or its direct layers.",
)
def test_layers_in_layers() -> None:
    layer = Container()
    inner = layer.named["inside"]
    direct = layer.first, layer.listed[0], inner
    assert {id(x) for x in children(layer)} == {id(x) for x in direct}
    assert not children(layer.first)
    result = all_layers(layer)
    assert result[0] is layer
    whole = layer, *direct, inner.layers[0]
    assert {id(x) for x in result} == {id(x) for x in whole}


@contract("compat.models.mask_of", "A tensor has its mask as `_keras_mask`.")
def test_masks() -> None:
    tokens = np.array([[1, 2, 0]])
    outputs = layers.Embedding(3, 2, mask_zero=True)(tokens)
    np.testing.assert_array_equal(mask_of(outputs), tokens != 0)
    other = tf.identity(outputs)
    assert mask_of(other) is None
    pass_mask(outputs, other)
    masked = layers.Activation("relu")(other)
    np.testing.assert_array_equal(masked._keras_mask, tokens != 0)


@contract(
    "curvature.hessian.layer_name",
    "Operations are named after their layer, perhaps with a number.",
)
def test_operations_bear_the_names_of_layers() -> None:
    inner = keras.Sequential([keras.Input((2,)), layers.Dense(2, name="last")])
    model = keras.Sequential([keras.Input((2,)), inner])
    twice = tf.function(lambda x: model(model(x)), autograph=False)
    graph = twice.get_concrete_function(tf.zeros((1, 2))).graph
    names = [o.name for o in graph.get_operations() if o.type == "MatMul"]
    assert len(names) == 2
    for name in names:
        assert "last" in map(layer_name, name.split("/"))


@contract(
    "compat.models.override_averages",
    "`SwapEMAWeights` calls `_tf_swap_variables` and `_tf_finalize_ema_values` "
    "with an optimizer, and swaps its averages there.",
)
def test_override_averages() -> None:
    """Swap the average of another optimizer instead of the model's one."""
    variable, other = keras.Variable(1.0), keras.optimizers.SGD(use_ema=True)
    other.build([variable])
    given: list[Any] = []

    def swap(below: Any, optimizer: Any) -> None:
        given.append(optimizer)
        below(other)

    model = network()
    model.compile(keras.optimizers.SGD(use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    callback = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    for _ in range(2):
        override_averages(callback, swap)
    callback.set_model(model)
    callback.set_params({"epochs": 1})
    callback.on_epoch_end(0)
    assert given == [model.optimizer] * 2  # to swap and to keep the averages
    assert float(variable) == 0.0
    for value, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, want)


def test_free_batch_axis() -> None:
    """Not a subclass, nor a model of a fixed batch size."""

    class Own(keras.Model):
        def call(self, x: Any) -> Any:
            return x

    inputs = keras.Input((3,)), keras.Input((2,))
    merged = keras.layers.Concatenate()(list(inputs))
    free, fixed = (
        keras.Sequential([keras.Input((3,), batch_size=n), layers.Dense(2)])
        for n in (None, 4)
    )
    call = ForwardCall((), {}, None)
    assert takes_any_batch(keras.Model(inputs, merged), call)
    assert takes_any_batch(free, call)
    assert not takes_any_batch(fixed, call)
    assert not takes_any_batch(Own(), call)
    reshaped = keras.ops.reshape(merged, [4, 5])
    assert not takes_any_batch(keras.Model(inputs, reshaped), call)


def test_layers_with_a_call_of_keras() -> None:
    """Also in a subclass with another constructor."""

    class Wide(layers.Dense):
        def __init__(self) -> None:
            super().__init__(100)

    class Twice(layers.Layer):
        def call(self, x: Any) -> Any:
            return 2 * x

    for layer in (layers.Dense(2), layers.LSTM(2), Wide()):
        assert has_keras_call(layer)
    for layer in (Twice(), layers.Lambda(lambda x: x)):
        assert not has_keras_call(layer)
