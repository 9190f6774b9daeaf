"""The layers, with small input shapes, that the block tests run through."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from keras import layers

from tests.support.reference import Array

# name -> (layer without a name, shape of one example)
Case = tuple[Callable[..., Any], tuple[int, ...]]

DENSE: dict[str, Case] = {
    "dense_rank2": (partial(layers.Dense, 4), (5,)),
    "dense_rank3": (partial(layers.Dense, 4, activation="tanh"), (3, 5)),
    "dense_rank4": (partial(layers.Dense, 2, use_bias=False), (2, 3, 4)),
    "dense_1x1": (partial(layers.Dense, 1, use_bias=False), (1,)),
    "dense_units_1": (partial(layers.Dense, 1), (3,)),
}

CONV: dict[str, Case] = {
    "conv1d_causal_dilated": (
        partial(layers.Conv1D, 2, 3, padding="causal", dilation_rate=2),
        (8, 3),
    ),
    "conv1d_causal_strided": (
        partial(layers.Conv1D, 2, 3, padding="causal", strides=2),
        (7, 2),
    ),
    "conv2d_same_odd": (
        partial(layers.Conv2D, 3, 3, padding="same", activation="tanh"),
        (4, 5, 2),
    ),
    "conv2d_same_even_strided": (
        partial(layers.Conv2D, 2, (2, 4), strides=2, padding="same"),
        (5, 6, 2),
    ),
    "conv2d_same_strides_differ": (
        partial(
            layers.Conv2D,
            2,
            3,
            strides=(2, 1),
            padding="same",
            use_bias=False,
        ),
        (6, 4, 2),
    ),
    "conv2d_valid_strides_leave_rest": (
        partial(layers.Conv2D, 2, (3, 2), strides=(3, 2)),
        (8, 7, 1),
    ),
    "conv2d_strides_skip_input": (
        partial(layers.Conv2D, 3, 1, strides=3, padding="same"),
        (7, 5, 2),
    ),
    "conv2d_dilated_same": (
        partial(layers.Conv2D, 2, 3, dilation_rate=(2, 1), padding="same"),
        (6, 5, 2),
    ),
    "conv2d_kernel_wider_than_input": (
        partial(layers.Conv2D, 2, 5, padding="same"),
        (3, 2, 1),
    ),
    # Large enough for A by correlations, see `blocks/patches.py`.
    "conv2d_correlated": (
        partial(layers.Conv2D, 2, 3, padding="same"),
        (14, 14, 4),
    ),
    "conv2d_1x1": (partial(layers.Conv2D, 3, 1), (3, 3, 4)),
    "conv3d_same": (
        partial(layers.Conv3D, 2, (2, 3, 1), strides=(1, 2, 2), padding="same"),
        (3, 4, 3, 2),
    ),
    "conv3d_valid": (
        partial(layers.Conv3D, 2, 2, use_bias=False),
        (3, 3, 2, 1),
    ),
}

GROUPED: dict[str, Case] = {
    "conv1d_groups": (
        partial(layers.Conv1D, 4, 2, groups=2, padding="same"),
        (5, 4),
    ),
    "conv2d_groups": (
        partial(layers.Conv2D, 6, 3, groups=3, padding="same", strides=2),
        (5, 4, 6),
    ),
    "depthwise1d": (
        partial(layers.DepthwiseConv1D, 3, padding="same"),
        (6, 3),
    ),
    "depthwise2d": (
        partial(layers.DepthwiseConv2D, 3, depth_multiplier=2),
        (5, 4, 3),
    ),
    "depthwise2d_same_strided": (
        partial(
            layers.DepthwiseConv2D,
            (2, 3),
            strides=2,
            padding="same",
            use_bias=False,
            activation="tanh",
        ),
        (5, 6, 2),
    ),
    "depthwise2d_one_channel": (
        partial(layers.DepthwiseConv2D, 2, depth_multiplier=3),
        (4, 3, 1),
    ),
}

TRANSPOSED: dict[str, Case] = {
    "transposed1d_same_strided": (
        partial(
            layers.Conv1DTranspose,
            2,
            3,
            strides=2,
            padding="same",
            activation="tanh",
        ),
        (4, 3),
    ),
    "transposed2d_overlap": (
        partial(layers.Conv2DTranspose, 2, (3, 2), strides=2),
        (3, 4, 2),
    ),
    "transposed2d_same_output_padding": (
        partial(
            layers.Conv2DTranspose,
            2,
            (3, 4),
            strides=(3, 2),
            padding="same",
            output_padding=(2, 1),
            activation="relu",
        ),
        (3, 2, 3),
    ),
    "transposed2d_gaps": (
        partial(layers.Conv2DTranspose, 2, 2, strides=3, output_padding=1),
        (2, 3, 2),
    ),
    "transposed2d_no_bias": (
        partial(layers.Conv2DTranspose, 2, 3, use_bias=False),
        (3, 3, 1),
    ),
    "transposed2d_one_position": (
        partial(layers.Conv2DTranspose, 2, 3, activation="tanh"),
        (1, 1, 3),
    ),
    "transposed3d": (
        partial(layers.Conv3DTranspose, 2, (2, 1, 3), strides=(1, 2, 2)),
        (2, 3, 2, 2),
    ),
}


def _einsum(equation: str, shape: Any, bias: str | None = None) -> Any:
    return partial(layers.EinsumDense, equation, shape, bias_axes=bias)


EINSUM: dict[str, Case] = {
    "einsum_sequence": (_einsum("abc,cd->abd", (None, 2), "d"), (3, 4)),
    "einsum_ellipsis": (_einsum("...x,xy->...y", 3, "y"), (2, 3, 4)),
    "einsum_heads": (
        _einsum("abc,cde->abde", (None, 2, 3), "de"),
        (3, 4),
    ),
    "einsum_join_heads": (
        _einsum("abcd,cde->abe", (None, 4), "e"),
        (3, 2, 3),
    ),
    "einsum_mixed_kernel_order": (
        _einsum("abc,ecd->abde", (None, 2, 3), "de"),
        (2, 4),
    ),
    "einsum_moved_output": (
        _einsum("abc,cd->adb", (2, None), None),
        (3, 4),
    ),
    "einsum_mixes_positions": (
        _einsum("abc,bd->adc", (2, None), None),
        (3, 4),
    ),
    "einsum_groups": (_einsum("abc,bcd->abd", (2, 3), "bd"), (2, 4)),
    "einsum_groups_shared": (
        _einsum("abcd,cde->abce", (None, 3, 2), "ce"),
        (2, 3, 4),
    ),
    "einsum_two_group_labels": (
        _einsum("abcd,bcde->abce", (2, 3, 2), None),
        (2, 3, 2),
    ),
}

EMBEDDING: dict[str, Case] = {
    "embedding_token": (partial(layers.Embedding, 6, 3), ()),
    "embedding_sequence": (partial(layers.Embedding, 6, 3), (5,)),
    "embedding_rank3": (partial(layers.Embedding, 4, 2), (2, 3)),
    "embedding_reversible": (partial(layers.ReversibleEmbedding, 6, 3), (5,)),
}

LINEAR: dict[str, Case] = {
    **DENSE,
    **CONV,
    **GROUPED,
    **EINSUM,
    **EMBEDDING,
}

NORMS: dict[str, Case] = {
    "batch_rank2": (layers.BatchNormalization, (3,)),
    "batch_image": (layers.BatchNormalization, (3, 2, 4)),
    "batch_axis_1": (partial(layers.BatchNormalization, axis=1), (3, 4)),
    "batch_no_scale": (
        partial(layers.BatchNormalization, scale=False),
        (2, 3),
    ),
    "layer_rank2": (layers.LayerNormalization, (4,)),
    "layer_sequence": (layers.LayerNormalization, (3, 4)),
    "layer_two_axes": (
        partial(layers.LayerNormalization, axis=(-2, -1)),
        (2, 3, 4),
    ),
    "layer_no_center": (
        partial(layers.LayerNormalization, center=False),
        (3, 4),
    ),
    "group": (partial(layers.GroupNormalization, 2), (3, 2, 4)),
    "group_no_scale": (
        partial(layers.GroupNormalization, 3, scale=False),
        (4, 6),
    ),
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
    """Float32 features, or tokens with repetitions for embeddings."""
    rng = np.random.default_rng(seed)
    if case.startswith("embedding"):
        return rng.integers(0, 4, size=(batch, *shape)).astype("int32")
    return (rng.normal(size=(batch, *shape)) + 0.3).astype("float32")
