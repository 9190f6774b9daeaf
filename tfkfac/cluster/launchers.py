"""Launchers of jobs: what the environment of a process says of its job.

Three things are needed: the address of worker 0, the number of workers and the
index of this one. `rendezvous.py` finds all other addresses. What a launcher
does not say, arguments or Keras' own variables have to.
"""

import dataclasses
import re
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from tfkfac.cluster.config import Cluster, split_address

Environment = Mapping[str, str]

# Above the ports that Linux gives to outgoing connections: that of worker 0 if
# nobody has chosen one, and the first of those of Slurm's jobs.
_PORT, _SLURM_PORT = 61_000, 61_001
_NO_PORT = re.compile(r"[^:]+|\[.*\]")


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of a job; each is None where it is not known.

    Attributes:
        coordinator: The address of worker 0, or of all workers with commas.
        num_processes: The number of workers, an integer or its digits.
        process_id: The index of this one, likewise.
    """

    coordinator: str | None = None
    num_processes: int | str | None = None
    process_id: int | str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.known().items())

    def known(self) -> dict[str, Any]:
        """Those of the three that are known."""
        return {k: v for k, v in vars(self).items() if v is not None}


class Launcher:
    """A source of what a process knows of its job, by variables.

    Attributes:
        name: Its name in messages.
        number: The variable with the number of workers.
        index: The variable with the index of this one.
        others: More variables that it sets.
    """

    name: ClassVar[str]
    number: ClassVar[str]
    index: ClassVar[str]
    others: ClassVar[tuple[str, ...]] = ()

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def __str__(self) -> str:
        read = ", ".join(f"{k}={v}" for k, v in self.variables().items())
        return f"{self.name} ({read})"

    def variables(self) -> dict[str, str]:
        """Those of its variables that are set."""
        names = (self.index, self.number, *self.others)
        return {n: v for n in names if (v := self.environment.get(n))}

    def is_there(self) -> bool:
        """True if it has started this process."""
        return len(self.variables()) == 2 + len(self.others)

    def member(self) -> Member:
        """This process, as it knows it."""
        known = self.variables()
        return Member(
            self.coordinator(), known.get(self.number), known.get(self.index)
        )

    def coordinator(self) -> str | None:
        """The address of worker 0, if it says."""
        return None


class Keras(Launcher):
    """The variables of `keras.distribution.initialize`, any of them."""

    name = "Keras"
    number = "KERAS_DISTRIBUTION_NUM_PROCESSES"
    index = "KERAS_DISTRIBUTION_PROCESS_ID"
    others = ("KERAS_DISTRIBUTION_JOB_ADDRESSES",)

    @override
    def is_there(self) -> bool:
        return bool(self.variables())

    @override
    def coordinator(self) -> str | None:
        return self.variables().get(self.others[0])


class Torchrun(Launcher):
    """PyTorch's launcher, and others that set the same variables."""

    name = "torchrun"
    number, index = "WORLD_SIZE", "RANK"
    others = ("MASTER_ADDR", "MASTER_PORT")

    @override
    def coordinator(self) -> str:
        """The next port where it listens at its own."""
        host, port = (self.environment[name] for name in self.others)
        if self.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = str(int(port) + 1)
        return f"{host}:{port}"


class OpenMPI(Launcher):
    """Open MPI's mpirun."""

    name = "Open MPI"
    number, index = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"


class Slurm(Launcher):
    """Slurm's srun; the batch script that calls it is no step of a job."""

    name = "Slurm"
    number, index = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
    others = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")

    @override
    def is_there(self) -> bool:
        # MPICH's mpirun has one task on each node, which starts the workers.
        tasks = self.environment.get(self.number)
        started = self.environment.get(MPICH.number, tasks)
        return super().is_there() and tasks == started

    @override
    def coordinator(self) -> str:
        """The first node, and a port that its other steps hardly have."""
        nodes, job, step = (self.environment[name] for name in self.others)
        number = 13 * int(job) + int(step)
        port = _SLURM_PORT + number % (2**16 - _SLURM_PORT)
        return f"{first_node(nodes)}:{port}"


class MPICH(Launcher):
    """MPICH's mpirun and others with the Process Management Interface."""

    name = "MPICH"
    number, index = "PMI_SIZE", "PMI_RANK"


class Kubernetes(Launcher):
    """An Indexed Job, also of a JobSet; the number is in Keras' variable."""

    name = "Kubernetes"
    number, index = Keras.number, "JOB_COMPLETION_INDEX"

    @override
    def is_there(self) -> bool:
        return self.index in self.variables()

    @override
    def coordinator(self) -> str | None:
        """This pod's name in its headless service, with the index 0."""
        host, _, service = socket.getfqdn().partition(".")
        job, _, index = host.rpartition("-")
        is_named = service and index == self.environment[self.index]
        return f"{job}-0.{service}" if is_named else None


# Asked in this order: what runs inside of another one comes before it.
LAUNCHERS = (Torchrun, OpenMPI, Slurm, MPICH, Kubernetes)


def find_cluster(
    environment: Environment, arguments: Member
) -> tuple[Cluster | None, str]:
    """The cluster of this process, and in words what was read.

    Each of the three things is taken from the arguments, else from Keras'
    variables, else from the first launcher that is there. Addresses that nobody
    says are empty. A process alone has no cluster.

    Raises:
        ValueError: If some are known but not all, or one is malformed.
    """
    keras = Keras(environment)
    started = (launcher(environment) for launcher in LAUNCHERS)
    launcher = next((one for one in started if one.is_there()), None)
    known = arguments.known()
    read = [f"arguments ({arguments})"] if known else []
    for source in (keras, launcher):
        if len(known) < 3 and source is not None and source.is_there():
            known = source.member().known() | known
            read.append(str(source))
    if read == [str(launcher)] and "num_processes" not in known:
        return None, f"{launcher} without {Keras.number}"
    if not read:
        is_batch = Slurm.others[1] in environment
        return None, "Slurm without srun" if is_batch else "no launcher"
    where = " and ".join(read)
    return _cluster(Member(**known), where), where


def _cluster(member: Member, where: str) -> Cluster | None:
    """The cluster of what is known; None if this is the only worker."""
    addresses = _addresses(member.coordinator, where)
    number = member.num_processes
    if number is None and len(addresses) > 1:
        number = len(addresses)
    size = _integer("num_processes", number, range(1, 2**31), where)
    if size == 1:
        return None
    index = _integer("process_id", member.process_id, range(size), where)
    if not addresses:
        raise _missing("coordinator", where)
    if len(addresses) not in (1, size):
        raise ValueError(
            f"`coordinator` must be one address, or those of all {size} "
            f"workers. Received: {where}"
        )
    return Cluster((*addresses, *[""] * (size - len(addresses))), index)


def _addresses(text: Any, where: str) -> tuple[str, ...]:
    """The addresses in a text, all with a port."""
    if text is None:
        return ()
    found = [str(one).strip() for one in str(text).split(",")]
    found = [
        f"{one}:{_PORT}" if _NO_PORT.fullmatch(one) else one for one in found
    ]
    try:
        for one in found:
            split_address(one)
    except ValueError as error:
        raise ValueError(
            f"`coordinator` must be 'host:port'. Received: {where}"
        ) from error
    if len(set(found)) < len(found):
        raise ValueError(
            f"`coordinator` must name no address twice. Received: {where}"
        )
    return tuple(found)


def _integer(name: str, value: Any, valid: range, where: str) -> int:
    """An integer, or its digits, in a range."""
    if value is None:
        raise _missing(name, where)
    if not str(value).isdecimal() or int(value) not in valid:
        raise ValueError(
            f"`{name}` must be an integer from {valid.start} to "
            f"{valid.stop - 1}. Received: {where}"
        )
    return int(value)


def _missing(name: str, where: str) -> ValueError:
    variable = {
        "coordinator": Keras.others[0],
        "num_processes": Keras.number,
        "process_id": Keras.index,
    }[name]
    return ValueError(
        f"A job of several workers needs `{name}`: pass it to "
        f"`tfkfac.MultiWorkerMirroredStrategy` or set `{variable}`. "
        f"Received: {where}"
    )


def first_node(nodes: str) -> str:
    """The first of a list of Slurm, as of "a[001-003,7]-ib,b1"."""
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
