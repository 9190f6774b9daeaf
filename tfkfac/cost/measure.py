"""The numbers of a machine, from a few tenths of a second of work."""

import functools
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfkfac.cost.machine import Machine
from tfkfac.distributed.collectives import Communicator
from tfkfac.linalg.symmetric import damped_inverse, eigh

Clock = Callable[[], float]

# Sizes of the products and decompositions, elements of what is moved.
_PRODUCT, _EIGEN, _SMALL = 768, 512, 256
_MOVED = 2**22
# Bytes that tell the bandwidth between workers, and how often it is tried.
_SENT = 2**22
_TRIES = 3


def measure_worker(clock: Clock = time.perf_counter) -> dict[str, float]:
    """Times products, decompositions and the memory of this process.

    An inverse of size n takes `a n^3 + b n^2`, of which two sizes tell a and
    b. An eigen-decomposition has an a of its own, and takes long: it is timed
    of one size.

    Args:
        clock: What tells the time.

    Returns:
        The numbers of a `Machine` that are of one worker.
    """

    def seconds(work: Callable[..., tf.Tensor], *args: tf.Tensor) -> float:
        return _seconds(functools.partial(tf.function(work), *args), clock)

    large, small = _PRODUCT, _SMALL
    with tf.init_scope():
        rows = tf.random.stateless_normal([large, large], [0, 0])
        gram = tf.matmul(rows, rows, transpose_a=True) / large
        part, damping = gram[:small, :small], tf.constant(0.01)
        inverse = seconds(damped_inverse, gram, damping) / large**2
        little = seconds(damped_inverse, part, damping) / small**2
        # What disturbs one of the two must not leave nothing for n^3.
        slope = (inverse - little) / (large - small)
        cubic = min(max(slope, inverse / large / 4), inverse / large)
        element = inverse - cubic * large
        eigen = seconds(eigh, gram[:_EIGEN, :_EIGEN]) / _EIGEN**2
        return {
            "flops": 2 * large**3 / seconds(tf.matmul, rows, gram),
            "inverse": 1 / cubic,
            "eigen": _EIGEN / max(eigen - element, eigen / 2),
            "memory": 8 * _MOVED / seconds(lambda x: 2 * x, tf.ones([_MOVED])),
            "element": element,
        }


def measure_network(group: Communicator) -> dict[str, float]:
    """Times collectives. Every process of the group has to call it.

    Args:
        group: The collectives of this process with the others.

    Returns:
        The numbers of a `Machine` that are of what is between workers.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        large, one = tf.zeros([_SENT // 4]), tf.zeros([1])
        latency = _seconds(lambda: group.all_reduce([one])[0])
        seconds = _seconds(lambda: group.all_reduce([large])[0])
    # How often the latency and a byte count, by a machine of ones.
    bare = Machine.of(1.0, 1.0, 0.0).all_reduce(_SENT, group.size)
    hops = Machine.of(1.0, 1.0, 1.0).all_reduce(_SENT, group.size) - bare
    return {
        "latency": latency / hops,
        "bandwidth": bare / max(seconds - latency, 1e-9),
    }


def agree(numbers: dict[str, float], group: Communicator) -> dict[str, float]:
    """The mean of what all processes have found, the same on each of them.

    Args:
        numbers: What this process has found.
        group: The collectives of this process with the others.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        own = tf.constant(list(numbers.values()), tf.float32)
        every = np.asarray(group.all_gather(own), np.float64)
    return dict(zip(numbers, map(float, every.mean(0)), strict=True))


def _seconds(
    work: Callable[[], tf.Tensor], clock: Clock = time.perf_counter
) -> float:
    """Least time of some work, after a first time that does not count."""
    times = []
    for _ in range(_TRIES + 1):
        start = clock()
        tf.nest.map_structure(lambda tensor: tensor.numpy(), work())
        times.append(clock() - start)
    return min(times[1:])
