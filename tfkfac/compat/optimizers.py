"""What a Keras optimizer keeps to itself."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src.optimizers import ALL_OBJECTS_DICT

from tfkfac.compat.overrides import keep_on, overridden, override

if TYPE_CHECKING:

    class KerasOptimizer:
        """`keras.optimizers.Optimizer` to a type checker.

        It takes Keras for `Any`, and a class below that may have any
        attribute, so that none of its own would be checked.
        """

        name: str
        built: bool

        def __init__(self, learning_rate: float, name: str) -> None: ...
        def build(self, variables: list[keras.Variable]) -> None:
            """See `keras.Optimizer.build`."""

        def apply_gradients(self, grads_and_vars: Any) -> Any:
            """See `keras.Optimizer.apply_gradients`."""

else:
    KerasOptimizer = keras.optimizers.Optimizer


def find_by_name(optimizer: type[KerasOptimizer]) -> None:
    """Lets `compile("name")` and `keras.optimizers.get` find a class.

    It relies on `keras.optimizers.deserialize` looking a name up, in lower
    case, in the table `ALL_OBJECTS_DICT`, and on its taking a class from there
    that is registered as serialisable and not of Keras.
    """
    ALL_OBJECTS_DICT[optimizer.__name__.lower()] = optimizer


def parts_of_multi_optimizer(optimizer: Any) -> Sequence[Any] | None:
    """The optimizers in a `MultiOptimizer`, or None if it is no such thing.

    Keras has had them since version 3.15.
    """
    kind = getattr(keras.optimizers, "MultiOptimizer", None)
    if kind is None or not isinstance(optimizer, kind):
        return None
    parts: Sequence[Any] = optimizer.optimizers
    return parts


def variable_key(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> Hashable:
    """A key of a variable that is the same on all replicas.

    It relies on `_var_key`, by which an optimizer finds a variable again that
    it meets as another object: a Keras variable, the mirrored variable inside
    it, or one replica's copy of that.
    """
    return optimizer._var_key(variable)


def knows_variable(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether an optimizer was built for a variable.

    It relies on the keys of `_trainable_variables_indices` being those of
    `_var_key`.
    """
    known = optimizer._trainable_variables_indices
    return variable_key(optimizer, variable) in known


def trainable_variables(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.Variable]:
    """The variables that an optimizer was built for, in their order.

    It relies on `_trainable_variables`, which `apply` without variables uses.
    """
    return list(optimizer._trainable_variables)


def raw_iterations(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable that counts the calls of `apply`.

    It relies on `_iterations`. The public `iterations` is the number of
    updates, which with an accumulation of gradients is not a variable.
    """
    return optimizer._iterations


def sgd_momenta(
    optimizer: keras.optimizers.SGD, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """The momentum that SGD keeps for some variables; none without momentum.

    It relies on `momentums`, in the order of `_get_variable_index`, and on a
    step with momentum `mu` making `mu b - rate g` of each b and adding to the
    weights that, or with `nesterov` `mu b - rate g` of the new b.
    """
    momenta = optimizer.momentums
    if not momenta:
        return []
    return [momenta[optimizer._get_variable_index(v)] for v in variables]


def on_overflow(
    scaler: keras.optimizers.LossScaleOptimizer,
    prepare: Callable[[], Callable[[], None]],
) -> None:
    """Does something where a `LossScaleOptimizer` skips a step.

    It relies on `_common_apply` calling `_stateful_handle_non_finite_grads`
    in the one of two branches that skips, in a single replica.

    Args:
        scaler: The optimizer; a second time for it changes nothing.
        prepare: Called before the branches; returns what is to be done.
    """

    def apply(below: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        undo = prepare()

        def skip(handle: Callable[[], None]) -> None:
            undo()
            handle()

        with overridden(scaler, "_stateful_handle_non_finite_grads", skip):
            below(*args, **kwargs)

    keep_on(
        scaler,
        "_tfkfac_on_overflow",
        lambda: override(scaler, "_common_apply", apply),
    )


def build_once(
    scaler: keras.optimizers.LossScaleOptimizer,
    variables: Sequence[keras.Variable],
) -> None:
    """Builds a `LossScaleOptimizer`, which is not built again after that.

    It relies on `built`, and on `build` making the scale and its counter anew
    each time: Keras calls it without asking where it loads a model.

    Args:
        scaler: The optimizer; a second time for it changes nothing.
        variables: What it is built for.
    """

    def build(below: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not scaler.built:
            below(*args, **kwargs)

    keep_on(
        scaler,
        "_tfkfac_build_once",
        lambda: override(scaler, "build", build),
    )
    scaler.build(variables)
