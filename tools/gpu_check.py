"""Check a machine with GPUs, in some minutes.

    python tools/gpu_check.py [--json FILE] [--only NAME ...]

Each check trains in processes of its own:

- each optimizer in `fit`, compiled by XLA: the loss falls, no step is skipped,
  and the weights are those of a CPU up to rounding;
- mixed precision;
- two GPUs under `MirroredStrategy`, and two processes over NCCL, against a CPU;
- peak memory of ResNet-20 without XLA, with Adam and with K-FAC;
- the time of a step, and of the first two: an MLP and a ResNet-20, beside Adam
  and Muon, with XLA and without.

Checks that need more GPUs than there are are skipped. The exit status is 1 if a
check fails.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

import paths  # noqa: F401
from command import machine
from common.arguments import make_parser_of

TOOLS = pathlib.Path(__file__).parent
STEPS = 12
# Upper bound of |w_gpu - w_cpu| / |w_cpu - w_initial|. XLA on a CPU has 4e-7 to
# 2e-5, and 8e-3 with spectral steps, which give the smallest and the largest
# singular values equal weight.
CLOSE, CLOSE_SPECTRAL = 1e-3, 0.05
LIMIT_S = 900.0  # timeout of a process
# Names of studies/compiled_step.py.
STEP_MODELS = ("m1", "resnet20")
STEP_OPTIMIZERS = ("adam", "muon", "natural", "kfac")
OFTEN = {"factor_update_interval": 1, "inverse_update_interval": 3}
# Class and arguments of each optimizer. FOSI makes 37 Lanczos steps for 37
# weights, so that its directions do not depend on the random start vector.
OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "kfac inverse": ("KFAC", OFTEN | {"learning_rate": 0.1}),
    "kfac eigen": (
        "KFAC",
        OFTEN | {"learning_rate": 0.1, "solver": "eigen"},
    ),
    "kfac spectral": ("KFAC", OFTEN | {"step": "spectral"}),
    "fosi": (
        "FOSI",
        {
            "inner_optimizer": {
                "class_name": "SGD",
                "config": {"learning_rate": 0.05},
            },
            "num_largest": 3,
            "warmup_steps": 2,
            "update_interval": 4,
            "lanczos_steps": 37,
        },
    ),
    "gauss_newton": ("GaussNewton", {}),
}
Record = dict[str, Any]


class CheckError(Exception):
    """A check has failed; the message says why."""


# ------------------------------------------------------------------ the checks
def run_process(command: Sequence[str], **variables: str) -> str:
    """Run a command; return its output."""
    needed = {"PYTHONPATH": str(TOOLS.parent), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command,
        env={**os.environ, **needed, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [""]
        raise CheckError(f"exit status {done.returncode}: {lines[-1]}")
    return done.stdout


def run_part(task: Mapping[str, Any], on_cpu: bool = False) -> Record:
    """Run a function of `PARTS` in a new process for each worker."""
    command = [sys.executable, __file__, "--part", json.dumps(task)]
    if workers := task.get("workers"):
        launch = [sys.executable, str(TOOLS / "launch.py"), str(workers)]
        command = [*launch, "--", *command]
    # Hide the GPUs from TensorFlow.
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    *_, last = run_process(command, **hidden).splitlines()
    record: Record = json.loads(last[last.index("{") :])
    return record


def check_training(
    optimizer: str, close: float = CLOSE, **task: Any
) -> Callable[[], Record]:
    """Return a check that trains and compares with weights of a CPU."""

    def check() -> Record:
        run: Record = {"part": "train", "optimizer": optimizer}
        with tempfile.TemporaryDirectory() as folder:
            record = run_part(run | task | {"file": f"{folder}/gpu"})
            first, last = record["losses"][0], record["losses"][-1]
            record["result"] = f"loss {first:.3g} -> {last:.3g}"
            record["result"] += ", by XLA" * record["XLA"]
            if not last < first:  # includes NaN
                raise CheckError(record["result"])
            if "policy" in task:  # the first loss scales are too large
                return record
            if record["skipped"]:
                raise CheckError(f"{record['skipped']} steps are skipped")
            if not record["GPUs"] and "workers" not in task:
                return record
            run |= {"is_reference": True, "XLA": record["XLA"]}
            run_part(run | {"file": f"{folder}/cpu"}, on_cpu=True)
            record["off"] = max(
                distance(str(file), f"{folder}/cpu0.npz")
                for file in pathlib.Path(folder).glob("gpu*.npz")
            )
            record["result"] += f", {record['off']:.1e} off a CPU's weights"
            if not record["off"] < close:
                raise CheckError(record["result"])
            return record

    return check


def distance(file: str, reference: str) -> float:
    """Return |a - b| / |b - start| for the weights of two results."""
    with np.load(file) as a, np.load(reference) as b:
        length = np.linalg.norm(b["end"] - b["start"])
        return float(np.linalg.norm(a["end"] - b["end"]) / length)


def check_memory() -> Record:
    """Compare the peak memory of ResNet-20 with Adam and with K-FAC."""
    peaks = {
        name: run_part({"part": "memory", "optimizer": name})["peak"]
        for name in ("adam", "kfac inverse")
    }
    texts = [f"{name} {size / 2**20:.0f} MB" for name, size in peaks.items()]
    return {"result": ", ".join(texts), "peak_bytes": peaks}


def check_steps() -> Record:
    """Time steps in `fit` with XLA and without, one process after the other."""
    rows: list[Record] = []
    for model in STEP_MODELS:
        for name in STEP_OPTIMIZERS:
            for is_xla in (True, False):
                row: Record = {"model": model, "optimizer": name}
                row["XLA"] = is_xla
                row |= run_part({"part": "steps"} | row)
                text = "{model} {optimizer}, XLA {XLA}: {first_s:.1f} s"
                text += ", then {step_ms:.1f} ms a step"
                print(text.format_map(row), flush=True)
                rows.append(row)
    return {"result": f"{len(rows)} rows above", "rows": rows}


# By name: number of GPUs that a check needs, and the check.
CHECKS: Mapping[str, tuple[int, Callable[[], Record]]] = {
    "KFAC, Cholesky": (0, check_training("kfac inverse")),
    "KFAC, eigen": (0, check_training("kfac eigen")),
    "KFAC, spectral": (0, check_training("kfac spectral", CLOSE_SPECTRAL)),
    "FOSI": (0, check_training("fosi")),
    "GaussNewton": (0, check_training("gauss_newton")),
    "mixed bfloat16": (
        0,
        check_training("kfac inverse", policy="mixed_bfloat16"),
    ),
    "mixed float16": (
        0,
        check_training("kfac inverse", policy="mixed_float16"),
    ),
    "two GPUs": (2, check_training("kfac inverse", is_mirrored=True)),
    "two processes, NCCL": (2, check_training("kfac inverse", workers=2)),
    "memory": (1, check_memory),
    "steps": (1, check_steps),
}


# ------------------------------------------- parts, in processes of their own
def find_gpus(task: Mapping[str, Any]) -> Record:
    """Return the GPUs that TensorFlow finds."""
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details
    build = tf.sysconfig.get_build_info()
    return {
        "GPUs": [details(gpu).get("device_name", gpu.name) for gpu in gpus],
        "CUDA": build.get("cuda_version"),
    }


def train(task: Mapping[str, Any]) -> Record:
    """Train on one batch repeatedly; write the weights to a file."""
    index = 0
    if "workers" in task:  # one GPU per worker
        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
    import keras
    import tensorflow as tf

    from compiled_step import list_gpu

    gpus = tf.config.list_physical_devices("GPU")
    strategy = strategy_of(task)
    jit_compile: Any = "auto"
    context: Any = contextlib.nullcontext()
    if task.get("is_reference"):
        # With XLA, inverses are used a step later, so a CPU compiles too.
        jit_compile = task["XLA"]
        context = mock.patch.object(
            tf.config, "list_physical_devices", list_gpu
        )
    # TensorFloat-32 has only ten bits of mantissa: no CPU has equal results.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(task.get("policy", "float32"))
    with context, strategy.scope():
        optimizer = make_optimizer(task["optimizer"])
        model, x, y, loss = problem(task["optimizer"])
        model.compile(optimizer, loss, jit_compile=jit_compile)
    start = flat(model)
    losses = model.fit(x, y, len(x), STEPS, shuffle=False, verbose=0)
    np.savez(f"{task['file']}{index}.npz", start=start, end=flat(model))
    return {
        "losses": [float(value) for value in losses.history["loss"]],
        "skipped": int(optimizer.skipped_steps),
        "XLA": bool(model.jit_compile),
        "GPUs": len(gpus),
    }


def strategy_of(task: Mapping[str, Any]) -> Any:
    """Return the strategy of a training."""
    import tensorflow as tf

    import tfkfac

    gpus = tf.config.list_physical_devices("GPU")
    experimental = tf.distribute.experimental
    if "workers" in task:
        types = experimental.CommunicationImplementation
        return tfkfac.MultiWorkerMirroredStrategy(
            communication_options=experimental.CommunicationOptions(
                implementation=types.NCCL if gpus else types.AUTO
            )
        )
    if "is_mirrored" in task:
        return tf.distribute.MirroredStrategy(["GPU:0", "GPU:1"])
    return tf.distribute.get_strategy()


def make_optimizer(name: str) -> Any:
    """Return an optimizer of `OPTIMIZERS`."""
    import tfkfac

    class_name, arguments = OPTIMIZERS[name]
    return getattr(tfkfac, class_name)(**arguments)


def problem(name: str) -> tuple[Any, np.ndarray, np.ndarray, Any]:
    """Return a model, inputs, targets and the loss for an optimizer.

    K-FAC trains convolutions on images, other optimizers a regression.
    """
    import keras
    from keras import layers

    rng = np.random.default_rng(0)
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
        return keras.Sequential(network), x, y, loss
    x = rng.normal(size=(64, 4)).astype("float32")
    hidden = layers.Dense(6, activation="tanh")
    network = [keras.Input((4,)), hidden, layers.Dense(1)]
    return keras.Sequential(network), x, np.sin(x[:, :1] * x[:, 1:2]), "mse"


def flat(model: Any) -> np.ndarray:
    """Return all trainable weights as one vector."""
    return np.concatenate([np.ravel(v) for v in model.trainable_variables])


def memory(task: Mapping[str, Any]) -> Record:
    """Return the peak memory of a GPU in a few steps of ResNet-20."""
    import keras
    import tensorflow as tf

    from benchmark import build

    name = task["optimizer"]
    model = build("M3")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = "adam" if name == "adam" else make_optimizer(name)
    # XLA needs minutes to compile K-FAC on this model.
    model.compile(optimizer, loss, jit_compile=False)
    x = np.zeros((128, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros(len(x), int), len(x), 4, verbose=0)
    info = tf.config.experimental.get_memory_info("GPU:0")
    return {"peak": info["peak"]}


def steps(task: Mapping[str, Any]) -> Record:
    """Return the seconds of the first two steps, the mean of 200 more."""
    import keras
    import tensorflow as tf

    import compiled_step

    keras.utils.set_random_seed(0)
    make, size = compiled_step.MODELS[task["model"]]
    model = make()
    model.compile(
        compiled_step.OPTIMIZERS[task["optimizer"]](),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile="auto" if task["XLA"] else False,
    )
    batch = compiled_step.random_batch(model, size)
    dataset = tf.data.Dataset.from_tensors(batch)
    times = [time.perf_counter()]
    for count in (2, 200):
        model.fit(dataset.repeat(count), verbose=0)
        times.append(time.perf_counter())
    first, later = np.diff(times)
    return {"first_s": first, "step_ms": later / 200 * 1e3}


PARTS = {"gpus": find_gpus, "train": train, "memory": memory, "steps": steps}


# ------------------------------------------------------------ the command line
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 1 if one fails."""
    parser = make_parser_of(__doc__)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        print(json.dumps(PARTS[options.part["part"]](options.part)))
        return 0
    facts = machine() | run_part({"part": "gpus"})
    print(", ".join(f"{k}: {v}" for k, v in facts.items()), flush=True)
    names, gpus = options.only or CHECKS, len(facts["GPUs"])
    records = [run_check(name, gpus) for name in names]
    if options.json:
        result = {"machine": facts, "checks": records}
        options.json.write_text(json.dumps(result, indent=1))
    return int(any(record["state"] == "FAILED" for record in records))


def run_check(name: str, gpus: int) -> Record:
    """Run a check; print and return its result."""
    needed, check = CHECKS[name]
    state, record = "skipped", {"result": f"needs {needed} GPUs, not {gpus}"}
    if needed <= gpus:
        try:
            state, record = "passed", check()
        except (CheckError, subprocess.TimeoutExpired) as error:
            state, record = "FAILED", {"result": str(error)}
    print(f"{name:20} {state}: {record['result']}", flush=True)
    return {"check": name, "state": state} | record


if __name__ == "__main__":
    sys.exit(main())
