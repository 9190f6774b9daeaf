"""Private parts of Keras' layers and models, and ways of saving them."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state, masking
from keras.src.saving.saving_lib import safe_get_h5_dataset, safe_get_h5_group

from tfkfac.compat.graphs import own_copy
from tfkfac.compat.optimizers import named_optimizer
from tfkfac.compat.overrides import Override, keep_on, override

Callbacks = list[keras.callbacks.Callback]
Arguments = Mapping[str, Any]
Within = Callable[[Callbacks, Arguments], AbstractContextManager[Callbacks]]

State = Mapping[str, np.ndarray]

# Name of an optimizer's own state in a tree and in a file.
KEY = "curvature"
_WEIGHTS = "optimizer_weights"


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that a layer holds as attributes, not those inside of them.

    It relies on `_flatten_layers`; in public Keras offers the like for models
    only.
    """
    return layer._flatten_layers(include_self=False, recursive=False)


def all_layers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """A layer and all layers inside of it, each once.

    It relies on `_flatten_layers`.
    """
    return layer._flatten_layers()


def last_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers with weights that are nearest to a model's outputs.

    Of a model that is not functional it is the last one. It relies on
    `_keras_history` of what a functional model returns, the operation and which
    of its `_inbound_nodes` has returned it, with its `input_tensors`.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None))
    if not all(isinstance(output, keras.KerasTensor) for output in outputs):
        return [layer for layer in model.layers if layer.weights][-1:]
    found: list[keras.layers.Layer] = []
    for output in outputs:
        tensors: list[Any] = [output]
        near: list[Any] = []
        while tensors and not near:
            calls = [tensor._keras_history[:2] for tensor in tensors]
            near = [op for op, _ in calls if getattr(op, "weights", None)]
            nodes = [op._inbound_nodes[index] for op, index in calls]
            tensors = [one for node in nodes for one in node.input_tensors]
        found += near
    inside = (
        last_layers(layer) if isinstance(layer, keras.Model) else [layer]
        for layer in found
    )
    return [layer for layers in inside for layer in layers]


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that a tensor carries, or None.

    It relies on Keras keeping it as the tensor's attribute `_keras_mask`.
    """
    return masking.get_keras_mask(tensor)


def pass_mask(source: Any, target: tf.Tensor) -> None:
    """Makes a tensor carry the mask of another one, if that has any."""
    mask = mask_of(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)


@contextlib.contextmanager
def kept_losses(model: keras.Model) -> Iterator[None]:
    """Keeps the losses that layers have added in their last call.

    It relies on a layer having them in `_losses`, and what identifies them to
    a stateless scope in `_loss_ids`.
    """
    layers = all_layers(model)
    kept = [(list(x._losses), set(x._loss_ids)) for x in layers]
    try:
        yield
    finally:
        for layer, (losses, identities) in zip(layers, kept, strict=True):
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(identities)


def losing_layers(model: keras.Model, scope: keras.StatelessScope) -> list[str]:
    """Names of the layers that have added a loss in a stateless scope.

    It relies on a layer having what identifies its own of the scope's losses
    in `_loss_ids`.
    """
    known = {id(loss) for loss in scope.losses}
    return [x.name for x in all_layers(model) if known & x._loss_ids]


def compiled_loss(model: keras.Model) -> Any:
    """The object that computes the compiled losses, new after each `compile`.

    It relies on `_compile_loss`.
    """
    return model._compile_loss


def call_takes_training(layer: keras.layers.Layer) -> bool:
    """True if the `call` of a layer or model has an argument `training`.

    It relies on `_call_has_training_arg`, which Keras' `train_step` asks.
    """
    return bool(layer._call_has_training_arg)


def loss_takes_training(model: keras.Model) -> bool:
    """True if the `compute_loss` of a model has an argument `training`.

    It relies on `_compute_loss_has_training_arg`, which is of the class'
    method, asked before anybody can have put another one in its place.
    """
    return bool(model._compute_loss_has_training_arg)


def changing_variables(model: keras.Model) -> list[keras.Variable]:
    """Variables of a model that a call in training may change.

    Moving statistics and random seeds, but no frozen weights.
    """
    frozen = {
        id(variable)
        for layer in all_layers(model)
        if not layer.trainable
        for variable in layer.weights
    }
    return [v for v in model.non_trainable_variables if id(v) not in frozen]


def own_value(variable: keras.Variable) -> tf.Variable:
    """This replica's variable that a Keras variable stands for.

    It relies on `_value`; `value` may be a cast of it.
    """
    return own_copy(variable._value)


def after_compile(action: Callable[[keras.Model], None]) -> Override:
    """Calls a function after each `Model.compile`, with the model.

    An optimizer may be given by its name among the custom objects.

    This relies on `compile` being a method of a base class of `keras.Model`,
    and on `load_model` calling it. The hook is on the class that defines it
    and not on `keras.Model`: `load_model` compares the `compile` of a model
    with that class' and compiles nothing when they differ.
    """

    def compile(
        below: Callable[..., None],
        model: keras.Model,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        first, rest = [named_optimizer(one) for one in args[:1]], args[1:]
        if "optimizer" in kwargs:
            kwargs["optimizer"] = named_optimizer(kwargs["optimizer"])
        below(model, *first, *rest, **kwargs)
        action(model)

    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    return override(owner, "compile", compile)


def around_fit(
    model: keras.Model, within: Within, name: str = "fit"
) -> Override:
    """Runs each `fit` of a model in a context, which chooses its callbacks.

    `name` is of another method with callbacks, `evaluate` or `predict`.

    This relies on the names of the arguments of `fit`, and on `fit` making a
    new `CallbackList` of a flat list of callbacks. The context gets these and
    all arguments; its value is the callbacks. A `fit` of the user's own that
    has no place for callbacks by name gets none.
    """
    signature = inspect.signature(getattr(model, name))
    kinds = {p.kind: name for name, p in signature.parameters.items()}
    others = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    def fit(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = given.arguments
        if "callbacks" not in arguments:
            # Among others without a name there may be callbacks, the sixth.
            unnamed = inspect.Parameter.VAR_POSITIONAL in kinds
            has_place = len(args) < 6 or not unnamed
            arguments = arguments.get(others, {}) if has_place else {}
        known = arguments.get("callbacks")
        if isinstance(known, keras.callbacks.CallbackList):
            known = known.callbacks
        flat = keras.tree.flatten(known) if known else []
        with within(flat, arguments) as chosen:
            if chosen is not flat:
                arguments["callbacks"] = chosen
            return below(*given.args, **given.kwargs)

    return override(model, name, fit)


def swap_averages_of(
    callback: keras.callbacks.SwapEMAWeights,
    choose: Callable[[keras.optimizers.Optimizer], Sequence[Any]],
) -> None:
    """Lets a callback swap the averages of other optimizers.

    `choose` is given the optimizer that the callback finds, and returns the
    optimizers to use. Repeated calls for a callback have no effect.

    It relies on `_tf_swap_variables` and `_tf_finalize_ema_values` being
    called with an optimizer, and on doing all for its variables.
    """

    def for_all(below: Callable[[Any], None], optimizer: Any) -> None:
        for chosen in choose(optimizer):
            below(chosen)

    def override_both() -> list[Override]:
        names = "_tf_swap_variables", "_tf_finalize_ema_values"
        return [override(callback, name, for_all) for name in names]

    keep_on(callback, "_tfkfac_averages", override_both)


def first_epoch(model: keras.Model, initial_epoch: int) -> int:
    """The epoch that `fit` begins with, once all callbacks have begun.

    It relies on `_initial_epoch`, which Keras' `BackupAndRestore` sets.
    """
    return int(model._initial_epoch or initial_epoch)


def set_first_epoch(model: keras.Model, epoch: int | None) -> None:
    """Lets `fit` begin with an epoch; None is its argument.

    It relies on `fit` reading `_initial_epoch` after `on_train_begin`.
    """
    model._initial_epoch = epoch


def skip_batches(model: keras.Model, count: int) -> Callable[[], None]:
    """Lets `fit` take some batches of its first epoch without training on them.

    It returns what ends that early. It relies on `fit` calling
    `train_function` with its iterator once for every `steps_per_execution`
    batches, and for no other reason, and on it being there when callbacks
    begin.
    """
    train = model.train_function
    left = count

    def restore() -> None:
        model.train_function = train

    def skip(iterator: Iterator[Any]) -> dict[str, Any]:
        nonlocal left
        for _ in range(model.steps_per_execution):
            next(iterator)
            left -= 1
        if left <= 0:
            restore()
        return {}

    if count:
        model.train_function = skip
    return restore


# `.keras` and `.weights.h5` files ask an optimizer for what it keeps beside its
# variables. Models in the old format `.h5` and state trees do not.
@dataclasses.dataclass(frozen=True)
class NamedArray:
    """An array that a `.h5` file takes for a variable, and its dataset."""

    path: str
    value: np.ndarray

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.value, dtype)


def carry_in_state_trees(
    model: keras.Model, save: Callable[[], State], load: Callable[[State], None]
) -> list[Override]:
    """Lets the state trees of a model carry its optimizer's own state.

    `load` gets the state of a tree, which may be none. It relies on
    `set_state_tree` passing over names in "optimizer_variables" that it does
    not know.
    """

    def get_state_tree(
        below: Callable[..., dict[str, Any]],
        value_format: str = "backend_tensor",
    ) -> dict[str, Any]:
        tree = below(value_format)
        state: Mapping[str, Any] = save()
        if value_format == "backend_tensor":
            convert = keras.ops.convert_to_tensor
            state = {name: convert(value) for name, value in state.items()}
        tree["optimizer_variables"][KEY] = dict(state)
        return tree

    def set_state_tree(
        below: Callable[..., Any], state_tree: Mapping[str, Any]
    ) -> None:
        below(state_tree)
        variables = state_tree.get("optimizer_variables")
        if variables is not None:
            load(variables.get(KEY) or {})

    return [
        override(model, "get_state_tree", get_state_tree),
        override(model, "set_state_tree", set_state_tree),
    ]


def is_saving_legacy_file() -> bool:
    """True while Keras writes a model into a `.h5` file.

    It relies on "use_legacy_config" of Keras' global state, and on nobody
    asking an optimizer for its variables under it but what writes them.
    """
    return bool(global_state.get_global_attribute("use_legacy_config", False))


def legacy_variables(state: State) -> list[NamedArray]:
    """State as variables of an optimizer, which a `.h5` file has by path.

    It relies on Keras asking such variables for their `path` and array alone.
    """
    return [
        # HDF5 has no bfloat16.
        NamedArray(
            f"{KEY}/{name}",
            value.astype("float32") if value.dtype.kind == "V" else value,
        )
        for name, value in state.items()
    ]


def legacy_state(weights: Sequence[Any]) -> State | None:
    """The state in a `.h5` file that an optimizer's weights are read from.

    It is empty if the file has none, and None if `weights`, the argument of
    `set_weights`, are of no file. It is with the weights; in older files it is
    beside them.

    It relies on Keras calling an optimizer's `set_weights` with datasets of
    the open file, and on the two functions by which Keras reads a group and a
    dataset that may be malicious.
    """
    if not weights or not isinstance(weights[0], h5py.Dataset):
        return None
    file = weights[0].file
    for place in (safe_get_h5_group(file, _WEIGHTS), file):
        if KEY in place:
            group = safe_get_h5_group(place, KEY)
            return {n: safe_get_h5_dataset(group, n)[()] for n in group}
    return {}
