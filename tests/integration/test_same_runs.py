"""All ways to train, save and load end with the same weights and state.

Each way is compared with one call of `fit`. A new optimizer or way is a row of
`OPTIMIZERS` or `WAYS`, and an entry of `PAIRS`.
"""

import contextlib
import dataclasses
import functools
import io
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfkfac
from tests.support.dtypes import floats
from tests.support.harness import flat
from tests.support.options import kfac
from tests.support.reference import Array
from tests.support.saved_models import MODELS
from tests.support.small import (
    FEATURES,
    curvature,
    data,
    gradients_of,
    loss,
    summary_text,
)

# Step 5 of 9 is between the updates of all intervals.
STOP, END, ROWS = 5, 9, 12
CLOCKS: dict[str, Any] = {
    "factor_update_interval": 2,
    "inverse_update_interval": 3,
}
FOSI_OPTIONS: dict[str, Any] = {
    "warmup_steps": 2,
    "update_interval": 4,
    "num_largest": 2,
    "num_smallest": 1,
    "lanczos_steps": 4,
}
KFAC: Any = tfkfac.KFAC
FOSI: Any = tfkfac.FOSI
PolynomialDecay = keras.optimizers.schedules.PolynomialDecay
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, an optimizer, and Keras' dtype policy."""

    optimizer: Callable[..., Any]
    model: str = "sequential"
    policy: str = "float32"

    def network(self) -> Any:
        keras.utils.set_random_seed(0)
        model = MODELS[self.model]()
        model(np.zeros((1, FEATURES)))
        return model

    def compiled(self, **options: Any) -> Any:
        model = self.network()
        model.compile(self.optimizer(), loss(), **options)
        return model

    def eager(self) -> Any:
        return self.compiled(run_eagerly=True)


OPTIMIZERS: dict[str, Case] = {
    "inverse": Case(lambda: KFAC(SGD(0.05, 0.5), **CLOCKS)),
    "eigen": Case(
        lambda: KFAC(Adam(0.01), solver="eigen", **CLOCKS), "functional"
    ),
    "half": Case(lambda: KFAC(0.1, **CLOCKS), "nested", "mixed_float16"),
    "subclassed": Case(
        lambda: KFAC(Adam(0.01, weight_decay=1e-3), **CLOCKS), "subclassed"
    ),
    "narrow": Case(
        lambda: kfac(
            0.1,
            distribution="mem_opt",
            factor_dtype="bfloat16",
            inverse_dtype="bfloat16",
            max_factor_dim=4,
            gradient_accumulation_steps=2,
            **CLOCKS,
        ),
        "functional",
    ),
    "drawn": Case(lambda: KFAC(0.1, fisher="monte_carlo", **CLOCKS)),
    "rest": Case(
        lambda: KFAC(
            PolynomialDecay(0.1, 12, 0.01), skip_layers=["logits"], **CLOCKS
        )
    ),
    "our scale": Case(
        lambda: tfkfac.LossScaleOptimizer(KFAC(0.1, **CLOCKS), 8.0, 3)
    ),
    "FOSI": Case(lambda: FOSI(Adam(0.01), **FOSI_OPTIONS)),
    "FOSI in columns": Case(
        lambda: FOSI(SGD(0.1, 0.9), layout="columns", **FOSI_OPTIONS)
    ),
    "FOSI accumulated": Case(
        lambda: FOSI(Adam(0.03, gradient_accumulation_steps=2), **FOSI_OPTIONS)
    ),
    "GaussNewton": Case(lambda: tfkfac.GaussNewton(), policy="float64"),
    "spectral": Case(
        lambda: KFAC(
            PolynomialDecay(1.0, 12),
            step="spectral",
            rest_optimizer=Adam(PolynomialDecay(0.01, 12)),
            skip_layers=["logits"],
            **CLOCKS,
        ),
        "functional",
        "float64",  # small directions would be roundings
    ),
    "spectral sums": Case(
        lambda: KFAC(
            PolynomialDecay(0.1, 12, 0.01),
            step="spectral",
            skip_layers=["logits"],
            gradient_accumulation_steps=2,
            max_factor_dim=4,
            **CLOCKS,
        ),
    ),
}


def batches(begin: int = 0, end: int = END) -> Any:
    """Return the batches of some steps."""
    x, y = (
        np.stack(column)
        for column in zip(*(data(ROWS, s) for s in range(END)), strict=True)
    )
    return tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end]))


def fit(model: Any, begin: int = 0, end: int = END, **options: Any) -> Any:
    model.fit(batches(begin, end), shuffle=False, verbose=0, **options)
    return model


def everything(model: Any) -> dict[str, Array]:
    """Return weights, curvature and variables of the inner optimizer."""
    values = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    # Automatic names have another number in every model.
    values |= {
        f"{i} {key.rpartition(':')[0]}": value
        for i, (key, value) in enumerate(curvature(optimizer).items())
    }
    variables = model.optimizer.variables
    return values | {
        f"variable {i}": np.array(v) for i, v in enumerate(variables)
    }


# --------------------------------------------------------- ways of saving
def by_keras_file(case: Case, folder: pathlib.Path, eager: bool = True) -> Any:
    """Save and load; without eager steps, go on by `train_on_batch`."""
    model = fit(case.compiled(run_eagerly=eager), 0, STOP)
    model.save(folder / "model.keras")
    copy = keras.models.load_model(folder / "model.keras")
    assert type(copy.optimizer) is type(model.optimizer)
    assert copy.optimizer.get_config() == model.optimizer.get_config()
    copy.run_eagerly = eager
    if eager:
        return fit(copy, STOP)
    for x, y in batches(STOP):
        copy.train_on_batch(x, y)
    return copy


def by_weights_file(case: Case, folder: pathlib.Path) -> Any:
    """Load into a model that was trained to the end."""
    fit(case.eager(), 0, STOP).save_weights(folder / "model.weights.h5")
    model = plain(case, True)[2]
    model.load_weights(folder / "model.weights.h5")
    return fit(model, STOP)


def by_checkpoint(case: Case, folder: pathlib.Path) -> Any:
    """Restore into a model that was trained to the end."""
    model, copy = fit(case.eager(), 0, STOP), plain(case, True)[2]
    saved, fresh = (
        tf.train.Checkpoint(model=m, optimizer=m.optimizer)
        for m in (model, copy)
    )
    status = fresh.restore(saved.save(str(folder / "checkpoint")))
    status.assert_existing_objects_matched()
    status.assert_consumed()
    return fit(copy, STOP)


# -------------------------------------------------------- ways of training
def custom_step(model: Any, x: Any, y: Any) -> Any:
    """A training step as in Keras' guides."""
    with tf.GradientTape() as tape:
        value = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        value = model.optimizer.scale_loss(value)
    weights = model.trainable_variables
    gradients = tape.gradient(value, weights)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return value


class CustomStep(keras.Sequential):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": custom_step(self, *batch)}


def by_custom_step(case: Case, folder: pathlib.Path) -> Any:
    model = CustomStep(case.network().layers)
    model.compile(case.optimizer(), loss())
    return fit(model)


def by_scaled_loop(case: Case, folder: pathlib.Path) -> Any:
    """Train in a `tf.function`; the loss scale grows every third step."""
    model = case.network()
    scaled = keras.optimizers.LossScaleOptimizer(
        case.optimizer(), initial_scale=8.0, dynamic_growth_steps=3
    )
    model.compile(scaled, loss())
    step = tf.function(functools.partial(custom_step, model))
    for x, y in batches():
        step(x, y)
    return model


def by_options(**options: Any) -> Callable[..., Any]:
    """Train with options of `compile`."""

    def way(case: Case, folder: pathlib.Path) -> Any:
        return fit(case.compiled(**options))

    return way


def by_attached_loop(case: Case, folder: pathlib.Path) -> Any:
    """Train in a custom loop without `compile`."""
    model = case.network()
    optimizer = case.optimizer().attach(model)
    for x, y in batches():
        gradients = gradients_of(model, x, y)
        optimizer.apply(gradients, model.trainable_variables)
    model.optimizer = optimizer
    return model


def by_bad_batches(case: Case, folder: pathlib.Path) -> Any:
    """Skip updates whose last batch has NaN or infinity.

    The first update traces the step; factors, inverses or directions are due
    in the others.
    """
    model = case.compiled()
    scaler = optimizer = model.optimizer
    if isinstance(scaler, keras.optimizers.LossScaleOptimizer):
        optimizer = scaler.inner_optimizer
    size = getattr(optimizer, "gradient_accumulation_steps", None) or 1
    rows = [*batches()]
    for step, value in ((6, np.inf), (2, np.nan), (0, np.nan)):
        x, y = rows[step]
        rows[step:step] = [(x, y)] * (size - 1) + [(x * value, y)]
    columns = tuple(tf.stack(column) for column in zip(*rows, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices(columns)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        history = model.fit(dataset, shuffle=False, verbose=0).history
    assert stderr.getvalue().count("gradients not finite: 3\n") == 1
    assert np.isfinite(history["loss"]).all()
    assert "gradients not finite: 3" in summary_text(optimizer)
    assert int(optimizer.skipped_steps) == 3
    optimizer.skipped_steps.assign(0)
    if scaler is not optimizer:
        # From 8, halved before steps 0, 2 and 6, doubled after steps 4 and 8.
        assert float(scaler.dynamic_scale) == 4
        assert int(scaler.step_counter) == 0
        scaler.dynamic_scale.assign(8 * 2**3)
    return model


def by_strategy(make: Callable[[], Any]) -> Callable[..., Any]:
    """Train under a strategy of one replica."""

    def way(case: Case, folder: pathlib.Path) -> Any:
        with make().scope():
            model = case.compiled()
        return fit(model)

    return way


# Function, and the largest distance of the weights over the distance that they
# moved; 0 stands for equal bits of the weights and the state.
WAYS: dict[str, tuple[Callable[[Case, pathlib.Path], Any], float]] = {
    ".keras": (by_keras_file, 0),
    ".keras, batch": (functools.partial(by_keras_file, eager=False), 0),
    ".weights.h5": (by_weights_file, 0),
    "checkpoint": (by_checkpoint, 0),
    "train step": (by_custom_step, 1e-4),
    "steps": (by_options(steps_per_execution=2), 1e-4),
    "eager": (by_options(run_eagerly=True), 1e-4),
    "scaled loop": (by_scaled_loop, 1e-4),
    "attach": (by_attached_loop, 1e-4),
    "bad batches": (by_bad_batches, 0),
    "one worker": (by_strategy(tfkfac.MultiWorkerMirroredStrategy), 0),
    "one replica": (
        by_strategy(lambda: tf.distribute.MirroredStrategy(["CPU:0"])),
        0,
    ),
}
# Optimizers of each way; those after the semicolon are slow.
PAIRS = {
    ".keras": "our scale; spectral, rest",
    ".keras, batch": "inverse",
    ".weights.h5": "eigen, FOSI in columns; GaussNewton, subclassed, narrow, "
    "half",
    "checkpoint": "drawn; spectral sums, FOSI accumulated",
    "train step": "inverse",
    "steps": "FOSI",
    "eager": "; GaussNewton",
    "scaled loop": "inverse; FOSI",
    "attach": "inverse",
    "bad batches": (
        "inverse, spectral sums, our scale, FOSI, GaussNewton; "
        "eigen, spectral, rest"
    ),
    "one worker": "inverse",
    "one replica": "FOSI",
}


def pairs() -> Iterator[Any]:
    for way, names in PAIRS.items():
        quick, _, slow = names.partition("; ")
        for name in filter(None, quick.split(", ")):
            yield pytest.param(name, way)
        for name in filter(None, slow.split(", ")):
            yield pytest.param(name, way, marks=pytest.mark.slow)


@functools.cache
def plain(case: Case, eager: bool) -> tuple[Mapping[str, Array], Array, Any]:
    """Return the end of one `fit`, the change of the weights, and the model."""
    with floats(case.policy):
        model = case.compiled(run_eagerly=eager)
        before = model.get_weights()
        fit(model)
    moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    return everything(model), flat(moved), model


@pytest.mark.parametrize(("name", "way"), pairs())
def test_same_run(
    name: str, way: str, tmp_path: pathlib.Path, run_eagerly: Any
) -> None:
    case, (run, gap) = OPTIMIZERS[name], WAYS[way]
    # Eager steps, where a trace takes more time than the steps.
    is_saving = run in (by_keras_file, by_weights_file, by_checkpoint)
    run_eagerly(is_saving)
    want, moved, _ = plain(case, is_saving)
    assert np.abs(moved).max() > 1e-3
    with floats(case.policy):
        got = everything(run(case, tmp_path))
    if gap:
        weights = [key for key in want if key.startswith("weight")]
        error = flat([got[k] - want[k] for k in weights])
        assert np.linalg.norm(error) <= gap * np.linalg.norm(moved)
        return
    assert list(got) == list(want)
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)
