"""Access private attributes of Keras' layers and models."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state, masking
from keras.src.export import export_utils

from tfkfac.compat.graphs import replica_copy
from tfkfac.compat.optimizers import named_optimizer
from tfkfac.compat.overrides import (
    Below,
    Override,
    keep_on,
    overridden,
    override,
)

Callbacks = list[keras.callbacks.Callback]
Arguments = Mapping[str, Any]
Within = Callable[[Callbacks, Arguments], AbstractContextManager[Callbacks]]


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return the direct sublayers of a layer, by `_flatten_layers`."""
    return layer._flatten_layers(include_self=False, recursive=False)


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Return a layer and all its sublayers, each once, by `_flatten_layers`."""
    return layer._flatten_layers()


def mask_of(tensor: Any) -> tf.Tensor | None:
    """Return the Keras mask of a tensor, or None, by `get_keras_mask`."""
    return masking.get_keras_mask(tensor)


def pass_mask(source: Any, target: tf.Tensor) -> None:
    """Copy the Keras mask of `source`, if it has a mask, to `target`."""
    mask = mask_of(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)


@contextlib.contextmanager
def kept_losses(model: keras.Model) -> Iterator[None]:
    """Restore on exit the losses that layers added in their last call.

    This relies on `_losses` of a layer, and on `_loss_ids`, which identify its
    losses in a stateless scope.
    """
    layers = all_layers(model)
    saved = [(list(x._losses), set(x._loss_ids)) for x in layers]
    try:
        yield
    finally:
        for layer, (losses, identities) in zip(layers, saved, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(identities)


def loss_layers(model: keras.Model, scope: keras.StatelessScope) -> list[str]:
    """Return names of layers that added losses in a scope, by `_loss_ids`."""
    identities = {id(loss) for loss in scope.losses}
    return [x.name for x in all_layers(model) if identities & x._loss_ids]


def compiled_loss(model: keras.Model) -> Any:
    """Return `_compile_loss` of a model, a new object for each `compile`."""
    return model._compile_loss


def has_keras_call(layer: keras.layers.Layer) -> bool:
    """True if Keras defines `call` of a layer, and the layer is no `Lambda`."""
    if isinstance(layer, keras.layers.Lambda):
        return False
    return type(layer).call.__module__.partition(".")[0] == "keras"


def input_specs(model: keras.Model) -> list[Any] | None:
    """Return specs of the arguments of a built model's call; None if unknown.

    This relies on `get_input_signature` for functional and sequential models.
    For others it relies on `_infer_input_signature_from_model`, which returns
    the shapes of the first call or of the build config of a loaded model.
    """
    if getattr(model, "inputs", None):
        specs = export_utils.get_input_signature(model)
    else:
        specs = export_utils._infer_input_signature_from_model(model)
    return specs and keras.tree.map_structure(
        lambda spec: tf.TensorSpec(spec.shape, spec.dtype), specs
    )


def call_takes_training(layer: keras.layers.Layer) -> bool:
    """True if `_call_has_training_arg`: `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def loss_takes_training(model: keras.Model) -> bool:
    """True if `compute_loss` of a model has an argument `training`.

    This relies on `_compute_loss_has_training_arg`, which Keras sets from the
    method of the class and not from an override.
    """
    return bool(model._compute_loss_has_training_arg)


def replica_variable(variable: keras.Variable) -> tf.Variable:
    """Return this replica's copy of `_value`, as `value` may be a cast."""
    return replica_copy(variable._value)


def after_compile(action: Callable[[keras.Model], None]) -> Override:
    """Call `action(model)` after each `Model.compile`.

    `compile` then also accepts the registered name of an optimizer. The
    override is on a base class of `keras.Model`: `load_model` skips `compile`
    if the model's class has another `compile` than that base class.
    """

    def compile(
        below: Below, model: keras.Model, *args: Any, **kwargs: Any
    ) -> None:
        optimizer, others = [named_optimizer(x) for x in args[:1]], args[1:]
        if "optimizer" in kwargs:
            kwargs["optimizer"] = named_optimizer(kwargs["optimizer"])
        below(model, *optimizer, *others, **kwargs)
        action(model)

    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    return override(owner, "compile", compile)


def wrap_fit(model: keras.Model, within: Within, name: str = "fit") -> Override:
    """Run each `fit` of a model inside a context that may change callbacks.

    This relies on the names of the arguments of `fit`, and on `fit` creating a
    `CallbackList` from a flat list of callbacks.

    Args:
        model: The model whose method is overridden.
        within: Creates the context from the flat list of callbacks and all
            arguments by name. Its value replaces the callbacks, unless the
            user's `fit` has no argument `callbacks`.
        name: `fit`, `evaluate` or `predict`.
    """
    signature = inspect.signature(getattr(model, name))
    names = {p.kind: name for name, p in signature.parameters.items()}
    keywords = names.get(inspect.Parameter.VAR_KEYWORD, "")

    def fit(below: Below, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if "callbacks" not in arguments:
            # `fit(*args, **kwargs)`: callbacks may be the sixth of `args`.
            has_args = inspect.Parameter.VAR_POSITIONAL in names
            is_keyword = len(args) < 6 or not has_args
            arguments = arguments.get(keywords, {}) if is_keyword else {}
        callbacks = arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        flat = keras.tree.flatten(callbacks) if callbacks else []
        with within(flat, arguments) as chosen:
            if chosen is not flat:
                arguments["callbacks"] = chosen
            return below(*bound.args, **bound.kwargs)

    return override(model, name, fit)


def wrap_compiled_steps(
    model: keras.Model, wrapper: Callable[[Below, Any], Any]
) -> Override:
    """Override how Keras calls the compiled function of a training step.

    The wrapper is called as `wrapper(below, data)` in a graph that XLA does not
    compile, also for each of several `steps_per_execution`. This relies on
    `make_train_function` passing the compiled function to
    `_autoconvert_optionals`, which nothing else calls there.
    """

    def make(below: Below, *args: Any, **kwargs: Any) -> Any:
        with overridden(
            model,
            "_autoconvert_optionals",
            lambda below, step: below(functools.partial(wrapper, step)),
        ):
            return below(*args, **kwargs)

    return override(model, "make_train_function", make)


def override_averages(
    callback: keras.callbacks.SwapEMAWeights,
    wrapper: Callable[[Below, keras.optimizers.Optimizer], None],
) -> None:
    """Override how `SwapEMAWeights` swaps or keeps an optimizer's averages.

    The wrapper is called as `wrapper(below, optimizer)`. Repeated calls for a
    callback have no effect. This relies on `_tf_swap_variables` and
    `_tf_finalize_ema_values`, which process the variables of the optimizer that
    is their argument, and on the callback only checking that the model's
    optimizer has `use_ema` and `_model_variables_moving_average`.
    """
    names = "_tf_swap_variables", "_tf_finalize_ema_values"
    keep_on(
        callback,
        "_tfkfac_averages",
        lambda: [override(callback, name, wrapper) for name in names],
    )


def first_epoch(model: keras.Model, initial_epoch: int) -> int:
    """Return the first epoch of `fit`; a backup sets `_initial_epoch`."""
    return int(model._initial_epoch or initial_epoch)


def set_first_epoch(model: keras.Model, epoch: int | None) -> None:
    """Set the first epoch of `fit`, `_initial_epoch`; None: no override."""
    model._initial_epoch = epoch


def skip_batches(model: keras.Model, count: int) -> Callable[[], None]:
    """Make `fit` read the first `count` batches without training on them.

    Return a function that ends the skipping early. This relies on `fit` calling
    `train_function` with its iterator only once per `steps_per_execution`
    batches, and on `train_function` being set before `on_train_begin`.
    """
    train = model.train_function
    remaining = count

    def restore() -> None:
        model.train_function = train

    def skip(iterator: Iterator[Any]) -> dict[str, Any]:
        nonlocal remaining
        for _ in range(min(model.steps_per_execution, remaining)):
            next(iterator)
            remaining -= 1
        if remaining <= 0:
            restore()
        return {}

    if count:
        model.train_function = skip
    return restore


def is_saving_legacy_file() -> bool:
    """True while Keras writes an `.h5` file: it sets "use_legacy_config"."""
    return bool(global_state.get_global_attribute("use_legacy_config", False))
