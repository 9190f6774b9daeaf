"""Read the workers of a job from the environment variables of its launcher.

A cluster needs three settings: the address of worker 0, the number of workers,
and the index of this worker. `rendezvous.py` finds all other addresses. The
user must give each setting that the launcher does not provide, as an argument
or in Keras' variables. A process without settings trains alone, unless a
variable of another launcher says that there are several processes.
"""

import contextlib
import json
import pathlib
import re
import socket
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from tfkfac.cluster.config import MAX_WORKERS, Cluster, split_address

Environment = Mapping[str, str]

# Keras' environment variable of each of the three settings. The first variable
# may also hold the addresses of all workers, separated by commas.
KERAS = {
    "coordinator": "KERAS_DISTRIBUTION_JOB_ADDRESSES",
    "num_processes": "KERAS_DISTRIBUTION_NUM_PROCESSES",
    "process_id": "KERAS_DISTRIBUTION_PROCESS_ID",
}
# Default port of worker 0, and first port for jobs of a scheduler. Both are
# above Linux' range of ephemeral ports, 32768 to 60999.
_PORT, _FIRST_JOB_PORT = 61_000, 61_001
_HAS_PORT = re.compile(r":[^\]]*$")


class Launcher:
    """A program that starts the workers and sets their environment variables.

    Attributes:
        name: Name of the launcher in messages.
        size_variable: Variable of the number of workers; "" if there is none.
        index_variable: Variable of the index of the worker.
        other_variables: Further variables that the launcher always sets.
        identity: Variables that together identify the job. Some may be unset.
    """

    name: ClassVar[str]
    index_variable: ClassVar[str]
    size_variable: ClassVar[str] = ""
    other_variables: ClassVar[tuple[str, ...]] = ()
    identity: ClassVar[tuple[str, ...]] = ()

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def __str__(self) -> str:
        values = ", ".join(f"{k}={v}" for k, v in self.variables().items())
        return f"{self.name} ({values})"

    def variables(self) -> dict[str, str]:
        """Return the variables of the launcher that are set."""
        names = self.index_variable, self.size_variable, *self.other_variables
        return {n: v for n in names if (v := self.environment.get(n))}

    def is_active(self) -> bool:
        """Return True if the launcher has started this process."""
        return len(self.variables()) == 2 + len(self.other_variables)

    def settings(self) -> dict[str, Any]:
        """Return the settings (keys of `KERAS`) that the launcher provides."""
        get = self.variables().get
        size, index = get(self.size_variable), get(self.index_variable)
        values = (self.coordinator(), size, index)
        return {k: v for k, v in zip(KERAS, values, strict=True) if v}

    def coordinator(self) -> str | None:
        """Return the address of worker 0, if the launcher provides it."""
        return None

    def job(self) -> str:
        """Return the identity of the job; "" if the launcher has none."""
        values = [self.environment.get(name) for name in self.identity]
        identity = ".".join(filter(None, values))
        return f"{self.name} {identity}" if identity else ""


class Keras(Launcher):
    """The variables that `keras.distribution.initialize` reads, if set."""

    name = "Keras"
    addresses_variable, size_variable, index_variable = KERAS.values()
    other_variables = (addresses_variable,)

    @override
    def is_active(self) -> bool:
        return bool(self.variables())

    @override
    def coordinator(self) -> str | None:
        return self.environment.get(self.addresses_variable)


class Torchrun(Launcher):
    """PyTorch's launcher, and others that set the same variables."""

    name = "torchrun"
    size_variable, index_variable = "WORLD_SIZE", "RANK"
    other_variables = ("MASTER_ADDR", "MASTER_PORT")
    identity = ("TORCHELASTIC_RUN_ID",)

    @override
    def coordinator(self) -> str:
        """Return the master's address; port + 1 if torchrun occupies port."""
        host, port = (self.environment[name] for name in self.other_variables)
        has_store = self.environment.get("TORCHELASTIC_USE_AGENT_STORE")
        if has_store == "True" and _is_number(port):
            port = str(int(port) + 1)
        return f"{host}:{port}"

    @override
    def job(self) -> str:
        # The default of `torchrun --rdzv-id`, "none", identifies no job.
        run_id = self.environment.get(*self.identity, "none")
        return "" if run_id == "none" else super().job()


class MPI(Launcher):
    """An mpirun, perhaps in an allocation of Slurm, PBS or LSF."""

    allocation = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")
    host_variables = ("LSB_MCPU_HOSTS", "LSB_HOSTS")
    host_files = ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE")

    @override
    def coordinator(self) -> str | None:
        """Return the first host of the allocation, and a port of the job."""
        get = self.environment.get
        if "JSM_NAMESPACE_SIZE" in self.environment:
            return None  # jsrun starts no worker on the first host
        hosts = [first_node(get("SLURM_JOB_NODELIST", ""))]
        hosts += " ".join(get(x, "") for x in self.host_variables).split()
        for name in self.host_files:
            # PBS has the file on the first host only.
            with contextlib.suppress(OSError):
                hosts += pathlib.Path(get(name, "")).read_text().split()
        job = "".join(get(name, "") for name in self.allocation)
        port = _port(zlib.crc32(job.encode())) if job else _PORT
        return next((f"{host}:{port}" for host in hosts if host), None)


class OpenMPI(MPI):
    """Open MPI's mpirun."""

    name = "Open MPI"
    size_variable = "OMPI_COMM_WORLD_SIZE"
    index_variable = "OMPI_COMM_WORLD_RANK"
    identity = ("PMIX_NAMESPACE",)


class SageMaker(OpenMPI):
    """Training jobs of Amazon SageMaker: Open MPI, or one worker on each host.

    `SM_HOSTS` is a JSON list. Its first host has rank 0 of Open MPI. `mpirun`
    copies the variables of this host to all ranks, so `SM_CURRENT_HOST` is the
    same in all of them.
    """

    name = "SageMaker"
    other_variables = ("SM_HOSTS", "SM_CURRENT_HOST")

    @override
    def is_active(self) -> bool:
        return self.variables().keys() >= set(self.other_variables)

    @override
    def settings(self) -> dict[str, Any]:
        hosts = self._hosts()
        index = hosts.index(self.environment["SM_CURRENT_HOST"])
        by_host = {"num_processes": len(hosts), "process_id": index}
        return by_host | super().settings()

    @override
    def coordinator(self) -> str:
        return self._hosts()[0]

    def _hosts(self) -> list[str]:
        """Return the hosts that `SM_HOSTS` lists."""
        try:
            hosts: list[str] = json.loads(self.environment["SM_HOSTS"])
        except json.JSONDecodeError:
            hosts = []
        current = self.environment["SM_CURRENT_HOST"]
        if not isinstance(hosts, list) or current not in hosts:
            raise ValueError(
                "`SM_HOSTS` must be a JSON list that contains "
                f"`SM_CURRENT_HOST`. Received: {self}"
            )
        return hosts


class Slurm(Launcher):
    """Slurm's srun. A batch script that runs without srun is no worker."""

    name = "Slurm"
    size_variable, index_variable = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
    other_variables = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
    identity = other_variables[1:]

    @override
    def is_active(self) -> bool:
        # MPICH's mpirun starts one Slurm task on each node, which starts its
        # workers. If the numbers of tasks and workers differ, use MPICH.
        tasks = self.environment.get(self.size_variable)
        workers = self.environment.get(MPICH.size_variable, tasks)
        return super().is_active() and tasks == workers

    @override
    def coordinator(self) -> str | None:
        """Return `host:port`: first node, port from the Slurm job and step."""
        nodes, job, step = (
            self.environment[name] for name in self.other_variables
        )
        if not (_is_number(job) and _is_number(step)):
            return None
        return f"{first_node(nodes)}:{_port(int(job), int(step))}"


def _port(job: int, step: int = 0) -> int:
    """Return the port of worker 0 of a scheduler's job and step."""
    return _FIRST_JOB_PORT + (13 * job + step) % (2**16 - _FIRST_JOB_PORT)


class MPICH(MPI):
    """MPICH's mpirun and others with the Process Management Interface."""

    name = "MPICH"
    size_variable, index_variable = "PMI_SIZE", "PMI_RANK"
    identity = MPI.allocation  # MPICH has no job id of its own


class Kubernetes(Launcher):
    """Indexed Job or JobSet, which does not provide the number of workers."""

    name, index_variable = "Kubernetes", "JOB_COMPLETION_INDEX"

    @override
    def is_active(self) -> bool:
        return self.index_variable in self.variables()

    @override
    def coordinator(self) -> str | None:
        """Return the name of the pod with index 0 in the headless service."""
        host, _, service = socket.getfqdn().partition(".")
        job, _, index = host.rpartition("-")
        is_pod = service and index == self.environment[self.index_variable]
        return f"{job}-0.{service}" if is_pod else None


# The first active launcher is used, so the inner of two nested launchers comes
# first: torchrun may run in a Slurm step.
LAUNCHERS = (Torchrun, SageMaker, OpenMPI, Slurm, MPICH, Kubernetes)

# Numbers of processes that other launchers set. Numbers of an allocation, such
# as `SLURM_NTASKS`, are not among them: its script is a single process.
_OTHER_SIZES = (
    "AWS_BATCH_JOB_NUM_NODES",
    "DMLC_NUM_WORKER",
    "FLUX_JOB_SIZE",
    "HOROVOD_SIZE",
    "JAX_NUM_PROCESSES",
    "JSM_NAMESPACE_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_SIZE",
    "PADDLE_TRAINERS_NUM",
    "PALS_LOCAL_SIZE",
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
)
# Indices of processes whose launcher sets no number of processes.
_OTHER_INDICES = ("ALPS_APP_PE", "PALS_RANKID", "PMIX_RANK", "SLURM_PROCID")


def find_cluster(
    environment: Environment, arguments: Mapping[str, Any]
) -> tuple[Cluster | None, str]:
    """Return the cluster (None for a single process) and the source's name.

    Each of the three settings is taken from the arguments, else from Keras'
    variables, else from the first active launcher. Unknown addresses are "".
    """
    keras = Keras(environment)
    launchers = (launcher(environment) for launcher in LAUNCHERS)
    launcher = next((x for x in launchers if x.is_active()), None)
    settings, sources, job = dict(arguments), [], ""
    if settings:
        argument_text = ", ".join(f"{k}={v}" for k, v in settings.items())
        sources.append(f"arguments ({argument_text})")
    for source in (keras, launcher):
        if len(settings) < 3 and source is not None and source.is_active():
            settings = source.settings() | settings
            sources.append(str(source))
            job = source.job()
    origin = " and ".join(sources)
    cluster = None
    if origin == str(launcher) and "num_processes" not in settings:
        origin = f"{origin} without {keras.size_variable}"
    elif sources:
        cluster = _make_cluster(settings, origin, job)
    else:
        is_batch = Slurm.other_variables[1] in environment
        origin = "Slurm without srun" if is_batch else "no launcher"
    if cluster is None and not arguments and not keras.is_active():
        _refuse_other_launchers(environment, launcher)
    return cluster, origin


def _refuse_other_launchers(
    environment: Environment, launcher: Launcher | None
) -> None:
    """Raise an error if this process is not the only one of its launcher.

    `launcher` is the active launcher, by which there is one process.
    """
    minima = dict.fromkeys(_OTHER_SIZES, 1)
    # An outer launcher may have set variables of the second table.
    if launcher is None or not launcher.size_variable:
        minima |= dict.fromkeys((x.size_variable for x in LAUNCHERS), 1)
        minima |= dict.fromkeys(_OTHER_INDICES, 0)
    for name, minimum in minima.items():
        value = environment.get(name, "")
        # torchrun's number of nodes may be a range, "1:4".
        number = value.rpartition(":")[2]
        if _is_number(number) and int(number) > minimum:
            raise ValueError(
                f"Environment variable `{name}` says that this process is one "
                "of several, but its launcher does not provide the cluster, so "
                "each process would train alone. Set `TF_CONFIG`, or pass "
                "`coordinator`, `num_processes` and `process_id` to the "
                "strategy; `num_processes=1` trains alone. Received: "
                f"{name}={value}"
            )


def _make_cluster(
    settings: dict[str, Any], origin: str, job: str
) -> Cluster | None:
    """Validate the settings; return None if there is one worker."""
    coordinator = settings.get("coordinator", "")
    if not isinstance(coordinator, str):
        raise _invalid("coordinator", "be 'host:port'", origin)
    addresses = coordinator.split(",")
    if len(addresses) > 1:
        settings.setdefault("num_processes", len(addresses))
    sizes = range(1, MAX_WORKERS + 1)
    size = _integer("num_processes", sizes, settings, origin)
    if size == 1:
        return None
    index = _integer("process_id", range(size), settings, origin)
    if "coordinator" not in settings:
        raise _missing("coordinator", origin)
    addresses = [
        a if _HAS_PORT.search(a) else f"{a}:{_PORT}" for a in addresses
    ]
    try:
        endpoints = set(map(split_address, addresses))
    except ValueError as error:
        requirement = "be 'host:port' or '[IPv6 address]:port'"
        raise _invalid("coordinator", requirement, origin) from error
    if len(addresses) not in (1, size) or len(endpoints) < len(addresses):
        requirement = f"be one address, or {size} different ones"
        raise _invalid("coordinator", requirement, origin)
    unknown_addresses = [""] * (size - len(addresses))
    return Cluster((*addresses, *unknown_addresses), index, job)


def _integer(
    name: str, valid: range, settings: Mapping[str, Any], origin: str
) -> int:
    """Convert a setting to an integer in the range `valid`."""
    if name not in settings:
        raise _missing(name, origin)
    value = str(settings[name])
    if not _is_number(value) or int(value) not in valid:
        requirement = f"be an integer from {valid.start} to {valid.stop - 1}"
        raise _invalid(name, requirement, origin)
    return int(value)


def _is_number(text: str) -> bool:
    """Return True for 1 to 18 decimal digits."""
    return text.isdecimal() and len(text) <= 18


def _missing(name: str, origin: str) -> ValueError:
    requirement = f"be given, as an argument or in `{KERAS[name]}`"
    return _invalid(name, requirement, origin)


def _invalid(name: str, requirement: str, origin: str) -> ValueError:
    return ValueError(f"`{name}` must {requirement}. Received: {origin}")


def first_node(nodes: str) -> str:
    """Return the first node of Slurm's list: "a001" of "a[001-003,7],b1"."""
    first = re.match(r"(\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
