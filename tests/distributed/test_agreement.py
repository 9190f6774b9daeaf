"""Agreement and training of several processes with several devices."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfkfac
from tests.support.cluster import run
from tests.support.collectives import batches, build

EXTENDED = collective_all_reduce_strategy.CollectiveAllReduceExtended
OPTIMIZERS = ("hybrid_opt", "dp_kfac", "rows", "accelerator")


def two_devices(_: Any, resolver: Any, worker: str) -> Any:
    return tuple(f"{worker}/device:CPU:{i}" for i in range(2)), "CPU"


def train() -> dict[str, Any]:
    """Train a model with each optimizer on two devices of each process.

    TensorFlow's strategy uses one CPU of each process. With the patch it uses
    two, as on hosts with several GPUs.
    """
    with mock.patch.object(EXTENDED, "_initialize_local_devices", two_devices):
        grid = tfkfac.MultiWorkerMirroredStrategy()
    assert grid.num_replicas_in_sync == 4
    results = {}
    for name in OPTIMIZERS:
        model = build(grid, name, [5])
        model.fit(batches(6), verbose=0)
        results[name] = [
            [np.asarray(v) for v in grid.experimental_local_results(w.value)]
            for w in model.trainable_variables
        ]
    return results


@pytest.mark.slow
def test_two_processes_of_two_devices() -> None:
    """All four replicas have equal bits, and nearly those of one process."""
    first, second = run(train, workers=2, devices=2)
    for name in OPTIMIZERS:
        for ours, theirs in zip(first[name], second[name], strict=True):
            for copy in (*ours, *theirs):
                np.testing.assert_array_equal(copy, ours[0])
    # DP-KFAC and accelerators are other algorithms with several replicas.
    for name in ("hybrid_opt", "rows"):
        alone = build(tf.distribute.get_strategy(), name, [5])
        alone.fit(batches(6), verbose=0)
        for ours, want in zip(first[name], alone.get_weights(), strict=True):
            np.testing.assert_allclose(ours[0], want, atol=1e-5)
