"""A cluster in a few numbers, and how long its collectives take."""

import dataclasses
import math
from typing import Any, Self

from tfkfac.checks import check_positive, check_range

# What is not known of a machine, in terms of its products of matrices: orders
# of magnitude, of which CPUs and GPUs are on different sides.
_INVERSE, _EIGEN, _MEMORY = 5.0, 150.0, 20.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds of the workers, which are all alike, and of their network.

    Attributes:
        flops: Floating point operations a second of products of matrices.
        inverse: Cholesky inverses of a large size n: n^3 a second.
        eigen: Eigen-decompositions of a large size n: n^3 a second.
        memory: Bytes a second that pass by where little is computed.
        bandwidth: Bytes a second that a worker receives.
        latency: Seconds until a small message is there.
        overhead: Seconds of a step that are none of these.
        element: Seconds for each of the n^2 elements that is decomposed,
            besides: of small matrices most.
        tree_broadcast: True if a broadcast goes down a tree, as TensorFlow's
            own between CPUs. NCCL's, between GPUs, goes round a ring.
    """

    flops: float
    inverse: float
    eigen: float
    memory: float
    bandwidth: float
    latency: float
    overhead: float = 0.0
    element: float = 0.0
    tree_broadcast: bool = False

    def __post_init__(self) -> None:
        for name in ("flops", "inverse", "eigen", "memory", "bandwidth"):
            check_positive(name, getattr(self, name))
        for name in ("latency", "overhead", "element"):
            check_range(name, getattr(self, name), 0.0)

    @classmethod
    def of(
        cls, flops: float, bandwidth: float, latency: float, **known: Any
    ) -> Self:
        """A machine of which only the usual three numbers are known.

        A Cholesky inverse of size n is taken for as long as products of 5 n^3
        operations, an eigen-decomposition of 150 n^3, and a byte of memory for
        20 operations.

        Args:
            flops: See the attributes.
            bandwidth: See the attributes.
            latency: See the attributes.
            **known: Others that are known.
        """
        flops = check_positive("flops", flops)
        guessed = {
            "inverse": flops / _INVERSE,
            "eigen": flops / _EIGEN,
            "memory": flops / _MEMORY,
        }
        return cls(
            flops=flops,
            bandwidth=bandwidth,
            latency=latency,
            **{**guessed, **known},
        )

    def products(self, multiplications: float) -> float:
        """Seconds of products of matrices.

        Args:
            multiplications: Their number; an addition comes with each.
        """
        return 2 * multiplications / self.flops

    def all_reduce(self, size: float, workers: int, messages: int = 1) -> float:
        """Seconds in which workers add up `size` bytes, in some messages.

        Each receives the data twice but for its own part. In a ring a message
        makes `2 (P - 1)` hops, up and down a tree `2 log2 P`: libraries take
        what is quicker.

        Args:
            size: Bytes that are added up.
            workers: Number of workers.
            messages: Number of messages.
        """
        if workers == 1 or not size:
            return 0.0
        ring = 2 * (workers - 1)
        tree = 2 * math.ceil(math.log2(workers))
        received = 2 * size * (workers - 1) / workers
        hops = messages * min(ring, tree)
        return received / self.bandwidth + hops * self.latency

    def broadcast(self, size: float, members: int, messages: int = 1) -> float:
        """Seconds in which a worker receives `size` bytes of others.

        Round a ring a message makes `P - 1` hops, down a tree `log2 P`.

        Args:
            size: Bytes that it receives.
            members: Size of the groups in which they are sent.
            messages: Number of messages.
        """
        if members == 1 or not size:
            return 0.0
        tree = self.tree_broadcast
        hops = math.ceil(math.log2(members)) if tree else members - 1
        return size / self.bandwidth + messages * hops * self.latency
