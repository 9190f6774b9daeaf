"""Every node of a training step can run on a GPU.

There is none here; TensorFlow's registry of kernels answers. Steps of several
replicas are in tests/distributed/test_collectives.py.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfkfac
from tests.support.gpu_kernels import REPORTS, without_gpu_kernel

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": lambda: tfkfac.KFAC(),
    "eigen": lambda: tfkfac.KFAC(solver="eigen"),
    "half": lambda: tfkfac.KFAC(
        distribution=tfkfac.Distribution(
            factor_dtype="bfloat16", inverse_dtype="bfloat16"
        )
    ),
    "sketch": lambda: tfkfac.KFAC(max_factor_dim=10, factor_rank=3),
    "sketch, eigen": lambda: tfkfac.KFAC(
        solver="eigen", max_factor_dim=10, factor_rank=3
    ),
    "fosi": lambda: tfkfac.FOSI(
        num_largest=2, num_smallest=1, warmup_steps=1, lanczos_steps=4
    ),
}


SLOW = pytest.mark.slow


def images() -> tuple[Any, Any]:
    return np.ones((4, 6, 6, 2), "float32"), keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(3, 3, padding="same"),
            layers.BatchNormalization(),
            layers.DepthwiseConv2D(2),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def tokens() -> tuple[Any, Any]:
    inputs = keras.Input((4,), dtype="int32")
    h = layers.Embedding(5, 4)(inputs)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 2)(h, h))
    h = layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d")(h)
    h = layers.Conv1D(3, 2)(h)
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(h))
    return np.ones((4, 4), "int32"), keras.Model(inputs, outputs)


def graph_of(
    network: Callable[[], tuple[Any, Any]], optimizer: str, jit: bool
) -> tf.Graph:
    x, model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss)
    step = tf.function(model.train_step, autograph=False, jit_compile=jit)
    return step.get_concrete_function((x, np.zeros(4, "int32"))).graph


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [
        (images, "sketch"),
        (images, "fosi"),
        pytest.param(images, "inverse", marks=SLOW),
        pytest.param(images, "sketch, eigen", marks=SLOW),
        pytest.param(tokens, "eigen", marks=SLOW),
        pytest.param(images, "eigen", marks=SLOW),
        pytest.param(images, "half", marks=SLOW),
        pytest.param(tokens, "inverse", marks=SLOW),
        pytest.param(tokens, "fosi", marks=SLOW),
    ],
)
def test_compiled_by_xla(network: Any, optimizer: str) -> None:
    """As Keras does on one GPU."""
    assert without_gpu_kernel(graph_of(network, optimizer, jit=True)) == set()


def test_not_compiled() -> None:
    """The event reports are strings; they run on the host."""
    graph = graph_of(images, "eigen", jit=False)
    assert without_gpu_kernel(graph) == REPORTS


def test_the_registry_knows_what_a_gpu_cannot_do() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return tf.unique_with_counts(tf.strings.length(tf.as_string(x)))[2]

    graph = function.get_concrete_function(tf.ones(3)).graph
    assert "AsString" in without_gpu_kernel(graph)
