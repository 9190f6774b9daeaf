"""Run a worker process on this machine and copy its output."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0: all messages of TensorFlow
STYLE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Messages that TensorFlow prints at any log level: start-up messages, and the
# error that no GPU driver is installed.
CHATTER = re.compile(
    r"WARNING: All log messages before absl::|I\d{4} [\d:.]+ +\d+ \w+\.cc:|"
    r"E\d{4} .*failed call to cuInit.*\(303\)$"
)
# Shell script that reads process groups. If the input ends without "done", the
# launcher has died: kill the groups.
GUARD = """
while read -r group; do
    [ "$group" = done ] && exit 0
    groups="$groups -$group"
done
[ -n "$groups" ] && kill -s KILL -- $groups
"""
_lock = threading.Lock()  # held while a line is written


def write_line(stream: TextIO, text: str) -> None:
    """Write a line, without colours unless the stream is a terminal."""
    with _lock:
        stream.write((text if stream.isatty() else STYLE.sub("", text)) + "\n")
        stream.flush()


class Worker:
    """A process, and the threads that copy its output.

    Raises:
        OSError: If the command cannot be run.
    """

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = f"worker {index}"
        self._is_first = index == 0
        self._shows_all = environment[LOG_LEVEL] == "0"
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the launcher only
        )
        assert self.process.stdout and self.process.stderr
        self._threads = [
            threading.Thread(target=self._copy, args=pair, daemon=True)
            for pair in (
                (self.process.stdout, sys.stdout),
                (self.process.stderr, sys.stderr),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _copy(self, pipe: IO[bytes], stream: TextIO) -> None:
        """Copy lines; copy only the last state of worker 0's progress bars."""
        try:
            for raw in pipe:
                line = raw.decode("utf-8", "replace").rstrip("\r\n")
                if CHATTER.match(line) and not self._shows_all:
                    continue
                if "\r" in line and not self._is_first:
                    continue
                states = [state.rstrip("\b") for state in line.split("\r")]
                last = next((state for state in states[::-1] if state), "")
                write_line(stream, f"[{self.name}] {last}")
        except BrokenPipeError:
            pass  # the main thread receives SIGPIPE

    @property
    def is_running(self) -> bool:
        """True if the process has not ended."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Signal the process and its children."""
        if self.is_running:
            os.killpg(self.process.pid, number)

    def finish_output(self) -> None:
        """Wait up to 1 s for output; children may keep the pipe open longer."""
        for thread in self._threads:
            thread.join(timeout=1.0)

    def ending(self) -> str:
        """Describe how the process failed."""
        code = self.process.returncode
        if code > 0:
            return f"{self.name} failed with exit code {code}"
        return f"{self.name} was ended by {signal.Signals(-code).name}"


class Guard:
    """A process that kills the workers if the launcher is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, worker: Worker) -> None:
        """Add a worker, which leads a process group."""
        self._send(str(worker.process.pid))

    def dismiss(self) -> None:
        """End the guard after all workers."""
        self._send("done")
        self._process.wait()

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
