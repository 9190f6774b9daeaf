"""A process on this machine that is a worker, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from worker_output import LineFilter, Terminal, pass_on

LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0 is all of TensorFlow's messages
# Reads the numbers of process groups; kills those when its input ends without
# a last word, which is when the process at the other end is gone.
GUARD = """
while read -r group; do
    [ "$group" = done ] && exit 0
    groups="$groups -$group"
done
[ -n "$groups" ] && kill -s KILL -- $groups
"""


class CannotRunError(Exception):
    """The command does not exist or is not a program."""


class Worker:
    """A process, and the threads that pass on what it writes.

    Raises:
        CannotRunError: If the command cannot be run.
    """

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        terminal: Terminal,
    ) -> None:
        self.name = f"worker {index}"
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        except OSError as error:
            raise CannotRunError(
                f"error: cannot run {command[0]!r}: {error.strerror}"
            ) from error
        pipes = (
            (self.process.stdout, sys.stdout),
            (self.process.stderr, sys.stderr),
        )
        prefix, wants_all = f"[{self.name}] ", environment.get(LEVEL) == "0"
        self._threads = [
            threading.Thread(
                target=pass_on,
                args=(
                    pipe,
                    LineFilter(terminal, stream, prefix, not index, wants_all),
                ),
                daemon=True,
            )
            for pipe, stream in pipes
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Signals the worker and the processes it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def finish_output(self) -> None:
        """Waits for its last words, but not for orphans that keep silent."""
        for thread in self._threads:
            thread.join(timeout=1.0)


class Guard:
    """Kills the workers if this process dies without a chance to do it."""

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
        """Tells it of a worker, which leads a process group."""
        self._say(str(worker.process.pid))

    def dismiss(self) -> None:
        """All workers have ended."""
        self._say("done")
        self._process.wait()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()


def describe(code: int) -> str:
    """Says how a process has failed."""
    if code > 0:
        return f"failed with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"
