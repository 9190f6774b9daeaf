"""Checks what must be seen once on a machine with a GPU, in some minutes.

    python tools/gpu_check.py [--json FILE] [--only NAME ...] [--quick]

Each check trains in processes of its own, whatever happens to the others:

- each optimizer in `fit`, as Keras compiles it there, by XLA: the loss falls,
  no step is skipped, and the weights are the CPU's but for rounding;
- mixed precision;
- two GPUs under `MirroredStrategy`, and two processes over NCCL, against a CPU;
- peak memory of ResNet-20 with Adam and with K-FAC;
- the time of a step of M1 to M4 beside Adam and Muon.

What needs more GPUs than there are is left out by name. It ends with 1 if a
check fails.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import paths  # noqa: F401
from command import machine
from common.tables import ruled

TOOLS = pathlib.Path(__file__).parent
STEPS = 12
# Part of the way from the first weights to the CPU's that others may be off.
# XLA on a CPU is 4e-7 to 2e-5 off, and 8e-3 with spectral steps, where the
# smallest singular values count as much as the largest.
CLOSE, CLOSE_SPECTRAL = 1e-3, 0.05
LIMIT = 900.0  # seconds of a process
MODELS = ("M1", "M2", "M3", "M4")
VARIANTS = ("sgd", "adam", "muon", "kfac-inverse", "kfac-eigen", "fosi-adam")
PASSED, FAILED, LEFT_OUT = "passed", "FAILED", "left out"
Record = dict[str, Any]


class CheckError(Exception):
    """What has been seen and must not be."""


class Check(NamedTuple):
    """A check.

    Attributes:
        name: Its name.
        gpus: Number of GPUs that it needs.
        run: Function of a `Bench` that returns what is to be recorded.
    """

    name: str
    gpus: int
    run: Callable[["Bench"], Record]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all checks; returns 1 if one fails."""
    options = parse_arguments(arguments)
    if options.part is not None:
        print(json.dumps(PARTS[options.part["part"]](options.part)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(pathlib.Path(folder), options.quick)
        facts = machine() | bench.facts
        print(", ".join(f"{k}: {v}" for k, v in facts.items()), flush=True)
        records = [
            conduct(check, bench)
            for check in CHECKS
            if not options.only or check.name in options.only
        ]
    rows = [(r["check"], r["state"], r["seen"]) for r in records]
    print("\n" + "\n".join(ruled([("check", "", "seen")], rows)))
    if options.json:
        found = {"machine": facts, "checks": records}
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(record["state"] == FAILED for record in records))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument(
        "--quick", action="store_true", help="time the steps of M1 alone"
    )
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def conduct(check: Check, bench: "Bench") -> Record:
    """Runs a check and says how it went."""
    start, found = time.monotonic(), {}
    if check.gpus > bench.gpus:
        gpus = f"{check.gpus} GPU{'s' * (check.gpus > 1)}"
        state, seen = LEFT_OUT, f"needs {gpus}, there are {bench.gpus}"
    else:
        try:
            found = check.run(bench)
            state, seen = PASSED, found.pop("seen")
        except (CheckError, subprocess.TimeoutExpired) as error:
            state, seen = FAILED, str(error)
    print(f"{check.name}: {state}, {seen}", flush=True)
    seconds = round(time.monotonic() - start, 1)
    record = {"check": check.name, "state": state, "seen": seen}
    return record | {"seconds": seconds} | found


class Bench:
    """Where checks are run: processes of their own, in a folder.

    Attributes:
        quick: Whether to time few steps.
        facts: What is there.
    """

    def __init__(self, folder: pathlib.Path, quick: bool) -> None:
        self.quick = quick
        self._folder = folder
        self._references: dict[str, Record] = {}
        self.facts = self.part({"part": "facts"})

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self.facts["GPUs"])

    def part(
        self, task: Mapping[str, Any], on_cpu: bool = False, workers: int = 1
    ) -> Record:
        """Runs a part in a process, or one for each worker.

        Raises:
            CheckError: If it ends with an error.
        """
        command = [sys.executable, __file__, "--part", json.dumps(task)]
        if workers > 1:
            launch = [sys.executable, str(TOOLS / "launch.py"), str(workers)]
            command = [*launch, "--", *command]
        # Nothing is found of a GPU that is not visible.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        done = self.process(command, hidden)
        *_, last = done.splitlines()
        record: Record = json.loads(last[last.index("{") :])
        return record

    def process(
        self, command: Sequence[str], variables: Mapping[str, str]
    ) -> str:
        """Runs a command; returns what it prints.

        Raises:
            CheckError: If it ends with an error.
        """
        own = {"PYTHONPATH": str(TOOLS.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            command,
            env={**os.environ, **own, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [""]
            raise CheckError(f"exit status {done.returncode}: {lines[-1]}")
        return done.stdout

    def file(self, name: str) -> str:
        """A file in the folder."""
        return str(self._folder / name)

    def train(self, optimizer: str, **task: Any) -> Record:
        """Trains, and compares the weights with those of a CPU.

        Raises:
            CheckError: If training does not go as it must.
        """
        workers, close = task.pop("workers", 1), task.pop("close", CLOSE)
        file = self.file(f"{optimizer} {task}")
        task = {"part": "train", "optimizer": optimizer, "file": file, **task}
        found = self.part(task, workers=workers)
        first, last = found["losses"][0], found["losses"][-1]
        found["seen"] = f"loss {first:.3g} -> {last:.3g}"
        found["seen"] += ", by XLA" * found["XLA"]
        if not last < first:  # NaN is not
            raise CheckError(found["seen"])
        if task.get("policy"):  # scales of a loss begin too large
            return found
        if found["skipped"]:
            raise CheckError(f"{found['skipped']} steps are skipped")
        if self.gpus or task.get("replicas"):
            off = max(
                self._distance(optimizer, of_worker(file, index))
                for index in range(workers)
            )
            found["off"] = off
            found["seen"] += f", {off:.1e} of the way from a CPU's weights"
            if not off < close:
                raise CheckError(found["seen"])
        return found

    def _distance(self, optimizer: str, file: str) -> float:
        """How far weights are from a CPU's, over the way of these."""
        cpu = self.file(f"{optimizer} CPU")
        if optimizer not in self._references:
            task = {"part": "train", "optimizer": optimizer, "file": cpu}
            self._references[optimizer] = self.part(task, on_cpu=True)
        with np.load(file) as own, np.load(of_worker(cpu, 0)) as reference:
            start, end = reference["start"], reference["end"]
            off = np.linalg.norm(own["end"] - end)
        return float(off / np.linalg.norm(end - start))


def of_worker(file: str, index: int) -> str:
    """The file of a worker."""
    return f"{file} of worker {index}.npz"


# ------------------------------------------------------------------ the checks
def fits(optimizer: str, **task: Any) -> Callable[[Bench], Record]:
    """A check that an optimizer trains."""
    return lambda bench: bench.train(optimizer, **task)


def measure_memory(bench: Bench) -> Record:
    """Peak memory of a ResNet-20, with Adam and with K-FAC."""
    found = {
        name: bench.part({"part": "memory", "optimizer": name})["peak"]
        for name in ("adam", "kfac inverse")
    }
    texts = [f"{name} {size / 2**20:.0f} MB" for name, size in found.items()]
    return {"seen": ", ".join(texts), "peak_bytes": found}


def time_steps(bench: Bench) -> Record:
    """Times of a step, as `fit` compiles it."""
    file = bench.file("steps")
    models, rounds = (MODELS[:1], "1") if bench.quick else (MODELS, "3")
    command = [
        sys.executable,
        str(TOOLS / "studies" / "benchmark.py"),
        "--mode",
        "fit",
    ]
    command += ["--models", *models, "--variants", *VARIANTS]
    command += ["--rounds", rounds, "--mixes", "10,100", "--json", file]
    print(bench.process(command, {}), flush=True)
    rows = json.loads(pathlib.Path(file).read_text())["rows"]
    return {"seen": f"{len(rows)} rows above", "rows": rows}


CHECKS = (
    Check("KFAC, Cholesky", 0, fits("kfac inverse")),
    Check("KFAC, eigen", 0, fits("kfac eigen")),
    Check("KFAC, spectral", 0, fits("kfac spectral", close=CLOSE_SPECTRAL)),
    Check("FOSI", 0, fits("fosi")),
    Check("GaussNewton", 0, fits("gauss_newton")),
    Check("mixed bfloat16", 0, fits("kfac inverse", policy="mixed_bfloat16")),
    Check("mixed float16", 0, fits("kfac inverse", policy="mixed_float16")),
    Check("two GPUs", 2, fits("kfac inverse", replicas="mirrored")),
    Check(
        "two processes, NCCL",
        2,
        fits("kfac inverse", replicas="workers", workers=2),
    ),
    Check("memory", 1, measure_memory),
    Check("steps", 0, time_steps),
)


# ------------------------------------------- parts, in processes of their own
def facts(task: Mapping[str, Any]) -> Record:
    """What TensorFlow finds."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details
    build = tf.sysconfig.get_build_info()
    return {
        "GPUs": [details(gpu).get("device_name", gpu.name) for gpu in gpus],
        "CUDA": build.get("cuda_version"),
    }


def train(task: Mapping[str, Any]) -> Record:
    """Trains on one batch, again and again; leaves the weights in a file."""
    index = 0
    if task.get("replicas") == "workers":  # a GPU for each
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    import keras
    import tensorflow as tf

    strategy = strategy_of(task.get("replicas"))
    # Rounded to ten bits, products of float32 are those of no CPU.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.utils.set_random_seed(0)
    if task.get("policy"):
        keras.config.set_dtype_policy(task["policy"])
    with strategy.scope():
        optimizer, x, y, layers, loss = problem(task["optimizer"])
        model = keras.Sequential(layers)
        model.compile(optimizer, loss)
    start = flat(model)
    losses = model.fit(x, y, len(x), STEPS, shuffle=False, verbose=0)
    np.savez(of_worker(task["file"], index), start=start, end=flat(model))
    return {
        "losses": [float(value) for value in losses.history["loss"]],
        "skipped": int(optimizer.skipped_steps),
        "XLA": bool(model.jit_compile),
    }


def strategy_of(replicas: str | None) -> Any:
    """The strategy of one replica, of two GPUs, or of two processes.

    Without a GPU the two are parts of the CPU.
    """
    import tensorflow as tf

    import tfkfac

    gpus = tf.config.list_physical_devices("GPU")
    if replicas == "workers":
        kinds = tf.distribute.experimental.CommunicationImplementation
        return tfkfac.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=kinds.NCCL if gpus else kinds.AUTO
            )
        )
    if replicas != "mirrored":
        return tf.distribute.get_strategy()
    if not gpus:
        (cpu,) = tf.config.list_physical_devices("CPU")
        part = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [part, part])
    return tf.distribute.MirroredStrategy(
        [f"{'GPU' if gpus else 'CPU'}:{index}" for index in range(2)]
    )


def problem(name: str) -> tuple[Any, np.ndarray, np.ndarray, list[Any], Any]:
    """An optimizer, data, layers and a loss for it.

    K-FAC has images and convolutions, the others a small regression.
    """
    import keras
    from keras import layers

    rng = np.random.default_rng(0)
    optimizer = OPTIMIZERS[name]()
    if name.startswith("kfac"):
        x = rng.normal(size=(64, 12, 12, 3)).astype("float32")
        y = (x[:, :6].sum((1, 2, 3)) > x[:, 6:].sum((1, 2, 3))).astype(int)
        network = [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(2, dtype="float32"),
        ]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return optimizer, x, y, network, loss
    x = rng.normal(size=(64, 4)).astype("float32")
    y = np.sin(x[:, :1] * x[:, 1:2])
    network = [
        keras.Input((4,)),
        layers.Dense(6, activation="tanh"),
        layers.Dense(1),
    ]
    return optimizer, x, y, network, "mse"


def _kfac(**arguments: Any) -> Callable[[], Any]:
    """K-FAC that renews its decompositions often."""

    def make() -> Any:
        import tfkfac

        return tfkfac.KFAC(
            factor_update_interval=1, inverse_update_interval=3, **arguments
        )

    return make


def _fosi() -> Any:
    """FOSI whose directions do not depend on where Lanczos began."""
    import keras

    import tfkfac

    sgd = keras.optimizers.SGD(0.05)
    return tfkfac.FOSI(
        sgd, num_largest=3, warmup_steps=2, update_interval=4, lanczos_steps=37
    )


def _gauss_newton() -> Any:
    import tfkfac

    return tfkfac.GaussNewton()


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "kfac inverse": _kfac(),
    "kfac eigen": _kfac(solver="eigen"),
    "kfac spectral": _kfac(step="spectral"),
    "fosi": _fosi,
    "gauss_newton": _gauss_newton,
}


def flat(model: Any) -> np.ndarray:
    """All trainable weights as one vector."""
    values = [np.ravel(v.numpy()) for v in model.trainable_variables]
    return np.concatenate(values)


def memory(task: Mapping[str, Any]) -> Record:
    """Peak memory of a GPU in a few steps of a ResNet-20."""
    import keras
    import tensorflow as tf

    from benchmark import build

    kfac = task["optimizer"] != "adam"
    model = build("M3")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_kfac()() if kfac else "adam", loss)
    x = np.zeros((128, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros(len(x), int), len(x), 4, verbose=0)
    info = tf.config.experimental.get_memory_info("GPU:0")
    return {"peak": info["peak"]}


PARTS = {"facts": facts, "train": train, "memory": memory}

if __name__ == "__main__":
    sys.exit(main())
