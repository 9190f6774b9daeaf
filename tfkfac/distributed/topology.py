"""The replicas of a job: which live in this process, and their roles."""

import dataclasses
import math

import tensorflow as tf

from tfkfac.compat.strategies import local_devices

_UNSUPPORTED = (
    tf.distribute.TPUStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.experimental.TPUStrategy,
    tf.distribute.experimental.ParameterServerStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The replicas of a job that are kept in sync.

    Attributes:
        replicas: Number of replicas.
        local: Ranks of those in this process.
        devices: The device of each of them; None is TensorFlow's choice.
        hint: Communication hint for collectives, the one place where GPUs
            and CPUs differ.
    """

    replicas: int
    local: tuple[int, ...]
    devices: tuple[str | None, ...]
    hint: str

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.replicas // len(self.local)

    @property
    def process(self) -> int:
        """Position of this process among all."""
        return self.process_of(self.local[0])

    def process_of(self, rank: int) -> int:
        """The process of a replica."""
        return rank // len(self.local)


def find_topology(strategy: tf.distribute.Strategy) -> Topology:
    """The topology of a strategy.

    Raises:
        ValueError: If the strategy is of a kind that is not supported.
    """
    check_strategy(strategy)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return Topology(1, (0,), (None,), "auto")
    devices = local_devices(strategy)
    first = 0
    if replicas > len(devices):
        first = len(devices) * task_position(strategy.cluster_resolver)
    local = tuple(range(first, first + len(devices)))
    on_gpus = all("GPU" in device.upper() for device in devices)
    return Topology(replicas, local, devices, "nccl" if on_gpus else "auto")


def task_position(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> int:
    """Position of this task among the workers; a chief comes first."""
    cluster = resolver.cluster_spec().as_dict()
    if resolver.task_type == "chief":
        return 0
    return len(cluster.get("chief", ())) + resolver.task_id


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raises a ValueError for a strategy that K-FAC cannot train under."""
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
    """The replicas of a job by their role.

    Attributes:
        workers: Ranks of those that train.
        accelerators: Ranks of those that compute curvature beside them. If
            there are none, the workers do it between their steps.
    """

    workers: tuple[int, ...]
    accelerators: tuple[int, ...] = ()

    def trains(self, rank: int) -> bool:
        """True if a replica is a worker."""
        return rank in self.workers

    def peers(self, rank: int) -> tuple[int, ...]:
        """Ranks of the replicas with the role of `rank`, itself among them."""
        return self.workers if self.trains(rank) else self.accelerators


def assign_roles(replicas: int, accelerator_fraction: float) -> Roles:
    """Roles in which the last replicas, a whole number, are accelerators.

    Raises:
        ValueError: If one of the roles would be left out.
    """
    if accelerator_fraction == 0:
        return Roles(tuple(range(replicas)))
    count = math.floor(accelerator_fraction * replicas + 0.5)
    if not 0 < count < replicas:
        missing = "accelerator" if count == 0 else "worker"
        raise ValueError(
            "Argument `accelerator_fraction` must leave at least one worker "
            f"and one accelerator of {replicas} replicas, or be 0: there "
            f"would be no {missing}. "
            f"Received: accelerator_fraction={accelerator_fraction}"
        )
    everyone = tuple(range(replicas))
    return Roles(everyone[: replicas - count], everyone[replicas - count :])
