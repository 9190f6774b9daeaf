"""Compare two versions of tfkfac bit for bit.

    python tools/same_bits.py write before.npz        # with the first version
    python tools/same_bits.py compare before.npz      # with the second version

Small models train for 20 steps in `fit` with many settings, in one process, on
two replicas of a process, and on two and four workers. `compare` lists the runs
whose weights or losses differ, and the difference over the distance from the
initial weights. `--only TEXT` selects the runs whose names contain the text.
Runs of only one version are listed, but do not count as different. Write and
compare on the same machine: other processors round differently.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    # Use one thread: several threads sum in an order that varies.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"

import keras
import numpy as np
import tensorflow as tf

import tfkfac
from launch import environments

STEPS, BATCH = 20, 16
# By place: number of processes, and of replicas in each process.
PLACES = {"process": (1, 1), "replicas": (1, 2), "two": (2, 1), "four": (4, 1)}
Data = tuple[Any, Any]
# A model, its data, and arguments of `compile`.
Task = tuple[Any, Data, dict[str, Any]]
Draw = np.random.Generator
layers, losses = keras.layers, keras.losses
KFAC: Any = tfkfac.KFAC
FOSI: Any = tfkfac.FOSI
GN: Any = tfkfac.GaussNewton
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def classes(logits: bool = True) -> Any:
    """Return the cross-entropy of integer labels."""
    return losses.SparseCategoricalCrossentropy(from_logits=logits)


def dense(draw: Draw) -> Task:
    """Classify with two dense layers, the first with an L2 penalty."""
    penalty = keras.regularizers.L2()
    hidden = layers.Dense(8, "tanh", kernel_regularizer=penalty)
    model = keras.Sequential([keras.Input((9,)), hidden, layers.Dense(4)])
    x = draw.normal(size=(STEPS * BATCH, 9)).astype("float32")
    return model, (x, draw.integers(0, 4, len(x))), {"loss": classes()}


def regression(draw: Draw) -> Task:
    """Fit squared errors with dense layers, the first without a bias."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(12, "tanh", use_bias=False),
            layers.Dense(6, "tanh"),
            layers.Dense(2),
        ]
    )
    x = draw.normal(size=(STEPS * BATCH, 5)).astype("float32")
    return model, (x, np.sin(x[:, :2] * x[:, 2:4])), {"loss": "mse"}


def image(draw: Draw) -> Task:
    """Classify images with all convolutions and batch normalisation."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.DepthwiseConv2D(3),
            layers.PReLU(shared_axes=[1, 2]),
            layers.Conv2D(6, 3, strides=2, groups=2, padding="same"),
            layers.Conv2DTranspose(3, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(3, "softmax"),
        ]
    )
    x = draw.normal(size=(STEPS * BATCH, 8, 8, 2)).astype("float32")
    y = draw.integers(0, 3, len(x))
    return model, (x, y), {"loss": classes(False), "metrics": ["accuracy"]}


def tokens(draw: Draw) -> Task:
    """Apply attention to padded tokens, with a loss for each token."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.TimeDistributed(layers.Dense(8, "gelu"))(x)
    model = keras.Model(ids, layers.Dense(11)(x))
    x = draw.integers(0, 11, (STEPS * BATCH, 6))
    return model, (x, (x * 3 + 1) % 11), {"loss": classes()}


def recurrent(draw: Draw) -> Task:
    """Train an LSTM, which has no curvature block, with two weighted losses."""
    inputs = keras.Input((5, 3))
    shared = layers.Dense(6, "tanh")
    x = layers.LSTM(4)(shared(shared(layers.Dense(6)(inputs))))
    outputs = {
        "one": layers.Dense(1, "sigmoid", name="one")(x),
        "two": layers.Dense(2, name="two")(x),
    }
    x = draw.normal(size=(STEPS * BATCH, 5, 3)).astype("float32")
    positive = (x[:, 0, :1] > 0).astype("float32")
    y = {"one": positive, "two": x[:, 1, :2] * x[:, 2, 1:]}
    loss = {"one": "binary_crossentropy", "two": "mse"}
    weights = {"one": 1.0, "two": 0.3}
    model = keras.Model(inputs, outputs)
    return model, (x, y), {"loss": loss, "loss_weights": weights}


def scalar_loss(draw: Draw) -> Task:
    """Regression with a custom loss that returns a scalar."""
    model, data, _ = regression(draw)

    def loss(y: Any, p: Any) -> Any:
        return 3.0 * tf.reduce_mean(tf.square(y - p))

    return model, data, {"loss": loss}


MODELS: dict[str, Callable[[Draw], Task]] = {
    function.__name__: function
    for function in (dense, regression, image, tokens, recurrent, scalar_loss)
}


def spread(distribution: str, fraction: Any = None, **arguments: Any) -> Any:
    """Return K-FAC with a distribution over workers."""
    names = {"assignment", "symmetric", "factor_dtype", "inverse_dtype"}
    wire = {k: arguments.pop(k) for k in names & set(arguments)}
    mode = tfkfac.Distribution(distribution, fraction, **wire)
    return KFAC(distribution=mode, **{"step": "natural", **arguments})


P = functools.partial
MODES = ("comm_opt", "mem_opt", "dp_kfac")
ALL = " ".join(MODELS)
# K-FAC with updates every 2 and 4 steps, FOSI with an estimation every 6.
OFTEN: Any = {"factor_update_interval": 2, "inverse_update_interval": 4}
K = P(KFAC, **OFTEN)
S = P(spread, **OFTEN)
F = P(FOSI, warmup_steps=2, update_interval=6)
WIDE = P(F, "adam", num_largest=3, num_smallest=1)
ACCUMULATE: Any = {"gradient_accumulation_steps": 2}
BFLOAT16: Any = {"factor_dtype": "bfloat16", "inverse_dtype": "bfloat16"}


def scheduled() -> Any:
    """Return K-FAC with schedules of learning rate, damping and clip."""
    schedules = keras.optimizers.schedules
    return KFAC(
        schedules.ExponentialDecay(0.1, 5, 0.8),
        damping=schedules.CosineDecay(0.1, 20),
        kl_clip=schedules.CosineDecay(0.01, 20),
    )


def scaled() -> Any:
    """Return K-FAC with a loss scale of 1024."""
    return tfkfac.LossScaleOptimizer(KFAC(step="natural"), 1024.0)


# By place: models, name of the run, optimizer, and arguments of `compile`
# ("policy" is the dtype policy of the layers).
TABLE: dict[str, list[tuple[Any, ...]]] = {
    "process": [
        (ALL, "defaults", KFAC),
        (ALL, "every step", lambda: K(Adam(0.01))),
        (ALL, "eigen", P(K, solver="eigen")),
        (ALL, "spectral", P(K, step="spectral")),
        ("dense image tokens recurrent", "drawn", P(K, fisher="monte_carlo")),
        ("dense image regression", "type2", P(K, fisher="type2")),
        ("dense image tokens", "narrow", P(KFAC, max_factor_dim=6)),
        ("image tokens recurrent", "reduce", P(KFAC, weight_sharing="reduce")),
        ("image tokens", "average", P(KFAC, weight_sharing="average")),
        ("dense", "no clip", P(KFAC, 0.01, kl_clip=None)),
        ("dense", "skip", P(KFAC, skip_layers=["dense"])),
        ("dense", "part", P(KFAC, factor_batch_fraction=0.5)),
        ("dense", "micro-batches", P(K, **ACCUMULATE)),
        ("image", "micro-batches", P(KFAC, gradient_accumulation_steps=4)),
        (
            "regression",
            "spectral micro-batches",
            P(KFAC, step="spectral", momentum=0.5, **ACCUMULATE),
        ),
        ("dense", "schedules", scheduled),
        (
            "dense",
            "clipped norm",
            lambda: KFAC(SGD(0.1, clipnorm=0.1, use_ema=True)),
        ),
        ("dense", "half", scaled, {"policy": "mixed_float16"}),
        ("image", "bfloat16", KFAC, {"policy": "mixed_bfloat16"}),
        ("image", "float64", KFAC, {"policy": "float64"}),
        ("dense", "eager", KFAC, {"run_eagerly": True}),
        ("image", "several at once", KFAC, {"steps_per_execution": 4}),
        ("dense image recurrent", "FOSI rows", P(WIDE, layout="rows")),
        ("dense image recurrent", "FOSI columns", P(WIDE, layout="columns")),
        ("regression", "FOSI SGD", P(F, inner_optimizer="sgd")),
        ("regression", "FOSI momentum", lambda: F(SGD(0.05, 0.9))),
        ("regression", "FOSI paper", P(F, final_update="paper")),
        ("dense regression scalar_loss", "GaussNewton", GN),
        ("regression", "GaussNewton residuals", P(GN, solve="residuals")),
        ("regression", "GaussNewton parameters", P(GN, solve="parameters")),
    ],
    "replicas": [
        *(("dense", f"KFAC {mode}", P(S, mode)) for mode in MODES),
        ("image", "KFAC", K),
        ("dense", "FOSI", P(F, "sgd")),
        ("regression", "GaussNewton", GN),
    ],
    "two": [
        *(
            ("dense image tokens", f"KFAC {m} {s}", P(S, m, solver=s))
            for m in MODES
            for s in ("inverse", "eigen")
        ),
        ("recurrent", "KFAC", KFAC),
        ("dense", "KFAC hybrid", P(S, "hybrid_opt", 0.5)),
        ("image", "KFAC triangles", P(S, "comm_opt", symmetric=True)),
        ("image", "KFAC bfloat16", P(S, "mem_opt", **BFLOAT16)),
        (
            "image",
            "KFAC float16 factors",
            P(S, "comm_opt", factor_dtype="float16"),
        ),
        ("tokens", "KFAC by memory", P(S, "mem_opt", assignment="memory")),
        ("tokens", "KFAC drawn", P(S, "mem_opt", fisher="monte_carlo")),
        ("dense", "KFAC narrow", P(spread, "dp_kfac", max_factor_dim=6)),
        ("image", "KFAC micro-batches", P(S, "mem_opt", **ACCUMULATE)),
        ("image", "KFAC spectral comm_opt", P(S, "comm_opt", step="spectral")),
        ("image", "KFAC spectral mem_opt", P(S, "mem_opt", step="spectral")),
        ("image", "FOSI rows", P(F, "adam", layout="rows")),
        ("image", "FOSI columns", P(F, "adam", layout="columns")),
        ("dense", "FOSI two roles", P(F, "sgd", accelerator_fraction=0.5)),
        ("regression dense", "GaussNewton", GN),
    ],
    "four": [
        ("tokens", "KFAC hybrid_opt 0.5", P(S, "hybrid_opt", 0.5)),
        ("tokens", "KFAC hybrid_opt 0.25", P(S, "hybrid_opt", 0.25)),
        ("tokens", "KFAC dp_kfac None", P(S, "dp_kfac")),
        (
            "image",
            "KFAC hybrid eigen",
            P(S, "hybrid_opt", 0.5, solver="eigen"),
        ),
        (
            "dense",
            "FOSI two roles",
            P(F, "sgd", layout="columns", accelerator_fraction=0.25),
        ),
    ],
}


def runs_of(place: str, only: str) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield name, model, optimizer and `compile` arguments of each run."""
    for names, title, optimizer, *compiled in TABLE[place]:
        for model in names.split():
            name = f"{place}/{model}/{title}"
            if only in name:
                yield name, model, optimizer, compiled[0] if compiled else {}


def strategy_of(place: str) -> Any:
    """Return the strategy for the processes and replicas of a place."""
    workers, replicas = PLACES[place]
    if workers > 1:
        return tfkfac.MultiWorkerMirroredStrategy()
    if replicas > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
        )
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    return tf.distribute.get_strategy()


def train(
    strategy: Any, model_name: str, optimizer: Callable[[], Any], options: Any
) -> dict[str, Any]:
    """Return the weights before and after the steps, and the losses."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    options = dict(options)
    keras.config.set_dtype_policy(options.pop("policy", "float32"))
    with strategy.scope():
        model, data, compiled = MODELS[model_name](np.random.default_rng(3))
        model.compile(optimizer(), **compiled, **options)

    def weights() -> np.ndarray:
        values = [np.ravel(w).astype("float64") for w in model.get_weights()]
        return np.concatenate(values)

    before = weights()
    batches = tf.data.Dataset.from_tensor_slices(data)
    history = model.fit(batches.batch(BATCH, drop_remainder=True), verbose=0)
    keras.config.set_dtype_policy("float32")
    loss = np.array(history.history["loss"], "float64")
    return {"before": before, "after": weights(), "loss": loss}


def run_place(place: str, only: str, file: str) -> None:
    """Train all runs of a place; the first worker writes the results."""
    strategy = strategy_of(place)
    results: dict[str, Any] = {}
    for name, model, optimizer, options in runs_of(place, only):
        try:
            result = train(strategy, model, optimizer, options)
        except Exception as error:
            if PLACES[place][0] > 1:
                raise
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        results |= {f"{name}|{key}": value for key, value in result.items()}
    if file:
        np.savez(file, **results)


def start(place: str, only: str, file: str) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a place."""
    workers, processes = PLACES[place][0], []
    for index, environment in enumerate(environments(workers)):
        if workers == 1:
            del environment["TF_CONFIG"]
        command = [sys.executable, __file__, "place", place, "--only", only]
        command += ["--file", "" if index else file]
        processes.append(subprocess.Popen(command, env=environment))
    return processes


def all_runs(only: str) -> dict[str, Any]:
    """Return the results of the runs of all places."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # Run at most four processes at a time.
        for places in (("process", "two"), ("replicas",), ("four",)):
            started = {}
            for place in places:
                if any(runs_of(place, only)):
                    file = str(pathlib.Path(folder) / f"{place}.npz")
                    started[file] = start(place, only, file)
            for file, processes in started.items():
                if sum(process.wait() != 0 for process in processes):
                    sys.exit(f"{pathlib.Path(file).stem}: failed")
                results.update(np.load(file))
    return results


def compare(old: Any, new: Any, only: str) -> Iterator[str]:
    """Yield a line for each run that differs."""
    names = sorted({key.rpartition("|")[0] for key in [*old, *new]})
    for name in names:
        if only not in name:
            continue
        keys = [f"{name}|{key}" for key in ("before", "after", "loss")]
        before, after, _ = keys
        if after not in old or after not in new:
            yield f"only {'before' if after in old else 'after'}: {name}"
        elif not all(np.array_equal(old[k], new[k], True) for k in keys):
            a, b = old[after], new[after]
            path = np.linalg.norm(a - old[before])
            gap = np.linalg.norm(a - b) / path if a.shape == b.shape else np.inf
            yield f"DIFFERS: {name}, by {gap:.1e} of the way"


def main() -> int:
    """Run the command line; return 1 if a run differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("write", "compare", "place"))
    parser.add_argument("name", help="a file; of `place`, the place")
    parser.add_argument("--only", default="", help="part of a run's name")
    parser.add_argument("--file", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "place":
        run_place(options.name, options.only, options.file)
        return 0
    results = all_runs(options.only)
    count = sum(key.endswith("|after") for key in results)
    if options.what == "write":
        np.savez(options.name, **results)
        print(f"{count} runs")
        return 0
    lines = list(compare(np.load(options.name), results, options.only))
    differ = sum(line.startswith("DIFFERS") for line in lines)
    print("\n".join([*lines, f"{count} runs, {differ} differ"]))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
