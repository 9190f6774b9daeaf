"""Curvature blocks: a layer's factors and its gradient as a matrix.

One tensor convention serves all layer types. Layer inputs `a` and gradients
at the pre-activation `g` are rows of shape `(batch, shared, features)`, or
`(batch, shared, groups, features)` for layers made of independent groups.
`shared` counts the positions at which the same weights are used: output
pixels, tokens, 1 for a plain dense layer. The gradient of the weights is a
matrix `(inputs + 1, outputs)`, the bias last, or `(groups, inputs + 1,
outputs)`.
"""

import abc
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.rows import (
    LayerGradient,
    RowGradient,
    Rows,
    Statistic,
    average_positions,
    weigh,
    with_shape,
)
from tfkfac.capture.taps import Record
from tfkfac.factors import Dense, Diagonal, Factor, Limit


class Alike(NamedTuple):
    """Kind of a call: those of one kind share the function of statistics.

    Attributes:
        key: The kind.
        any_size: True if one function does for all sizes.
    """

    key: Hashable
    any_size: bool = True


class Block(abc.ABC):
    """Kronecker-factored curvature block of the weights of one layer.

    A subclass says which `variables` it covers and which kinds of `factors`
    it has, turns what a call of the layer left behind into `rows`, and the
    gradients of the variables into a matrix and back.

    Attributes:
        kind: Name in tables.
        layer: The layer.
        path: Its path.
        dtype: Dtype of the statistics.
        examples_first: True if input, gradient and mask of a record have the
            examples as their first axis, and the rows of an example are of
            its own alone. Then statistics of a part of a batch are cheaper.
        swapped: True if its A is the G, and its G the A, of the block that it
            takes the statistics for, see `used_as`.
        left_out: Why the block took no part in the last step that was traced,
            or None.
        limit: `limit.matrix(size)` is the kind of a factor that is one matrix:
            whole, or approximated if it is wider than the user allows. A layer
            whose block declares a wider one nevertheless is left alone.

    Args:
        layer: A built Keras layer.
        path: Unique name that ends with the layer's name.
    """

    kind: str
    examples_first: bool = False
    swapped: bool = False
    left_out: str | None = None
    limit = Limit()

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        self.layer = layer
        self.path = path
        wide = keras.backend.standardize_dtype(layer.variable_dtype)
        self.dtype = tf.float64 if wide == "float64" else tf.float32

    # ------------------------------------------------------ of a layer type
    @staticmethod
    def unsupported(layer: keras.layers.Layer) -> str | None:
        """Returns why this layer can have no such block, or None."""
        return None

    @property
    @abc.abstractmethod
    def variables(self) -> list[keras.Variable]:
        """The weights covered, kernel first."""

    @property
    @abc.abstractmethod
    def factors(self) -> dict[str, Factor]:
        """The kinds of "A", the inputs', and "G", the outputs' factor.

        A block without "A" has an identity in its place.
        """

    @abc.abstractmethod
    def rows(self, record: Record) -> Rows:
        """Turns a record of the layer into rows."""

    def alike(self, record: Record) -> Alike | None:
        """Kind of a call: those of one kind share the function of statistics.

        It is one of input, gradient and moments, where no mask was seen. None,
        the default, if the statistics of this call are its own.

        Args:
            record: The record of the call.
        """
        return None

    def relevant(
        self, calls: Sequence[Sequence[Record]]
    ) -> Sequence[Sequence[Record]]:
        """Picks the calls that the block stands for, by their records.

        If the layer did something in this step that makes the block wrong,
        `left_out` says what; its gradients then stay as they are.
        """
        return calls

    def used_as(self, calls: Sequence[Sequence[Record]]) -> "Block":
        """The block that takes the statistics of a step; itself, by default.

        Another one if the calls of the step are of another kind. It has the
        same `variables` and kinds of factors, which may be `swapped`.
        """
        return self

    @property
    def form(self) -> Hashable | None:
        """Kind of a block: one kind makes matrices of equal shapes alike.

        None, the default, if this one has a way of its own.
        """
        return None

    @abc.abstractmethod
    def to_matrix(self, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        """Gradients of `variables` as one `([groups,] inputs, outputs)`."""

    @abc.abstractmethod
    def from_matrix(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """Inverse of `to_matrix`."""

    def from_gradient(self, gradient: LayerGradient) -> list[tf.Tensor]:
        """The same of a gradient in any form."""
        return self.from_matrix(gradient.matrix)

    # -------------------------------------------------------------- shared
    @property
    def factor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in which the factors are kept."""
        return {name: kind.shape for name, kind in self.factors.items()}

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        """Shape `([groups,] inputs, outputs)` of the gradient matrix."""
        a, g = self.factors.get("A"), self.factors["G"]
        return (*g.stack_shape, a.size if a else 1, g.size)

    def cast(self, tensor: tf.Tensor) -> tf.Tensor:
        """Casts to the dtype of the statistics, float32 or better."""
        return tf.cast(tensor, self.dtype)

    def gradient(self, rows: Rows) -> tf.Tensor:
        """The gradient matrix that rows come to."""
        if rows.a is None:
            return tf.reduce_sum(rows.g, [0, 1])[..., None, :]
        return tf.einsum("bs...i,bs...o->...io", rows.a, rows.g)

    def input_multiplications(
        self, inputs: Sequence[int | None], rows: int
    ) -> float:
        """About how many multiplications the statistic of A takes.

        Args:
            inputs: Shape of the layer's input.
            rows: Number of rows, those of all examples together.
        """
        return rows * self.factors["A"].multiplications

    def input_statistic(
        self, a: tf.Tensor, weights: tf.Tensor | None, sharing: str
    ) -> Statistic:
        """Sum of `a a^T` over the rows that carry loss, and their number."""
        a, count = weigh(a, weights, self.dtype)
        if sharing != "expand":
            a, count = average_positions(a, weights, self.dtype)
        return Statistic(self.factors["A"].gram(a), count)

    def output_statistic(self, g: tf.Tensor, sharing: str) -> tf.Tensor:
        """Sum of `g g^T` over rows.

        "reduce" adds an example's rows first; "average" takes their mean, over
        all positions.
        """
        if sharing == "reduce":
            g = tf.reduce_sum(g, 1, keepdims=True)
        elif sharing == "average":
            g = tf.reduce_mean(g, 1, keepdims=True)
        return self.factors["G"].gram(g)

    def dense(self, values: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The block as an explicit matrix, for tests on small layers.

        Args:
            values: The tensors of the factors by name.

        Returns:
            `A (x) G` acting on the row-major flattened gradient matrix, of
            shape `([groups,] inputs * outputs, inputs * outputs)`.
        """
        g = self.factors["G"].as_matrix(values["G"])
        if "A" not in self.factors:
            return g
        a = self.factors["A"].as_matrix(values["A"])
        product = tf.einsum("...ij,...kl->...ikjl", a, g)
        size = a.shape[-1] * g.shape[-1]
        return tf.reshape(product, [*g.shape[:-2], size, size])


class MatrixBlock(Block):
    """Block of a kernel that is a matrix after a reshape, with its bias.

    The layer has the attributes `kernel` and, if there is one, `bias`. A
    subclass has to turn a record into rows, with `with_bias` at the inputs.

    A layer of `groups` independent parts has its kernel's last axis split
    into groups and has one matrix for each.
    """

    # 0 for a layer of one part: its factors have no axis of groups.
    groups: int = 0

    def __init__(self, layer: keras.layers.Layer, path: str) -> None:
        super().__init__(layer, path)
        self._kernel = self._find_kernel()
        bias = self._find_bias()
        self._bias = [bias] if bias is not None and bias.trainable else []

    def _find_kernel(self) -> keras.Variable:
        return self.layer.kernel

    def _find_bias(self) -> keras.Variable | None:
        return getattr(self.layer, "bias", None)

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

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape `([groups,] inputs, outputs)` of the kernel as a matrix."""
        outputs = self._output_size()
        size = math.prod(self._kernel.shape)
        if not self.groups:
            return (size // outputs, outputs)
        return (self.groups, size // outputs // self.groups, outputs)

    def _output_size(self) -> int:
        return self._kernel.shape[-1]

    @property
    @override
    def factors(self) -> dict[str, Factor]:
        *_, inputs, outputs = self.matrix_shape
        return {
            "A": self._kind(inputs + len(self._bias)),
            "G": self._kind(outputs),
        }

    def _kind(self, size: int) -> Factor:
        if self.groups:
            return self.limit.stack(self.groups, size)
        return self.limit.matrix(size)

    def plainly_alike(self, record: Record) -> Alike | None:
        """The `alike` of a call whose rows are the plain inputs.

        That is with factors that are whole matrices.
        """
        is_plain = isinstance(record.inputs, tf.Tensor)
        kinds = tuple(type(kind) for kind in self.factors.values())
        if not is_plain or kinds != (Dense, Dense):
            return None
        return Alike((type(self), self.dtype, bool(self._bias)))

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
        # Rows are cut, and not the matrix, which is larger.
        a, one = tf.split(gradient.a, [gradient.a.shape[1] - 1, 1], 1)
        kernel = tf.matmul(a, gradient.g, transpose_a=True)
        bias = tf.matmul(one, gradient.g, transpose_a=True)
        return [self._join(kernel), self._join_bias(bias)]

    def with_bias(self, a: tf.Tensor) -> tf.Tensor:
        """Appends the bias' 1 to the inputs if there is a bias."""
        if not self._bias:
            return a
        paddings = [[0, 0]] * (a.shape.rank - 1) + [[0, 1]]
        return tf.pad(a, paddings, constant_values=1)

    def _split(self, kernel: tf.Tensor) -> tf.Tensor:
        """Kernel to `([groups,] inputs, outputs)`."""
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
        """The last row of the matrix as the bias."""
        return tf.reshape(row, self._bias[0].shape)


class PerExampleBlock(Block, abc.ABC):
    """Fisher matrix of a few weights, or its diagonal.

    It is the mean over examples of `u u^T`, where `u` is the gradient of an
    example's loss in all weights of the block: no Kronecker product, so there
    is no A and nothing is approximated. Both ways of weight sharing are the
    same.

    A subclass says which its `variables` are, and computes
    `example_gradients`.

    Attributes:
        diagonal: True to keep the diagonal only. Defaults to False.
    """

    diagonal: bool = False

    @abc.abstractmethod
    def example_gradients(self, record: Record) -> list[tf.Tensor]:
        """The gradient of each example, summed over its positions.

        Args:
            record: The record of one call of the layer.

        Returns:
            For each of `variables` a tensor of shape `(batch, *shape)`.
        """

    @property
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
        parts = tf.split(matrix[0], self._sizes)
        return [
            tf.reshape(part, variable.shape)
            for part, variable in zip(parts, self.variables, strict=True)
        ]

    @property
    def _sizes(self) -> list[int]:
        return [math.prod(variable.shape) for variable in self.variables]
