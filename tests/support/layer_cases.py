"""Layers with small input shapes for the tests of blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from keras import layers

from tests.support.reference import Array

# Function that makes the layer from its name, and the shape of one example.
Case = tuple[Callable[..., Any], tuple[int, ...]]

dense = partial(partial, layers.Dense)
conv1d = partial(partial, layers.Conv1D)
conv2d = partial(partial, layers.Conv2D)
conv3d = partial(partial, layers.Conv3D)
depthwise2d = partial(partial, layers.DepthwiseConv2D)
transposed1d = partial(partial, layers.Conv1DTranspose)
transposed2d = partial(partial, layers.Conv2DTranspose)
embedding = partial(partial, layers.Embedding)
batch_norm = partial(partial, layers.BatchNormalization)
layer_norm = partial(partial, layers.LayerNormalization)
group_norm = partial(partial, layers.GroupNormalization)
SAME: dict[str, Any] = {"padding": "same"}
CAUSAL: dict[str, Any] = {"padding": "causal"}
NO_BIAS: dict[str, Any] = {"use_bias": False}


def einsum(equation: str, shape: Any, bias: str | None = None) -> Any:
    return partial(layers.EinsumDense, equation, shape, bias_axes=bias)


DENSE: dict[str, Case] = {
    "dense_rank2": (dense(4), (5,)),
    "dense_rank3": (dense(4, activation="tanh"), (3, 5)),
    "dense_rank4": (dense(2, **NO_BIAS), (2, 3, 4)),
    "dense_1x1": (dense(1, **NO_BIAS), (1,)),
    "dense_units_1": (dense(1), (3,)),
}

CONV: dict[str, Case] = {
    "conv1d_causal_dilated": (conv1d(2, 3, dilation_rate=2, **CAUSAL), (8, 3)),
    "conv1d_causal_strided": (conv1d(2, 3, strides=2, **CAUSAL), (7, 2)),
    "conv2d_same_odd": (conv2d(3, 3, activation="tanh", **SAME), (4, 5, 2)),
    "conv2d_same_even_strided":
        (conv2d(2, (2, 4), strides=2, **SAME), (5, 6, 2)),
    "conv2d_same_strides_differ":
        (conv2d(2, 3, strides=(2, 1), **SAME, **NO_BIAS), (6, 4, 2)),
    "conv2d_valid_strides_leave_rest":
        (conv2d(2, (3, 2), strides=(3, 2)), (8, 7, 1)),
    "conv2d_strides_skip_input": (conv2d(3, 1, strides=3, **SAME), (7, 5, 2)),
    "conv2d_dilated_same":
        (conv2d(2, 3, dilation_rate=(2, 1), **SAME), (6, 5, 2)),
    "conv2d_kernel_wider_than_input": (conv2d(2, 5, **SAME), (3, 2, 1)),
    # Large enough for A by correlations, see `blocks/correlation.py`.
    "conv2d_correlated": (conv2d(2, 3, **SAME), (14, 14, 4)),
    "conv2d_1x1": (conv2d(3, 1), (3, 3, 4)),
    "conv3d_same":
        (conv3d(2, (2, 3, 1), strides=(1, 2, 2), **SAME), (3, 4, 3, 2)),
    "conv3d_valid": (conv3d(2, 2, **NO_BIAS), (3, 3, 2, 1)),
}  # fmt: skip

GROUPED: dict[str, Case] = {
    "conv1d_groups": (conv1d(4, 2, groups=2, **SAME), (5, 4)),
    "conv2d_groups": (conv2d(6, 3, groups=3, strides=2, **SAME), (5, 4, 6)),
    "depthwise1d": (partial(layers.DepthwiseConv1D, 3, **SAME), (6, 3)),
    "depthwise2d": (depthwise2d(3, depth_multiplier=2), (5, 4, 3)),
    "depthwise2d_same_strided": (
        depthwise2d((2, 3), strides=2, activation="tanh", **SAME, **NO_BIAS),
        (5, 6, 2),
    ),
    "depthwise2d_one_channel": (depthwise2d(2, depth_multiplier=3), (4, 3, 1)),
}

TRANSPOSED: dict[str, Case] = {
    "transposed1d_same_strided":
        (transposed1d(2, 3, strides=2, activation="tanh", **SAME), (4, 3)),
    "transposed2d_overlap": (transposed2d(2, (3, 2), strides=2), (3, 4, 2)),
    "transposed2d_same_output_padding": (
        transposed2d(2, (3, 4), strides=(3, 2), output_padding=(2, 1),
                     activation="relu", **SAME),
        (3, 2, 3),
    ),
    "transposed2d_gaps":
        (transposed2d(2, 2, strides=3, output_padding=1), (2, 3, 2)),
    "transposed2d_no_bias": (transposed2d(2, 3, **NO_BIAS), (3, 3, 1)),
    "transposed2d_one_position":
        (transposed2d(2, 3, activation="tanh"), (1, 1, 3)),
    "transposed3d": (
        partial(layers.Conv3DTranspose, 2, (2, 1, 3), strides=(1, 2, 2)),
        (2, 3, 2, 2),
    ),
}  # fmt: skip

EINSUM: dict[str, Case] = {
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
    "einsum_two_group_labels":
        (einsum("abcd,bcde->abce", (2, 3, 2)), (2, 3, 2)),
}  # fmt: skip

EMBEDDING: dict[str, Case] = {
    "embedding_token": (embedding(6, 3), ()),
    "embedding_sequence": (embedding(6, 3), (5,)),
    "embedding_rank3": (embedding(4, 2), (2, 3)),
    "embedding_reversible": (partial(layers.ReversibleEmbedding, 6, 3), (5,)),
}

LINEAR: dict[str, Case] = DENSE | CONV | GROUPED | EINSUM | EMBEDDING

NORMS: dict[str, Case] = {
    "batch_rank2": (batch_norm(), (3,)),
    "batch_image": (batch_norm(), (3, 2, 4)),
    "batch_axis_1": (batch_norm(axis=1), (3, 4)),
    "batch_no_scale": (batch_norm(scale=False), (2, 3)),
    "layer_rank2": (layer_norm(), (4,)),
    "layer_sequence": (layer_norm(), (3, 4)),
    "layer_two_axes": (layer_norm(axis=(-2, -1)), (2, 3, 4)),
    "layer_no_center": (layer_norm(center=False), (3, 4)),
    "group": (group_norm(2), (3, 2, 4)),
    "group_no_scale": (group_norm(3, scale=False), (4, 6)),
    "rms": (layers.RMSNormalization, (3, 4)),
}

PRELU: dict[str, Case] = {
    "prelu": (layers.PReLU, (5,)),
    "prelu_image": (layers.PReLU, (2, 3, 2)),
    "prelu_shared": (partial(layers.PReLU, shared_axes=[1, 2]), (2, 3, 2)),
    "prelu_shared_first": (partial(layers.PReLU, shared_axes=1), (3, 2)),
}


def make_input(
    case: str, shape: tuple[int, ...], batch: int, seed: int = 1
) -> Array:
    """Return float32 features, or repeated tokens for embeddings."""
    rng = np.random.default_rng(seed)
    if case.startswith("embedding"):
        return rng.integers(0, 4, size=(batch, *shape)).astype("int32")
    return (rng.normal(size=(batch, *shape)) + 0.3).astype("float32")
