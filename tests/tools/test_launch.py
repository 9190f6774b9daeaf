"""The launcher, with workers that need no TensorFlow."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "tools" / "launch.py"
PREAMBLE = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index = config["task"]["index"]
"""


def command(workers: int, code: str, *options: str) -> list[str]:
    python = [sys.executable, "-c", PREAMBLE + code]
    return [sys.executable, str(SCRIPT), *options, str(workers), "--", *python]


def launch(
    workers: int, code: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workers, code, *options),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )


@contextlib.contextmanager
def launched(arguments: list[str]) -> Iterator[Any]:
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def assert_gone(identifiers: list[int]) -> None:
    """No process runs; an orphan may wait to be reaped."""
    for identifier in identifiers:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(identifier)],
            capture_output=True,
            text=True,
        ).stdout
        assert state[:1] in ("", "Z")


def lines_of(output: str, worker: int) -> list[str]:
    prefix = f"[worker {worker}] "
    lines = output.splitlines()
    return [line.removeprefix(prefix) for line in lines if prefix in line]


def test_configuration() -> None:
    """Tasks, distinct addresses, and one random secret."""
    code = "print(json.dumps(config)); print(os.environ['TFKFAC_SECRET'])"
    done = launch(3, code)
    assert done.returncode == 0 and done.stderr == ""
    lines = [lines_of(done.stdout, worker) for worker in range(3)]
    configs = [json.loads(line) for line, _ in lines]
    tasks = [config["task"] for config in configs]
    assert tasks == [{"type": "worker", "index": w} for w in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(config["cluster"]["worker"] == addresses for config in configs)
    (secret,) = {secret for _, secret in lines}
    assert len(secret) == 64
    done = launch(1, code, TFKFAC_SECRET="word")
    assert lines_of(done.stdout, 0)[1] == "word"


OUTPUT = r"""
sys.stdout.buffer.write(b"a\r\nb\n\n\xff\n\xc3\xa4\n")
print("I0000 00:00:1795473054.391472   10145 port.cc:153] oneDNN custom")
for step in range(3):
    back = "\b" * 7 * (step > 0)  # as Keras does
    sys.stdout.write(f"{back}\r\x1b[1m{step + 1}/3\x1b[0m bar")
    sys.stdout.flush()
print("\nend", end="")
"""


def test_output() -> None:
    """Line ends, invalid UTF-8, TensorFlow's messages, progress bars."""
    done = launch(2, OUTPUT, TF_CPP_MIN_LOG_LEVEL="1")
    lines = ["a", "b", "", "\ufffd", "ä"]
    assert lines_of(done.stdout, 0) == [*lines, "3/3 bar", "end"]
    assert lines_of(done.stdout, 1) == [*lines, "end"]
    done = launch(1, OUTPUT, TF_CPP_MIN_LOG_LEVEL="0")
    assert lines_of(done.stdout, 0)[5].startswith("I0000")


def test_failure_stops_the_others() -> None:
    code = """
print(os.getpid(), flush=True)
if index == 1:
    time.sleep(0.2)
    print("no luck", file=sys.stderr)
    sys.exit(3)
time.sleep(60)
"""
    start = time.monotonic()
    done = launch(3, code)
    assert time.monotonic() - start < 20
    assert done.returncode == 3
    assert done.stderr.startswith("[worker 1] no luck\nlaunch.py: worker 1")
    assert_gone([int(lines_of(done.stdout, w)[0]) for w in range(3)])


WAIT = "print(os.getpid(), flush=True); time.sleep(60)"
# The child is in the process group of its worker.
WAIT_IN_CHILD = (
    "import subprocess; subprocess.run([sys.executable, '-c', "
    "'import os, time; print(os.getpid(), flush=True); time.sleep(60)'])"
)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, WAIT), (signal.SIGTERM, WAIT_IN_CHILD)]
)
def test_signal_stops_all(number: signal.Signals, code: str) -> None:
    with launched(command(2, code)) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    assert_gone([int(line.split()[-1]) for line in lines])


def test_reader_that_leaves() -> None:
    code = "print(os.getpid(), flush=True)\nwhile True: print('x' * 1000)"
    with launched(command(2, code)) as process:
        line = process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=30) == 128 + signal.SIGPIPE
        assert "Exception ignored" not in process.stderr.read()
    assert_gone([int(line.split()[-1])])


def test_a_command_that_cannot_be_run() -> None:
    words = [sys.executable, str(SCRIPT), "2", "--", "no-such"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 127
    assert "error: cannot run 'no-such': No such" in done.stderr


def test_restarts() -> None:
    """Two restarts of all workers, at other ports.

    Options are on both sides of the number; all words after the first `--` are
    of the command.
    """
    code = "print(config['cluster']['worker'], sys.argv[1:], flush=True)\n"
    code += "sys.exit(4) if index else time.sleep(60)"
    words = [*command(2, code, "--restarts", "2"), "--", "--min-workers", "9"]
    place = words.index("--")
    words[place:place] = ["--min-workers", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    lines = lines_of(done.stdout, 1)
    # A port may be in use by a worker that has just been stopped.
    assert len(set(lines)) == 3
    for line in lines:
        assert line.endswith("['--', '--min-workers', '9']")


LOST = """
count = len(config["cluster"]["worker"])
print(count, flush=True)
if index == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if count == 3:
    time.sleep(60)
"""


def test_a_job_goes_on_without_a_worker_that_is_lost() -> None:
    done = launch(3, LOST, "--min-workers", "2")
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, 2) == ["3"]
    # The first start may end before worker 1 prints.
    assert lines_of(done.stdout, 1) in (["2"], ["3", "2"])
    done = launch(3, LOST, "--min-workers", "3")
    assert done.returncode == 128 + signal.SIGKILL
    # An error of the program would happen again.
    code = "sys.exit(4) if index == 2 else time.sleep(60)"
    done = launch(3, code, "--min-workers", "1")
    assert done.returncode == 4 and "goes on" not in done.stderr


def test_nobody_outlives_a_launcher_that_is_killed() -> None:
    with launched(command(2, WAIT_IN_CHILD)) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()
        process.wait()
        # All processes hold these.
        process.stdout.read()
        process.stderr.read()
    time.sleep(0.1)
    assert_gone([int(line.split()[-1]) for line in lines])


@pytest.mark.slow
def test_a_worker_may_save_before_it_terminates() -> None:
    code = """
def save(*_):
    time.sleep(4)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    with launched(command(2, code)) as process:
        for _ in range(2):
            process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert process.stdout.read().count("saved") == 2
