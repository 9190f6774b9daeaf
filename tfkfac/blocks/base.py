"""Base classes of curvature blocks: factors and gradient matrix of a layer.

All layer types use the same tensor convention. Layer inputs `a` and
pre-activation gradients `g` have shape `(batch, shared, features)`, or
`(batch, shared, groups, features)` for layers with independent groups.
`shared` is the number of positions that use the same weights: output pixels,
tokens, or 1 for a dense layer on vectors. The weight gradient is a matrix
`(inputs + 1, outputs)`, or `(groups, inputs + 1, outputs)`, with the bias as
last row.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.patches import Patches
from tfkfac.blocks.rows import (
    LayerGradient,
    RowGradient,
    Rows,
    Statistic,
    weigh,
    with_shape,
)
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey
from tfkfac.factors import Dense, Diagonal, Factor, Limit


class Block(abc.ABC):
    """Kronecker-factored curvature block of the weights of one layer.

    A subclass defines the covered `variables` and the types of their
    `factors`. It converts the record of a layer call to `rows`, and the
    gradients of the variables to a matrix and back.

    Attributes:
        kind: Name of the block type in tables and messages.
        layer: The layer.
        path: Path of the layer.
        dtype: Dtype of the statistics, float32 or float64.
        examples_first: True if the first axis of a record's input, gradient
            and mask is the batch, and rows of an example depend on this
            example alone. Statistics of a subsample are then cheaper.
        swapped: True if factors A and G exchange their roles with respect to
            the block that keeps the statistics, see `used_as`.
        skip_reason: Reason for skipping the block in the last traced step, or
            None.
        limit: Creates factors of the allowed size: `limit.matrix(size)` is a
            `Dense` factor, or a `LowRank` factor above `max_factor_dim`. A
            block with a larger dense factor is not used.

    Args:
        layer: A built Keras layer.
        path: Unique path that ends with the layer's name.
    """

    kind: str
    examples_first: bool = False
    swapped: bool = False
    skip_reason: str | None = None
    limit = Limit()

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        self.layer = layer
        self.path = path
        variable_dtype = keras.backend.standardize_dtype(layer.variable_dtype)
        self.dtype = tf.float64 if variable_dtype == "float64" else tf.float32

    # --------------------------------------------- defined by a subclass
    @staticmethod
    def unsupported(layer: keras.layers.Layer) -> str | None:
        """Return why this block does not support a layer, or None."""
        return None

    @property
    @abc.abstractmethod
    def variables(self) -> list[keras.Variable]:
        """Weights covered by the block, kernel first."""

    @property
    @abc.abstractmethod
    def factors(self) -> dict[str, Factor]:
        """Factors by name: "A" of the inputs and "G" of the outputs.

        A block without "A" uses the identity for it.
        """

    @abc.abstractmethod
    def rows(self, record: Record) -> Rows:
        """Convert a recorded layer call to rows `a` and `g`."""

    def trace_key(self, record: Record) -> TraceKey | None:
        """Key under which calls share one traced statistics function.

        The shared function depends on input, gradient and moments of the
        record only. It is not used for records with a mask. None, the default,
        traces each call separately.
        """
        return None

    def relevant(
        self, calls: Sequence[Sequence[Record]]
    ) -> Sequence[Sequence[Record]]:
        """Select the layer calls that belong to this block.

        Defaults to all calls. An override may set `skip_reason` to a reason why
        the block is not valid for these calls; the step then does not
        precondition its gradients.
        """
        return calls

    def used_as(self, calls: Sequence[Sequence[Record]]) -> "Block":
        """Return the block that computes the statistics of this step.

        Defaults to `self`. An override may return another block, depending on
        the calls. It must have the same `variables` and types of factors,
        with A and G exchanged if it is `swapped`.
        """
        return self

    @abc.abstractmethod
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Join gradients of `variables` to `([groups,] inputs, outputs)`."""

    @abc.abstractmethod
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """Inverse of `to_matrix`."""

    def from_gradient(self, gradient: LayerGradient) -> list[tf.Tensor]:
        """Convert a layer gradient to one gradient per variable."""
        return self.from_matrix(gradient.matrix)

    # ------------------------------------------------- common to all blocks
    @functools.cached_property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that store the factors, by factor name."""
        return {name: factor.shape for name, factor in self.factors.items()}

    @functools.cached_property
    def gradient_shape(self) -> tuple[int, ...]:
        """Shape `([groups,] inputs, outputs)` of the gradient matrix."""
        a, g = self.factors.get("A"), self.factors["G"]
        return (*g.stack_shape, a.size if a else 1, g.size)

    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Cast a tensor to the dtype of the statistics."""
        return tf.cast(tensor, self.dtype)

    def gradient(self, rows: Rows) -> tf.Tensor:
        """Gradient matrix `sum a g^T` of the rows."""
        if rows.a is None:
            return tf.reduce_sum(rows.g, [0, 1])[..., None, :]
        a, g, shape = rows.a, rows.g, self.gradient_shape
        if isinstance(a, Patches):
            product = functools.partial(tf.einsum, "n...i,n...o->...io")
            return a.sum(product, shape, g)
        if isinstance(g, Patches):
            product = functools.partial(tf.einsum, "no,ni->io")
            return g.sum(product, shape, a)
        return tf.einsum("bs...i,bs...o->...io", a, g)

    def input_statistic(
        self, a: Any, weights: tf.Tensor | None, sharing: str
    ) -> Statistic:
        """Sum `a a^T` over the rows with nonzero weight, and count these rows.

        "reduce" and "average" use the mean over the positions of an example.
        """
        factor = self.factors["A"]
        if isinstance(a, Patches):
            a = dataclasses.replace(a, weights=weights)
            if sharing == "expand":
                return Statistic(a.gram(factor), a.count())
            sums, counts = a.position_sums()
        else:
            a, count = weigh(a, weights, self.dtype)
            if sharing == "expand":
                return Statistic(factor.gram(a), count)
            if weights is None:
                weights = tf.ones(tf.shape(a)[:2], self.dtype)
            sums = tf.reduce_sum(a, 1, keepdims=True)
            counts = tf.reduce_sum(weights, 1)
            counts = tf.reshape(counts, [-1] + [1] * (a.shape.rank - 1))
        # Mean over the positions of each example; count examples.
        means = tf.math.divide_no_nan(sums, counts)
        count = tf.reduce_sum(tf.cast(counts > 0, self.dtype))
        return Statistic(factor.gram(means), count)

    def output_statistic(self, g: Any, sharing: str) -> tf.Tensor:
        """Sum of `g g^T` over rows.

        "reduce" uses the sum over the positions of an example, "average" the
        mean.
        """
        factor = self.factors["G"]
        if isinstance(g, Patches):
            if sharing == "expand":
                return g.gram(factor)
            sums, counts = g.position_sums()
            is_mean = sharing == "average"
            return factor.gram(
                tf.math.divide_no_nan(sums, counts) if is_mean else sums
            )
        if sharing == "reduce":
            g = tf.reduce_sum(g, 1, keepdims=True)
        elif sharing == "average":
            g = tf.reduce_mean(g, 1, keepdims=True)
        return factor.gram(g)


class MatrixBlock(Block):
    """Block of a layer with a matrix-shaped kernel and an optional bias.

    The layer has an attribute `kernel`, and optionally `bias`. A subclass
    implements `rows` and applies `with_bias` to the inputs.

    With `groups`, the last axis of the kernel is split into independent
    groups, each with its own gradient matrix and its own factors.
    """

    # Number of independent groups; 0 if factors have no group axis.
    groups: int = 0
    _kernel_name = "kernel"  # attribute of the layer
    _covers_bias = True

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        self._kernel = getattr(layer, self._kernel_name)
        bias = getattr(layer, "bias", None) if self._covers_bias else None
        self._bias = [bias] if bias is not None and bias.trainable else []

    @staticmethod
    @override
    def unsupported(layer: keras.layers.Layer) -> str | None:
        if getattr(layer, "lora_enabled", False):
            return "LoRA weights"
        if getattr(layer, "quantization_mode", None) is not None:
            return "quantized weights"
        return None

    @property
    @override
    def variables(self) -> list[keras.Variable]:
        return [self._kernel, *self._bias]

    @functools.cached_property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape `([groups,] inputs, outputs)` of the kernel as a matrix."""
        outputs = self._output_size()
        size = math.prod(self._kernel.shape)
        if not self.groups:
            return (size // outputs, outputs)
        return (self.groups, size // outputs // self.groups, outputs)

    def _output_size(self) -> int:
        return self._kernel.shape[-1]

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        *groups, inputs, outputs = self.matrix_shape
        return {
            "A": self.limit.matrix(inputs + len(self._bias), tuple(groups)),
            "G": self.limit.matrix(outputs, tuple(groups)),
        }

    def dense_trace_key(self, record: Record) -> TraceKey | None:
        """Trace key of a layer whose rows `a` are its unmodified inputs.

        None unless the input is one tensor and both factors are `Dense`.
        """
        is_tensor = isinstance(record.inputs, tf.Tensor)
        factor_types = tuple(type(factor) for factor in self.factors.values())
        if not is_tensor or factor_types != (Dense, Dense):
            return None
        return TraceKey((type(self), self.dtype, bool(self._bias)))

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        kernel, *bias = gradients
        matrix = self.cast(self._split(kernel))
        if not bias:
            return matrix
        row = tf.reshape(bias[0], [*matrix.shape[:-2], 1, matrix.shape[-1]])
        return tf.concat([matrix, self.cast(row)], -2)

    @override
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        if not self._bias:
            return [self._join(matrix)]
        kernel, bias = tf.split(matrix, [matrix.shape[-2] - 1, 1], -2)
        return [self._join(kernel), self._join_bias(bias)]

    @override
    def from_gradient(self, gradient: LayerGradient) -> list[tf.Tensor]:
        if not self._bias or not isinstance(gradient, RowGradient):
            return super().from_gradient(gradient)
        # Split the bias column off `a`, which is smaller than `a^T g`.
        a, ones = tf.split(gradient.a, [gradient.a.shape[1] - 1, 1], 1)
        kernel = tf.matmul(a, gradient.g, transpose_a=True)
        bias = tf.matmul(ones, gradient.g, transpose_a=True)
        return [self._join(kernel), self._join_bias(bias)]

    def with_bias(self, a: tf.Tensor) -> tf.Tensor:
        """Append a column of ones to the inputs if the layer has a bias."""
        if not self._bias:
            return a
        paddings = [[0, 0]] * (a.shape.rank - 1) + [[0, 1]]
        return tf.pad(a, paddings, constant_values=1)

    def _split(self, kernel: tf.Tensor) -> tf.Tensor:
        """Reshape the kernel to `([groups,] inputs, outputs)`."""
        if not self.groups:
            return with_shape(kernel, self.matrix_shape)
        groups, inputs, outputs = self.matrix_shape
        kernel = tf.reshape(kernel, [inputs, groups, outputs])
        return tf.transpose(kernel, [1, 0, 2])

    def _join(self, matrix: tf.Tensor) -> tf.Tensor:
        """Inverse of `_split`."""
        if self.groups:
            matrix = tf.transpose(matrix, [1, 0, 2])
        return with_shape(matrix, self._kernel.shape)

    def _join_bias(self, row: tf.Tensor) -> tf.Tensor:
        """Reshape the last row of the matrix to the shape of the bias."""
        return tf.reshape(row, self._bias[0].shape)


class PerExampleBlock(Block, abc.ABC):
    """Exact Fisher block of a few weights: full matrix, or diagonal only.

    The factor G is the mean over examples of `u u^T`, where `u` is the
    gradient of an example's loss with respect to all weights of the block.
    There is no factor A. All values of `weight_sharing` give the same matrix.

    A subclass implements `variables` and `example_gradients`.

    Attributes:
        diagonal: True to store the diagonal only. Defaults to False.
    """

    diagonal: bool = False

    @abc.abstractmethod
    def example_gradients(self, record: Record) -> list[tf.Tensor]:
        """Gradient of each example, summed over its positions.

        Args:
            record: The record of one layer call.

        Returns:
            A tensor of shape `(batch, *variable.shape)` for each variable.
        """

    @functools.cached_property
    @override
    def factors(self) -> dict[str, Factor]:
        size = sum(self._sizes)
        if self.diagonal:
            return {"G": Diagonal(size)}
        return {"G": self.limit.matrix(size)}

    @override
    def rows(self, record: Record) -> Rows:
        gradients = self.example_gradients(record)
        batch = tf.shape(gradients[0])[0]
        flat = [
            tf.reshape(self.cast(gradient), [batch, size])
            for gradient, size in zip(gradients, self._sizes, strict=True)
        ]
        return Rows(None, tf.concat(flat, -1)[:, None], None)

    @override
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = [tf.reshape(self.cast(g), [-1]) for g in gradients]
        return tf.concat(flat, 0)[None]

    @override
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.split(matrix[0], self._sizes)
        return [
            tf.reshape(gradient, variable.shape)
            for gradient, variable in zip(flat, self.variables, strict=True)
        ]

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(variable.shape) for variable in self.variables]
