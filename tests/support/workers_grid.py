"""Several processes with several devices each, as hosts with GPUs are.

TensorFlow's strategy for several workers takes one CPU of each only. Here it
is told of two, which is as near as CPUs come to it.
"""

from typing import Any
from unittest import mock

import numpy as np
from tensorflow.python.distribute import collective_all_reduce_strategy

import tfkfac
from tests.support.workers_collectives import batches, build

EXTENDED = collective_all_reduce_strategy.CollectiveAllReduceExtended


def two_devices(_: Any, resolver: Any, worker: str) -> Any:
    return tuple(f"{worker}/device:CPU:{i}" for i in range(2)), "CPU"


def train(names: list[str]) -> dict[str, Any]:
    """Trains a model with each of some optimizers."""
    with mock.patch.object(EXTENDED, "_initialize_local_devices", two_devices):
        strategy = tfkfac.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 4
    results = {}
    for name in names:
        model = build(strategy, name, [5])
        model.fit(batches(6), verbose=0)
        copies = [
            [
                np.asarray(v)
                for v in strategy.experimental_local_results(w.value)
            ]
            for w in model.trainable_variables
        ]
        results[name] = copies
    return results
