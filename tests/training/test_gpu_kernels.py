"""Every node of a training step has a GPU kernel.

Tested without a GPU, by TensorFlow's kernel registry. For steps of several
replicas see tests/distributed/test_collectives.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.gpu_kernels import REPORTS, without_gpu_kernel
from tests.support.small import loss
from tests.training.test_xla import NETWORKS

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "inverse": tfkfac.KFAC,
    "half": lambda: tfkfac.KFAC(
        step="natural",
        distribution=tfkfac.Distribution(
            factor_dtype="bfloat16", inverse_dtype="bfloat16"
        ),
    ),
    "spectral": lambda: tfkfac.KFAC(step="spectral"),
    "sketch": lambda: tfkfac.KFAC(
        step="natural", solver="eigen", max_factor_dim=10
    ),
    "fosi": lambda: tfkfac.FOSI(
        num_largest=2, num_smallest=1, warmup_steps=1, lanczos_steps=4
    ),
}


def missing(network: str, optimizer: str, jit: bool) -> set[str]:
    """Operations of a step without a GPU kernel."""
    model = NETWORKS[network]()
    model.compile(OPTIMIZERS[optimizer](), loss())
    step = tf.function(model.train_step, autograph=False, jit_compile=jit)
    (inputs,) = model.inputs
    x = np.ones((4, *inputs.shape[1:]), inputs.dtype)
    graph = step.get_concrete_function((x, np.zeros(4, "int32"))).graph
    return without_gpu_kernel(graph)


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [
        ("images", "sketch"),
        pytest.param("tokens", "spectral", marks=pytest.mark.slow),
        pytest.param("images", "half", marks=pytest.mark.slow),
        pytest.param("tokens", "fosi", marks=pytest.mark.slow),
    ],
)
def test_compiled_by_xla(network: str, optimizer: str) -> None:
    """Steps compiled by XLA, Keras' default on one GPU."""
    assert missing(network, optimizer, jit=True) == set()


def test_not_compiled() -> None:
    """Only the event reports, which are strings, run on the host."""
    assert missing("rows", "inverse", jit=False) == REPORTS


def test_the_registry_knows_what_a_gpu_cannot_do() -> None:
    @tf.function
    def function(x: tf.Tensor) -> tf.Tensor:
        return tf.unique_with_counts(tf.strings.length(tf.as_string(x)))[2]

    graph = function.get_concrete_function(tf.ones(3)).graph
    assert "AsString" in without_gpu_kernel(graph)
