"""All workers stop after the same batch, whichever worker requests it."""

import contextlib
import json
import pathlib
import random
import signal
import socket
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from tests.support.ports import address, claim_ports
from tests.support.programs import Program
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
        if stopping.end_batch(batch == 20 + seed and rank in (0, seed)):
            return batch
    raise AssertionError("no end")


def train_twice() -> list[int]:
    return [train(seed) for seed in range(2)]


@pytest.mark.parametrize("where", ["two"])
def test_all_workers_stop_after_the_same_batch(
    on_workers: Any, where: str
) -> None:
    """Twice in a process; two workers request the second stop."""
    ends = on_workers(where, train_twice)
    assert ends == [ends[0]] * 2
    assert ends[0][0] >= 20 and ends[0][1] >= 21


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


def start(program: str, argument: object, **options: Any) -> Program:
    """Start the process of a worker; it prints `ready`."""
    command = [sys.executable, "-c", PREFIX + program, argument]
    return Program(command, **options)


@pytest.mark.slow
def test_the_strategy_keeps_the_handler_of_sigterm(
    tmp_path: pathlib.Path,
) -> None:
    with contextlib.ExitStack() as stack:
        ports = claim_ports(len(PROGRAMS))
        processes = {
            name: stack.enter_context(
                start(
                    program,
                    tmp_path,
                    environment={"TF_CONFIG": config_of(port)},
                )
            )
            for (name, (program, _)), port in zip(
                PROGRAMS.items(), map(stack.enter_context, ports), strict=True
            )
        }
        for process in processes.values():
            process.wait_for("^ready$")
            process.send(signal.SIGTERM)
        codes = {name: p.end(LIMIT_S) for name, p in processes.items()}
    assert codes == {name: code for name, (_, code) in PROGRAMS.items()}


def config_of(port: socket.socket) -> str:
    """Return the `TF_CONFIG` of a cluster of one worker."""
    task = {"type": "worker", "index": 0}
    return json.dumps({"cluster": {"worker": [address(port)]}, "task": task})


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
                start(
                    init + LONG,
                    json.dumps(arguments),
                    environment=proxy | variables,
                )
            )
            for arguments, variables in (({}, torchrun), (given, {}))
        )
        for process in (first, second):
            process.wait_for("^ready$")
        second.send(signal.SIGTERM)
        assert second.end(LIMIT_S) == -signal.SIGTERM
        assert first.end(3 * LIMIT_S) == -signal.SIGTERM
    for index, process in enumerate((first, second)):
        assert f"tfkfac: worker {index} of 2 by " in process.text()
        is_lost = process.find("is gone without a word: it was killed")
        assert bool(is_lost) == (process is first)
