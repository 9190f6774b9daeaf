"""The job scripts of the guide, run by real launchers on this machine.

`bash tools/test.sh --clusters` installs the launchers. All jobs reach the same
weights bit for bit, with and without an interruption by SIGTERM.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.cluster import ROOT, worker_environment

pytestmark = pytest.mark.clusters

JOBS = "examples/clusters"
PROGRAM = ["python", f"{JOBS}/train.py"]
EPOCHS = "12"
LIMIT = 300.0
COORDINATOR = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
MPICH = ["mpirun.mpich", "-n", "2", "-genv", COORDINATOR, "localhost:23457"]
JOB: dict[str, Sequence[str]] = {
    "srun": ["srun", "-n", "2", "--overcommit", *PROGRAM],
    "Open MPI": ["bash", f"{JOBS}/openmpi.sh"],
    "MPICH": [*MPICH, *PROGRAM],
    "Ray": [f"{ROOT}/.venv-ray/bin/python", f"{JOBS}/ray_train.py"],
}


def environment() -> dict[str, str]:
    """Return the environment of root in a shell, on a machine of few cores."""
    path = os.pathsep.join(
        [str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    )
    return worker_environment(0, []) | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / JOBS)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def start(command: Sequence[str], *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def results(output: str) -> set[str]:
    """Read the weights of the two workers from the output of a job."""
    weights = dict(re.findall(r"worker (\d) of 2: .*weights (\w+)", output))
    assert weights.keys() == {"0", "1"}, output
    return set(weights.values())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the weights of the job started with `TF_CONFIG`."""
    launcher = [sys.executable, "tools/launch.py", "2", "--", *PROGRAM]
    job = start(launcher, tmp_path_factory.mktemp("backup"), EPOCHS)
    output, _ = job.communicate(timeout=LIMIT)
    weights = results(output)
    assert len(weights) == 1
    return weights


def test_a_job_of_ray(expected: set[str], tmp_path: pathlib.Path) -> None:
    job = start(JOB["Ray"], tmp_path, EPOCHS)
    output, _ = job.communicate(timeout=LIMIT)
    assert job.returncode == 0, output
    assert results(output) == expected
    assert "tfkfac: worker 1 of 2 by TF_CONFIG" in output
    assert "cannot answer SIGTERM" in output


def cancel(job: subprocess.Popen[str]) -> None:
    """Send SIGTERM to the tasks by `scancel`."""
    command = ["squeue", "--noheader", "--format=%i"]
    jobs = subprocess.run(command, capture_output=True, text=True, check=True)
    subprocess.run(["scancel", "-s", "TERM", *jobs.stdout.split()], check=True)


def terminate(job: subprocess.Popen[str]) -> None:
    job.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("name", "end", "code", "source"),
    [
        ("srun", cancel, 143, "by Slurm (SLURM_PROCID="),
        ("Open MPI", terminate, 1, "and Open MPI (OMPI_COMM_WORLD_RANK="),
        ("MPICH", terminate, 143, "and MPICH (PMI_RANK="),
    ],
)
def test_a_job_resumes_after_sigterm(
    name: str,
    end: Callable[[subprocess.Popen[str]], None],
    code: int,
    source: str,
    expected: set[str],
    tmp_path: pathlib.Path,
) -> None:
    job = start(JOB[name], tmp_path, EPOCHS)
    lines = output_of(job)
    begin = "".join(take_until(lines, "Epoch 3/"))
    assert re.search(f"tfkfac: worker 1 of 2 .*{re.escape(source)}", begin)
    assert "cannot answer SIGTERM" not in begin
    end(job)
    rest = "".join(lines)
    assert job.wait(LIMIT) == code, begin + rest
    assert "tfkfac: SIGTERM: training is backed up after batch" in rest
    again = start(JOB[name], tmp_path, EPOCHS)
    output, _ = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, output
    assert "Epoch 1/" not in output
    assert results(output) == expected


def output_of(job: subprocess.Popen[str]) -> Iterator[str]:
    assert job.stdout is not None
    yield from job.stdout


def take_until(lines: Iterator[str], text: str) -> Iterator[str]:
    for line in lines:
        yield line
        if text in line:
            return
    raise AssertionError(f"no {text!r}")


def test_a_batch_job_of_slurm_resumes(
    expected: set[str], tmp_path: pathlib.Path
) -> None:
    """The script submits itself again; the second run finishes training."""
    log = tmp_path / "log"
    options = ["--parsable", "--overcommit", f"--output={log}"]
    submit = start(
        ["sbatch", *options, f"{JOBS}/slurm.sh"], tmp_path / "backup", EPOCHS
    )
    job, _ = submit.communicate(timeout=LIMIT)
    wait_for(log, "Epoch 3/")
    subprocess.run(["scancel", "-s", "TERM", job.strip()], check=True)
    wait_for(log, "tfkfac: SIGTERM: training is backed up after batch")
    wait_for(log, "worker 0 of 2: loss")
    wait_for(log, "worker 1 of 2: loss")
    assert results(log.read_text()) == expected


def wait_for(log: pathlib.Path, text: str) -> None:
    end = time.monotonic() + LIMIT
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {log}"
        time.sleep(0.5)
