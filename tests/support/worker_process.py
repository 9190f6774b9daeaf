"""The program of each process of a cluster; `cluster.py` starts it.

python -m tests.support.worker_process DIRECTORY INDEX DEVICES
"""

import faulthandler
import importlib
import itertools
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import traceback
from typing import Any


def call_file(directory: pathlib.Path, number: int) -> pathlib.Path:
    return directory / f"call{number}.pickle"


def result_file(
    directory: pathlib.Path, number: int, worker: int
) -> pathlib.Path:
    return directory / f"call{number}.worker{worker}.pickle"


def main(directory: pathlib.Path, index: int, devices: int) -> None:
    """Run every call of the cluster; write a file with its result."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=exit_with_stdin, daemon=True).start()
    set_devices(devices)
    for number in itertools.count():
        path = call_file(directory, number)
        while not path.exists():
            time.sleep(0.01)
        result = call(*pickle.loads(path.read_bytes()))
        write(result_file(directory, number, index), result)


def exit_with_stdin() -> None:
    """End the process when its standard input ends.

    The parent closes it after all workers are done: a worker that exits earlier
    breaks the last collective of the others.
    """
    sys.stdin.buffer.read()
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


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file that is complete as soon as it exists."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.rename(path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
