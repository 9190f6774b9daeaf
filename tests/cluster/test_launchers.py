"""Clusters from simulated environments of launchers."""

import pathlib
import re
import socket
from typing import Any

import pytest
import tensorflow as tf

import tfkfac
from tfkfac.cluster import strategy
from tfkfac.cluster.config import Cluster
from tfkfac.cluster.launchers import find_cluster, first_node

KERAS = "KERAS_DISTRIBUTION_"
ADDRESS = f"{KERAS}JOB_ADDRESSES"
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
}
AGENT = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}
# As srun and sbatch of Slurm 22.05 set them.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}
SLURM = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_PROCID": "1",
}
# As SageMaker's toolkit sets them; `mpirun -x` gives all ranks the same.
SAGEMAKER = {
    "SM_HOSTS": '["algo-1", "algo-2", "algo-3"]',
    "SM_CURRENT_HOST": "algo-1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", f"{KERAS}NUM_PROCESSES": "3"}
POD = "train-1.workers.default.svc.cluster.local"
ALL = {
    ADDRESS: "host0:1,host1:2,host2",
    f"{KERAS}PROCESS_ID": "2",
}


# In allocations of schedulers, as their manuals print the variables.
IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-09,12],cpu1"}
IN_PBS = {"PBS_JOBID": "1843[2].pbs01", "PBS_NODEFILE": "pbs.txt"}
IN_LSF = {"LSB_JOBID": "531", "LSB_JOBINDEX": "0"}
NODES = "c12n03.cluster.org\nc12n03.cluster.org\nc12n04.cluster.org\n"


def unknown(first: str, index: int) -> Cluster:
    return Cluster((first, "", ""), index)


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine the name of a pod of Kubernetes."""
    monkeypatch.setattr(socket, "getfqdn", lambda: POD)


GIVEN = {"coordinator": "first:1", "process_id": 2}
WHOLE = GIVEN | {"num_processes": 3}


AGENT_OF_ANY_JOB = AGENT | {"TORCHELASTIC_RUN_ID": "none"}
OPEN_MPI_12 = OPEN_MPI | {ADDRESS: "host0:1", "PMIX_NAMESPACE": "12"}
SAGEMAKER_12 = SAGEMAKER | OPEN_MPI | {"PMIX_NAMESPACE": "12"}
# Launchers inside of other launchers.
TORCHRUN_IN_SLURM = SLURM | TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"}
MPICH_IN_SLURM = SLURM | {"PMI_RANK": "1", "PMI_SIZE": "6", ADDRESS: "host0:1"}
KERAS_IN_KUBERNETES = KUBERNETES | {ADDRESS: "host0", f"{KERAS}PROCESS_ID": "2"}


@pytest.mark.parametrize(
    ("environment", "given", "expected", "source", "job"),
    [
        (TORCHRUN, {}, unknown("host0:29500", 1), "torchrun (RANK=1, WOR", ""),
        # The store of torchrun listens at the port; the default of its
        # identity is equal in all jobs.
        (AGENT_OF_ANY_JOB, {}, unknown("host0:29501", 1), "torchrun", ""),
        (OPEN_MPI_12, {}, unknown("host0:1", 2), "Open MPI", "Open MPI 12"),
        (SAGEMAKER_12, {}, unknown("algo-1:61000", 2),
         "SageMaker (OMPI_COMM_WORLD_RANK=2", "SageMaker 12"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-2"}, {},
         unknown("algo-1:61000", 1), "SageMaker", ""),
        (SLURM, {}, unknown("gpu07:61092", 1), "Slurm (SLURM_PR", "Slurm 7.0"),
        (MPICH | {ADDRESS: "h"}, {}, unknown("h:61000", 1), "and MPICH", ""),
        (KUBERNETES, {}, unknown(f"{POD.replace('-1', '-0')}:61000", 1),
         "Kubernetes (JOB_COMPLETION_INDEX=1", ""),
        (ALL, {}, Cluster(("host0:1", "host1:2", "host2:61000"), 2), "Ker", ""),
        (TORCHRUN_IN_SLURM, {}, unknown("host0:29500", 1), "torchrun",
         "torchrun run"),
        (MPICH_IN_SLURM, {}, Cluster(("host0:1", *[""] * 5), 1), "MPICH",
         "MPICH 7"),
        # Keras' variables replace those of each launcher, arguments all.
        (KERAS_IN_KUBERNETES, {}, unknown("host0:61000", 2), "Keras", ""),
        (SLURM, GIVEN, unknown("first:1", 2), "id=2) and Slurm", "Slurm 7.0"),
        # Started by the user, perhaps each in its own Slurm step.
        (SLURM, WHOLE, unknown("first:1", 2), "arguments (coordinator=fi", ""),
        # Single processes.
        ({}, {}, None, "no launcher", ""),
        (BATCH, {}, None, "Slurm without srun", ""),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {}, None, "Slurm", ""),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, {}, None, "Open MPI", ""),
        (SAGEMAKER | {"SM_HOSTS": '["algo-1"]'}, {}, None, "SageMaker", ""),
        # The pods may be independent jobs.
        ({"JOB_COMPLETION_INDEX": "1"}, {}, None,
         f"without {KERAS}NUM_PROCESSES", ""),
    ],
)  # fmt: skip
def test_find_cluster(
    environment: dict[str, str],
    given: dict[str, Any],
    expected: Cluster | None,
    source: str,
    job: str,
) -> None:
    """None is a single process."""
    cluster, where = find_cluster(environment, given)
    assert cluster == expected
    assert source in where
    assert cluster is None or cluster.job == job


def test_train_job_of_kubeflow() -> None:
    """With the variables that the torch runtime of Trainer v2 sets."""
    examples = pathlib.Path(__file__).parents[2] / "examples"
    text = (examples / "clusters" / "kubeflow.yaml").read_text()
    name, nodes = re.findall(r"(?:  name|numNodes): (\w+)$", text, re.M)
    pod = {
        "PET_NNODES": nodes,
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": "1",
    }
    expanded = re.sub(r"\$\((\w+)\)", lambda match: pod[match[1]], text)
    environment = dict(re.findall(r"- (KERAS_\w+)=(\S+)", expanded))
    cluster, _ = find_cluster(pod | environment, {})
    assert cluster == Cluster(("digits-node-0-0.digits:29400", ""), 1)


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH])
@pytest.mark.parametrize(
    ("allocation", "first"),
    [
        (IN_SLURM, "gpu07"),
        (IN_PBS, "c12n03.cluster.org"),
        (IN_LSF | {"LSB_MCPU_HOSTS": "hostA 2 hostB 4"}, "hostA"),
        (IN_LSF | {"LSB_HOSTS": "hostB hostB hostA"}, "hostB"),
        (IN_LSF | {"LSB_DJOB_HOSTFILE": "pbs.txt"}, "c12n03.cluster.org"),
    ],
)
def test_mpirun_in_an_allocation(
    launcher: dict[str, str],
    allocation: dict[str, str],
    first: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 is on its first host, at a port of the job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pbs.txt").write_text(NODES)
    ports = set()
    for identity in ({}, {"PBS_JOBID": "2"}, {"PBS_JOBID": "1843[3].pbs01"}):
        environment = launcher | allocation | identity
        cluster, _ = find_cluster(environment, {})
        assert cluster is not None
        host, _, port = cluster.addresses[0].rpartition(":")
        assert (host, cluster.addresses[1:]) == (first, ("", ""))
        ports.add(int(port))
    assert len(ports) == 3 and 61_000 < min(ports) <= max(ports) < 2**16


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE=4"),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PRO"),
        # Kubeflow's runtimes, without torchrun.
        ({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"}, "PET_NNODES=2"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, "PET_NPROC_PER_N"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
        ({"ALPS_APP_PE": "3"}, "ALPS_APP_PE=3"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID=1"),
        # horovodrun in the shell of `srun --pty bash`.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
                  "HOROVOD_SIZE": "4"}, "HOROVOD_SIZE=4"),
        # Single processes, and scripts in an allocation of several.
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, ""),
        ({"PMIX_RANK": "0"}, ""),
        (BATCH | {"SLURM_NPROCS": "3", "SLURM_JOB_NUM_NODES": "3"}, ""),
        (IN_PBS | {"PBS_NP": "8", "PBS_NUM_NODES": "2", "NCPUS": "4"}, ""),
        (IN_LSF | {"LSB_DJOB_NUMPROC": "6", "LSB_HOSTS": "a a b"}, ""),
        # torchrun of one process in each of four tasks of srun.
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "PMI_SIZE": "4",
                     "PMI_RANK": "1", "PMIX_RANK": "1"}, ""),
        # A launcher or settings of the user have the cluster.
        (SLURM | {"HOROVOD_SIZE": "4"}, ""),
        ({"FLUX_JOB_SIZE": "4", f"{KERAS}NUM_PROCESSES": "1"}, ""),
    ],
)  # fmt: skip
def test_launchers_without_a_cluster(
    environment: dict[str, str], refused: str
) -> None:
    if not refused:
        find_cluster(environment, {})
        return
    name = refused.partition("=")[0]
    message = f"variable `{name}.*TF_CONFIG.*`process_id`.*{refused}"
    with pytest.raises(ValueError, match=message):
        find_cluster(environment, {})
    assert find_cluster(environment, {"num_processes": 1})[0] is None
    assert find_cluster(environment, WHOLE)[0] == unknown("first:1", 2)


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        (OPEN_MPI | {"JSM_NAMESPACE_SIZE": "3", "LSB_HOSTS": "launch a b c"},
         {}, "`coordinator` must be given"),
        # On another host than the first one of an allocation of PBS.
        (OPEN_MPI | IN_PBS, {}, "`coordinator` must be given"),
        (OPEN_MPI, {}, f"`coordinator` must be given.*`{ADDRESS}`.*_RANK=2"),
        ({}, {"coordinator": "a:1"}, "`num_processes` must be given"),
        ({}, {"num_processes": 2}, "`process_id` must be given"),
        (TORCHRUN | {"RANK": "3"}, {}, "`process_id` must be .* from 0 to 2"),
        (TORCHRUN | {"RANK": "x"}, {}, "`process_id` must be an integer"),
        (TORCHRUN, {"num_processes": 0}, "`num_processes` must be an integer"),
        (TORCHRUN, {"process_id": True}, "`process_id` must be an integer"),
        (AGENT | {"MASTER_PORT": "x"}, {}, "`coordinator` must be 'host:"),
        (AGENT | {"MASTER_PORT": "65535"}, {}, "`coordinator` must be 'host:"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, {}, "from 1 to 4096"),
        (TORCHRUN, {"num_processes": 10**9}, "from 1 to 4096"),
        (TORCHRUN, {"coordinator": "::1"}, r"or '\[IPv6 address\]:port'"),
        (TORCHRUN, {"coordinator": 80}, "must be 'host:port'"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, {}, "`SM_HOSTS` must be a JSON"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo"}, {}, "`SM_HOSTS` must be"),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, {}, "must be 'host:port'"),
        (SLURM | {"SLURM_JOB_ID": "x"}, {}, "`coordinator` must be given"),
        (ALL, {"num_processes": 4}, "be one address, or 4 different"),
        (ALL | {ADDRESS: "a:1,a:1,b:1"}, {}, "one address, or 3 different"),
    ],
)  # fmt: skip
def test_missing_or_malformed_settings(
    environment: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_cluster(environment, given)


def test_a_pod_without_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1")
    with pytest.raises(ValueError, match="`coordinator` must be given"):
        find_cluster(KUBERNETES, {})


def test_first_node() -> None:
    """Expected: the output of `scontrol show hostnames`."""
    for nodes, first in (
        ("host", "host"),
        ("host-1,host-2", "host-1"),
        ("n[003,7-9]", "n003"),
        ("n[08-12,20],login1", "n08"),
        ("login1,n[08-12]", "login1"),
        ("rack[2-3]node[00-15]", "rack2node00"),
        ("n[5]-ib0,n[6]-ib0", "n5-ib0"),
        ("a.b.org,c.b.org", "a.b.org"),
    ):
        assert first_node(nodes) == first


def test_concurrent_jobs_of_slurm_have_different_ports() -> None:
    ports = set()
    for job in range(100, 200):
        for step in range(10):
            ids = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            cluster, _ = find_cluster(SLURM | ids, {})
            assert cluster is not None
            ports.add(int(cluster.addresses[0].rpartition(":")[2]))
    assert len(ports) == 1000
    assert min(ports) > 60_999 and max(ports) < 2**16


def test_resolver_and_arguments_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver: Any = object()
    with pytest.raises(ValueError, match="`cluster_resolver` must be None"):
        tfkfac.MultiWorkerMirroredStrategy(resolver, coordinator="a:1")


@pytest.mark.parametrize(
    ("index", "visible", "environment", "expected"),
    [
        (0, 4, {}, [0, 1]),
        (2, 4, {}, [2, 3]),
        (1, 4, {}, [0, 1, 2, 3]),  # the only worker on its host
        (2, 3, {}, [1]),
        # The launcher has assigned GPUs.
        (2, 1, {}, [0]),
        (2, 2, {"SLURM_GPUS_PER_TASK": "2"}, [0, 1]),
        (2, 0, {}, []),
    ],
)
def test_workers_of_a_host_share_its_gpus(
    index: int,
    visible: int,
    environment: dict[str, str],
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a simulated list of GPUs."""
    gpus = list(range(visible))

    def choose(chosen: list[int], _: str) -> None:
        gpus[:] = chosen

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", choose)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy._share_gpus(Cluster(("host0:1", "host1:1", "host0:2"), index))
    assert gpus == expected
