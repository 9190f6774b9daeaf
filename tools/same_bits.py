"""Says whether two versions of tfkfac train to the same bits.

    python tools/same_bits.py write before.npz        # with the one
    python tools/same_bits.py compare before.npz      # with the other

Small models make 20 steps in `fit` with many options, in one process, on two
replicas of a process, and on two and four workers. `compare` lists the runs
whose weights or losses differ, and by how much of the way they have gone.
`--only TEXT` takes the runs whose name has it; a run that one side lacks is
said, and is no difference. Bits hold on one machine alone: write both there.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

if __name__ == "__main__":
    # One thread each: sums of several come in any order.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"

import keras
import numpy as np
import tensorflow as tf

import tfkfac

STEPS, BATCH = 20, 16
# Where runs are made: processes, and replicas of each.
PLACES = {
    "process": (1, 1),
    "replicas": (1, 2),
    "two": (2, 1),
    "four": (4, 1),
}
Data = tuple[Any, Any]
Run = tuple[str, str, dict[str, Any]]
layers, losses = keras.layers, keras.losses
KFAC: Any = tfkfac.KFAC
FOSI: Any = tfkfac.FOSI
GN: Any = tfkfac.GaussNewton
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def classes(logits: bool = True) -> Any:
    """The cross-entropy of class numbers."""
    return losses.SparseCategoricalCrossentropy(from_logits=logits)


def dense(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """Two dense layers, one with a penalty, and classes."""
    model = keras.Sequential(
        [
            keras.Input((9,)),
            layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2()),
            layers.Dense(4),
        ]
    )
    x = draw.normal(size=(STEPS * BATCH, 9)).astype("float32")
    return model, (x, draw.integers(0, 4, len(x))), {"loss": classes()}


def regression(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """Dense layers without a bias here and there, and squared errors."""
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


def image(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """Convolutions of all kinds, normalisation and a softmax."""
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


def tokens(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """Attention over embedded tokens, padded, with a loss a token."""
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.TimeDistributed(layers.Dense(8, "gelu"))(x)
    model = keras.Model(ids, layers.Dense(11)(x))
    x = draw.integers(0, 11, (STEPS * BATCH, 6))
    return model, (x, (x * 3 + 1) % 11), {"loss": classes()}


def recurrent(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """A recurrent layer, which has no block, and two outputs with weights."""
    inputs = keras.Input((5, 3))
    shared = layers.Dense(6, "tanh")
    x = layers.LSTM(4)(shared(shared(layers.Dense(6)(inputs))))
    outputs = {
        "one": layers.Dense(1, "sigmoid", name="one")(x),
        "two": layers.Dense(2, name="two")(x),
    }
    x = draw.normal(size=(STEPS * BATCH, 5, 3)).astype("float32")
    y = {
        "one": (x[:, 0, :1] > 0).astype("float32"),
        "two": x[:, 1, :2] * x[:, 2, 1:],
    }
    return (
        keras.Model(inputs, outputs),
        (x, y),
        {
            "loss": {"one": "binary_crossentropy", "two": "mse"},
            "loss_weights": {"one": 1.0, "two": 0.3},
        },
    )


def scalar_loss(draw: np.random.Generator) -> tuple[Any, Data, dict[str, Any]]:
    """A loss of the user's own that returns one number."""
    model, data, _ = regression(draw)

    def loss(y: Any, p: Any) -> Any:
        return 3.0 * tf.reduce_mean(tf.square(y - p))

    return model, data, {"loss": loss}


MODELS: dict[str, Callable[..., tuple[Any, Data, dict[str, Any]]]] = {
    function.__name__: function
    for function in (dense, regression, image, tokens, recurrent, scalar_loss)
}


def spread(distribution: str, fraction: Any = None, **arguments: Any) -> Any:
    """K-FAC, spread over workers in some way."""
    names = {"assignment", "symmetric", "factor_dtype", "inverse_dtype"}
    wire = {k: v for k, v in arguments.items() if k in names}
    rest = {k: v for k, v in arguments.items() if k not in names}
    return KFAC(
        distribution=tfkfac.Distribution(distribution, fraction, **wire),
        **rest,
    )


MOMENTUM = {
    "class_name": "SGD",
    "config": {"learning_rate": 0.05, "momentum": 0.9},
}
EVERY: dict[str, Any] = {
    "factor_update_interval": 2,
    "inverse_update_interval": 4,
}
# For every place: model, what is special about the run, optimizer, and
# arguments of `compile` ("policy" is that of the layers).
RUNS: dict[str, list[tuple[str, str, Callable[[], Any], dict[str, Any]]]] = {
    "process": [
        *((model, "defaults", lambda: KFAC(), {}) for model in MODELS),
        *(
            (model, "every step", lambda: KFAC(Adam(0.01), **EVERY), {})
            for model in MODELS
        ),
        *(
            (model, "eigen", lambda: KFAC(solver="eigen", **EVERY), {})
            for model in MODELS
        ),
        *(
            (model, "drawn", lambda: KFAC(fisher="monte_carlo", **EVERY), {})
            for model in ("dense", "image", "tokens", "recurrent")
        ),
        *(
            (model, "type2", lambda: KFAC(fisher="type2", **EVERY), {})
            for model in ("dense", "image", "regression")
        ),
        *(
            (model, "narrow", lambda: KFAC(max_factor_dim=6), {})
            for model in ("dense", "image", "tokens")
        ),
        *(
            (model, "reduce", lambda: KFAC(weight_sharing="reduce"), {})
            for model in ("image", "tokens", "recurrent")
        ),
        *(
            (model, "average", lambda: KFAC(weight_sharing="average"), {})
            for model in ("image", "tokens")
        ),
        *(
            (model, "spectral", lambda: KFAC(step="spectral", **EVERY), {})
            for model in MODELS
        ),
        ("dense", "no clip", lambda: KFAC(0.01, kl_clip=None), {}),
        ("dense", "skip", lambda: KFAC(skip_layers=["dense"]), {}),
        ("dense", "part", lambda: KFAC(factor_batch_fraction=0.5), {}),
        (
            "dense",
            "micro-batches",
            lambda: KFAC(gradient_accumulation_steps=2, **EVERY),
            {},
        ),
        (
            "image",
            "micro-batches",
            lambda: KFAC(gradient_accumulation_steps=4),
            {},
        ),
        (
            "regression",
            "spectral micro-batches",
            lambda: KFAC(
                step="spectral", momentum=0.5, gradient_accumulation_steps=2
            ),
            {},
        ),
        (
            "dense",
            "schedules",
            lambda: KFAC(
                keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.8),
                damping=keras.optimizers.schedules.CosineDecay(0.1, 20),
                kl_clip=keras.optimizers.schedules.CosineDecay(0.01, 20),
            ),
            {},
        ),
        (
            "dense",
            "clipped norm",
            lambda: KFAC(SGD(0.1, clipnorm=0.1, use_ema=True)),
            {},
        ),
        (
            "dense",
            "half",
            lambda: tfkfac.LossScaleOptimizer(KFAC(), 1024.0),
            {"policy": "mixed_float16"},
        ),
        ("image", "bfloat16", KFAC, {"policy": "mixed_bfloat16"}),
        ("image", "float64", KFAC, {"policy": "float64"}),
        ("dense", "eager", KFAC, {"run_eagerly": True}),
        ("image", "several at once", KFAC, {"steps_per_execution": 4}),
        *(
            (
                model,
                f"FOSI {layout}",
                lambda layout=layout: FOSI(
                    "adam",
                    layout=layout,
                    warmup_steps=2,
                    update_interval=6,
                    num_largest=3,
                    num_smallest=1,
                ),
                {},
            )
            for model in ("dense", "image", "recurrent")
            for layout in ("rows", "columns")
        ),
        *(
            (
                "regression",
                f"FOSI {name}",
                lambda arguments=arguments: FOSI(
                    warmup_steps=2, update_interval=6, **arguments
                ),
                {},
            )
            for name, arguments in (
                ("SGD", {"inner_optimizer": "sgd"}),
                ("momentum", {"inner_optimizer": MOMENTUM}),
                ("paper", {"final_update": "paper"}),
            )
        ),
        *(
            (model, "GaussNewton", lambda: GN(), {})
            for model in ("dense", "regression", "scalar_loss")
        ),
        (
            "regression",
            "GaussNewton residuals",
            lambda: GN(solve="residuals"),
            {},
        ),
        (
            "regression",
            "GaussNewton parameters",
            lambda: GN(solve="parameters"),
            {},
        ),
    ],
    "replicas": [
        *(
            (
                "dense",
                f"KFAC {mode}",
                lambda mode=mode: spread(mode, **EVERY),
                {},
            )
            for mode in ("comm_opt", "mem_opt", "dp_kfac")
        ),
        ("image", "KFAC", lambda: KFAC(**EVERY), {}),
        (
            "dense",
            "FOSI",
            lambda: FOSI("sgd", warmup_steps=2, update_interval=6),
            {},
        ),
        ("regression", "GaussNewton", lambda: GN(), {}),
    ],
    "two": [
        *(
            (
                model,
                f"KFAC {mode} {solver}",
                lambda mode=mode, solver=solver: spread(
                    mode, solver=solver, **EVERY
                ),
                {},
            )
            for model in ("dense", "image", "tokens")
            for mode in ("comm_opt", "mem_opt", "dp_kfac")
            for solver in ("inverse", "eigen")
        ),
        ("recurrent", "KFAC", lambda: KFAC(), {}),
        (
            "dense",
            "KFAC hybrid",
            lambda: spread("hybrid_opt", 0.5, **EVERY),
            {},
        ),
        (
            "image",
            "KFAC triangles",
            lambda: spread("comm_opt", symmetric=True, **EVERY),
            {},
        ),
        (
            "image",
            "KFAC bfloat16",
            lambda: spread(
                "mem_opt",
                factor_dtype="bfloat16",
                inverse_dtype="bfloat16",
                **EVERY,
            ),
            {},
        ),
        (
            "image",
            "KFAC float16 factors",
            lambda: spread("comm_opt", factor_dtype="float16", **EVERY),
            {},
        ),
        (
            "tokens",
            "KFAC by memory",
            lambda: spread("mem_opt", assignment="memory", **EVERY),
            {},
        ),
        (
            "tokens",
            "KFAC drawn",
            lambda: spread("mem_opt", fisher="monte_carlo", **EVERY),
            {},
        ),
        (
            "dense",
            "KFAC narrow",
            lambda: spread("dp_kfac", max_factor_dim=6),
            {},
        ),
        (
            "image",
            "KFAC micro-batches",
            lambda: spread("mem_opt", gradient_accumulation_steps=2, **EVERY),
            {},
        ),
        *(
            (
                "image",
                f"KFAC spectral {mode}",
                lambda mode=mode: spread(mode, step="spectral", **EVERY),
                {},
            )
            for mode in ("comm_opt", "mem_opt")
        ),
        *(
            (
                "image",
                f"FOSI {layout}",
                lambda layout=layout: FOSI(
                    "adam", layout=layout, warmup_steps=2, update_interval=6
                ),
                {},
            )
            for layout in ("rows", "columns")
        ),
        (
            "dense",
            "FOSI two roles",
            lambda: FOSI(
                "sgd",
                accelerator_fraction=0.5,
                warmup_steps=2,
                update_interval=6,
            ),
            {},
        ),
        ("regression", "GaussNewton", lambda: GN(), {}),
        ("dense", "GaussNewton", lambda: GN(), {}),
    ],
    "four": [
        *(
            (
                "tokens",
                f"KFAC {mode} {fraction}",
                lambda mode=mode, fraction=fraction: spread(
                    mode, fraction, **EVERY
                ),
                {},
            )
            for mode, fraction in (
                ("hybrid_opt", 0.5),
                ("hybrid_opt", 0.25),
                ("dp_kfac", None),
            )
        ),
        (
            "image",
            "KFAC hybrid eigen",
            lambda: spread("hybrid_opt", 0.5, solver="eigen", **EVERY),
            {},
        ),
        (
            "dense",
            "FOSI two roles",
            lambda: FOSI(
                "sgd",
                layout="columns",
                accelerator_fraction=0.25,
                warmup_steps=2,
                update_interval=6,
            ),
            {},
        ),
    ],
}


def strategy_of(place: str) -> Any:
    """The strategy of a place."""
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


def weights_of(
    strategy: Any, model_name: str, optimizer: Callable[[], Any], options: Any
) -> dict[str, Any]:
    """Weights before and after the steps, and the losses."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    options = dict(options)
    keras.config.set_dtype_policy(options.pop("policy", "float32"))
    with strategy.scope():
        model, (x, y), compiled = MODELS[model_name](np.random.default_rng(3))
        model.compile(optimizer(), **compiled, **options)
    before = [np.array(w, "float64") for w in model.get_weights()]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(
        BATCH, drop_remainder=True
    )
    history = model.fit(data, verbose=0).history
    keras.config.set_dtype_policy("float32")
    return {
        "before": np.concatenate([w.ravel() for w in before]),
        "after": np.concatenate(
            [np.array(w, "float64").ravel() for w in model.get_weights()]
        ),
        "loss": np.array(history["loss"], "float64"),
    }


def run_place(place: str, only: str, file: str) -> None:
    """Makes all runs of a place; the first worker writes what came out."""
    strategy = strategy_of(place)
    results: dict[str, Any] = {}
    for model, what, optimizer, options in RUNS[place]:
        name = f"{place}/{model}/{what}"
        if only not in name:
            continue
        try:
            found = weights_of(strategy, model, optimizer, options)
        except Exception as error:
            if PLACES[place][0] > 1:
                raise
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        for key, value in found.items():
            results[f"{name}|{key}"] = value
    if file:
        np.savez(file, **results)


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def start(place: str, only: str, file: str) -> list[subprocess.Popen[bytes]]:
    """The processes of a place."""
    workers = PLACES[place][0]
    hosts = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    processes = []
    for index in range(workers):
        environment = dict(os.environ)
        if workers > 1:
            environment["TF_CONFIG"] = json.dumps(
                {
                    "cluster": {"worker": hosts},
                    "task": {"type": "worker", "index": index},
                }
            )
        command = [sys.executable, __file__, "place", place]
        command += ["--only", only, "--file", "" if index else file]
        processes.append(subprocess.Popen(command, env=environment))
    return processes


def all_runs(only: str) -> dict[str, Any]:
    """What came out of the runs of all places.

    Raises:
        SystemExit: If a process failed.
    """
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        # One process beside two workers; four workers alone.
        for places in (("process", "two"), ("replicas",), ("four",)):
            started = {}
            for place in places:
                names = (f"{place}/{m}/{w}" for m, w, *_ in RUNS[place])
                if any(only in name for name in names):
                    file = str(pathlib.Path(folder) / f"{place}.npz")
                    started[file] = start(place, only, file)
            for file, processes in started.items():
                if any(process.wait() for process in processes):
                    raise SystemExit(f"{pathlib.Path(file).stem}: failed")
                found.update(np.load(file))
    return found


def compare(old: Any, new: Any, only: str) -> Iterator[str]:
    """A line for each run that is not the same."""
    names = sorted({key.rpartition("|")[0] for key in [*old, *new]})
    for name in names:
        if only not in name:
            continue
        if f"{name}|after" not in old or f"{name}|after" not in new:
            side = "before" if f"{name}|after" in old else "after"
            yield f"only {side}: {name}"
            continue
        keys = ("before", "after", "loss")
        if all(
            np.array_equal(old[f"{name}|{k}"], new[f"{name}|{k}"], True)
            for k in keys
        ):
            continue
        a, b = old[f"{name}|after"], new[f"{name}|after"]
        way = np.linalg.norm(a - old[f"{name}|before"])
        gap = np.linalg.norm(a - b) / way if a.shape == b.shape else np.inf
        yield f"DIFFERS: {name}, by {gap:.1e} of the way"


def main() -> int:
    """Runs what the command line says."""
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
    found = all_runs(options.only)
    count = sum(key.endswith("|after") for key in found)
    if options.what == "write":
        np.savez(options.name, **found)
        print(f"{count} runs")
        return 0
    lines = list(compare(np.load(options.name), found, options.only))
    differ = sum(line.startswith("DIFFERS") for line in lines)
    print("\n".join([*lines, f"{count} runs, {differ} differ"]))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
