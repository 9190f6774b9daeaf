"""Gradients where TensorFlow's own are wrong, illegal or keep too much."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfkfac.compat.overrides import overridden

KERAS_NN = (
    "keras.src.backend.tensorflow.nn",
    "keras.src.backend.tensorflow.ops.nn",  # from Keras 3.16 on
)


def module_at(*places: str) -> ModuleType:
    """The module that is at one of several places.

    Args:
        places: Its names, the oldest first.

    Raises:
        ImportError: If it is at none of them.
    """
    for place in places:
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            # What the module itself may miss is another matter.
            if not f"{place}.".startswith(f"{error.name}."):
                raise
    raise ImportError(
        f"There is none of the modules {list(places)} that tfkfac knows of. "
        "Install a version of Keras that tfkfac's metadata allow."
    )


keras_nn = module_at(*KERAS_NN)

Sum = Callable[[tf.Tensor], tf.Tensor]
Moments = tuple[tf.Tensor, tf.Tensor]  # mean and variance


def with_gradient(
    function: Callable[[tf.Tensor], tf.Tensor],
    tensor: tf.Tensor,
    gradient: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Applies a function whose gradient on tapes is another's.

    In a graph `tf.custom_gradient` enters what it was called with into a
    registry of the process, for good: the graph, all functions that hang on
    it and its model's records are never freed. Tapes do not need the registry;
    gradients through a whole `tf.function`, which do, are the function's own.

    It relies on `stop_recording` and `record_operation` of TensorFlow's
    `record`, which `tf.custom_gradient` calls as well.

    Args:
        function: Takes the tensor to another.
        tensor: Its argument.
        gradient: Takes the gradient of the result to that of the argument.
    """
    with record.stop_recording():
        # A tape cannot tell a result that is the argument itself from it.
        result = tf.identity(function(tensor))
    record.record_operation(
        "with_gradient", [result], [tensor], lambda g: [gradient(g)]
    )
    return result


@contextlib.contextmanager
def exact_second_derivatives(total: Sum) -> Iterator[None]:
    """Gives the code that this thread traces inside right second derivatives.

    `tf.nn.moments` stops the gradient of the mean within the variance. That
    leaves the first derivative as it is and makes the second one wrong by
    several percent. Moments that are synchronised over replicas reduce in a
    way that is illegal inside a `tf.cond`.

    This relies on Keras calling `tf.nn.moments`, and for synchronised moments
    `_compute_moments_sync` of the module at `KERAS_NN`, through the modules'
    attributes, where a layer of the user's own is likely to look as well. Both
    are as they were when no thread is inside.

    Args:
        total: Differentiable sum over the replicas.
    """

    def plain(_: Any, /, *args: Any, **kwargs: Any) -> Moments:
        return plain_moments(*args, **kwargs)

    def synchronized(
        _: Any, x: tf.Tensor, axes: Sequence[int], keepdims: bool
    ) -> Moments:
        return synchronized_moments(x, axes, keepdims, total)

    with (
        overridden(tf.nn, "moments", plain),
        overridden(keras_nn, "_compute_moments_sync", synchronized),
    ):
        yield


def plain_moments(
    x: tf.Tensor,
    axes: Any,
    shift: Any = None,
    keepdims: bool = False,
    name: str | None = None,
) -> Moments:
    """Mean and variance without tricks; arguments as `tf.nn.moments`."""
    del shift, name
    wide = tf.cast(x, tf.float32) if x.dtype.size < 4 else x
    mean = tf.reduce_mean(wide, axes, keepdims=True)
    variance = tf.reduce_mean(tf.square(wide - mean), axes, keepdims=keepdims)
    if not keepdims:
        mean = tf.reduce_mean(wide, axes)
    return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)


def synchronized_moments(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool, total: Sum
) -> Moments:
    """Mean and variance over the batches of all replicas."""
    sums = [
        tf.reduce_sum(value, axes, keepdims=keepdims)
        for value in (tf.ones_like(x), x, tf.square(x))
    ]
    count, first, second = tf.unstack(total(tf.stack(sums)))
    mean = tf.math.divide_no_nan(first, count)
    square = tf.math.divide_no_nan(second, count)
    return mean, tf.maximum(square - tf.square(mean), 0)
