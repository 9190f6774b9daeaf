"""A batch kept for later steps."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfkfac.capture.forward import ForwardCall
from tfkfac.capture.loss_batch import LossBatch
from tfkfac.compat.graphs import state_variable


class HeldBatch:
    """A batch in variables, so that later steps can use it.

    Args:
        structure: Any nest of tensors and constants. Only its form is kept.
    """

    def __init__(self, structure: Any) -> None:
        leaves = tf.nest.flatten(structure, expand_composites=True)
        self._variables = [
            held_variable(leaf) if tf.is_tensor(leaf) else None
            for leaf in leaves
        ]

    @property
    def bytes(self) -> int:
        """Bytes of the batch that is held, none before the first."""
        return sum(
            size_in_bytes(variable.read_value())
            for variable in self._variables
            if variable is not None
        )

    def hold(self, structure: Any) -> None:
        """Copies the current batch."""
        leaves = tf.nest.flatten(structure, expand_composites=True)
        for variable, leaf in zip(self._variables, leaves, strict=True):
            if variable is not None:
                variable.assign(leaf)

    def get(self, structure: Any) -> Any:
        """Returns the batch that is held, in the form of the current one."""
        leaves = tf.nest.flatten(structure, expand_composites=True)
        values = [
            leaf if variable is None else tf.convert_to_tensor(variable)
            for variable, leaf in zip(self._variables, leaves, strict=True)
        ]
        return tf.nest.pack_sequence_as(
            structure, values, expand_composites=True
        )


def size_in_bytes(tensor: tf.Tensor) -> int:
    """Bytes of the elements of an eager tensor."""
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)


def held_variable(tensor: tf.Tensor) -> tf.Variable:
    """A variable for tensors like this one, of any number of rows."""
    rest = tensor.shape.as_list()[1:]
    any_rows = [None, *rest] if tensor.shape.rank else []
    shape = [0, *(size or 0 for size in rest)] if tensor.shape.rank else []
    empty = "" if tensor.dtype == tf.string else 0
    with tf.init_scope():
        nothing = tf.fill(shape, empty)
    return state_variable(nothing, tensor.dtype, "held", any_rows)


def point(
    batch: LossBatch, call: ForwardCall, shares: Sequence[tf.Tensor]
) -> tuple[Any, ...]:
    """What the loss of a batch is computed from, and this replica's shares."""
    arguments = {k: v for k, v in batch.arguments.items() if k != "y_pred"}
    return call.args, call.kwargs, arguments, tuple(shares)


def describe(leaf: Any) -> Any:
    """The kind of a leaf: dtype and shape but for the rows, or the value."""
    if not tf.is_tensor(leaf):
        return repr(leaf)
    return leaf.dtype.name, leaf.shape.as_list()[1:] if leaf.shape.rank else []
