"""A batch kept for later steps."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall
from tfkfac.compat.graphs import state_variable
from tfkfac.loss.batch import LossBatch
from tfkfac.saving.entries import Entry, Spread


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

    def serialized(self) -> list[Any]:
        """The tensors of the batch, each in TensorFlow's own form."""
        return [
            tf.io.serialize_tensor(variable.read_value()).numpy()
            for variable in self._variables
            if variable is not None
        ]

    def restore(self, serialized: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Takes its tensors from the first of some, if there are any.

        Returns:
            The others.
        """
        rest = list(serialized)
        with tf.init_scope():
            for variable in self._variables:
                if variable is not None and rest:
                    variable.assign(
                        tf.io.parse_tensor(rest.pop(0), variable.dtype)
                    )
        return rest

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


class HeldBatches:
    """A held batch of each form that there has been.

    They are saved as one vector of numbers; what is restored becomes those of
    the first forms there are.
    """

    # Of what is saved, as of a variable.
    shape, dtype = tf.TensorShape([None]), tf.int32

    def __init__(self) -> None:
        self._held: list[tuple[Any, HeldBatch]] = []
        self._restored: list[tf.Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of the batches."""
        return sum(held.bytes for _, held in self._held)

    def of(self, current: Any) -> HeldBatch:
        """The variables for batches of a form, made when it is new."""
        leaves = tf.nest.flatten(current, expand_composites=True)
        form = [describe(leaf) for leaf in leaves]
        for known, held in self._held:
            if known == form:
                return held
        held = HeldBatch(current)
        self._held.append((form, held))
        self._restored = held.restore(self._restored)
        return held

    def entry(self, name: str, part: str) -> Entry:
        """What is to be saved, of a part of the state."""
        return Entry("", name, self, Spread.OWNED, part, least=-math.inf)

    def numpy(self) -> np.ndarray:
        """The batches as a vector of numbers."""
        leaves = [v for _, held in self._held for v in held.serialized()]
        packed = tf.io.serialize_tensor(tf.constant(leaves, tf.string)).numpy()
        # Not all that carries numbers between workers carries bytes.
        missing = -len(packed) % 4
        return np.frombuffer(
            bytes([missing, 0, 0, 0]) + packed + bytes(missing), np.int32
        )

    def assign(self, value: tf.Tensor) -> None:
        """Inverse of `numpy`.

        Raises:
            ValueError: If `value` is not what that has returned.
        """
        data = value.numpy().tobytes()
        try:
            end = len(data) - data[0]
            packed = tf.io.parse_tensor(data[4:end], tf.string)
            leaves = tf.unstack(packed)
        except (
            IndexError,
            ValueError,
            tf.errors.InvalidArgumentError,
        ) as error:
            raise ValueError(
                f"A saved batch cannot be read: {error}"
            ) from error
        for _, held in self._held:
            leaves = held.restore(leaves)
        self._restored = leaves


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
