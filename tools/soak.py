"""Trains a small model for many steps on some workers, and looks for leaks.

    python tools/soak.py                               # all modes, 2,000 steps
    python tools/soak.py --steps 10000 comm_opt dp_kfac
    python tools/soak.py --workers 4 hybrid_opt

For each mode a row of a table: milliseconds of a step, main memory of the
worker that has most of it after a tenth of the steps and at the end, how it
grows over the last half, threads at these times, traces of the step, and
whether all workers end with the same bits.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launch import environments

MODES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),  # for comparison
    "comm_opt": ("KFAC", {"distribution": "comm_opt"}),
    "mem_opt": ("KFAC", {"distribution": "mem_opt"}),
    "dp_kfac": ("KFAC", {"distribution": "dp_kfac"}),
    # With two workers it is mem_opt.
    "hybrid_opt": ("KFAC", {"distribution": "hybrid_opt"}),
    "quadratic": ("KFAC", {"step": "quadratic"}),
    "DHO2 rows": ("FOSI", {"layout": "rows", "update_interval": 100}),
    "DHO2 columns": ("FOSI", {"layout": "columns", "update_interval": 100}),
    "MR-DHO2": ("FOSI", {"accelerator_fraction": 0.5, "update_interval": 100}),
}
LOOKS = 20
MARK = "soak: "


# ------------------------------------------------------------------ the worker
def work(mode: str, steps: int) -> None:
    """Trains, and prints what it has seen as JSON."""
    import keras

    import tfkfac

    kind, arguments = MODES[mode]
    traces = []

    inner = keras.optimizers.SGD
    base = inner if kind == "SGD" else getattr(tfkfac, kind)

    class Counted(base):  # type: ignore[misc, valid-type]
        def apply(self, *args: Any, **kwargs: Any) -> None:
            traces.append(1)  # this is Python of the trace
            super().apply(*args, **kwargs)

    strategy = tfkfac.MultiWorkerMirroredStrategy()
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((10,)),
                keras.layers.Dense(16, "tanh"),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            Counted(0.01 if base is inner else inner(0.01), **arguments),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    random = np.random.default_rng(0)
    length = steps // LOOKS
    x = random.normal(size=(8 * length, 10)).astype("float32")
    looks: list[tuple[float, int, int]] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            looks.append((time.monotonic(), *memory_and_threads()))

    model.fit(
        x,
        x[:, :3].argmax(-1),
        batch_size=8,
        epochs=LOOKS,
        verbose=0,
        callbacks=[Look()],
    )
    weights = b"".join(np.asarray(w.numpy()).tobytes() for w in model.weights)
    found = {
        "looks": looks,
        "traces": len(traces),
        "weights": zlib.crc32(weights),
        "finite": bool(np.isfinite(np.frombuffer(weights, "float32")).all()),
    }
    print(MARK + json.dumps(found), flush=True)


def memory_and_threads() -> tuple[int, int]:
    """Bytes of this process in main memory, and its threads."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/task"))


# ------------------------------------------------------------------- the table
def run(mode: str, steps: int, workers: int = 2) -> list[dict[str, Any]]:
    """What the workers have seen.

    Raises:
        RuntimeError: If one of them fails.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", "--steps", str(steps), mode],
            env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments(workers)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"A worker of mode {mode!r} has failed.")
    return [
        json.loads(line.removeprefix(MARK))
        for output in outputs
        for line in output.splitlines()
        if line.startswith(MARK)
    ]


def growth(looks: Sequence[Sequence[float]], steps: int) -> float:
    """Bytes by which memory grows in a step, in the last half."""
    memory = np.array([look[1] for look in looks[LOOKS // 2 :]])
    at = np.arange(len(memory)) * steps / LOOKS
    return float(np.polyfit(at, memory, 1)[0])


def row(mode: str, steps: int, found: Sequence[Mapping[str, Any]]) -> str:
    """A row of the table."""
    looks = max((one["looks"] for one in found), key=lambda x: x[-1][1])
    first, last = looks[1], looks[-1]
    seconds = (last[0] - first[0]) / (steps * (LOOKS - 2) / LOOKS)
    same = len({one["weights"] for one in found}) == 1
    cells = [
        mode,
        f"{steps:,}",
        f"{1e3 * seconds:.1f}",
        f"{first[1] / 2**20:.0f} / {last[1] / 2**20:.0f}",
        f"{max(growth(one['looks'], steps) for one in found):.0f}",
        f"{first[2]} / {last[2]}",
        "/".join(str(one["traces"]) for one in found),
        "equal" if same and found[0]["finite"] else "DIFFERENT",
    ]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("modes", nargs="*", metavar="MODE")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.modes) - set(MODES)
    if unknown:
        parser.error(f"MODE must be one of {[*MODES]}: {sorted(unknown)}")
    if options.worker:
        work(options.modes[0], options.steps)
        return 0
    print(
        "| mode | steps | ms a step | MB | bytes a step | threads | traces | "
        "weights |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for mode in options.modes or MODES:
        found = run(mode, options.steps, options.workers)
        print(row(mode, options.steps, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
