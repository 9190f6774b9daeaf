"""Small layers, and the definition of their factors in float64 NumPy.

A view turns the input of a layer and the gradient at its pre-activation into
the rows a and g of a block, `(groups, batch, shared, features)`. The gradient
of the block's weights is the sum of the products `a g^T`.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.support.harness import SLOPES, half_squared_error, randomize
from tests.support.reference import Array, append_one, factors, patches

# Function that makes the layer from its name, and the shape of one example.
Case = tuple[Callable[..., Any], tuple[int, ...]]

dense = partial(partial, layers.Dense)
conv1d = partial(partial, layers.Conv1D)
conv2d = partial(partial, layers.Conv2D)
conv3d = partial(partial, layers.Conv3D)
depthwise2d = partial(partial, layers.DepthwiseConv2D)
transposed2d = partial(partial, layers.Conv2DTranspose)
transposed3d = partial(partial, layers.Conv3DTranspose)
separable2d = partial(partial, layers.SeparableConv2D)
embedding = partial(partial, layers.Embedding)
batch_norm = partial(partial, layers.BatchNormalization)
layer_norm = partial(partial, layers.LayerNormalization)
group_norm = partial(partial, layers.GroupNormalization)
SAME: dict[str, Any] = {"padding": "same"}
NO_BIAS: dict[str, Any] = {"use_bias": False}


def each_step(make: Any) -> Any:
    return lambda name, dtype: layers.TimeDistributed(
        make(name=name, dtype=dtype), dtype=dtype
    )


def einsum(equation: str, shape: Any, bias: str | None = None) -> Any:
    return partial(layers.EinsumDense, equation, shape, bias_axes=bias)


# Transposed convolutions that TensorFlow cannot run on a CPU.
NOT_ON_CPU: dict[str, Case] = {
    "transposed2d_dilated": (transposed2d(2, (3, 2), dilation_rate=(2, 3)),
                             (3, 4, 2)),
    "transposed2d_channels_first": (
        transposed2d(2, (3, 2), strides=2, data_format="channels_first"),
        (3, 2, 4),
    ),
}  # fmt: skip
LAYERS: dict[str, Case] = {
    "dense_rank2": (dense(4), (5,)),
    "dense_rank3": (dense(4, activation="tanh"), (3, 5)),
    "dense_rank4": (dense(2, **NO_BIAS), (2, 3, 4)),
    "conv1d_causal_dilated":
        (conv1d(2, 3, dilation_rate=2, padding="causal"), (8, 3)),
    "conv2d_same_odd": (conv2d(3, 3, activation="tanh", **SAME), (4, 5, 2)),
    "conv2d_same_even_strided":
        (conv2d(2, (2, 4), strides=2, **SAME), (5, 6, 2)),
    "conv2d_valid_strides_leave_rest":
        (conv2d(2, (3, 2), strides=(3, 2)), (8, 7, 1)),
    "conv2d_dilated_same":
        (conv2d(2, 3, dilation_rate=(2, 1), **SAME), (6, 5, 2)),
    # Large enough for A by correlations, see `blocks/correlation.py`.
    "conv2d_correlated": (conv2d(2, 3, **SAME), (14, 14, 4)),
    "conv2d_1x1": (conv2d(3, 1), (3, 3, 4)),
    "conv3d_same":
        (conv3d(2, (2, 3, 1), strides=(1, 2, 2), **SAME), (3, 4, 3, 2)),
    "conv3d_valid": (conv3d(2, 2, **NO_BIAS), (3, 3, 2, 1)),
    "conv2d_groups": (conv2d(6, 3, groups=3, strides=2, **SAME), (5, 4, 6)),
    "depthwise1d": (partial(layers.DepthwiseConv1D, 3, **SAME), (6, 3)),
    "depthwise2d": (depthwise2d(3, depth_multiplier=2), (5, 4, 3)),
    "depthwise2d_same_strided": (
        depthwise2d((2, 3), strides=2, activation="tanh", **SAME, **NO_BIAS),
        (5, 6, 2),
    ),
    "separable2d": (
        separable2d(3, 3, strides=2, activation="tanh", **SAME), (5, 4, 2)
    ),
    "einsum_sequence": (einsum("abc,cd->abd", (None, 2), "d"), (3, 4)),
    "einsum_ellipsis": (einsum("...x,xy->...y", 3, "y"), (2, 3, 4)),
    "einsum_heads": (einsum("abc,cde->abde", (None, 2, 3), "de"), (3, 4)),
    "einsum_join_heads": (einsum("abcd,cde->abe", (None, 4), "e"), (3, 2, 3)),
    "einsum_mixed_kernel_order":
        (einsum("abc,ecd->abde", (None, 2, 3), "de"), (2, 4)),
    "einsum_moved_output": (einsum("abc,cd->adb", (2, None)), (3, 4)),
    "einsum_mixes_positions": (einsum("abc,bd->adc", (2, None)), (3, 4)),
    "einsum_groups": (einsum("abc,bcd->abd", (2, 3), "bd"), (2, 4)),
    "einsum_groups_shared":
        (einsum("abcd,cde->abce", (None, 3, 2), "ce"), (2, 3, 4)),
    "embedding_token": (embedding(6, 3), ()),
    "embedding_sequence": (embedding(6, 3), (5,)),
    "embedding_reversible": (partial(layers.ReversibleEmbedding, 6, 3), (5,)),
    "transposed2d_overlap": (transposed2d(2, (3, 2), strides=2), (3, 4, 2)),
    "transposed2d_same_output_padding": (
        transposed2d(2, (3, 4), strides=(3, 2), output_padding=(2, 1),
                     activation="relu", **SAME),
        (3, 2, 3),
    ),
    "transposed2d_gaps":
        (transposed2d(2, 2, strides=3, output_padding=1), (2, 3, 2)),
    "transposed2d_no_bias": (transposed2d(2, 3, **NO_BIAS), (3, 3, 1)),
    "transposed3d": (
        transposed3d(2, (2, 1, 3), strides=(1, 2, 2), activation="tanh"),
        (2, 3, 2, 2),
    ),
    **NOT_ON_CPU,
    "batch_image": (batch_norm(), (3, 2, 4)),
    "batch_axis_1": (batch_norm(axis=1), (3, 4)),
    "batch_no_scale": (batch_norm(scale=False), (2, 3)),
    "layer_two_axes": (layer_norm(axis=(-2, -1)), (2, 3, 4)),
    "layer_no_center": (layer_norm(center=False), (3, 4)),
    "group": (group_norm(2), (3, 2, 4)),
    "group_no_scale": (group_norm(3, scale=False), (4, 6)),
    "rms": (layers.RMSNormalization, (3, 4)),
    "prelu_image": (layers.PReLU, (2, 3, 2)),
    "prelu_shared_first": (partial(layers.PReLU, shared_axes=1), (3, 2)),
    "dense_each_step": (each_step(dense(3, activation="tanh")), (3, 4)),
    "depthwise2d_each_step": (
        each_step(depthwise2d((2, 3), strides=2, activation="tanh")),
        (2, 5, 6, 2),
    ),
    "einsum_each_step":
        (each_step(einsum("abc,cd->abd", (None, 2), "d")), (2, 3, 4)),
    "layer_each_step": (each_step(layer_norm()), (3, 4)),
}  # fmt: skip


# ------------------------------------------------------------------ definitions
class View:
    """Rows of one block of a layer.

    Attributes:
        groups: Number of pairs of factors; None for a block with one pair.
        diagonal: Name of the factor that is stored as a vector.
    """

    groups: int | None = None
    diagonal = ""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def rows(self, x: Array, g: Array) -> tuple[Array | None, Array]:
        """Inputs with the bias's 1, and gradients; None without a factor A."""
        a, g = (v.reshape(1, len(v), -1, v.shape[-1]) for v in (x, g))
        return self.with_one(a), g

    def with_one(self, a: Array) -> Array:
        has_bias = getattr(self.layer, "bias", None) is not None
        return append_one(a) if has_bias else a

    def factors(
        self,
        a: Array | None,
        g: Array,
        sharing: str = "expand",
        keep: Array | None = None,
    ) -> dict[str, Array]:
        """Factors in their public shapes, by name."""
        pairs = zip(g if a is None else a, g, strict=True)
        blocks = [factors(*pair, sharing, keep) for pair in pairs]
        A, G = (np.stack(m) for m in zip(*blocks, strict=True))
        named = {"G": G} if a is None else {"A": A, "G": G}
        for name, value in named.items():
            if self.groups is None:
                named[name] = value[0]
            if name == self.diagonal:
                named[name] = np.diagonal(named[name])
        return named


class EmbeddingView(View):
    """A dense layer of one-hot tokens."""

    diagonal = "A"

    def rows(self, x: Array, g: Array) -> tuple[Array, Array]:
        tokens = x.astype(int).reshape(len(x), -1)
        one_hot = np.eye(self.layer.input_dim)[tokens]
        return one_hot[None], g.reshape(1, *tokens.shape, -1)


class ConvView(View):
    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        groups = getattr(layer, "groups", 1)
        if isinstance(layer, (layers.DepthwiseConv1D, layers.DepthwiseConv2D)):
            self.groups = int(layer.kernel.shape[-2])
        elif groups > 1:
            self.groups = groups

    def rows(self, x: Array, g: Array) -> tuple[Array, Array]:
        return self.inputs(x), self.grouped(g.reshape(len(g), -1, g.shape[-1]))

    def inputs(self, x: Array) -> Array:
        m = self.layer
        p = patches(x, m.kernel_size, m.strides, m.dilation_rate, m.padding)
        parts = self.grouped(p)
        return self.with_one(parts.reshape(*parts.shape[:3], -1))

    def grouped(self, value: Array) -> Array:
        return np.stack(np.split(value, self.groups or 1, axis=-1))


class SeparableView(ConvView):
    """The depthwise kernel, without a bias, or the pointwise kernel."""

    def __init__(self, layer: Any, is_depthwise: bool) -> None:
        super().__init__(layer)
        self.is_depthwise = is_depthwise
        self.channels = int(layer.depthwise_kernel.shape[-2])
        self.groups = self.channels if is_depthwise else None

    def with_one(self, a: Array) -> Array:
        return a if self.is_depthwise else super().with_one(a)

    def rows(self, x: Array, g: Array) -> tuple[Array, Array]:
        depthwise, pointwise = (
            np.array(kernel, float)
            for kernel in (
                self.layer.depthwise_kernel, self.layer.pointwise_kernel
            )
        )  # fmt: skip
        g = g.reshape(1, len(g), -1, g.shape[-1])
        m = self.layer
        p = patches(x, m.kernel_size, m.strides, m.dilation_rate, m.padding)
        if self.is_depthwise:
            inner = g[0] @ pointwise.reshape(-1, g.shape[-1]).T
            return np.moveaxis(p, -1, 0), self.grouped(inner)
        kernel = depthwise.reshape(-1, *depthwise.shape[-2:])
        inner = np.einsum("nskc,kcm->nscm", p, kernel)
        return self.with_one(inner.reshape(1, *p.shape[:2], -1)), g


class TransposedView(View):
    """Inputs, and patches of the gradient for each input position."""

    def rows(self, x: Array, g: Array) -> tuple[Array, Array]:
        layer, g = self.layer, channels_last(self.layer, g)
        x = channels_last(layer, x)
        cells, outputs = x.shape[1:-1], g.shape[1:-1]
        grid = np.indices(cells).reshape(len(cells), -1, 1)
        offsets = np.indices(layer.kernel_size).reshape(len(cells), 1, -1)
        strides, dilation = (
            np.array(v)[:, None, None]
            for v in (layer.strides, layer.dilation_rate)
        )
        index = grid * strides + offsets * dilation
        extent = index.max((1, 2)) + 1
        # "same" crops the output, by an odd cell more at the end.
        crop = np.maximum(extent - outputs, 0) // 2
        ends = np.maximum(extent - crop - outputs, 0)
        pads = [(0, 0), *zip(crop, ends, strict=True), (0, 0)]
        columns = np.pad(g, pads)[(slice(None), *index)]
        a = x.reshape(1, len(x), -1, x.shape[-1])
        return a, columns.reshape(*a.shape[:3], -1)


class BiasView(View):
    """The bias of a transposed convolution."""

    def rows(self, x: Array, g: Array) -> tuple[None, Array]:
        g = channels_last(self.layer, g)
        return None, g.reshape(1, len(g), -1, g.shape[-1]).sum(2, keepdims=True)


def channels_last(layer: Any, value: Array) -> Array:
    is_first = layer.data_format == "channels_first"
    return np.moveaxis(value, 1, -1) if is_first else value


class EinsumView(View):
    """Labels of the kernel decide: contracted, produced, or groups."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        equation = layer.equation
        named = equation.split(",")[0].replace(".", "")
        hidden = "ZYXWVU"[: layer.input_spec.ndim - len(named)]
        left, self.out = equation.replace("...", hidden).split("->")
        self.into, kernel = left.split(",")
        self.g = [c for c in kernel if c in self.into and c in self.out]
        self.i = [c for c in kernel if c in self.into and c not in self.out]
        self.o = [c for c in kernel if c not in self.into]
        if self.g:
            size = dict(zip(kernel, layer.kernel.shape, strict=True))
            self.groups = math.prod(size[c] for c in self.g)

    def rows(self, x: Array, g: Array) -> tuple[Array, Array]:
        a = self.gather(x, self.into, self.i)
        return self.with_one(a), self.gather(g, self.out, self.o)

    def gather(self, value: Array, labels: str, last: list[str]) -> Array:
        # The batch is the first label of the input.
        own = {*self.g, self.into[0]}
        shared = [c for c in self.into if c in self.out and c not in own]
        order = [*self.g, self.into[0], *shared, *last]
        value = np.einsum(f"{labels}->{''.join(order)}", value)
        n = len(self.g)
        count = math.prod(value.shape[n + 1 : n + 1 + len(shared)])
        return value.reshape(self.groups or 1, value.shape[n], count, -1)


class NormalizationView(View):
    """Gradients of the scale and the offset of each feature and example."""

    def rows(self, x: Array, g: Array) -> tuple[None, Array]:
        layer = self.layer
        # RMSNormalization's `scale` is a variable, elsewhere it is a flag.
        scale = getattr(layer, "gamma", getattr(layer, "scale", None))
        hat, g = (self.features(v) for v in (self.normalized(x), g))
        parts = [(g * hat).sum(1)] * hasattr(scale, "shape")
        parts += [g.sum(1)] * (getattr(layer, "beta", None) is not None)
        self.groups = hat.shape[-1]
        return None, np.stack(parts, -1).swapaxes(0, 1)[:, :, None]

    def normalized(self, x: Array) -> Array:
        layer, shape, rank = self.layer, x.shape, x.ndim
        axes = [int(i) % rank for i in np.atleast_1d(layer.axis)]
        if isinstance(layer, layers.RMSNormalization):
            power = np.mean(x**2, axis=tuple(axes), keepdims=True)
            return np.asarray(x / np.sqrt(power + layer.epsilon))
        if isinstance(layer, layers.GroupNormalization):
            x = x.reshape(*shape[:-1], layer.groups, -1)
            axes = [i for i in range(1, rank + 1) if i != rank - 1]
        elif isinstance(layer, layers.BatchNormalization):
            axes = [i for i in range(rank) if i not in axes]
        centered = x - x.mean(tuple(axes), keepdims=True)
        variance = x.var(tuple(axes), keepdims=True)
        return (centered / np.sqrt(variance + layer.epsilon)).reshape(shape)

    def features(self, value: Array) -> Array:
        """(batch, shared, features)."""
        rank = value.ndim
        axes = [int(i) % rank for i in np.atleast_1d(self.layer.axis)]
        value = np.moveaxis(value, axes, range(rank - len(axes), rank))
        size = math.prod(value.shape[rank - len(axes) :])
        return value.reshape(len(value), -1, size)


class PReLUView(View):
    diagonal = "G"

    def rows(self, x: Array, g: Array) -> tuple[None, Array]:
        shared = tuple(self.layer.shared_axes or ())
        u = np.sum(g * np.minimum(x, 0), shared, keepdims=True)
        return None, u.reshape(1, len(x), 1, -1)


class StepsView(View):
    """View of a layer in a `TimeDistributed`: steps are positions."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        (self.inner,) = views_of(layer.layer)

    def rows(self, x: Array, g: Array) -> tuple[Array | None, Array]:
        folded = (v.reshape(-1, *v.shape[2:]) for v in (x, g))
        a, g = self.inner.rows(*folded)
        self.groups = self.inner.groups
        rows = [
            None if v is None else v.reshape(len(v), len(x), -1, v.shape[-1])
            for v in (a, g)
        ]
        if rows[0] is None:  # one row per example
            rows[1] = rows[1].sum(2, keepdims=True)
        return rows[0], rows[1]


def views_of(layer: Any) -> Iterator[View]:
    """A view of each block of a built layer."""
    if isinstance(layer, layers.TimeDistributed):
        yield StepsView(layer)
    elif isinstance(layer, layers.Dense):
        yield View(layer)
    elif isinstance(layer, layers.Embedding):
        yield EmbeddingView(layer)
    elif isinstance(layer, layers.EinsumDense):
        yield EinsumView(layer)
    elif isinstance(layer, layers.PReLU):
        yield PReLUView(layer)
    elif hasattr(layer, "epsilon"):
        yield NormalizationView(layer)
    elif hasattr(layer, "pointwise_kernel"):
        yield SeparableView(layer, True)
        yield SeparableView(layer, False)
    elif "Transpose" in type(layer).__name__:
        yield TransposedView(layer)
        if layer.use_bias:
            yield BiasView(layer)
    else:
        yield ConvView(layer)


# ----------------------------------------------------------------------- models
def make_input(
    case: str, shape: tuple[int, ...], batch: int, seed: int = 1
) -> Array:
    """Return float32 features, or repeated tokens for embeddings."""
    rng = np.random.default_rng(seed)
    if case.startswith("embedding"):
        return rng.integers(0, 4, size=(batch, *shape)).astype("int32")
    return (rng.normal(size=(batch, *shape)) + 0.3).astype("float32")


def targets(model: Any, x: Any, seed: int = 2) -> Array:
    """Noise in the shape of the model's output."""
    rng = np.random.default_rng(seed)
    noise: Array = rng.normal(size=model(x).shape).astype("float32")
    return noise


def problem(
    layer: keras.Layer, shape: tuple[int, ...], batch: int
) -> tuple[Any, Array, Array]:
    """A model of one layer, with inputs and targets."""
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layer(inputs))
    randomize(model)
    x = make_input("", shape, batch)
    return model, x, targets(model, x)


def slope_of(layer: keras.Layer, outputs: Any) -> Array:
    """Derivative of the layer's activation at its outputs."""
    layer = getattr(layer, "layer", layer)  # of a `TimeDistributed`
    name = getattr(getattr(layer, "activation", None), "__name__", None)
    values = np.asarray(outputs, np.float64)
    return SLOPES[None if name == "linear" else name](values)


def per_example(model: Any, x: Any, y: Array) -> dict[str, Array]:
    """Gradients of each l_n, `(batch, *shape)`, by path of the variable."""
    variables = model.trainable_variables
    rows: list[list[Array]] = []
    for n in range(len(y)):
        example = tf.nest.map_structure(lambda a, n=n: a[n : n + 1], x)
        with tf.GradientTape() as tape:
            outputs = model(example, training=True)
            value = half_squared_error(y[n : n + 1], outputs)
        gradients = tape.gradient(value, [v.value for v in variables])
        rows.append([np.asarray(g, np.float64) for g in gradients])
    stacks = [np.stack(column) for column in zip(*rows, strict=True)]
    return {v.path: g for v, g in zip(variables, stacks, strict=True)}
