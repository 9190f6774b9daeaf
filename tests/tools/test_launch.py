"""Runs the script with commands that need no TensorFlow."""

import contextlib
import json
import os
import pathlib
import pty
import re
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


def command(workers: int, code: str) -> list[str]:
    python = [sys.executable, "-c", PREAMBLE + code]
    return [sys.executable, str(SCRIPT), str(workers), "--", *python]


def launch(
    workers: int, code: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(workers, code),
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
    """None of the processes runs; an orphan may wait to be reaped."""
    for identifier in identifiers:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(identifier)],
            capture_output=True,
            text=True,
        ).stdout
        assert state[:1] in ("", "Z")


def own_lines(output: str, worker: int) -> list[str]:
    prefix = f"[worker {worker}] "
    lines = output.splitlines()
    return [line.removeprefix(prefix) for line in lines if prefix in line]


def test_configuration() -> None:
    done = launch(3, "print(json.dumps(config))")
    assert done.returncode == 0
    assert done.stderr == ""
    configs = [json.loads(*own_lines(done.stdout, w)) for w in range(3)]
    tasks = [config["task"] for config in configs]
    assert tasks == [{"type": "worker", "index": w} for w in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(config["cluster"]["worker"] == addresses for config in configs)


def test_one_secret_for_each_job() -> None:
    """Unless the user has set one."""
    secrets = []
    for environment in ({}, {}, {"TFKFAC_SECRET": "word"}):
        code = "print(os.environ['TFKFAC_SECRET'])"
        done = launch(2, code, **environment)
        (secret,) = {own_lines(done.stdout, w)[0] for w in range(2)}
        secrets.append(secret)
    assert len(set(secrets)) == 3
    assert secrets[2] == "word"
    assert all(len(secret) == 64 for secret in secrets[:2])


JOB = """
import tensorflow as tf, tfkfac
strategy = tfkfac.MultiWorkerMirroredStrategy(start_timeout=60)
replica = lambda: tf.distribute.get_replica_context()
total = strategy.run(lambda: replica().all_reduce("sum", tf.constant(2.0)))
tfkfac_channel = strategy.stopping._channel
connection = next(iter(tfkfac_channel._connections.values()))
print("total", total.numpy(), "MAC", connection._keys is not None, flush=True)
# A message of one worker reaches the other one with a MAC.
if index == 1:
    strategy.stopping.request()
while not strategy.stopping.end_batch():
    time.sleep(0.01)
print("stopped", flush=True)
"""


@pytest.mark.slow
def test_a_real_job_with_a_secret() -> None:
    done = launch(2, JOB, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stderr
    for worker in range(2):
        lines = own_lines(done.stdout, worker)
        assert lines == ["total 4.0 MAC True", "stopped"]
    assert "not authenticated" not in done.stderr


def test_odd_output() -> None:
    """Windows' line ends, bytes that are not UTF-8, no end of line."""
    code = r"""
sys.stdout.buffer.write(b"a\r")
sys.stdout.flush()
time.sleep(0.1)
sys.stdout.buffer.write(b"\nb\r\n\n\xff\n\xc3\xa4 end")
"""
    done = launch(2, code)
    for worker in range(2):
        lines = own_lines(done.stdout, worker)
        assert lines == ["a", "b", "", "\ufffd", "ä end"]


CHATTER = """
print("WARNING: All log messages before absl::InitializeLog() is called")
print("I0000 00:00:1795473054.391472   10145 port.cc:153] oneDNN custom")
print("E0000 00:00:1795473054.391472   10145 a.cc:1] an error")
print("I am no message", os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""


@pytest.mark.parametrize("level", ["", "0"])
def test_notes_of_tensorflow_at_its_start(level: str) -> None:
    shown = {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    ours = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        command(1, CHATTER), capture_output=True, text=True, env=ours | shown
    )
    *notes, last = own_lines(done.stdout, 0)
    assert last == f"I am no message {level or 2}"
    assert len(notes) == (3 if level else 1)


BAR = r"""
print("Epoch 1")
for step in range(3):
    back = "\b" * 7 * (step > 0)  # as Keras does
    sys.stdout.write(f"{back}\r\x1b[1m{step + 1}/3\x1b[0m bar")
    sys.stdout.flush()
    time.sleep(0.2)
print()
print("done")
"""


def test_bars_of_worker_0_in_a_file() -> None:
    done = launch(2, BAR)
    assert own_lines(done.stdout, 0) == ["Epoch 1", "3/3 bar", "done"]
    assert own_lines(done.stdout, 1) == ["Epoch 1", "done"]
    assert "\r" not in done.stdout


def test_bars_of_worker_0_in_a_terminal() -> None:
    main, side = pty.openpty()
    shown = b""
    process = subprocess.Popen(command(2, BAR), stdout=side, stderr=side)
    os.close(side)
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(main, 1024):
            shown += piece
    assert process.wait() == 0
    os.close(main)
    text = shown.decode()
    # Not every state has to be seen.
    assert re.search(r"\r\[worker 0\] [123]/3 bar\x1b\[K", text)
    assert "\r\x1b[K[worker " in text  # a line replaces the bar
    assert "[worker 0] \x1b[1m3/3\x1b[0m bar\r\n" in text
    assert "[worker 1] 1/3" not in text


def test_failure_stops_the_others() -> None:
    code = """
print(os.getpid(), flush=True)
if index == 1:
    time.sleep(0.2)
    sys.exit("no luck")
time.sleep(60)
"""
    start = time.monotonic()
    done = launch(3, code.replace('sys.exit("no luck")', "sys.exit(3)"))
    assert time.monotonic() - start < 10
    assert done.returncode == 3
    assert "launch.py: worker 1 failed with exit code 3" in done.stderr
    assert_gone([int(own_lines(done.stdout, w)[0]) for w in range(3)])
    # Its last words come before that.
    done = launch(3, code)
    assert done.returncode == 1
    assert done.stderr.startswith("[worker 1] no luck\nlaunch.py: worker 1")


WAIT = "print(os.getpid(), flush=True); time.sleep(60)"
# Its child is in the same group.
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


@pytest.mark.parametrize(
    "arguments,code,message",
    [
        (["0", "--", "ls"], 2, "must be a whole number above 0; received '0'"),
        (["2"], 2, "a command must follow"),
        (["2", "--", "no-such"], 127, "error: cannot run 'no-such': No such"),
    ],
)
def test_bad_arguments(arguments: list[str], code: int, message: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert message in done.stderr


# Counts its starts in a file of each worker.
COUNT = """
path = os.environ["COUNTS"] + f"/{index}"
with open(path, "a") as file:
    file.write("x")
starts = os.path.getsize(path)
print(starts, config["cluster"]["worker"], flush=True)
"""


def test_restarts_start_all_again(tmp_path: pathlib.Path) -> None:
    """Until there have been enough of them."""
    code = "sys.exit(4) if index else time.sleep(60)"
    python, script, *rest = command(2, COUNT + code)
    done = subprocess.run(
        [python, script, "--restarts", "2", *rest],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COUNTS": str(tmp_path)},
    )
    assert done.returncode == 4
    lines = own_lines(done.stdout, 1)  # the other may end before it prints
    assert [line[0] for line in lines] == ["1", "2", "3"]
    # A port may still be in use by what has just been stopped.
    assert len({line[1:] for line in lines}) == 3
    told = re.findall("launch.py: restart (.*)", done.stderr)
    assert told == ["1 of 2", "2 of 2"]


def elastic(least: int, code: str) -> subprocess.CompletedProcess[str]:
    """Three workers of which the last one is lost, wherever it is the third."""
    python, script, *rest = command(3, code)
    return subprocess.run(
        [python, script, "--min-workers", str(least), *rest],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_job_goes_on_without_a_worker_that_is_lost() -> None:
    lost = """
count = len(config["cluster"]["worker"])
print(count, flush=True)
if index == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if count == 3:
    time.sleep(60)
"""
    done = elastic(2, lost)
    assert done.returncode == 0, done.stderr
    assert {line[0] for line in own_lines(done.stdout, 1)} == {"3", "2"}
    assert "launch.py: the job goes on with 2 workers" in done.stderr
    done = elastic(3, lost)
    assert done.returncode == 128 + signal.SIGKILL
    # An error of the program would be one again.
    done = elastic(1, "sys.exit(4) if index == 2 else time.sleep(60)")
    assert done.returncode == 4 and "goes on" not in done.stderr


def test_nobody_outlives_a_launcher_that_is_killed() -> None:
    with launched(command(2, WAIT_IN_CHILD)) as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()
        process.wait()
        # All of them hold these.
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
