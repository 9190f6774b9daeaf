"""Launchers of jobs: what the environment of a process says of its job.

Three things are needed: the address of worker 0, the number of workers and the
index of this one. `rendezvous.py` finds all other addresses. What a launcher
does not say, arguments or Keras' own variables have to.
"""

import re
import socket
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from tfkfac.cluster.config import MOST_WORKERS, Cluster, split_address

Environment = Mapping[str, str]

# The three things, and Keras' variables of them. The first may have the
# addresses of all workers, with commas.
KERAS = {
    "coordinator": "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "num_processes": "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "process_id": "KERAS_DISTRIBUTION_PROCESS_ID",
}
# Above the ports that Linux gives to outgoing connections: that of worker 0 if
# nobody has chosen one, and the first of those of Slurm's jobs.
_PORT, _SLURM_PORT = 61_000, 61_001
_HAS_PORT = re.compile(r":[^\]]*$")


class Launcher:
    """A source of the three things, in variables.

    Attributes:
        name: Its name in messages.
        number: The variable with the number of workers, if there is one.
        index: The variable with the index of this one.
        others: More variables that it sets.
        identity: Variables that together identify the job, if it sets them.
    """

    name: ClassVar[str]
    index: ClassVar[str]
    number: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()
    identity: ClassVar[tuple[str, ...]] = ()

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

    def known(self) -> dict[str, Any]:
        """Those of the three things that it says."""
        read = self.variables().get
        found = (self.coordinator(), read(self.number), read(self.index))
        return {k: v for k, v in zip(KERAS, found, strict=True) if v}

    def coordinator(self) -> str | None:
        """The address of worker 0, if it says."""
        return None

    def job(self) -> str:
        """Return the identity of the job; "" if the launcher has none."""
        values = [self.environment.get(name) for name in self.identity]
        identity = ".".join(filter(None, values))
        return f"{self.name} {identity}" if identity else ""


class Keras(Launcher):
    """The variables of `keras.distribution.initialize`, any of them."""

    name = "Keras"
    first, number, index = KERAS.values()
    others = (first,)

    @override
    def is_there(self) -> bool:
        return bool(self.variables())

    @override
    def coordinator(self) -> str | None:
        return self.environment.get(self.first)


class Torchrun(Launcher):
    """PyTorch's launcher, and others that set the same variables."""

    name = "torchrun"
    number, index = "WORLD_SIZE", "RANK"
    others = ("MASTER_ADDR", "MASTER_PORT")
    identity = ("TORCHELASTIC_RUN_ID",)

    @override
    def coordinator(self) -> str:
        """The next port where it listens at its own."""
        host, port = (self.environment[name] for name in self.others)
        has_store = self.environment.get("TORCHELASTIC_USE_AGENT_STORE")
        if has_store == "True" and _is_number(port):
            port = str(int(port) + 1)
        return f"{host}:{port}"

    @override
    def job(self) -> str:
        # "none" is the default of `torchrun --rdzv-id`.
        run = self.environment.get(*self.identity, "none")
        return "" if run == "none" else super().job()


class OpenMPI(Launcher):
    """Open MPI's mpirun."""

    name = "Open MPI"
    number, index = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    identity = ("PMIX_NAMESPACE",)


class Slurm(Launcher):
    """Slurm's srun; the batch script that calls it is no step of a job."""

    name = "Slurm"
    number, index = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
    others = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
    identity = others[1:]

    @override
    def is_there(self) -> bool:
        # MPICH's mpirun has one task on each node, which starts the workers.
        tasks = self.environment.get(self.number)
        started = self.environment.get(MPICH.number, tasks)
        return super().is_there() and tasks == started

    @override
    def coordinator(self) -> str | None:
        """The first node, and a port that its other steps hardly have."""
        nodes, job, step = (self.environment[name] for name in self.others)
        if not (_is_number(job) and _is_number(step)):
            return None
        number = 13 * int(job) + int(step)
        port = _SLURM_PORT + number % (2**16 - _SLURM_PORT)
        return f"{first_node(nodes)}:{port}"


class MPICH(Launcher):
    """MPICH's mpirun and others with the Process Management Interface."""

    name = "MPICH"
    number, index = "PMI_SIZE", "PMI_RANK"
    # MPICH has no job id. The allocation in which it runs has one of these.
    identity = ("SLURM_JOB_ID", "PBS_JOBID")


class Kubernetes(Launcher):
    """An Indexed Job, also of a JobSet. It does not say the number."""

    name, index = "Kubernetes", "JOB_COMPLETION_INDEX"

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
    environment: Environment, arguments: Mapping[str, Any]
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
    known, read, job = dict(arguments), [], ""
    if known:
        given = ", ".join(f"{k}={v}" for k, v in known.items())
        read.append(f"arguments ({given})")
    for source in (keras, launcher):
        if len(known) < 3 and source is not None and source.is_there():
            known = source.known() | known
            read.append(str(source))
            job = source.job()
    where = " and ".join(read)
    if where == str(launcher) and "num_processes" not in known:
        return None, f"{where} without {keras.number}"
    if not read:
        is_batch = Slurm.others[1] in environment
        return None, "Slurm without srun" if is_batch else "no launcher"
    return _cluster(known, where, job), where


def _cluster(known: dict[str, Any], where: str, job: str) -> Cluster | None:
    """The cluster of what is known; None if this is the only worker."""
    first = known.get("coordinator", "")
    if not isinstance(first, str):
        raise _invalid("coordinator", "be 'host:port'", where)
    addresses = first.split(",")
    if len(addresses) > 1:
        known.setdefault("num_processes", len(addresses))
    size = _integer("num_processes", range(1, MOST_WORKERS + 1), known, where)
    if size == 1:
        return None
    index = _integer("process_id", range(size), known, where)
    if "coordinator" not in known:
        raise _missing("coordinator", where)
    addresses = [
        one if _HAS_PORT.search(one) else f"{one}:{_PORT}" for one in addresses
    ]
    try:
        hosts = {split_address(one) for one in addresses}
    except ValueError as error:
        what = "be 'host:port' or '[IPv6 address]:port'"
        raise _invalid("coordinator", what, where) from error
    if len(addresses) not in (1, size) or len(hosts) < len(addresses):
        what = f"be one address, or {size} different ones"
        raise _invalid("coordinator", what, where)
    unknown = [""] * (size - len(addresses))
    return Cluster((*addresses, *unknown), index, job)


def _integer(
    name: str, valid: range, known: Mapping[str, Any], where: str
) -> int:
    """An integer in a range, or its digits."""
    if name not in known:
        raise _missing(name, where)
    value = str(known[name])
    if not _is_number(value) or int(value) not in valid:
        what = f"be an integer from {valid.start} to {valid.stop - 1}"
        raise _invalid(name, what, where)
    return int(value)


def _is_number(text: str) -> bool:
    """Return True if `int` can read the digits of a number below 10^18."""
    return text.isdecimal() and len(text) <= 18


def _missing(name: str, where: str) -> ValueError:
    what = f"be given, as an argument or in `{KERAS[name]}`"
    return _invalid(name, what, where)


def _invalid(name: str, what: str, where: str) -> ValueError:
    return ValueError(f"`{name}` must {what}. Received: {where}")


def first_node(nodes: str) -> str:
    """The first of a list of Slurm, as of "a[001-003,7]-ib,b1"."""
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
