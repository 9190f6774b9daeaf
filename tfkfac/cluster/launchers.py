"""Read the workers of a job from the environment variables of its launcher.

A cluster needs three settings: the address of worker 0, the number of workers,
and the index of this worker. `rendezvous.py` finds all other addresses. The
user must give each setting that the launcher does not provide, as an argument
or in Keras' variables. A process without settings trains alone, unless a
variable of another launcher says that there are several processes.

To add a launcher, add a row to `LAUNCHERS`, to the cases of
`tests/cluster/test_launchers.py`, and to the page "Launchers" of the
documentation.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Program that starts the workers and sets their environment variables."""

    name: str  # name of the launcher in messages
    index: str  # variable of the index of the worker
    size: str  # variable of the number of workers; "" if there is none
    # Function of the environment that returns the address of worker 0; None if
    # the launcher does not provide it.
    address: Callable[[Environment], str | None]
    others: tuple[str, ...] = ()  # further variables that are always set
    # Variables that together identify the job. Some may be unset.
    identity: tuple[str, ...] = ()

    def variables(self, environment: Environment) -> dict[str, str]:
        """Return the launcher's variables; {} if another launcher is used."""
        names = filter(None, (self.index, self.size, *self.others))
        values = {name: environment.get(name, "") for name in names}
        # MPICH's mpirun starts one Slurm task on each node, which starts its
        # workers. If the numbers of tasks and workers differ, use MPICH.
        tasks = environment.get(_SLURM_SIZE)
        is_nested = environment.get(_PMI_SIZE, tasks) not in ("", tasks)
        if not all(values.values()) or (self.name == "Slurm" and is_nested):
            return {}
        return values


def _master(environment: Environment) -> str:
    """Return torchrun's address; port + 1 if torchrun listens at the port."""
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if has_store and _is_number(port):
        port = str(int(port) + 1)
    return f"{host}:{port}"


def _first_host(environment: Environment) -> str | None:
    """Return "host:port" of an allocation's first host (Slurm, PBS or LSF)."""
    get = environment.get
    if "JSM_NAMESPACE_SIZE" in environment:
        return None  # jsrun starts no worker on the first host
    hosts = [first_node(get("SLURM_JOB_NODELIST", ""))]
    for name in ("LSB_MCPU_HOSTS", "LSB_HOSTS"):
        hosts += get(name, "").split()
    for name in ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE"):
        # PBS has the file on the first host only.
        with contextlib.suppress(OSError):
            hosts += pathlib.Path(get(name, "")).read_text().split()
    job = "".join(get(name, "") for name in _ALLOCATION)
    port = _job_port(zlib.crc32(job.encode())) if job else _PORT
    return next((f"{host}:{port}" for host in hosts if host), None)


def _first_node_of_step(environment: Environment) -> str | None:
    """Return Slurm's first node, with a port derived from the job and step."""
    job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    if not (_is_number(job) and _is_number(step)):
        return None
    port = _job_port(13 * int(job) + int(step))
    return f"{first_node(environment['SLURM_STEP_NODELIST'])}:{port}"


def _first_pod(environment: Environment) -> str | None:
    """Return the name of the pod with index 0 in the headless service."""
    host, _, service = socket.getfqdn().partition(".")
    job, _, index = host.rpartition("-")
    is_pod = service and index == environment["JOB_COMPLETION_INDEX"]
    return f"{job}-0.{service}" if is_pod else None


def _job_port(number: int) -> int:
    """Return the port of worker 0, given a number derived from the job."""
    return _FIRST_JOB_PORT + number % (2**16 - _FIRST_JOB_PORT)


def _sagemaker_hosts(environment: Environment) -> list[str]:
    """Return SageMaker's list of hosts, which must contain this host."""
    try:
        hosts = list(json.loads(environment[_HOSTS]))
        hosts.index(environment[_CURRENT])
    except (ValueError, TypeError):
        raise ValueError(
            f"`{_HOSTS}` must be a JSON list that contains `{_CURRENT}`. "
            f"Received: {_HOSTS}={environment[_HOSTS]}, "
            f"{_CURRENT}={environment[_CURRENT]}"
        ) from None
    return hosts


# Variables of SageMaker's hosts. `mpirun` copies the variables of the first
# host to all ranks, so its `SM_CURRENT_HOST` is the same in all of them.
_HOSTS, _CURRENT = "SM_HOSTS", "SM_CURRENT_HOST"
_ALLOCATION = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "LSB_JOBINDEX")
_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
_SLURM_SIZE, _PMI_SIZE = "SLURM_STEP_NUM_TASKS", "PMI_SIZE"
# The first active launcher is used, so the inner of two nested launchers comes
# first: torchrun may run in a Slurm step.
# fmt: off
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", _master,
             ("MASTER_ADDR", "MASTER_PORT"), ("TORCHELASTIC_RUN_ID",)),
    Launcher("SageMaker", _RANK, _SIZE, lambda e: _sagemaker_hosts(e)[0],
             (_HOSTS, _CURRENT), ("PMIX_NAMESPACE",)),
    # The index and the size follow from the list of hosts.
    Launcher("SageMaker", _CURRENT, _HOSTS, lambda e: _sagemaker_hosts(e)[0]),
    Launcher("Open MPI", _RANK, _SIZE, _first_host, (), ("PMIX_NAMESPACE",)),
    Launcher("Slurm", "SLURM_PROCID", _SLURM_SIZE, _first_node_of_step,
             ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"),
             ("SLURM_JOB_ID", "SLURM_STEP_ID")),
    Launcher("MPICH", "PMI_RANK", _PMI_SIZE, _first_host, (), _ALLOCATION),
    # An Indexed Job or JobSet does not provide the number of workers.
    Launcher("Kubernetes", "JOB_COMPLETION_INDEX", "", _first_pod),
)
# fmt: on


# Numbers of processes that other launchers set. Numbers of an allocation, such
# as `SLURM_NTASKS`, are excluded: the script of an allocation is one process.
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
    launcher = next((x for x in LAUNCHERS if x.variables(environment)), None)
    keras = {k: v for k, v in KERAS.items() if environment.get(v)}
    settings, job = dict(arguments), ""
    sources = []
    if arguments:
        texts = (f"{name}={value}" for name, value in arguments.items())
        sources.append(f"arguments ({', '.join(texts)})")
    if keras and len(settings) < len(KERAS):
        settings = {k: environment[v] for k, v in keras.items()} | settings
        sources.append(_describe("Keras", keras.values(), environment))
    if launcher is not None and len(settings) < len(KERAS):
        variables = launcher.variables(environment)
        provided = {
            "coordinator": launcher.address(environment),
            "num_processes": variables.get(launcher.size),
            "process_id": variables.get(launcher.index),
        }
        if launcher.index == _CURRENT:
            hosts = _sagemaker_hosts(environment)
            provided["num_processes"] = str(len(hosts))
            provided["process_id"] = str(hosts.index(environment[_CURRENT]))
        settings = {k: v for k, v in provided.items() if v} | settings
        sources.append(_describe(launcher.name, variables, environment))
        # The default of `torchrun --rdzv-id`, "none", identifies no job.
        values = map(environment.get, launcher.identity)
        identity = ".".join(x for x in values if x and x != "none")
        job = f"{launcher.name} {identity}" if identity else ""
    origin = " and ".join(sources)
    cluster = None
    if not arguments and not keras and "num_processes" not in settings:
        if launcher is not None:
            origin = f"{origin} without {KERAS['num_processes']}"
        else:
            is_batch = "SLURM_JOB_ID" in environment
            origin = "Slurm without srun" if is_batch else "no launcher"
    else:
        cluster = _make_cluster(settings, origin, job)
    if cluster is None and not arguments and not keras:
        _refuse_other_launchers(environment, launcher)
    return cluster, origin


def _describe(
    name: str, variables: Iterable[str], environment: Environment
) -> str:
    """Format the name of a source and the values of its variables."""
    values = ", ".join(f"{v}={environment[v]}" for v in variables)
    return f"{name} ({values})"


def _refuse_other_launchers(
    environment: Environment, launcher: Launcher | None
) -> None:
    """Raise an error if a launcher without addresses started many processes."""
    minima = dict.fromkeys(_OTHER_SIZES, 1)
    # Skip these if a launcher gives the size: an outer one may have set them.
    if launcher is None or not launcher.size:
        minima |= dict.fromkeys((x.size for x in LAUNCHERS), 1)
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
