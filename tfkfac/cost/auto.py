"""`distribution="auto"`: a measured machine, and the quickest mode on it.

The mode changes how long a step takes, never its result: "dp_kfac" has factors
of another batch, and is the user's to choose.
"""

import dataclasses
import functools
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfkfac.cost.estimate import (
    Candidate,
    Workload,
    candidates,
    compare_plans,
    recommend,
)
from tfkfac.cost.machine import Machine
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.plan import MODES
from tfkfac.distributed.topology import Topology
from tfkfac.linalg.symmetric import damped_inverse, eigh

# Machines of which nothing has been measured: of a core with a network of 1
# Gbit/s, of a GPU with one of 100 Gbit/s.
_ASSUMED = {
    "auto": Machine.of(1e11, 1.25e8, 1e-4, tree_broadcast=True),
    "nccl": Machine.of(1e13, 1.25e10, 1e-5),
}
# Sizes of the products and decompositions, elements that are moved, bytes of
# the message that gives the bandwidth, and number of tries.
_LARGE, _EIGEN, _SMALL = 768, 512, 256
_MOVED, _SENT, _TRIES = 2**22, 2**22, 3


def choose(
    load: Workload,
    solver: str,
    topology: Topology,
    machine: Machine | None,
    intervals: tuple[int, int],
) -> tuple[Candidate, list[str]]:
    """The quickest distribution of the same method, and lines that say why.

    A machine of None is an assumed one. Intervals are those of the factors and
    of decompositions, in steps.
    """
    workers = topology.replicas
    if workers == 1:
        text = "Distribution: comm_opt, as there is one worker."
        return Candidate("comm_opt", None, solver), [text]
    work = "assumed" if machine is None else "measured"
    is_unseen = topology.processes == 1 or topology.hint == "nccl"
    sent = "assumed" if is_unseen else work
    machine = machine or _ASSUMED[topology.hint]
    same = [name for name, mode in MODES.items() if mode.reduces_factors]
    some = list(candidates(workers, [solver], same))
    found = compare_plans(load, some, machine, workers)
    best = recommend(found, *intervals).candidate
    return best, [
        f"Distribution: {best.text}, chosen by what K-FAC adds to a step at "
        f"intervals {intervals[0]} and {intervals[1]}:",
        *(
            f"  {one.candidate.text}: "
            f"{1e3 * one.amortised(*intervals):.3g} ms, "
            f"{one.state['total'] / 2**20:.3g} MB of state"
            for one in found
        ),
        f"with {machine.flops / 1e9:.3g} GFLOP/s, {work}, and "
        f"{machine.bandwidth / 1e9:.3g} GB/s and "
        f"{1e6 * machine.latency:.3g} us between workers, {sent}.",
    ]


def measure_machine(topology: Topology, group: Communicator) -> Machine:
    """The machine of a job; all of its processes have to call this."""
    numbers: dict[str, Any] = measure_worker()
    if len(topology.local) > 1:  # the replicas share a memory
        numbers["bandwidth"] = numbers["memory"]
    if topology.processes > 1:
        with tf.init_scope(), tf.device("CPU:0"):
            if topology.hint != "nccl":  # which the CPU's do not show
                numbers |= _measure_network(group)
            own = tf.constant(list(numbers.values()), tf.float32)
            mean = np.asarray(group.all_gather(own), np.float64).mean(0)
        numbers = dict(zip(numbers, map(float, mean), strict=True))
    return dataclasses.replace(_ASSUMED[topology.hint], **numbers)


def measure_worker(
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """The numbers of a `Machine` that belong to one worker, by a clock.

    An inverse of size n takes `a n^3 + b n^2`, and two sizes give a and b; an
    eigen-decomposition, which takes long, has an a of its own and one size.
    """

    def seconds(work: Callable[..., tf.Tensor], *args: tf.Tensor) -> float:
        return _seconds(functools.partial(tf.function(work), *args), clock)

    with tf.init_scope():
        rows = tf.random.stateless_normal([_LARGE, _LARGE], [0, 0])
        gram = tf.matmul(rows, rows, transpose_a=True) / _LARGE
        part, damping = gram[:_SMALL, :_SMALL], tf.constant(0.01)
        inverse = seconds(damped_inverse, gram, damping) / _LARGE**2
        little = seconds(damped_inverse, part, damping) / _SMALL**2
        # Noise in one of the two must leave something for n^3.
        slope = (inverse - little) / (_LARGE - _SMALL)
        cubic = min(max(slope, inverse / _LARGE / 4), inverse / _LARGE)
        element = inverse - cubic * _LARGE
        eigen = seconds(eigh, gram[:_EIGEN, :_EIGEN]) / _EIGEN**2
        return {
            "flops": 2 * _LARGE**3 / seconds(tf.matmul, rows, gram),
            "inverse": 1 / cubic,
            "eigen": _EIGEN / max(eigen - element, eigen / 2),
            "memory": 8 * _MOVED / seconds(lambda x: 2 * x, tf.ones([_MOVED])),
            "element": element,
        }


def _measure_network(group: Communicator) -> dict[str, float]:
    """Bandwidth and latency between the processes of a group."""
    latency, seconds = (
        _seconds(functools.partial(group.all_reduce, [tf.zeros([size])]))
        for size in (1, _SENT // 4)
    )
    # How often the latency and a byte count, by a machine of ones.
    bare = Machine.of(1.0, 1.0, 0.0).all_reduce(_SENT, group.size)
    hops = Machine.of(1.0, 1.0, 1.0).all_reduce(_SENT, group.size) - bare
    rest = max(seconds - latency, 1e-9)
    return {"latency": latency / hops, "bandwidth": bare / rest}


def _seconds(
    work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """The least time of some work, after a first time that does not count."""

    def run() -> None:
        tf.nest.map_structure(lambda tensor: tensor.numpy(), work())

    times = timeit.repeat(run, timer=clock, number=1, repeat=_TRIES + 1)
    return min(times[1:])
