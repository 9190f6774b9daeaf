"""Replicas of a job: ranks and devices of this process, and roles."""

import dataclasses
import math

import tensorflow as tf

from tfkfac.compat.strategies import local_devices, uses_ring

_UNSUPPORTED = (
    tf.distribute.TPUStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The synchronous replicas of a job."""

    replicas: int  # number of replicas
    local: tuple[int, ...]  # ranks of the replicas in this process
    devices: tuple[str | None, ...]  # devices of local replicas; None: default
    hint: str  # hint for collectives: "nccl" or "ring" on GPUs, else "auto"

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.replicas // len(self.local)

    @property
    def process(self) -> int:
        """Index of this process in the job."""
        return self.process_of(self.local[0])

    def process_of(self, rank: int) -> int:
        """Index of the process of a replica."""
        return rank // len(self.local)


def find_topology(strategy: tf.distribute.Strategy) -> Topology:
    """Return the topology of a strategy."""
    check_strategy(strategy)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return Topology(1, (0,), (None,), "auto")
    devices = local_devices(strategy)
    process = 0
    if replicas > len(devices):
        resolver = strategy.cluster_resolver
        if resolver.task_type != "chief":
            cluster = resolver.cluster_spec().as_dict()
            process = len(cluster.get("chief", ())) + resolver.task_id
    first_rank = len(devices) * process
    local = tuple(range(first_rank, first_rank + len(devices)))
    hint = "auto"
    if all("GPU" in device.upper() for device in devices):
        hint = "ring" if uses_ring(strategy) else "nccl"
    return Topology(replicas, local, devices, hint)


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raise a ValueError if a strategy is not supported."""
    if isinstance(strategy, _UNSUPPORTED):
        raise ValueError(
            "The distribution strategy must be a `MirroredStrategy` or a "
            "`tfkfac.MultiWorkerMirroredStrategy`; TPUs, parameter servers "
            "and central storage are not supported. Received: strategy="
            f"{strategy}"
        )


# ------------------------------------------------------------------ roles
@dataclasses.dataclass(frozen=True)
class Roles:
    """Ranks of the workers, and of the accelerators of MR-DHO2."""

    workers: tuple[int, ...]
    accelerators: tuple[int, ...] = ()

    def trains(self, rank: int) -> bool:
        """Return True if a replica is a worker, not an accelerator."""
        return rank in self.workers

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of all replicas with the same role as `rank`."""
        return self.workers if self.trains(rank) else self.accelerators


def assign_roles(replicas: int, accelerator_fraction: float) -> Roles:
    """Make a fraction of the replicas, the last ones, accelerators."""
    count = math.floor(accelerator_fraction * replicas + 0.5)
    if accelerator_fraction != 0 and not 0 < count < replicas:
        missing = "accelerator" if count == 0 else "worker"
        raise ValueError(
            "Argument `accelerator_fraction` must leave at least one worker "
            f"and one accelerator of {replicas} replicas, or be 0: there "
            f"would be no {missing}. "
            f"Received: accelerator_fraction={accelerator_fraction}"
        )
    ranks = tuple(range(replicas))
    return Roles(ranks[: replicas - count], ranks[replicas - count :])
