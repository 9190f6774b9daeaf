"""Processes of tests: their output by line and time, and their exit codes."""

import atexit
import contextlib
import functools
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
LIMIT_S = 300.0
INTERVAL_S = 0.02


class Server:
    """The process of `fork_server.py`, and its replies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            cwd=ROOT,
            env=worker_environment(0, []),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C must not end it
        )
        self._numbers = itertools.count()
        self.replies: dict[tuple[str, int], int] = {}
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, number, value = line.split()
            self.replies[kind, int(number)] = int(value)
        for _, started in list(self.replies):  # the server has died
            self.replies.setdefault(("ended", started), -signal.SIGKILL)

    def start(self, **request: Any) -> tuple[int, int]:
        """Start a program; return its number and process identifier."""
        number = next(self._numbers)
        assert self._process.stdin is not None
        print(
            json.dumps({"number": number, **request}),
            file=self._process.stdin,
            flush=True,
        )
        wait(lambda: ("started", number) in self.replies, LIMIT_S)
        return number, self.replies["started", number]


server = functools.cache(Server)


class Program(contextlib.AbstractContextManager["Program"]):
    """A process on the CPU that is killed at the end of the context.

    A Python program is a fork of a server that has imported tfkfac, because the
    import takes seconds. All forks have the same string hashes; the workers of
    `tests/tools/test_launch.py` do not.

    Attributes:
        lines: The lines of its output and errors, with their times.
        ended_s: Time of its end; 0 while it runs.
        code: Its exit code after the end.
        log: File of its output.
    """

    def __init__(
        self,
        command: Sequence[object],
        addresses: Sequence[str] = (),
        index: int = 0,
        environment: Mapping[str, str] | None = None,
        folder: pathlib.Path = ROOT,
        dry: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Start a process.

        Args:
            command: Words of the command.
            addresses: Of all workers of its cluster, if any.
            index: Of this worker.
            environment: Other variables to set.
            folder: Working directory.
            dry: Not None to end a Python script with exit code 0 after its
                arguments, and these others, are parsed and its help is
                printed, or at its first layer.
        """
        self.lines: list[tuple[float, str]] = []
        self.ended_s = 0.0
        self.code = 0
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.log = pathlib.Path(self._file.name)
        variables = worker_environment(index, addresses)
        variables |= environment or {}
        words = [str(word) for word in command]
        self._poll: Callable[[], int | None]
        if words[0] == sys.executable:
            number, self.process = server().start(
                words=words[1:],
                environment=variables,
                folder=str(folder),
                log=self._file.name,
                dry=dry,
            )
            self._poll = lambda: server().replies.get(("ended", number))
        else:
            process = subprocess.Popen(
                words,
                env=variables,
                cwd=folder,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.process, self._poll = process.pid, process.poll
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        if not self.ended_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process, signal.SIGKILL)
            self.send(signal.SIGKILL)  # if it has no group yet
        self._thread.join()
        self._file.close()

    def _read(self) -> None:
        """Read lines until the program has ended."""
        with open(self.log, errors="replace", newline="\n") as log:
            line = ""
            while not self.ended_s:
                code = self._poll()
                while part := log.readline():
                    line += part
                    if line.endswith("\n") or code is not None:
                        self.lines.append((time.monotonic(), line))
                        line = ""
                if code is not None:
                    self.code, self.ended_s = code, time.monotonic()
                time.sleep(INTERVAL_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, number)

    def text(self) -> str:
        return "".join(line for _, line in list(self.lines))

    def find(self, pattern: str) -> tuple[float, str] | None:
        """Return the time and text of the first line that matches."""
        lines = list(self.lines)
        return next((x for x in lines if re.search(pattern, x[1])), None)

    def wait_for(self, pattern: str, limit_s: float = LIMIT_S) -> None:
        """Wait for a line that matches."""
        wait(lambda: self.find(pattern) or self.ended_s, limit_s, self)
        assert self.find(pattern), self.text()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; return the exit code."""
        wait(lambda: self.ended_s, limit_s, self)
        return self.code


def wait(
    condition: Callable[[], Any], limit_s: float, *programs: Program
) -> None:
    """Wait for a condition; fail with the output of some programs."""
    end = time.monotonic() + limit_s
    while not condition():
        text = "\n---\n".join(program.text() for program in programs)
        assert time.monotonic() < end, text
        time.sleep(INTERVAL_S)


def worker_environment(index: int, addresses: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker: CPU only, one thread, no proxy."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.lower() not in PROXIES and name != "TF_CONFIG"
    }
    if len(addresses) > 1:
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": list(addresses)}, "task": task}
        environment["TF_CONFIG"] = json.dumps(config)
    return environment | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "GRPC_VERBOSITY": "ERROR",
        "NO_PROXY": "*",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTEROP_THREADS": "4",
        "TF_NUM_INTRAOP_THREADS": "1",
        "no_proxy": "*",
    }
