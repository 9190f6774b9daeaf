"""What is measured of a machine."""

import time

import numpy as np

from tfkfac.cost import Machine
from tfkfac.cost.auto import measure_worker


def test_numbers_of_a_worker() -> None:
    """About the speed of NumPy; eigenvalues take longest."""
    machine = Machine(**measure_worker(), bandwidth=1.0, latency=0.0)
    assert min(machine.flops, machine.inverse) > machine.eigen > 1e6
    assert machine.memory > 1e7
    array = np.ones([512, 512], np.float32)
    start = time.perf_counter()
    for _ in range(4):
        array = array @ array / 512
    own = 4 * 2 * 512**3 / (time.perf_counter() - start)
    # Another library, another number of threads, a machine that is busy.
    assert own / 50 < machine.flops < 50 * own
