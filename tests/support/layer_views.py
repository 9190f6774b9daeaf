"""What each linear Keras layer is in float64: rows, matrix and outputs.

A view turns a layer's input into the rows of A's sample, its weights into a
(groups, d_in, d_out) matrix and its output into rows of d_out features, so
that every layer reads `split(z) == rows(x) @ matrix(weights)`. The tests
check this identity against Keras' own forward pass before they use a view.
"""

import math
from collections.abc import Sequence

import keras
import numpy as np

from tests.support.reference import Array, append_one, patches


class View:
    """Base: `groups` is None for a layer with a single block."""

    groups: int | None = None
    # A of an embedding is diagonal and stored as a vector.
    diagonal = False

    def __init__(self, layer: keras.Layer) -> None:
        self.layer = layer
        self.has_bias = bool(getattr(layer, "use_bias", False))

    def inputs(self, x: Array) -> Array:
        """Rows without the bias's 1, (groups, batch, shared, d_in)."""
        raise NotImplementedError

    def kernel_matrix(self, kernel: Array) -> Array:
        """(groups, d_in, d_out)."""
        raise NotImplementedError

    def bias_matrix(self, bias: Array) -> Array:
        """(groups, d_out)."""
        return bias.reshape(self.groups or 1, -1)

    def split(self, z: Array) -> Array:
        """(groups, batch, shared, d_out)."""
        raise NotImplementedError

    def rows(self, x: Array) -> Array:
        a = self.inputs(x)
        return append_one(a) if self.has_bias else a

    def matrix(self, weights: Sequence[Array]) -> Array:
        """Kernel with the bias as the last row."""
        kernel = self.kernel_matrix(weights[0])
        if not self.has_bias:
            return kernel
        bias = self.bias_matrix(weights[1])[:, None, :]
        return np.concatenate([kernel, bias], axis=1)


class DenseView(View):
    def inputs(self, x: Array) -> Array:
        return x.reshape(1, len(x), -1, x.shape[-1])

    def kernel_matrix(self, kernel: Array) -> Array:
        return kernel[None]

    def split(self, z: Array) -> Array:
        return z.reshape(1, len(z), -1, z.shape[-1])


class ConvView(View):
    def __init__(self, layer: keras.Layer) -> None:
        super().__init__(layer)
        self.groups = layer.groups if layer.groups > 1 else None

    def inputs(self, x: Array) -> Array:
        m, count = self.layer, self.groups or 1
        p = patches(x, m.kernel_size, m.strides, m.dilation_rate, m.padding)
        parts = np.split(p, count, axis=-1)
        return np.stack([part.reshape(*p.shape[:2], -1) for part in parts])

    def kernel_matrix(self, kernel: Array) -> Array:
        flat = kernel.reshape(-1, kernel.shape[-1])
        return np.stack(np.split(flat, self.groups or 1, axis=-1))

    def split(self, z: Array) -> Array:
        flat = z.reshape(len(z), -1, z.shape[-1])
        return np.stack(np.split(flat, self.groups or 1, axis=-1))


class DepthwiseView(ConvView):
    """Every input channel is a group of its own."""

    def __init__(self, layer: keras.Layer) -> None:
        View.__init__(self, layer)
        self.groups = int(layer.kernel.shape[-2])

    def kernel_matrix(self, kernel: Array) -> Array:
        flat = kernel.reshape(-1, *kernel.shape[-2:])
        return np.moveaxis(flat, 1, 0)


class EinsumView(View):
    """Labels of the kernel decide: contracted, produced, or groups."""

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__(layer)
        self.has_bias = layer.bias is not None
        equation = layer.equation
        named = equation.split(",")[0].replace(".", "")
        hidden = "ZYXWVU"[: layer.input_spec.ndim - len(named)]
        equation = equation.replace("...", hidden)
        left, self.out = equation.split("->")
        self.into, self.kernel_labels = left.split(",")
        pick = list(self.kernel_labels)
        self.g = [c for c in pick if c in self.into and c in self.out]
        self.i = [c for c in pick if c in self.into and c not in self.out]
        self.o = [c for c in pick if c not in self.into]
        self.size = dict(
            zip(self.kernel_labels, layer.kernel.shape, strict=True)
        )
        if self.g:
            self.groups = math.prod(self.size[c] for c in self.g)

    def _gather(self, value: Array, labels: str, last: list[str]) -> Array:
        """(groups, batch, shared, prod(last))."""
        # The batch is the first label of the input.
        batch = self.into[0]
        shared = [
            c
            for c in self.into
            if c in self.out and c not in self.g and c != batch
        ]
        order = [*self.g, batch, *shared, *last]
        value = np.einsum(f"{labels}->{''.join(order)}", value)
        at = value.shape
        n, s = len(self.g), len(self.g) + 1 + len(shared)
        return value.reshape(
            math.prod(at[:n]), at[n], math.prod(at[n + 1 : s]), -1
        )

    def inputs(self, x: Array) -> Array:
        return self._gather(x, self.into, self.i)

    def split(self, z: Array) -> Array:
        return self._gather(z, self.out, self.o)

    def kernel_matrix(self, kernel: Array) -> Array:
        order = "".join([*self.g, *self.i, *self.o])
        kernel = np.einsum(f"{self.kernel_labels}->{order}", kernel)
        d_in = math.prod(self.size[c] for c in self.i)
        return kernel.reshape(self.groups or 1, d_in, -1)

    def bias_matrix(self, bias: Array) -> Array:
        axes = "".join(c for c in self.out if c in self.layer.bias_axes)
        bias = bias.reshape([self.size[c] for c in axes])
        order = "".join([*self.g, *self.o])
        bias = np.einsum(f"{axes}->{order}", bias)
        return bias.reshape(self.groups or 1, -1)


class EmbeddingView(DenseView):
    """A dense layer on one-hot tokens; only A's diagonal is kept."""

    diagonal = True

    def inputs(self, x: Array) -> Array:
        tokens = x.astype(int).reshape(len(x), -1)
        return np.eye(self.layer.input_dim)[tokens][None]


def view_of(layer: keras.Layer) -> View:
    """The view of a built layer."""
    kinds = keras.layers
    if isinstance(layer, kinds.Dense):
        return DenseView(layer)
    if isinstance(layer, kinds.Embedding):
        return EmbeddingView(layer)
    if isinstance(layer, kinds.EinsumDense):
        return EinsumView(layer)
    if isinstance(layer, (kinds.DepthwiseConv1D, kinds.DepthwiseConv2D)):
        return DepthwiseView(layer)
    return ConvView(layer)


def normalized(layer: keras.Layer, x: Array) -> Array:
    """Output of a normalisation layer before its scale and offset."""
    kinds = keras.layers
    rank = x.ndim
    if isinstance(layer, kinds.RMSNormalization):
        axis = np.atleast_1d(layer.axis)
        axes = tuple(int(i) % rank for i in axis)
        power = np.mean(x**2, axis=axes, keepdims=True)
        return np.asarray(x / np.sqrt(power + layer.epsilon))
    if isinstance(layer, kinds.GroupNormalization):
        shape = (*x.shape[:-1], layer.groups, x.shape[-1] // layer.groups)
        grouped = x.reshape(shape)
        axes = tuple(i for i in range(1, rank + 1) if i != rank - 1)
        return _standardize(grouped, axes, layer.epsilon).reshape(x.shape)
    if isinstance(layer, kinds.BatchNormalization):
        axes = tuple(i for i in range(rank) if i != layer.axis % rank)
        return _standardize(x, axes, layer.epsilon)
    axes = tuple(int(i) % rank for i in np.atleast_1d(layer.axis))
    return _standardize(x, axes, layer.epsilon)


def _standardize(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    mean = x.mean(axes, keepdims=True)
    variance = x.var(axes, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(variance + epsilon))


def feature_rows(layer: keras.Layer, value: Array) -> Array:
    """(batch, shared, features) with the normalised axes as features."""
    rank = value.ndim
    axes = [int(i) % rank for i in np.atleast_1d(layer.axis)]
    value = np.moveaxis(value, axes, range(rank - len(axes), rank))
    features = math.prod(value.shape[rank - len(axes) :])
    return value.reshape(len(value), -1, features)
