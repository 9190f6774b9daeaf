"""Start the workers of a TensorFlow cluster on this machine.

    python tools/launch.py 2 -- python examples/classification.py --epochs 5

Every worker runs the command with its own `TF_CONFIG`. Each line of output
starts with the worker's name; progress bars are printed for worker 0, in their
last state. If a worker fails, the other workers are stopped and its exit code
is returned, or all workers are restarted with `--restarts`. Ctrl-C stops all
workers. SIGTERM is passed to the workers, which have 30 s to save their state.

With `--min-workers M` a job continues if a signal has killed workers (for
example, out of memory): the other workers, at least M, are started again and
resume from the last backup of the job.

Defaults of the workers' environment: a random `TFKFAC_SECRET` for each job, by
which workers authenticate each other; `TF_NUM_INTRAOP_THREADS` as each worker's
share of the cores; TF_CPP_MIN_LOG_LEVEL=2. In a virtual environment `python` is
the interpreter of that environment.
"""

import argparse
import json
import math
import os
import pathlib
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from local_worker import LOG_LEVEL, Guard, Worker, write_line

NAME = pathlib.Path(__file__).name
# SIGPIPE means that no process reads the output.
STOP_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE
# Time from a signal to SIGKILL; LONG_GRACE_S after SIGTERM to the launcher, in
# which workers can save their state.
GRACE_S, LONG_GRACE_S = 3.0, 30.0
EARLY_S = 5.0  # delay of the message that a worker ended before the others
CANNOT_RUN = 127  # exit code of a shell that cannot run a command


def catch_signals() -> list[int]:
    """Return a list to which this process adds the stop signals it receives.

    The launcher polls it: an exception in a signal handler could lose a worker
    that is just started.
    """
    received: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, frame: received.append(number))
    return received


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parse(arguments)
    received = catch_signals()
    for stream in (sys.stdout, sys.stderr):
        assert hasattr(stream, "reconfigure")
        stream.reconfigure(errors="replace")
    count, restarts = options.workers, 0
    while True:
        code, killed = run(options.command, count, received)
        if code in (0, CANNOT_RUN) or received:
            return code
        if killed and count - killed >= (options.min_workers or math.inf):
            count -= killed
            say(f"the job goes on with {count} workers")
        elif restarts < options.restarts:
            restarts += 1
            say(f"restart {restarts} of {options.restarts}")
        else:
            return code


def say(message: str) -> None:
    """Print a message with the name of this script."""
    write_line(sys.stderr, f"{NAME}: {message}")


def run(
    command: Sequence[str], count: int, received: list[int]
) -> tuple[int, int]:
    """Start all workers and wait for them.

    Returns:
        The exit code, and the number of workers that a signal has killed.
    """
    workers: list[Worker] = []
    guard = Guard()
    try:
        for environment in environments(count):
            workers.append(Worker(len(workers), command, environment))
            guard.watch(workers[-1])
        code = wait(workers, received)
        return code, sum((w.process.poll() or 0) < 0 for w in workers)
    except OSError as error:
        say(f"error: cannot run {command[0]!r}: {error.strerror}")
        return CANNOT_RUN, 0
    finally:
        stop(workers, received)
        guard.dismiss()


def wait(workers: Sequence[Worker], received: list[int]) -> int:
    """Return the exit code of the first failure or signal; else 0."""
    report_at: dict[str, float] = {}  # time to report an early end, by name
    while not received:
        codes = [worker.process.poll() for worker in workers]
        for worker, code in zip(workers, codes, strict=True):
            if code:
                worker.finish_output()
                say(worker.ending())
                return code if code > 0 else 128 - code
            if code == 0:
                report_at.setdefault(worker.name, time.monotonic() + EARLY_S)
        if None not in codes:
            return 0
        for name, due in report_at.items():
            if time.monotonic() > due:
                report_at[name] = math.inf
                say(f"{name} has ended; others are still running")
        time.sleep(0.05)
    number = received[0]
    say(f"stopped by {signal.Signals(number).name}")
    return 128 + number


def stop(workers: Sequence[Worker], received: list[int]) -> None:
    """End all workers, by SIGKILL after a grace time or a second signal."""
    first = received[0] if received else None
    for worker in workers:
        worker.signal(
            signal.SIGINT if first == signal.SIGINT else signal.SIGTERM
        )
    num_signals = len(received)
    grace_s = LONG_GRACE_S if first == signal.SIGTERM else GRACE_S
    deadline = time.monotonic() + grace_s
    while (
        any(worker.is_running for worker in workers)
        and time.monotonic() < deadline
        and len(received) == num_signals
    ):
        time.sleep(0.02)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        worker.finish_output()


def environments(count: int) -> Iterator[dict[str, str]]:
    """Yield the environment of each worker."""
    common = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // count)
    common.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
    common.setdefault("PYTHONUNBUFFERED", "1")
    common.setdefault("TFKFAC_SECRET", secrets.token_hex(32))
    common.setdefault(LOG_LEVEL, "2")
    # Exclude local addresses: gRPC would connect to them by the proxy.
    for name in ("no_proxy", "NO_PROXY"):
        hosts = common.get(name)
        common[name] = f"{hosts},127.0.0.1" if hosts else "127.0.0.1"
    if sys.prefix != sys.base_prefix:
        scripts = str(pathlib.Path(sys.executable).parent)
        path = common.get("PATH", os.defpath)
        common["PATH"] = scripts + os.pathsep + path
    # Open all sockets before closing any, so that the ports are distinct.
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    for index in range(count):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task}
        yield {**common, "TF_CONFIG": json.dumps(config)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s [-h] N [--restarts K] [--min-workers M] -- COMMAND "
        "[ARGUMENT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workers", metavar="N", type=int)
    parser.add_argument("--restarts", metavar="K", type=int, default=0)
    parser.add_argument("--min-workers", metavar="M", type=int)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    command = words[end + 1 :]
    if not command and not {"-h", "--help"} & {*words}:
        parser.error(
            "`-- COMMAND` must follow the number of workers and the options; "
            f"received {shlex.join(words)}"
        )
    options = parser.parse_args(words[:end])
    options.command = command
    minimum = options.min_workers
    if options.workers < 1:
        parser.error(f"N must be at least 1; received {options.workers}")
    if options.restarts < 0:
        parser.error(
            f"--restarts must be at least 0; received {options.restarts}"
        )
    if minimum is not None and not 1 <= minimum <= options.workers:
        parser.error(
            f"--min-workers must be between 1 and {options.workers}; received "
            f"{minimum}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
