"""Starts the workers of a TensorFlow cluster on this machine.

    python tools/launch.py 2 -- python examples/classification.py --model cnn

Every worker runs the command with its own `TF_CONFIG`. Their output comes out
line by line with the worker's name in front; progress bars are shown for worker
0 only. When a worker fails, the others are stopped and its exit code is
returned, or with `--restarts` all are started again; Ctrl-C stops all. SIGTERM
is handed on to the workers, which have half a minute to save what they have.
TensorFlow's notes at the start are left out; TF_CPP_MIN_LOG_LEVEL=0 shows them.

With `--min-workers M` a job goes on without workers that a signal has killed,
as where memory has ended: the others are stopped and as many started again, M
at least, which go on from what the job has saved.

Workers prove to each other that they are of this job: unless `TFKFAC_SECRET` is
set, they share a random one.

The workers share the processor: unless `TF_NUM_INTRAOP_THREADS` is set, each
uses its part of the cores. In a virtual environment `python` is that of the
environment whose interpreter runs this script.
"""

import argparse
import json
import math
import os
import pathlib
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from local_worker import LEVEL, CannotRunError, Guard, Worker, describe
from worker_output import Terminal

NAME = pathlib.Path(__file__).name
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGPIPE,  # nobody reads what we write
)
# Seconds from a polite signal to SIGKILL; the longer where this script got the
# signal SIGTERM, so that a worker can save what it has.
GRACE, LONG_GRACE = 3.0, 30.0
EARLY = 5.0  # seconds until a worker has ended too long before the others


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(arguments)
    signals = Signals()
    for stream in (sys.stdout, sys.stderr):
        assert hasattr(stream, "reconfigure")
        stream.reconfigure(errors="replace")
    terminal = Terminal()
    count, restarts = options.workers, 0
    while True:
        code, killed = run(options.command, count, signals, terminal)
        # 127 is a command that cannot run at all.
        if code in (0, 127) or signals.received:
            return code
        if killed and count - killed >= (options.min_workers or math.inf):
            count -= killed
            say(terminal, f"the job goes on with {count} workers")
        elif restarts < options.restarts:
            restarts += 1
            say(terminal, f"restart {restarts} of {options.restarts}")
        else:
            return code


def run(
    command: Sequence[str], count: int, signals: Signals, terminal: Terminal
) -> tuple[int, int]:
    """Starts all workers and waits for them.

    Returns:
        The exit code, and how many workers a signal has killed.
    """
    workers: list[Worker] = []
    guard = Guard()
    try:
        for environment in environments(count):
            index = len(workers)
            workers.append(Worker(index, command, environment, terminal))
            guard.watch(workers[-1])
        code = wait(workers, signals, terminal)
        return code, sum((w.process.poll() or 0) < 0 for w in workers)
    except CannotRunError as error:
        say(terminal, str(error))
        return 127, 0
    finally:
        stop(workers, signals, terminal)
        guard.dismiss()


def say(terminal: Terminal, message: str) -> None:
    """Writes a message of this script."""
    terminal.write_line(sys.stderr, f"{NAME}: {message}")


def wait(
    workers: Sequence[Worker], signals: Signals, terminal: Terminal
) -> int:
    """Returns the code of the first failure or signal, else 0 in the end."""
    early: dict[str, float] = {}
    while not signals.received:
        codes = [worker.process.poll() for worker in workers]
        for worker, code in zip(workers, codes, strict=True):
            if code:
                worker.finish_output()
                say(terminal, f"{worker.name} {describe(code)}")
                return code if code > 0 else 128 - code
            if code == 0:
                early.setdefault(worker.name, time.monotonic() + EARLY)
        if None not in codes:
            return 0
        tell_early(early, terminal)
        time.sleep(0.05)
    number = signals.received[0]
    say(terminal, f"stopped by {signal.Signals(number).name}")
    return 128 + number


def tell_early(early: dict[str, float], terminal: Terminal) -> None:
    """Tells once of workers that have ended long before the others.

    Args:
        early: When it is time to tell, by worker.
        terminal: Where to.
    """
    for name, when in early.items():
        if time.monotonic() > when:
            early[name] = math.inf
            say(terminal, f"{name} has ended; others are still running")


def stop(
    workers: Sequence[Worker], signals: Signals, terminal: Terminal
) -> None:
    """Ends all workers, with SIGKILL if they do not obey or in a hurry.

    A second Ctrl-C is a hurry. A worker that was asked from outside to
    terminate may want to save what it has.
    """
    is_interrupt = signals.received[:1] == [signal.SIGINT]
    if is_interrupt:
        terminal.hide_interrupts()
    for worker in workers:
        worker.signal(signal.SIGINT if is_interrupt else signal.SIGTERM)
    known = len(signals.received)
    is_asked = signals.received[:1] == [signal.SIGTERM]
    deadline = time.monotonic() + (LONG_GRACE if is_asked else GRACE)
    while (
        any(worker.is_running for worker in workers)
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
    environment.setdefault("TFKFAC_SECRET", secrets.token_hex(32))
    environment.setdefault(LEVEL, "2")
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
        usage="%(prog)s [-h] [--restarts K] [--min-workers M] N -- COMMAND "
        "[ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workers", metavar="N", type=whole_number, help="how many workers"
    )
    parser.add_argument(
        "--restarts",
        metavar="K",
        type=whole_number,
        default=0,
        help="how often all workers are started again after a failure",
    )
    parser.add_argument(
        "--min-workers",
        metavar="M",
        type=whole_number,
        help="with how many workers a job goes on that has lost some",
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
    if (options.min_workers or 1) > options.workers:
        parser.error(
            f"--min-workers must be at most the number of workers, "
            f"{options.workers}; received {options.min_workers}"
        )
    return options


def whole_number(text: str) -> int:
    """Parses a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number above 0; received {text!r}"
        )
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
