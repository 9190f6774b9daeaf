"""All workers stop after the same batch, whichever worker requests it."""

import contextlib
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.test_channel import LIMIT_S, connected_workers
from tests.support.cluster import ROOT, worker_environment
from tests.support.ports import address, claim_ports
from tfkfac.cluster.channel import PEER_EXITED, PEER_LOST
from tfkfac.cluster.stopping import Stopping


@pytest.mark.parametrize("seed", range(3))
def test_all_workers_stop_after_the_same_batch(seed: int) -> None:
    """A barrier in each batch stands for a synchronous training step."""
    size = 2 + seed
    step = threading.Barrier(size, timeout=LIMIT_S)
    ends: list[int | None] = [None] * size

    def train(stopping: Stopping, index: int) -> None:
        chance = random.Random(seed + 100 * index)
        for batch in range(1, 200):
            step.wait()
            time.sleep(chance.choice([0, 0, 0.001]))
            if batch == 20 + seed and index in (seed % size, size - 1):
                stopping.request()
            if stopping.end_batch():
                ends[index] = batch
                return

    with connected_workers(size, Stopping) as workers:
        threads = [
            threading.Thread(target=train, args=(stopping, i))
            for i, (_, stopping) in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert ends[0] is not None
    assert ends[0] >= 20 + seed
    assert ends == [ends[0]] * size


def test_one_worker_stops_at_once() -> None:
    stopping = Stopping()
    assert not stopping.end_batch()
    stopping.request()
    assert stopping.end_batch()
    assert not stopping.end_batch()


class Silent:
    """Channel of two workers that drops the messages of this worker."""

    size = 2

    def broadcast(self, message: Any) -> None:
        pass


def test_a_lost_worker_ends_the_wait_for_it() -> None:
    stopping = Stopping(Silent())  # type: ignore[arg-type]
    stopping.on_message(1, {"stop": True})
    stopping.on_message(1, PEER_LOST)
    assert not stopping.end_batch()


def test_an_agreed_stop_survives_the_exit_of_a_worker() -> None:
    """The exit of a worker does not cancel the batch of the stop."""
    stopping = Stopping(Silent())  # type: ignore[arg-type]
    stopping.on_message(1, {"stop": True})
    for worker in range(2):
        stopping.on_message(worker, {"stops after": 2 - worker})
    stopping.on_message(1, PEER_EXITED)
    assert not stopping.end_batch()
    assert stopping.end_batch()


# ------------------------------------------------- SIGTERM outside of `fit`
PREFIX = """
import signal, sys, threading, time
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
    "after the constructor": (INIT + "wait()", -signal.SIGTERM),
    "in C++": (INIT + LONG, -signal.SIGTERM),
    "in a thread": (
        f"""
def train():
    {INIT}
    wait()
thread = threading.Thread(target=train, daemon=True)
thread.start()
thread.join()
""",
        -signal.SIGTERM,
    ),
    "handler set before": (
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n{INIT}wait()",
        7,
    ),
    "handler set after": (
        f"{INIT}signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\nwait()",
        7,
    ),
    "ignored before": (
        f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{INIT}
ready()
time.sleep(2)
""",
        0,
    ),
    "after fit with a backup": (INIT + FIT + "wait()", -signal.SIGTERM),
    "strategy of TensorFlow with KFAC": (
        """
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    optimizer = tfkfac.KFAC(0.01)
wait()
""",
        -signal.SIGTERM,
    ),
}


@contextlib.contextmanager
def workers(
    program: str, count: int, *arguments: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the processes of one job; each prints `ready`."""
    with contextlib.ExitStack() as stack:
        addresses = [
            address(stack.enter_context(port)) for port in claim_ports(count)
        ]
        config = {"cluster": {"worker": addresses}}
        processes = []
        for index in range(count):
            task = {"type": "worker", "index": index}
            environment = worker_environment(index, addresses)
            environment["TF_CONFIG"] = json.dumps({**config, "task": task})
            process = subprocess.Popen(
                [sys.executable, "-c", PREFIX + program, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=ROOT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


@pytest.mark.slow
def test_the_strategy_keeps_the_handler_of_sigterm(
    tmp_path: pathlib.Path,
) -> None:
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(workers(program, 1, str(tmp_path)))[0]
            for name, (program, _) in PROGRAMS.items()
        }
        for process in processes.values():
            wait_until_ready(process)
            process.send_signal(signal.SIGTERM)
        codes = {name: p.wait(LIMIT_S) for name, p in processes.items()}
    assert codes == {name: code for name, (_, code) in PROGRAMS.items()}


def test_sigterm_before_fit_ends_all_workers() -> None:
    """Also the worker without SIGTERM, which would wait in a collective."""
    with workers(INIT + LONG, 2) as processes:
        for process in processes:
            wait_until_ready(process)
        processes[1].send_signal(signal.SIGTERM)
        assert processes[1].wait(LIMIT_S) == -signal.SIGTERM
        for process in processes[:1]:
            assert process.wait(3 * LIMIT_S) == -signal.SIGTERM
            assert process.stderr is not None
            text = process.stderr.read()
            assert re.search(r"worker 1 at \S+ is gone without a word", text)
