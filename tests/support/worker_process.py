"""The program of each process of a cluster; `cluster.py` starts it."""

import faulthandler
import importlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.support.garbage import tune_garbage_collection


def main() -> None:
    """Run every call of the cluster; send its value and traceback."""
    _, path, devices = sys.argv
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(path)
    connection = Connection(connected.detach())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    np.random.seed()  # all forks inherit the same random state
    tune_garbage_collection()
    set_devices(int(devices))
    calls: queue.Queue[bytes] = queue.Queue()
    arguments = connection, calls
    threading.Thread(target=receive, args=arguments, daemon=True).start()
    while True:
        connection.send_bytes(call(*pickle.loads(calls.get())))


def receive(connection: Connection, calls: queue.Queue[bytes]) -> None:
    """Receive calls, and end the process when the parent closes the pipe.

    The parent closes the pipe after all workers are done: a worker that exits
    earlier breaks the last collective of the others.
    """
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        sys.stdout.flush()
        # TensorFlow's shutdown waits for workers that may have exited.
        os._exit(0)


def set_devices(devices: int) -> None:
    """Split the CPU into logical devices."""
    if devices > 1:
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * devices,
        )


def call(target: str, args: Any, kwargs: Any) -> bytes:
    """Return the pickled value and traceback, one of which is None."""
    module, _, function = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)(
            *args, **kwargs
        )
        return pickle.dumps((value, None))
    except BaseException:  # also SystemExit, which the cluster reports
        error = traceback.format_exc()
        print(error, flush=True)
        return pickle.dumps((None, error))


if __name__ == "__main__":
    main()
