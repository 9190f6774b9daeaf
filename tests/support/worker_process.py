"""What each process of a test cluster runs; `cluster.py` starts it.

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


def case_file(directory: pathlib.Path, case: int) -> pathlib.Path:
    return directory / f"case{case}.pickle"


def result_file(
    directory: pathlib.Path, case: int, worker: int
) -> pathlib.Path:
    return directory / f"case{case}.worker{worker}.pickle"


def main(directory: pathlib.Path, index: int, devices: int) -> None:
    """Runs every case as it comes and leaves a file for it."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    dismissal = threading.Thread(target=leave_when_dismissed, daemon=True)
    dismissal.start()
    set_devices(devices)
    for case in itertools.count():
        path = case_file(directory, case)
        while not path.exists():
            time.sleep(0.01)
        result = call(*pickle.loads(path.read_bytes()))
        write(result_file(directory, case, index), result)


def leave_when_dismissed() -> None:
    """Ends the process when its standard input ends.

    The parent closes it when all workers are done: one that leaves earlier
    breaks the last collective of its peers. It also ends with the parent.
    """
    sys.stdin.buffer.read()
    sys.stdout.flush()
    # TensorFlow's own shutdown waits for peers that may be gone.
    os._exit(0)


def set_devices(devices: int) -> None:
    """Splits the CPU before anything else can use it."""
    if devices > 1:
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * devices,
        )


def call(target: str, args: Any, kwargs: Any) -> bytes:
    """The pickled result and traceback, one of which is None."""
    module, _, function = target.partition(":")
    try:
        value = getattr(importlib.import_module(module), function)(
            *args, **kwargs
        )
        return pickle.dumps((value, None))
    except BaseException:  # also SystemExit: the peers must hear of it
        error = traceback.format_exc()
        print(error, flush=True)
        return pickle.dumps((None, error))


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that is complete as soon as it exists."""
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.rename(path)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
