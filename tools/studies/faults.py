"""Measure what happens when a worker of a job has a fault.

    python tools/studies/faults.py            # all faults: five minutes
    python tools/studies/faults.py kill data  # some faults

Two processes train a small model; worker 1 has the fault. "Reported" is the
time from the fault to the first line that names the fault, "ended" the time
until no worker runs. Different settings count from the start of `compile`. The
exit status is the number of rows with an unexpected result.
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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import command  # noqa: F401, the module path
from common.arguments import make_parser_of
from launch import environments

BATCHES, FAULTY_BATCH = 200, 60
MARK = "a fault begins"
LIMIT_S = 150.0


class Fault(NamedTuple):
    """A fault and its expected result.

    Attributes:
        title: Its description.
        line: Regular expression of the line that names the fault; None if
            training goes on.
        codes: Exit codes of the workers.
        pause_s: Seconds after which a stopped worker continues.
        hanging: Number of workers that do not end by themselves.
    """

    title: str
    line: str | None
    codes: tuple[int, int] = (1, 1)
    pause_s: float | None = None
    hanging: int = 0


# Lines of the watch, and errors that name a difference between the workers.
SAYS = "^tfkfac.*: worker {} at .* "
FAILED = SAYS.format(1) + "has failed: "
GONE = SAYS + "is gone without a word"
DIFFERS = "^ValueError: All workers must .*"
FAULTS: Mapping[str, Fault] = {
    "callback": Fault(
        "exception in a callback",
        FAILED + r"OSError: \[Errno 28\] No space left on device",
    ),
    "data": Fault("exception in the data", FAILED + ".*OSError: no such batch"),
    "before": Fault("exception before `fit`", FAILED + "KeyError: 'before'"),
    "leave": Fault(
        "`sys.exit` in a callback", SAYS.format(1) + "has ended", (1, 3)
    ),
    "kill": Fault("kill -9", GONE.format(1), (1, -9)),
    "kill first": Fault("kill -9 of worker 0", GONE.format(0), (-9, 1)),
    "stop": Fault(
        "SIGSTOP for ever",
        SAYS.format(1) + "stopped answering",
        (1, -9),
        hanging=1,
    ),
    "pause": Fault("SIGSTOP for 5 s", None, (0, 0), pause_s=5.0),
    "slow": Fault("callback of 20 s on one worker", None, (0, 0)),
    "hang": Fault(
        "data that never comes",
        r"^tfkfac: worker 1 at .* is in .*batches \(faults.py",
        (-9, -9),
        hanging=2,
    ),
    "empty": Fault(
        "data that ends early on one worker",
        "^tfkfac: the last 20 batches of replica 1 had no examples",
        (0, 0),
    ),
    "activation": Fault(
        "another activation",
        DIFFERS + "activation: 'relu' on worker 0, 'tanh' on worker 1",
    ),
    "loss": Fault("another loss", DIFFERS + "loss: 'mse' on worker 0, 'mae'"),
    "policy": Fault(
        "another dtype policy", DIFFERS + "dtype policy: 'float32'"
    ),
    "momentum": Fault(
        "another momentum",
        DIFFERS + "inner optimizer's momentum: 0.5 on worker 0, 0.9",
    ),
    "steps": Fault(
        "another `steps_per_epoch`",
        DIFFERS + f"steps per epoch: {BATCHES} on worker 0",
    ),
    "terminate": Fault(
        "SIGTERM, with `ChiefBackup`",
        "^tfkfac: SIGTERM: training is backed up after batch",
        (143, 143),
    ),
}
# Faults in the settings of a worker, in its data, and by a signal.
SETTINGS = ("activation", "loss", "policy", "momentum", "steps")
DATA = ("data", "hang", "empty")
SIGNALS = {
    "kill": signal.SIGKILL,
    "kill first": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
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

    def batches() -> Any:
        for number in range(BATCHES):
            if number == FAULTY_BATCH and fault in DATA:
                print(MARK, flush=True)
                if fault == "data":
                    raise OSError("no such batch")
                if fault == "empty":
                    return
                time.sleep(1000)
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == FAULTY_BATCH:
                act(fault)

    strategy = tfkfac.MultiWorkerMirroredStrategy()
    if fault in SETTINGS:
        print(MARK, flush=True)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        activation = "tanh" if fault == "activation" else "relu"
        policy = "mixed_bfloat16" if fault == "policy" else None
        layers = [
            keras.layers.Dense(9, activation, dtype=policy),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((5,)), *layers])
        momentum = 0.9 if fault == "momentum" else 0.5
        model.compile(
            tfkfac.KFAC(keras.optimizers.SGD(0.01, momentum)),
            "mae" if fault == "loss" else "mse",
        )
    if fault == "before":
        print(MARK, flush=True)
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


def act(fault: str) -> None:
    """Cause a fault inside a callback."""
    if fault in ("callback", "leave", "slow", *SIGNALS):
        print(MARK, flush=True)
    if fault == "callback":
        raise OSError(28, "No space left on device")
    if fault == "leave":
        sys.exit(3)
    if fault == "slow":
        time.sleep(20)
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])


# ------------------------------------------------------------------- the table
class Result(NamedTuple):
    """The result of a job.

    Attributes:
        line: The line that names the fault, or None.
        reported_s: Seconds from the fault until this line.
        ended_s: Seconds from the fault until no worker ran.
        codes: Exit codes of the workers.
        output: Output of both workers.
    """

    line: str | None
    reported_s: float | None
    ended_s: float
    codes: tuple[int, ...]
    output: str

    def problem(self, fault: Fault) -> str | None:
        """Return the difference from the expected result, or None."""
        if fault.line is not None and self.line is None:
            return f"no line matches {fault.line!r}"
        if self.codes != fault.codes:
            return f"exit codes {self.codes}, not {fault.codes}"
        return None


class Job:
    """The workers of a job with a fault."""

    def __init__(self, name: str, directory: str) -> None:
        self._fault = FAULTS[name]
        self._output: list[str] = []
        self._begin = self._reported = 0.0
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
            is_over = self._line is not None and running == self._fault.hanging
            if is_over or time.monotonic() > deadline:
                for worker in self._workers:
                    worker.kill()
        ended = time.monotonic() - self._begin
        for reader in readers:
            reader.join()
        reported = None if self._line is None else self._reported - self._begin
        codes = tuple(worker.wait() for worker in self._workers)
        return Result(self._line, reported, ended, codes, "".join(self._output))

    def _read(self, worker: "subprocess.Popen[str]") -> None:
        assert worker.stdout is not None
        fault = self._fault
        for line in worker.stdout:
            now = time.monotonic()
            self._output.append(line)
            if MARK in line:
                self._begin = now
                if fault.pause_s is not None:
                    threading.Timer(
                        fault.pause_s, worker.send_signal, [signal.SIGCONT]
                    ).start()
            pattern = fault.line
            if self._line is None and pattern and re.search(pattern, line):
                self._line, self._reported = line.strip(), now


def run(name: str) -> Result:
    """Run a job with a fault."""
    with tempfile.TemporaryDirectory() as directory:
        return Job(name, directory).run()


def row(fault: Fault, result: Result) -> str:
    """Return a row of the table."""
    line = "training goes on" if fault.line is None else result.line
    text = re.sub(r" at 127.0.0.1:\d+", "", line or "-")
    reported = "" if result.line is None else f"{result.reported_s:.1f}"
    ended, codes = f"{result.ended_s:.1f}", ", ".join(map(str, result.codes))
    return f"| {fault.title} | {text} | {reported} | {ended} | {codes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the number of rows that are not as expected."""
    parser = make_parser_of(__doc__)
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
