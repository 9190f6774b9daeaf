"""All workers stop after the same batch, whichever worker requests it."""

import contextlib
import json
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.support.cluster import ROOT, run, worker_environment
from tests.support.ports import address, claim_ports
from tests.support.strategies import local_ranks, strategy
from tfkfac.cluster.events import EXITED, LOST
from tfkfac.cluster.stopping import Stopping

LIMIT_S = 10.0


def train(seed: int) -> int:
    """Train until all workers stop; return the number of batches."""
    job = strategy()
    stopping = job.stopping
    (rank,) = local_ranks()
    random.seed(10 * seed + rank)

    @tf.function
    def step() -> tf.Tensor:
        return job.reduce("SUM", job.run(lambda: tf.constant(1.0)), axis=None)

    for batch in range(1, 500):
        step()
        time.sleep(random.choice([0, 0, 0.001]))
        if batch == 20 + seed and rank in (seed % 4, 3):
            stopping.request()
        if stopping.end_batch():
            return batch
    raise AssertionError("no end")


def train_twice() -> list[int]:
    return [train(seed) for seed in range(2)]


def test_all_workers_stop_after_the_same_batch() -> None:
    """Twice in a process; two workers request each stop."""
    ends = run(train_twice, workers=4)
    assert ends == [ends[0]] * 4
    assert ends[0][0] >= 20 and ends[0][1] >= 21


def test_one_worker_stops_at_once() -> None:
    stopping = Stopping()
    assert not stopping.end_batch()
    stopping.request()
    assert stopping.end_batch()
    assert not stopping.end_batch()


@pytest.mark.parametrize("is_agreed", [False, True])
def test_the_end_of_a_worker_ends_the_wait_for_it(is_agreed: bool) -> None:
    """It does not cancel a stop on which all have agreed."""
    # The events of this worker are dropped.
    log: Any = SimpleNamespace(size=2, post=lambda event: None)
    stopping = Stopping(log)
    stopping.on_event(1, {"stop": True})
    for worker in range(2 if is_agreed else 0):
        stopping.on_event(worker, {"stops after": 2 - worker})
    stopping.on_event(1, EXITED if is_agreed else {LOST: [1]})
    assert not stopping.end_batch()
    assert stopping.end_batch() == is_agreed


# ------------------------------------------------- SIGTERM outside of `fit`
START_LIMIT_S = 90.0
PREFIX = """
import json, signal, sys, threading, time
import keras, tensorflow as tf, tfkfac
def ready():
    print("ready", flush=True)
def wait():
    ready()
    time.sleep(60)
"""
INIT = "strategy = tfkfac.MultiWorkerMirroredStrategy()\n"
FIT = """
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(tfkfac.KFAC(0.01), "mse")
x = tf.ones([4, 1])
callbacks = [tfkfac.callbacks.ChiefBackup(sys.argv[1])]
model.fit(x, x, batch_size=4, callbacks=callbacks, verbose=0)
"""
# Python runs no signal handler during this call.
LONG = """
@tf.function
def count():
    start = [tf.constant(0, tf.int64)]
    return tf.while_loop(lambda i: i < 2**40, lambda i: i + 1, start)
count.get_concrete_function()
ready()
count()
"""
# Programs of one worker that receive SIGTERM when ready, and their exit
# codes. Expected: as without a strategy.
PROGRAMS = {
    "in C++": (INIT + LONG, -signal.SIGTERM),
    "in a thread": (
        f"def train():\n    {INIT}    wait()\n"
        "thread = threading.Thread(target=train, daemon=True)\n"
        "thread.start()\nthread.join()",
        -signal.SIGTERM,
    ),
    "handler set before": (
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n{INIT}wait()",
        7,
    ),
    "ignored before": (
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{INIT}ready()\n"
        "time.sleep(2)",
        0,
    ),
    "after fit with a backup": (INIT + FIT + "wait()", -signal.SIGTERM),
    "strategy of TensorFlow with KFAC": (
        "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "with strategy.scope():\n    tfkfac.KFAC(0.01)\nwait()",
        -signal.SIGTERM,
    ),
}


@contextlib.contextmanager
def started(
    program: str, arguments: str, environment: dict[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start the process of a worker; it prints `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREFIX + program, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=worker_environment(0, []) | environment,
        cwd=ROOT,
    )
    timer = threading.Timer(START_LIMIT_S, process.kill)
    timer.start()
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(timer.cancel)
        yield process


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


@pytest.mark.slow
def test_the_strategy_keeps_the_handler_of_sigterm(
    tmp_path: pathlib.Path,
) -> None:
    task = {"type": "worker", "index": 0}
    with contextlib.ExitStack() as stack:
        ports = claim_ports(len(PROGRAMS))
        processes = {}
        for (name, (program, _)), port in zip(
            PROGRAMS.items(), ports, strict=True
        ):
            cluster = {"worker": [address(stack.enter_context(port))]}
            config = json.dumps({"cluster": cluster, "task": task})
            processes[name] = stack.enter_context(
                started(program, str(tmp_path), {"TF_CONFIG": config})
            )
        for process in processes.values():
            wait_until_ready(process)
            process.send_signal(signal.SIGTERM)
        codes = {name: p.wait(LIMIT_S) for name, p in processes.items()}
    assert codes == {name: code for name, (_, code) in PROGRAMS.items()}


def test_sigterm_before_fit_ends_all_workers() -> None:
    """Also the worker without SIGTERM, which would wait in a collective.

    The workers know only worker 0, by variables of torchrun and by arguments.
    A web proxy is set, to which gRPC would connect.
    """
    init = INIT.replace("()", "(**json.loads(sys.argv[1]))")
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "a.org"}
    with contextlib.ExitStack() as stack:
        (claim,) = claim_ports(1)
        port = str(stack.enter_context(claim).getsockname()[1])
        torchrun = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }
        names = "coordinator", "num_processes", "process_id"
        given = dict(zip(names, (f"localhost:{port}", 2, 1), strict=True))
        first, second = (
            stack.enter_context(
                started(init + LONG, json.dumps(arguments), proxy | variables)
            )
            for arguments, variables in (({}, torchrun), (given, {}))
        )
        for process in (first, second):
            wait_until_ready(process)
        second.send_signal(signal.SIGTERM)
        assert second.wait(LIMIT_S) == -signal.SIGTERM
        assert first.wait(3 * LIMIT_S) == -signal.SIGTERM
        for index, process in enumerate((first, second)):
            assert process.stderr is not None
            text = process.stderr.read()
            assert f"tfkfac: worker {index} of 2 by " in text
            is_lost = "is gone without a word: it was killed" in text
            assert is_lost == (process is first)
