"""Who takes part in the training, and which of them live in this process."""

import dataclasses

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

    def position(self, rank: int) -> int:
        """Position of a rank among those of this process."""
        return self.local.index(rank)

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
    """Reads the topology off a strategy.

    Args:
        strategy: The default strategy, a `MirroredStrategy` or a
            `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: If the strategy is of another kind.
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
    """Refuses strategies that K-FAC cannot train under.

    Raises:
        ValueError: If the strategy is not synchronous data parallelism with
            mirrored variables.
    """
    if isinstance(strategy, _UNSUPPORTED):
        raise ValueError(
            "The distribution strategy must be a `MirroredStrategy` or a "
            "`tfkfac.MultiWorkerMirroredStrategy`; TPUs, parameter servers "
            "and central storage are not supported. Received: strategy="
            f"{strategy}"
        )
