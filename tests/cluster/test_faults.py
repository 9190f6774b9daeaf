"""Faults on one worker of a job of real processes.

`pytest tests/cluster/test_faults.py -m "slow or not slow" -s` prints a row for
each fault: the fault, the error of the other workers, and the seconds from the
fault until this error and until the last other worker has ended.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.ports import address, claim_ports
from tests.support.programs import Program, wait

START_LIMIT_S = 120.0
# Limit of the error of the other workers, with a margin for a loaded machine:
# the measured times are .2 s after an exception and up to 5 s after a kill.
LIMIT_S = 20.0
END_LIMIT_S = 40.0  # until Python has ended, after this error
MARK = "a fault begins"
FAILED = "worker {} at \\S+ has failed: "
KILLED = "worker {} at \\S+ is gone without a word: it was killed"
SUSPENDED = "worker {} at \\S+ stopped answering: the process is suspended"
DISK = r"OSError: \[Errno 28\] No space left on device"
SIGTERM = "SIGTERM: training is backed up after batch"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault and its expected result.

    Attributes:
        action: "raise", "exit", "pause" or "freeze" (SIGSTOP for 1 or 15 s),
            or a signal that the worker gets.
        place: Where the fault happens: "start" (after the strategy), "data",
            "fit" (batch 30), "evaluate", or "backup" (while writing).
        worker: Index of the faulty worker.
        line: Regular expression of a line of each other worker; "" if training
            goes on.
        codes: Exit codes of the faulty worker and of the others.
        workers: Number of workers.
    """

    action: str
    place: str
    worker: int
    line: str
    codes: tuple[int, int] = (1, 1)
    workers: int = 2


FAULTS = [
    Fault("raise", "fit", 1, FAILED.format(1) + DISK),
    Fault("kill", "fit", 1, KILLED.format(1), (-9, 1)),
    Fault("term", "fit", 1, SIGTERM, (143, 143)),
    *(
        pytest.param(fault, marks=pytest.mark.slow)
        for fault in [
            Fault("raise", "start", 0, FAILED.format(0) + DISK),
            Fault("raise", "data", 0, FAILED.format(0) + ".*" + DISK),
            Fault("raise", "evaluate", 1, FAILED.format(1) + DISK, workers=3),
            Fault("exit", "fit", 0, "worker 0 at \\S+ has ended", (3, 1)),
            Fault("kill", "start", 0, KILLED.format(0), (-9, 1)),
            Fault("kill", "fit", 0, KILLED.format(0), (-9, 1), workers=3),
            Fault("kill", "backup", 0, KILLED.format(0), (-9, 1)),
            Fault("stop", "fit", 1, SUSPENDED.format(1), (-9, 1)),
            Fault("stop", "data", 0, SUSPENDED.format(0), (-9, 1), workers=3),
            Fault("freeze", "fit", 1, SUSPENDED.format(1), (1, 1)),
            Fault("pause", "fit", 0, "", (0, 0)),
        ]
    ),
]


# ------------------------------------------------------------------ the worker
def work(fault: Fault, index: int, directory: str) -> None:
    """Train; on the faulty worker, cause the fault."""
    import keras
    import numpy as np

    import tfkfac

    strategy = tfkfac.MultiWorkerMirroredStrategy()

    def act(place: str) -> None:
        if (place, index) != (fault.place, fault.worker):
            return
        print(MARK, flush=True)
        if fault.action == "raise":
            raise OSError(28, "No space left on device")
        if fault.action == "exit":
            sys.exit(3)
        if seconds := {"pause": 1, "freeze": 15}.get(fault.action):
            wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            number = signal.Signals[f"SIG{fault.action.upper()}"]
            os.kill(os.getpid(), number)

    class Act(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == 30:
                act("fit")

        def on_test_batch_end(self, batch: int, logs: object = None) -> None:
            if batch == 3:
                act("evaluate")

    def batches() -> Any:
        for number in range(2000):
            if number == 40:
                act("data")
            yield np.ones((8, 5), "float32"), np.ones((8, 1), "float32")

    act("start")
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        inner = keras.optimizers.SGD(0.01)
        # Without a block, whose trace takes seconds.
        model.compile(tfkfac.KFAC(inner, skip_layers=keras.layers.Dense), "mse")
    callbacks: list[Any] = [Act()]
    if fault.action == "term" or fault.place == "backup":
        callbacks.insert(0, tfkfac.callbacks.ChiefBackup(directory))
    if fault.place == "backup":
        model.save_weights = lambda *_, **__: act("backup")
    model.fit(
        batches(),
        epochs=3,
        steps_per_epoch=100,
        validation_data=batches(),
        validation_steps=9,
        verbose=0,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_fault(fault: Fault, tmp_path: pathlib.Path) -> None:
    """All other workers end in time and name the faulty worker and cause."""
    try:
        check(fault, tmp_path)
    except AssertionError as error:
        # A machine that stops a process for 4 s causes another fault.
        if fault.action == "freeze" or "stood still" not in str(error):
            raise
        check(fault, tmp_path / "again")


def check(fault: Fault, directory: pathlib.Path) -> None:
    """Start the workers and check how they end."""
    command = [sys.executable, "-m", __name__, repr(fault)]
    with contextlib.ExitStack() as stack:
        ports = claim_ports(fault.workers)
        addresses = [address(stack.enter_context(port)) for port in ports]
        workers = [
            stack.enter_context(
                Program([*command, index, directory], addresses, index)
            )
            for index in range(fault.workers)
        ]
        faulty = workers[fault.worker]
        others = [worker for worker in workers if worker is not faulty]
        wait(lambda: faulty.find(MARK), START_LIMIT_S, *workers)
        begin, _ = faulty.find(MARK) or (0.0, "")
        lines = []
        for worker in others if fault.line else []:
            find = functools.partial(worker.find, fault.line)
            wait(find, LIMIT_S, *workers)
            lines.append(find() or (0.0, ""))
        ending = others if fault.action == "stop" else workers
        seconds = END_LIMIT_S if fault.line else START_LIMIT_S
        wait(lambda: all(w.ended_s for w in ending), seconds, *workers)
    if fault.action == "freeze":
        assert faulty.find("This process stood still for more than")
    codes = [worker.code for worker in (faulty, *others)]
    logs = "\n---\n".join(worker.text() for worker in workers)
    assert (codes[0], *set(codes[1:])) == fault.codes, logs
    reported = max((time_s for time_s, _ in lines), default=begin) - begin
    ended = max(worker.ended_s for worker in others) - begin
    text = lines[0][1].strip() if lines else "training goes on"
    print(
        f"\n| {fault.action} in {fault.place} of worker {fault.worker} | "
        f"{text[-160:]} | {reported:.1f} | {ended:.1f} |"
    )


if __name__ == "__main__":
    work(eval(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
