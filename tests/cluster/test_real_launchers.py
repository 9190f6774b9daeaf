"""The job scripts of the guide, run by real launchers on this machine.

`bash tools/test.sh --clusters` installs the launchers. All jobs reach the same
weights bit for bit, with and without an interruption by SIGTERM.
"""

import os
import pathlib
import re
import signal
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.support.programs import ROOT, Program, wait

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
    return {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / JOBS)]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def start(command: Sequence[str], *arguments: object) -> Program:
    return Program([*command, *arguments], environment=environment())


def results(output: str) -> set[str]:
    """Read the weights of the two workers from the output of a job."""
    weights = dict(re.findall(r"worker (\d) of 2: .*weights (\w+)", output))
    assert weights.keys() == {"0", "1"}, output
    return set(weights.values())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the weights of the job started with `TF_CONFIG`."""
    launcher = [sys.executable, "tools/launch.py", "2", "--", *PROGRAM]
    weights = results(
        output_of(launcher, tmp_path_factory.mktemp("backup"), EPOCHS)
    )
    assert len(weights) == 1
    return weights


def test_a_job_of_ray(expected: set[str], tmp_path: pathlib.Path) -> None:
    output = output_of(JOB["Ray"], tmp_path, EPOCHS)
    assert results(output) == expected
    assert "tfkfac: worker 1 of 2 by TF_CONFIG" in output
    assert "cannot answer SIGTERM" in output


def output_of(command: Sequence[str], *arguments: object) -> str:
    """Run a job to the end; return its output."""
    with start(command, *arguments) as job:
        assert job.end(LIMIT) == 0, job.text()
    return job.text()


def cancel(_: Program) -> None:
    """Send SIGTERM to the tasks by `scancel`."""
    jobs = output_of(["squeue", "--noheader", "--format=%i"]).split()
    output_of(["scancel", "-s", "TERM", *jobs])


def terminate(job: Program) -> None:
    job.send(signal.SIGTERM)


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
    end: Callable[[Program], None],
    code: int,
    source: str,
    expected: set[str],
    tmp_path: pathlib.Path,
) -> None:
    with start(JOB[name], tmp_path, EPOCHS) as job:
        job.wait_for("Epoch 3/", LIMIT)
        begin = job.text()
        assert re.search(f"tfkfac: worker 1 of 2 .*{re.escape(source)}", begin)
        assert "cannot answer SIGTERM" not in begin
        end(job)
        assert job.end(LIMIT) == code, job.text()
    assert job.find("tfkfac: SIGTERM: training is backed up after batch")
    output = output_of(JOB[name], tmp_path, EPOCHS)
    assert "Epoch 1/" not in output
    assert results(output) == expected


def test_a_batch_job_of_slurm_resumes(
    expected: set[str], tmp_path: pathlib.Path
) -> None:
    """The script submits itself again; the second run finishes training."""
    log = tmp_path / "log"
    options = ["--parsable", "--overcommit", f"--output={log}"]
    submit = ["sbatch", *options, f"{JOBS}/slurm.sh"]
    job = output_of(submit, tmp_path / "backup", EPOCHS).strip()
    wait_for(log, "Epoch 3/")
    output_of(["scancel", "-s", "TERM", job])
    wait_for(log, "tfkfac: SIGTERM: training is backed up after batch")
    wait_for(log, "worker 0 of 2: loss")
    wait_for(log, "worker 1 of 2: loss")
    assert results(log.read_text()) == expected


def wait_for(log: pathlib.Path, text: str) -> None:
    wait(lambda: log.exists() and text in log.read_text(), LIMIT)
