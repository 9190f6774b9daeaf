"""Saves small trained models, and their weights after some more steps.

    git worktree add --detach /tmp/old COMMIT
    PYTHONPATH=/tmp/old python tests/data/saved/make.py

The files here are of commit 76edc53; `tests/saving/test_old_files.py` loads
them with today's code. They are not made anew, or they hold nothing.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

import tfkfac

HERE = pathlib.Path(__file__).parent
STEPS, MORE, BATCH = 5, 5, 8
KFAC: Any = tfkfac.KFAC
EVERY: dict[str, Any] = {
    "factor_update_interval": 2,
    "inverse_update_interval": 3,
}


def dense() -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5, "tanh"),
            layers.Dense(4, "tanh", use_bias=False),
            layers.Dense(3),
        ]
    )


def image() -> Any:
    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(3, 3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(2, 3, strides=2, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def regression() -> Any:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(2)]
    )


# Model and optimizer; what a case is called is the name of its file.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "kfac_defaults.keras": (dense, lambda: KFAC()),
    "kfac.weights.h5": (dense, lambda: KFAC("adam", **EVERY)),
    "kfac.h5": (dense, lambda: KFAC(solver="eigen", **EVERY)),
    "kfac_image.keras": (
        image,
        lambda: KFAC(solver="eigen", fisher="monte_carlo", **EVERY),
    ),
    "kfac_wire.keras": (
        dense,
        lambda: KFAC(
            distribution="mem_opt",
            assignment="memory",
            factor_dtype="bfloat16",
            inverse_dtype="bfloat16",
            symmetric_communication=True,
            **EVERY,
        ),
    ),
    "kfac_micro_batches.keras": (
        dense,
        lambda: KFAC(gradient_accumulation_steps=3, **EVERY),
    ),
    "kfac_narrow.keras": (
        dense,
        lambda: KFAC(max_factor_dim=4, factor_rank=2, **EVERY),
    ),
    "kfac_quadratic.keras": (
        regression,
        lambda: KFAC(
            step="quadratic",
            damping=tfkfac.LevenbergMarquardt(every=2),
            quadratic_batch_fraction=0.5,
            **EVERY,
        ),
    ),
    "kfac_loss_scale.keras": (
        dense,
        lambda: tfkfac.LossScaleOptimizer(KFAC(**EVERY), 64.0, 4),
    ),
    "fosi.keras": (
        dense,
        lambda: tfkfac.FOSI(
            "adam",
            warmup_steps=1,
            update_interval=3,
            num_largest=2,
            num_smallest=1,
        ),
    ),
    "fosi_columns.keras": (
        dense,
        lambda: tfkfac.FOSI(
            keras.optimizers.SGD(0.05, momentum=0.9),
            layout="columns",
            warmup_steps=1,
            update_interval=3,
        ),
    ),
    "gauss_newton.keras": (regression, lambda: tfkfac.GaussNewton()),
}
# What one process cannot train with.
CONFIGS: list[Callable[[], Any]] = [
    lambda: KFAC(
        distribution="hybrid_opt",
        gradient_worker_fraction=0.5,
        assignment="memory",
    ),
    lambda: KFAC(skip_layers=["dense.*"]),
    lambda: KFAC(
        "adam",
        distribution="dp_kfac",
        factor_dtype="float16",
        damping=keras.optimizers.schedules.CosineDecay(0.1, 20),
        weight_sharing="reduce",
    ),
    lambda: tfkfac.FOSI("sgd", accelerator_fraction=0.25, layout="columns"),
]


def data(model: Any, rows: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(3)
    x = draw.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    if model.output_shape[-1] == 2:
        return x, np.sin(x[:, :2] * x[:, 2:4])
    return x, draw.integers(0, 3, rows)


def main() -> None:
    """Writes the files beside this one."""
    found: dict[str, Any] = {}
    for name, (make, optimizer) in CASES.items():
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        model = make()
        loss: Any = keras.losses.SparseCategoricalCrossentropy(True)
        model.compile(optimizer(), "mse" if make is regression else loss)
        x, y = data(model, (STEPS + MORE) * BATCH)
        cut = STEPS * BATCH
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x[:cut], y[:cut], **options)
        if name.endswith(".weights.h5"):
            # Into a model that says what it is compiled with.
            model.save_weights(HERE / name)
            text = json.dumps(keras.saving.serialize_keras_object(model))
            found[f"{name}|model"] = np.array(text)
        else:
            model.save(HERE / name)
        found[f"{name}|x"], found[f"{name}|y"] = x[cut:], y[cut:]
        for when in ("before", "after"):
            found[f"{name}|{when}"] = np.concatenate(
                [np.array(w).ravel() for w in model.get_weights()]
            )
            if when == "before":
                model.fit(x[cut:], y[cut:], **options)
    found["configs"] = np.array(
        json.dumps([keras.saving.serialize_keras_object(c()) for c in CONFIGS])
    )
    np.savez_compressed(HERE / "runs.npz", **found)


if __name__ == "__main__":
    main()
