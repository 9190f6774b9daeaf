"""Clusters from simulated environments of launchers, and two processes."""

import contextlib
import json
import socket
import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

import tfkfac
from tests.support.cluster import ROOT, worker_environment
from tests.support.ports import claim_ports
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
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "3"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", f"{KERAS}NUM_PROCESSES": "3"}
POD = "train-1.workers.default.svc.cluster.local"
ALL = {
    ADDRESS: "host0:1,host1:2,host2",
    f"{KERAS}PROCESS_ID": "2",
}


def unknown(first: str, index: int) -> Cluster:
    return Cluster((first, "", ""), index)


@pytest.fixture(autouse=True)
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine the name of a pod of Kubernetes."""
    monkeypatch.setattr(socket, "getfqdn", lambda: POD)


@pytest.mark.parametrize(
    ("environment", "expected", "name"),
    [
        (TORCHRUN, unknown("host0:29500", 1), "torchrun (RANK=1, WORLD"),
        # The store of torchrun listens at the port.
        (AGENT, unknown("host0:29501", 1), "torchrun"),
        (OPEN_MPI | {ADDRESS: "host0:1"}, unknown("host0:1", 2), "Open MPI"),
        (SLURM, unknown("gpu07:61092", 1), "Slurm (SLURM_PROCID=1, "),
        (MPICH | {ADDRESS: "host0"}, unknown("host0:61000", 1), "and MPICH"),
        (
            KUBERNETES,
            unknown(f"{POD.replace('-1', '-0')}:61000", 1),
            "Kubernetes (JOB_COMPLETION_INDEX=1",
        ),
        (ALL, Cluster(("host0:1", "host1:2", "host2:61000"), 2), "Keras"),
        # A launcher inside of another launcher.
        (SLURM | TORCHRUN, unknown("host0:29500", 1), "torchrun"),
        (SLURM | MPICH, unknown("gpu07:61092", 1), "Slurm"),
        (
            SLURM | {"PMI_RANK": "1", "PMI_SIZE": "6", ADDRESS: "host0:1"},
            Cluster(("host0:1", *[""] * 5), 1),
            "MPICH",
        ),
        # Keras' variables replace those of each launcher.
        (
            KUBERNETES | {ADDRESS: "host0", f"{KERAS}PROCESS_ID": "2"},
            unknown("host0:61000", 2),
            "Keras",
        ),
    ],
)
def test_find_cluster(
    environment: dict[str, str], expected: Cluster, name: str
) -> None:
    cluster, where = find_cluster(environment, {})
    assert cluster == expected
    assert name in where


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "no launcher"),
        (BATCH, "Slurm without srun"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, "Slurm (SLURM_PROCID"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, "Open MPI"),
        # The pods may be independent jobs.
        ({"JOB_COMPLETION_INDEX": "1"}, f"without {KERAS}NUM_PROCESSES"),
    ],
)
def test_a_single_process(environment: dict[str, str], expected: str) -> None:
    cluster, where = find_cluster(environment, {})
    assert cluster is None
    assert expected in where


def test_arguments_override_launchers() -> None:
    given: dict[str, Any] = {"coordinator": "first:1", "process_id": 2}
    cluster, where = find_cluster(SLURM, given)
    assert cluster == unknown("first:1", 2)
    assert "arguments (coordinator=first:1, process_id=2) and Slurm" in where
    full = given | {"num_processes": 4}
    assert find_cluster(SLURM, full)[0] == Cluster(("first:1", "", "", ""), 2)


@pytest.mark.parametrize(
    ("environment", "given", "message"),
    [
        (OPEN_MPI, {}, f"`coordinator` must be given.*`{ADDRESS}`.*_RANK=2"),
        ({}, {"coordinator": "a:1"}, "`num_processes` must be given"),
        ({}, {"num_processes": 2}, "`process_id` must be given"),
        (TORCHRUN | {"RANK": "3"}, {}, "`process_id` must be .* from 0 to 2"),
        (TORCHRUN | {"RANK": "x"}, {}, "`process_id` must be an integer"),
        (TORCHRUN | {"MASTER_PORT": "x"}, {}, "`coordinator` must be 'host:"),
        (TORCHRUN, {"num_processes": 0}, "`num_processes` must be an integer"),
        (TORCHRUN, {"process_id": True}, "`process_id` must be an integer"),
        (TORCHRUN, {"process_id": 1.0}, "`process_id` must be an integer"),
        (AGENT | {"MASTER_PORT": "x"}, {}, "`coordinator` must be 'host:"),
        (AGENT | {"MASTER_PORT": "65535"}, {}, "`coordinator` must be 'host:"),
        (TORCHRUN | {"WORLD_SIZE": "1000000000"}, {}, "from 1 to 4096"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, {}, "from 1 to 4096"),
        (TORCHRUN, {"num_processes": 10**9}, "from 1 to 4096"),
        (TORCHRUN, {"process_id": -1}, "`process_id` must be an integer"),
        (TORCHRUN, {"coordinator": "http://a:1"}, "must be 'host:port'"),
        (TORCHRUN, {"coordinator": "http://a"}, "must be 'host:port'"),
        (TORCHRUN, {"coordinator": "::1"}, r"or '\[IPv6 address\]:port'"),
        (TORCHRUN, {"coordinator": "::1:80"}, "must be 'host:port'"),
        (TORCHRUN, {"coordinator": 80}, "must be 'host:port'"),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, {}, "must be 'host:port'"),
        (SLURM | {"SLURM_JOB_ID": "x"}, {}, "`coordinator` must be given"),
        (ALL, {"num_processes": 4}, "be one address, or 4 different"),
        (ALL | {ADDRESS: "a:1,a:1,b:1"}, {}, "one address, or 3 different"),
    ],
)
def test_missing_or_malformed_settings(
    environment: dict[str, str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find_cluster(environment, given)


@pytest.mark.parametrize(
    ("environment", "given", "job"),
    [
        (SLURM, {}, "Slurm 7.0"),
        (SLURM | {"SLURM_STEP_ID": "1"}, {}, "Slurm 7.1"),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "run"}, {}, "torchrun run"),
        # The default of torchrun, equal in all jobs.
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, {}, ""),
        (TORCHRUN, {}, ""),
        (
            OPEN_MPI | {ADDRESS: "host0", "PMIX_NAMESPACE": "12"},
            {},
            "Open MPI 12",
        ),
        (MPICH | {ADDRESS: "host0", "SLURM_JOB_ID": "7"}, {}, "MPICH 7"),
        (MPICH | {ADDRESS: "host0"}, {}, ""),
        (ALL, {}, ""),
        # Started by the user, perhaps each in its own Slurm step.
        (
            SLURM,
            {"coordinator": "a:1", "num_processes": 2, "process_id": 1},
            "",
        ),
    ],
)
def test_the_identity_of_a_job(
    environment: dict[str, str], given: dict[str, Any], job: str
) -> None:
    cluster, _ = find_cluster(environment, given)
    assert cluster is not None
    assert cluster.job == job


def test_a_pod_without_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1")
    with pytest.raises(ValueError, match="`coordinator` must be given"):
        find_cluster(KUBERNETES, {})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("host", "host"),
        ("host-1,host-2", "host-1"),
        ("n[1-4]", "n1"),
        ("n[003,7-9]", "n003"),
        ("n[08-12,20],login1", "n08"),
        ("login1,n[08-12]", "login1"),
        ("rack[2-3]node[00-15]", "rack2node00"),
        ("n[5]-ib0,n[6]-ib0", "n5-ib0"),
        ("a.b.org,c.b.org", "a.b.org"),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    """Expected: the output of `scontrol show hostnames`."""
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
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: gpus)
    monkeypatch.setattr(
        tf.config,
        "set_visible_devices",
        lambda chosen, _: gpus.__setitem__(slice(None), chosen),
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy._share_gpus(Cluster(("host0:1", "host1:1", "host0:2"), index))
    assert gpus == expected


# ------------------------------------------------------------- real processes
PROGRAM = """
import json, os, sys
import tensorflow as tf
import tfkfac
strategy = tfkfac.MultiWorkerMirroredStrategy(**json.loads(sys.argv[1]))
replica = lambda: tf.distribute.get_replica_context()
total = strategy.run(lambda: replica().all_reduce("sum", tf.constant(2.0)))
print(total.numpy(), strategy.cluster_resolver.task_id)
"""


def test_two_processes_that_know_only_worker_0() -> None:
    """By variables of torchrun and by arguments, with a web proxy set."""
    with contextlib.closing(*claim_ports(1)) as claim:
        port = claim.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        # Without `no_grpc_proxy` TensorFlow would connect to the proxy.
        proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "a.org"}
        workers = [
            (TORCHRUN | variables | {"MASTER_ADDR": "localhost"}, {}),
            (
                {},
                {
                    "coordinator": f"localhost:{port}",
                    "num_processes": 2,
                    "process_id": 1,
                },
            ),
        ]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
                env=worker_environment(0, []) | proxy | variables,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for variables, arguments in workers
        ]
        for index, process in enumerate(processes):
            out, err = process.communicate(timeout=90)
            assert out == f"4.0 {index}\n", err
            (line,) = (x for x in err.splitlines() if "tfkfac" in x)
            assert line.startswith(f"tfkfac: worker {index} of 2 by ")
