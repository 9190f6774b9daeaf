"""Measures what happens when a worker of a job has a fault.

    python tools/studies/faults.py            # all faults: five minutes
    python tools/studies/faults.py kill data  # some faults

Two processes train a small model; worker 1 has the fault. "Reported" is the
time from the fault to the first line that names it, "ended" the time until no
worker runs. Differences of the job itself count from the start of `compile`.
The exit status is the number of rows that are not as expected.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import command  # noqa: F401, the module path
from launch import environments

BATCHES, FAULTY_BATCH = 200, 60
MARK = "a fault begins"
LIMIT_S = 150.0


class Fault(NamedTuple):
    """A fault and its expected result.

    Attributes:
        title: Its description.
        says: Regular expression of the line that names the fault; None if
            training goes on.
        codes: Exit codes of the workers.
        pause_s: Seconds after which a stopped worker continues.
        left: Number of workers that do not end by themselves.
    """

    title: str
    says: str | None
    codes: tuple[int, int]
    pause_s: float | None = None
    left: int = 0


# A line of `Watch`, or the error that `fit` raises after a failed collective.
SAYS = "^tfkfac.*: worker {} at .* "
FAILED = SAYS.format(1) + "has failed: "
GONE = SAYS + "is gone without a word"
REFUSED = "^ValueError: All workers must .*"
DISK = r"OSError: \[Errno 28\] No space left on device"
HEARTBEAT = "StartAbort UNAVAILABLE: .*task:1.*stopped sending heartbeats"
STANDSTILL = r"^tfkfac: worker 1 at .* is in .*batches \(faults.py"
EMPTY = "^tfkfac: the last 20 batches of replica 1 had no examples"
ACTIVATION = REFUSED + "activation: 'relu' on worker 0, 'tanh' on worker 1"
MOMENTUM = REFUSED + "inner optimizer's momentum: 0.5 on worker 0, 0.9"
BACKUP = "^tfkfac: SIGTERM: training is backed up after batch"
FAULTS: Mapping[str, Fault] = {
    "callback": Fault("exception in a callback", FAILED + DISK, (1, 1)),
    "data": Fault(
        "exception in the data", FAILED + ".*OSError: no such batch", (1, 1)
    ),
    "before": Fault(
        "exception before `fit`", FAILED + "KeyError: 'before'", (1, 1)
    ),
    "leave": Fault(
        "`sys.exit` in a callback", SAYS.format(1) + "has ended", (1, 3)
    ),
    "kill": Fault("kill -9", GONE.format(1), (1, -9)),
    "kill first": Fault("kill -9 of worker 0", GONE.format(0), (-9, 1)),
    "stop": Fault("SIGSTOP for ever", HEARTBEAT, (1, -9), left=1),
    "pause": Fault("SIGSTOP for 5 s", None, (0, 0), pause_s=5.0),
    "slow": Fault("callback of 20 s on one worker", None, (0, 0)),
    "hang": Fault("data that never comes", STANDSTILL, (-9, -9), left=2),
    "empty": Fault("data that ends early on one worker", EMPTY, (0, 0)),
    "activation": Fault("another activation", ACTIVATION, (1, 1)),
    "loss": Fault(
        "another loss", REFUSED + "loss: 'mse' on worker 0, 'mae'", (1, 1)
    ),
    "policy": Fault(
        "another dtype policy", REFUSED + "dtype policy: 'float32'", (1, 1)
    ),
    "momentum": Fault("another momentum", MOMENTUM, (1, 1)),
    "steps": Fault(
        "another `steps_per_epoch`",
        REFUSED + f"steps per epoch: {BATCHES} on worker 0",
        (1, 1),
    ),
    "terminate": Fault("SIGTERM, with `ChiefBackup`", BACKUP, (143, 143)),
}


# ------------------------------------------------------------------ the worker
def work(name: str, directory: str) -> None:
    """Train; on the faulty worker, cause the fault."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfkfac

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    is_faulty = task["index"] == (0 if name == "kill first" else 1)
    fault = name if is_faulty else ""

    def begin() -> None:
        print(MARK, flush=True)

    def batches() -> Any:
        for number in range(BATCHES):
            if number == FAULTY_BATCH and fault in ("data", "hang", "empty"):
                begin()
                if fault == "data":
                    raise OSError("no such batch")
                if fault == "empty":
                    return
                time.sleep(1000)
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == FAULTY_BATCH:
                act(fault, begin)

    strategy = tfkfac.MultiWorkerMirroredStrategy()
    if fault in ("activation", "loss", "policy", "momentum", "steps"):
        begin()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(
                    9,
                    "tanh" if fault == "activation" else "relu",
                    dtype="mixed_bfloat16" if fault == "policy" else None,
                ),
                keras.layers.Dense(1),
            ]
        )
        momentum = 0.9 if fault == "momentum" else 0.5
        model.compile(
            tfkfac.KFAC(keras.optimizers.SGD(0.01, momentum)),
            "mae" if fault == "loss" else "mse",
        )
    if fault == "before":
        begin()
        raise KeyError("before")
    shape = tf.TensorSpec((None, 5)), tf.TensorSpec((None, 1))
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_generator(
            batches, output_signature=shape
        ).prefetch(1)
    )
    backup = tfkfac.callbacks.ChiefBackup(directory)
    model.fit(
        data,
        steps_per_epoch=BATCHES - (fault == "steps"),
        shuffle=False,
        verbose=0,
        callbacks=[*[backup] * (name == "terminate"), Act()],
    )


def act(fault: str, begin: Callable[[], None]) -> None:
    """Cause a fault inside a callback."""
    signals = {
        "kill": signal.SIGKILL,
        "kill first": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "pause": signal.SIGSTOP,
        "terminate": signal.SIGTERM,
    }
    if fault in ("callback", "leave", "slow", *signals):
        begin()
    if fault == "callback":
        raise OSError(28, "No space left on device")
    if fault == "leave":
        sys.exit(3)
    if fault == "slow":
        time.sleep(20)
    if fault in signals:
        os.kill(os.getpid(), signals[fault])


# ------------------------------------------------------------------- the table
class Result(NamedTuple):
    """The result of a job.

    Attributes:
        line: The line that names the fault, or None.
        said: Seconds until this line.
        ended: Seconds until no worker ran.
        codes: Exit codes of the workers.
        output: Output of both workers.
    """

    line: str | None
    said: float | None
    ended: float
    codes: tuple[int, ...]
    output: str

    def problem(self, fault: Fault) -> str | None:
        """Return the difference from the expected result, or None."""
        if fault.says is not None and self.line is None:
            return f"no line matches {fault.says!r}"
        if self.codes != fault.codes:
            return f"exit codes {self.codes}, not {fault.codes}"
        return None


class Job:
    """The workers of a job with a fault."""

    def __init__(self, name: str, directory: str) -> None:
        self._fault = FAULTS[name]
        self._output: list[str] = []
        self._begin = self._said = 0.0
        self._line: str | None = None
        self._workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", directory, name],
                env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for environment in environments(2)
        ]

    def run(self) -> Result:
        """Wait for the end; kill workers that do not end by themselves."""
        readers = [
            threading.Thread(target=self._read, args=(worker,))
            for worker in self._workers
        ]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + LIMIT_S
        while running := sum(w.poll() is None for w in self._workers):
            time.sleep(0.02)
            is_over = self._line is not None and running == self._fault.left
            if is_over or time.monotonic() > deadline:
                for worker in self._workers:
                    worker.kill()
        ended = time.monotonic() - self._begin
        for reader in readers:
            reader.join()
        said = None if self._line is None else self._said - self._begin
        codes = tuple(worker.wait() for worker in self._workers)
        return Result(self._line, said, ended, codes, "".join(self._output))

    def _read(self, worker: "subprocess.Popen[str]") -> None:
        assert worker.stdout is not None
        fault = self._fault
        for line in worker.stdout:
            now = time.monotonic()
            self._output.append(line)
            if MARK in line:
                self._begin = now
                if fault.pause_s is not None:
                    go_on = (signal.SIGCONT,)
                    threading.Timer(
                        fault.pause_s, worker.send_signal, go_on
                    ).start()
            says = fault.says
            if self._line is None and says and re.search(says, line):
                self._line, self._said = line.strip(), now


def run(name: str) -> Result:
    """Run a job with a fault."""
    with tempfile.TemporaryDirectory() as directory:
        return Job(name, directory).run()


def row(fault: Fault, result: Result) -> str:
    """Return a row of the table."""
    line = "training goes on" if fault.says is None else result.line
    text = re.sub(r" at 127.0.0.1:\d+", "", line or "-")
    said = "" if result.said is None else f"{result.said:.1f}"
    codes = ", ".join(map(str, result.codes))
    return f"| {fault.title} | {text} | {said} | {result.ended:.1f} | {codes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the number of rows that are not as expected."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--worker", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"FAULT must be one of {[*FAULTS]}: {sorted(unknown)}")
    if options.worker is not None:
        work(options.faults[0], options.worker)
        return 0
    print("| fault | line | reported (s) | ended (s) | exit codes |")
    print("|---|---|---|---|---|", flush=True)
    wrong = 0
    for name in options.faults or FAULTS:
        result = run(name)
        print(row(FAULTS[name], result), flush=True)
        if problem := result.problem(FAULTS[name]):
            wrong += 1
            print(f"{name}: {problem}\n{result.output}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
