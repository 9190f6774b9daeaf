"""Starts the workers of a TensorFlow cluster on this machine.

    python tools/launch.py 2 -- python examples/train_classifier.py --model cnn

Every worker runs the command with its own `TF_CONFIG`. Their output comes out
line by line with the worker's name in front; progress bars are shown for worker
0 only. When a worker fails, the others are stopped and its exit code is
returned; Ctrl-C stops all.

The workers share the processor: unless `TF_NUM_INTRAOP_THREADS` is set, each
uses its part of the cores. In a virtual environment `python` is that of the
environment whose interpreter runs this script.
"""

import argparse
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from worker_output import LineFilter, Terminal, pass_on

NAME = pathlib.Path(__file__).name
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,  # nobody reads what we write
)
GRACE = 3.0  # seconds from a polite signal to SIGKILL


class Signals:
    """The signals that told this process to stop, so far.

    They are looked up, not raised: one that arrives while a worker starts
    must not lose it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        self.received.append(number)


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
        self._threads = [
            threading.Thread(
                target=pass_on,
                args=(
                    pipe,
                    LineFilter(terminal, stream, f"[{self.name}] ", not index),
                ),
                daemon=True,
            )
            for pipe, stream in pipes
        ]
        for thread in self._threads:
            thread.start()

    def signal(self, number: int) -> None:
        """Signals the worker and the processes it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def finish_output(self) -> None:
        """Waits for its last words, but not for orphans that keep silent."""
        for thread in self._threads:
            thread.join(timeout=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(arguments)
    signals = Signals()
    for stream in (sys.stdout, sys.stderr):
        assert hasattr(stream, "reconfigure")
        stream.reconfigure(errors="replace")
    terminal = Terminal()
    workers: list[Worker] = []
    try:
        for environment in environments(options.workers):
            index = len(workers)
            workers.append(
                Worker(index, options.command, environment, terminal)
            )
        return wait(workers, signals, terminal)
    except CannotRunError as error:
        say(terminal, str(error))
        return 127
    finally:
        stop(workers, signals)


def say(terminal: Terminal, message: str) -> None:
    """Writes a message of this script."""
    terminal.write_line(sys.stderr, f"{NAME}: {message}")


def wait(
    workers: Sequence[Worker], signals: Signals, terminal: Terminal
) -> int:
    """Returns the code of the first failure or signal, else 0 in the end."""
    while not signals.received:
        codes = [worker.process.poll() for worker in workers]
        for worker, code in zip(workers, codes, strict=True):
            if code:
                worker.finish_output()
                say(terminal, f"{worker.name} {describe(code)}")
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(0.05)
    return 128 + signals.received[0]


def describe(code: int) -> str:
    """Says how a process has failed."""
    if code > 0:
        return f"failed with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def stop(workers: Sequence[Worker], signals: Signals) -> None:
    """Ends all workers, with SIGKILL if they do not obey or in a hurry.

    A second Ctrl-C is a hurry.
    """
    is_interrupt = signals.received[:1] == [signal.SIGINT]
    for worker in workers:
        worker.signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
    known = len(signals.received)
    deadline = time.monotonic() + GRACE
    while (
        any(worker.process.poll() is None for worker in workers)
        and time.monotonic() < deadline
        and len(signals.received) == known
    ):
        time.sleep(0.02)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        worker.finish_output()


def local_addresses(count: int) -> list[str]:
    """Distinct free addresses: all are open while they are chosen."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


def environments(count: int) -> Iterator[dict[str, str]]:
    """Yields the environment of each worker."""
    common = common_environment(count)
    addresses = local_addresses(count)
    for index in range(count):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        yield {**common, "TF_CONFIG": json.dumps(config)}


def common_environment(workers: int) -> dict[str, str]:
    """What the environments of all workers share."""
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // workers)
    environment.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # gRPC would ask a proxy for these addresses, too.
    for name in ("no_proxy", "NO_PROXY"):
        known = environment.get(name)
        environment[name] = f"{known},127.0.0.1" if known else "127.0.0.1"
    if sys.prefix != sys.base_prefix:
        scripts = str(pathlib.Path(sys.executable).parent)
        path = environment.get("PATH", os.defpath)
        environment["PATH"] = scripts + os.pathsep + path
    return environment


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s [-h] N -- COMMAND [ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workers", metavar="N", type=number_of_workers, help="how many workers"
    )
    parser.add_argument(
        "command",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="what each of them runs, with its arguments",
    )
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        parser.error("a command must follow the number of workers")
    return options


def number_of_workers(text: str) -> int:
    """Parses N."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number above 0; received {text!r}"
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
