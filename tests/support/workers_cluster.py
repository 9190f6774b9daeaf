"""What the tests of the test cluster run."""

import json
import os
import signal
import sys
import time
from typing import Any


def index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def describe(*args: Any, **kwargs: Any) -> Any:
    return index(), os.getpid(), args, kwargs


def fail(worker: int | None = None) -> str:
    if worker in (None, index()):
        raise RuntimeError(f"told to fail, worker {index()}")
    return "fine"


def fail_and_hang(worker: int) -> None:
    fail(worker)
    wait_for_a_peer_that_is_gone()


def wait_for_a_peer_that_is_gone() -> None:
    time.sleep(60)


def die(worker: int) -> None:
    if worker == index():
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_a_peer_that_is_gone()


def leave() -> None:
    sys.exit("leaving")


def not_picklable() -> Any:
    return lambda: None


def count_devices() -> int:
    import tensorflow as tf

    return len(tf.config.list_logical_devices("CPU"))
