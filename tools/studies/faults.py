"""What happens when a worker of a job has a fault: a table, of real processes.

    python tools/studies/faults.py            # all faults: five minutes
    python tools/studies/faults.py kill data  # some

Two workers train a small model; one of them (worker 1, if it is not said) has
the fault. "Said" is how long after it the first line comes that tells of it,
"ended" when no worker runs any more. Faults of the job itself are there from
the start, and the time is that from the start of `compile`.
"""

import argparse
import dataclasses
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

import command  # noqa: F401, the module path
from launch import environments

BATCHES, WHEN = 200, 60
MARK = "a fault begins"
LIMIT = 150.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, and what is to happen.

    Attributes:
        what: It, in words.
        says: What the line that tells of it has, as a regular expression; None
            if there is nothing to tell.
        codes: The exit codes of the workers.
        pause: Seconds after which a stopped worker goes on, if it does.
        left: How many workers do not end by themselves.
    """

    what: str
    says: str | None
    codes: tuple[int, int]
    pause: float | None = None
    left: int = 0


# Said by the watch, or by the `fit` whose collective has failed before.
SAYS = "^tfkfac.*: worker {} at .* "
FAILED = SAYS.format(1) + "has failed: "
GONE = SAYS + "is gone without a word"
REFUSED = "^ValueError: All workers must .*"
FAULTS: Mapping[str, Fault] = {
    "callback": Fault(
        "an exception in a callback, as of a full disk",
        FAILED + r"OSError: \[Errno 28\] No space left on device",
        (1, 1),
    ),
    "data": Fault(
        "an exception in the data", FAILED + ".*OSError: no such batch", (1, 1)
    ),
    "before": Fault(
        "an exception before `fit`", FAILED + "KeyError: 'before'", (1, 1)
    ),
    "leave": Fault(
        "`sys.exit` in a callback",
        SAYS.format(1) + "has ended",
        (1, 3),
    ),
    "kill": Fault("kill -9", GONE.format(1), (1, -9)),
    "kill first": Fault("kill -9 of worker 0", GONE.format(0), (-9, 1)),
    "stop": Fault(
        "SIGSTOP for ever",
        "StartAbort UNAVAILABLE: .*task:1.*stopped sending heartbeats",
        (1, -9),
        left=1,
    ),
    "pause": Fault("SIGSTOP for 5 s", None, (0, 0), pause=5.0),
    "slow": Fault("a callback of 20 s on one worker", None, (0, 0)),
    "hang": Fault(
        "data that never comes",
        r"^tfkfac: worker 1 at .* is in .*batches \(faults.py",
        (-9, -9),
        left=2,
    ),
    "empty": Fault(
        "data that ends early on one worker",
        "^tfkfac: the last 20 batches of replica 1 had no examples",
        (0, 0),
    ),
    "activation": Fault(
        "another activation",
        REFUSED + "activation: 'relu' on worker 0, 'tanh' on worker 1",
        (1, 1),
    ),
    "loss": Fault(
        "another loss", REFUSED + "loss: 'mse' on worker 0, 'mae'", (1, 1)
    ),
    "policy": Fault(
        "another dtype policy", REFUSED + "dtype policy: 'float32'", (1, 1)
    ),
    "momentum": Fault(
        "another momentum of the inner optimizer",
        REFUSED + "inner optimizer's momentum: 0.5 on worker 0, 0.9",
        (1, 1),
    ),
    "steps": Fault(
        "other `steps_per_epoch`",
        REFUSED + f"steps per epoch: {BATCHES} on worker 0",
        (1, 1),
    ),
    "terminate": Fault(
        "SIGTERM, with `ChiefBackup`",
        "^tfkfac: SIGTERM: training is backed up after batch",
        (143, 143),
    ),
}


# ------------------------------------------------------------------ the worker
def work(name: str, directory: str) -> None:
    """Trains, with a fault if this process is the one that has it."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfkfac

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    is_faulty = task["index"] == (0 if name == "kill first" else 1)
    fault = name if is_faulty else ""

    def begin() -> None:
        print(MARK, flush=True)

    def batches():  # type: ignore[no-untyped-def]
        for number in range(BATCHES):
            if number == WHEN and fault in ("data", "hang", "empty"):
                begin()
                if fault == "data":
                    raise OSError("no such batch")
                if fault == "empty":
                    return
                time.sleep(1000)
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == WHEN:
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


def act(fault: str, begin) -> None:  # type: ignore[no-untyped-def]
    """Does what goes wrong in a callback."""
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
@dataclasses.dataclass(frozen=True)
class Result:
    """What has happened.

    Attributes:
        line: The line that tells of it, or None.
        said: Seconds until it came.
        ended: Seconds until no worker ran any more.
        codes: The exit codes of the workers.
        output: All that they wrote.
    """

    line: str | None
    said: float | None
    ended: float
    codes: tuple[int, ...]
    output: str

    def problem(self, fault: Fault) -> str | None:
        """What is not as it should be, or None."""
        if fault.says is not None and self.line is None:
            return f"nobody says {fault.says!r}"
        if self.codes != fault.codes:
            return f"exit codes {self.codes}, not {fault.codes}"
        return None


class Job:
    """The workers of a job with a fault.

    Args:
        name: Of the fault.
        directory: For backups.
    """

    def __init__(self, name: str, directory: str) -> None:
        self._fault = FAULTS[name]
        self._output: list[str] = []
        self._begin = self._said = 0.0
        self._line: str | None = None
        arguments = ["--worker", directory, name]
        self._workers = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments],
                env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            for environment in environments(2)
        ]

    def run(self) -> Result:
        """Waits for the end."""
        readers = [
            threading.Thread(target=self._read, args=(worker,))
            for worker in self._workers
        ]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + LIMIT
        while any(w.poll() is None for w in self._workers):
            time.sleep(0.02)
            if time.monotonic() > deadline or self._is_over():
                for worker in self._workers:
                    worker.kill()
        ended = time.monotonic()
        for reader in readers:
            reader.join()
        return Result(
            self._line,
            None if self._line is None else self._said - self._begin,
            ended - self._begin,
            tuple(worker.wait() for worker in self._workers),
            "".join(self._output),
        )

    def _is_over(self) -> bool:
        """Whether those that still run do not end by themselves."""
        running = sum(worker.poll() is None for worker in self._workers)
        return self._line is not None and running == self._fault.left

    def _read(self, worker: "subprocess.Popen[str]") -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            now = time.monotonic()
            self._output.append(line)
            if MARK in line:
                self._begin = now
                self._go_on(worker)
            says = self._fault.says
            if self._line is None and says and re.search(says, line):
                self._line, self._said = line.strip(), now

    def _go_on(self, worker: "subprocess.Popen[str]") -> None:
        if self._fault.pause is not None:
            signals = (signal.SIGCONT,)
            threading.Timer(
                self._fault.pause, worker.send_signal, signals
            ).start()


def run(name: str) -> Result:
    """Runs a job with a fault."""
    with tempfile.TemporaryDirectory() as directory:
        return Job(name, directory).run()


def row(fault: Fault, result: Result) -> str:
    """A row of the table."""
    line = "nothing; training goes on" if fault.says is None else result.line
    text = re.sub(r" at 127.0.0.1:\d+", "", (line or "-").strip())
    said = "" if result.said is None else f"{result.said:.1f}"
    codes = ", ".join(map(str, result.codes))
    return f"| {fault.what} | {text} | {said} | {result.ended:.1f} | {codes} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the number of rows that are not right."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    parser.add_argument("--worker", metavar="DIRECTORY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.faults) - set(FAULTS)
    if unknown:
        parser.error(f"FAULT must be one of {[*FAULTS]}: {sorted(unknown)}")
    if options.worker is not None:
        work(options.faults[0], options.worker)
        return 0
    print("| fault | what is said | said (s) | ended (s) | exit codes |")
    print("|---|---|---|---|---|", flush=True)
    wrong = 0
    for name in options.faults or FAULTS:
        result = run(name)
        print(row(FAULTS[name], result), flush=True)
        problem = result.problem(FAULTS[name])
        if problem is not None:
            wrong += 1
            print(f"{name}: {problem}\n{result.output}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
