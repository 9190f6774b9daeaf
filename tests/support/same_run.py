"""Runs that must end alike: an optimizer, and a way to make its steps.

`same_run` compares a way with `plain`, one call of `fit`. A row more in
`OPTIMIZERS` or in `WAYS` is all that a new one needs.
"""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac
from same_bits import spread
from tests.support.reference import Array
from tests.support.saved_models import MODELS
from tests.support.small import FEATURES, curvature, data, gradients_of, loss

# Step 5 of 9 is between the updates of all intervals.
STOP, END, ROWS = 5, 9, 12
EVERY: dict[str, Any] = {
    "factor_update_interval": 2,
    "inverse_update_interval": 3,
}
BESIDE: dict[str, Any] = {
    "warmup_steps": 2,
    "update_interval": 4,
    "num_largest": 2,
    "num_smallest": 1,
}
KFAC: Any = tfkfac.KFAC
FOSI: Any = tfkfac.FOSI
PolynomialDecay = keras.optimizers.schedules.PolynomialDecay
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained: a model, an optimizer, and Keras' dtype policy."""

    optimizer: Callable[..., Any]
    model: str = "sequential"
    policy: str = "float32"
    near: bool = True
    """False if rounding may change the run, as with labels that are drawn."""

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        before = keras.config.floatx(), keras.config.dtype_policy()
        if self.policy == "float64":
            keras.config.set_floatx("float64")
        keras.config.set_dtype_policy(self.policy)
        try:
            yield
        finally:
            keras.config.set_floatx(before[0])
            keras.config.set_dtype_policy(before[1])

    def network(self, seed: int = 0) -> Any:
        keras.utils.set_random_seed(seed)
        model = MODELS[self.model]()
        model(np.zeros((1, FEATURES)))
        return model

    def compiled(self, seed: int = 0, **options: Any) -> Any:
        model = self.network(seed)
        model.compile(self.optimizer(), loss(), **options)
        return model


OPTIMIZERS: dict[str, Case] = {
    "inverse": Case(lambda: KFAC(SGD(0.05, 0.5), **EVERY)),
    "eigen": Case(
        lambda: KFAC(Adam(0.01), solver="eigen", **EVERY), "functional"
    ),
    "float64": Case(lambda: KFAC(**EVERY), "nested", "float64"),
    "half": Case(lambda: KFAC(**EVERY), policy="mixed_float16", near=False),
    "subclassed": Case(
        lambda: KFAC(Adam(0.01, weight_decay=1e-3), **EVERY), "subclassed"
    ),
    "wire": Case(
        lambda: spread(
            "mem_opt",
            factor_dtype="bfloat16",
            inverse_dtype="bfloat16",
            **EVERY,
        ),
        "functional",
        near=False,
    ),
    "narrow": Case(lambda: KFAC(max_factor_dim=4, **EVERY)),
    "drawn": Case(lambda: KFAC(fisher="monte_carlo", **EVERY), near=False),
    "accumulated": Case(
        lambda: KFAC(gradient_accumulation_steps=2, **EVERY), "functional"
    ),
    "rest": Case(
        lambda: KFAC(
            PolynomialDecay(0.1, 12, 0.01), skip_layers=["logits"], **EVERY
        )
    ),
    "our scale": Case(lambda: tfkfac.LossScaleOptimizer(KFAC(**EVERY), 8.0, 3)),
    "Keras' scale": Case(
        lambda: keras.optimizers.LossScaleOptimizer(
            KFAC(**EVERY), initial_scale=8.0, dynamic_growth_steps=3
        )
    ),
    "FOSI": Case(lambda: FOSI(Adam(0.01), **BESIDE)),
    "FOSI in columns": Case(
        lambda: FOSI(SGD(0.1, 0.9), layout="columns", **BESIDE)
    ),
    "FOSI accumulated": Case(
        lambda: FOSI(Adam(0.03, gradient_accumulation_steps=2), **BESIDE)
    ),
    "GaussNewton": Case(lambda: tfkfac.GaussNewton(), policy="float64"),
    "spectral": Case(
        lambda: KFAC(
            step="spectral",
            rest_optimizer=Adam(PolynomialDecay(0.01, 12)),
            skip_layers=["logits"],
            **EVERY,
        ),
        "functional",
        "float64",  # where no small direction comes of rounding
    ),
    "spectral sums": Case(
        lambda: KFAC(
            PolynomialDecay(0.1, 12, 0.01),
            step="spectral",
            gradient_accumulation_steps=2,
            max_factor_dim=4,
            **EVERY,
        ),
    ),
}


def batches(begin: int = 0, end: int = END) -> Any:
    """Batches of a run, from a step to another."""
    x, y = (
        np.stack(column)
        for column in zip(*(data(ROWS, s) for s in range(END)), strict=True)
    )
    return tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end]))


def fit(model: Any, begin: int = 0, end: int = END, **options: Any) -> Any:
    model.fit(batches(begin, end), shuffle=False, verbose=0, **options)
    return model


def everything(model: Any) -> dict[str, Array]:
    """Weights, curvature and inner variables, in order."""
    found = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    own = model.optimizer
    if isinstance(own, keras.optimizers.LossScaleOptimizer):
        own = own.inner_optimizer
    # Automatic names have another number in every model.
    kept = curvature(own)
    found |= {
        f"{i} {key.rpartition(':')[0]}": v
        for i, (key, v) in enumerate(kept.items())
    }
    values = model.optimizer.variables
    return found | {f"variable {i}": np.array(v) for i, v in enumerate(values)}


# ---------------------------------------------------------- the ways of saving
def by_keras_file(case: Case, folder: pathlib.Path) -> Any:
    model = fit(case.compiled(), 0, STOP)
    model.save(folder / "model.keras")
    copy = keras.models.load_model(folder / "model.keras")
    assert type(copy.optimizer) is type(model.optimizer)
    assert copy.optimizer.get_config() == model.optimizer.get_config()
    return fit(copy, STOP)


def by_legacy_file(case: Case, folder: pathlib.Path) -> Any:
    fit(case.compiled(), 0, STOP).save(folder / "model.h5")
    return fit(keras.models.load_model(folder / "model.h5"), STOP)


def by_weights_file(case: Case, folder: pathlib.Path) -> Any:
    """Into a model that was trained otherwise."""
    fit(case.compiled(), 0, STOP).save_weights(folder / "model.weights.h5")
    model = fit(case.compiled(seed=1), 0, 1)
    model.load_weights(folder / "model.weights.h5")
    return fit(model, STOP)


def by_state_tree(case: Case, folder: pathlib.Path) -> Any:
    """As `keras.callbacks.OrbaxCheckpoint` saves, with numbers for scalars."""
    model = fit(case.compiled(), 0, STOP)
    tree = keras.tree.map_structure(
        lambda x: x.item() if x.ndim == 0 else x.copy(),
        model.get_state_tree("numpy_array"),
    )
    # By the names of the inner optimizer Keras finds its variables.
    copy = fit(keras.models.clone_model(model), 0, 1)
    copy.set_state_tree(tree)
    return fit(copy, STOP)


def by_checkpoint(case: Case, folder: pathlib.Path) -> Any:
    model = fit(case.compiled(), 0, STOP)
    copy = fit(case.compiled(seed=1), 0, 1)
    saved, fresh = (
        tf.train.Checkpoint(model=one, optimizer=one.optimizer)
        for one in (model, copy)
    )
    status = fresh.restore(saved.save(str(folder / "checkpoint")))
    status.assert_existing_objects_matched()
    status.assert_consumed()
    return fit(copy, STOP)


# -------------------------------------------------------- the ways of training
def own_step(model: Any, x: Any, y: Any) -> Any:
    """A training step as in Keras' guides."""
    with tf.GradientTape() as tape:
        value = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        value = model.optimizer.scale_loss(value)
    weights = model.trainable_variables
    gradients = tape.gradient(value, weights)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return value


class OwnTrainStep(keras.Sequential):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": own_step(self, *batch)}


def by_own_train_step(case: Case, folder: pathlib.Path) -> Any:
    model = OwnTrainStep(case.network().layers)
    model.compile(case.optimizer(), loss())
    return fit(model)


def by_loop(case: Case, folder: pathlib.Path) -> Any:
    """A loop of the user's own, in a function."""
    model = case.compiled()
    step = tf.function(functools.partial(own_step, model))
    for x, y in batches():
        step(x, y)
    return model


def by_one_batch_at_a_time(case: Case, folder: pathlib.Path) -> Any:
    model = case.compiled()
    for x, y in batches():
        model.train_on_batch(x, y)
    return model


def by_options(**options: Any) -> Callable[..., Any]:
    """With other options of `compile`."""

    def way(case: Case, folder: pathlib.Path) -> Any:
        return fit(case.compiled(**options))

    return way


def by_attached_loop(case: Case, folder: pathlib.Path) -> Any:
    """A loop of the user's own that Keras' `compile` knows nothing of."""
    model = case.network()
    optimizer = case.optimizer().attach(model)
    for x, y in batches():
        gradients = gradients_of(model, x, y)
        optimizer.apply(gradients, model.trainable_variables)
    model.optimizer = optimizer
    return model


def by_scaled_loss(case: Case, folder: pathlib.Path) -> Any:
    """With a scale that grows every third step."""
    model = case.network()
    scaled = keras.optimizers.LossScaleOptimizer(
        case.optimizer(), initial_scale=8.0, dynamic_growth_steps=3
    )
    model.compile(scaled, loss())
    return fit(model)


def by_strategy(make: Callable[[], Any]) -> Callable[..., Any]:
    """Under a strategy of one replica."""

    def way(case: Case, folder: pathlib.Path) -> Any:
        with make().scope():
            model = case.compiled()
        return fit(model)

    return way


@dataclasses.dataclass(frozen=True)
class Way:
    """How a run is made, and how near it is to the plain one.

    `gap` is a part of the way that the weights have gone; 0 wants all bits,
    of the weights, the curvature and the inner optimizer.
    """

    run: Callable[[Case, pathlib.Path], Any]
    gap: float = 0.0
    models: tuple[str, ...] = tuple(MODELS)
    without: tuple[str, ...] = ()
    """Optimizers that it is not for."""


NAMED = ("sequential", "functional", "nested")
NEEDS_COMPUTE_LOSS = tuple(n for n in OPTIMIZERS if n[:2] in ("FO", "Ga"))
# Whose steps are others where nobody sees the loss.
NEEDS_LOSS = tuple(n for n in OPTIMIZERS if n.startswith("spectral"))
SCALES = ("half", "our scale", "Keras' scale")
WAYS: dict[str, Way] = {
    ".keras": Way(by_keras_file, models=NAMED),
    # Keras does not save the scale of a loss there.
    ".h5": Way(by_legacy_file, models=NAMED, without=SCALES),
    ".weights.h5": Way(by_weights_file),
    # Numbers there are of 32 bits.
    "state tree": Way(
        by_state_tree,
        models=("sequential", "functional"),
        without=("GaussNewton", "spectral"),
    ),
    "checkpoint": Way(by_checkpoint),
    "train step": Way(by_own_train_step, 1e-4, ("sequential",)),
    "batch": Way(by_one_batch_at_a_time),
    "steps": Way(by_options(steps_per_execution=3), 1e-4),
    "eager": Way(by_options(run_eagerly=True), 1e-4),
    "loop": Way(by_loop, 1e-4),
    "one worker": Way(by_strategy(tfkfac.MultiWorkerMirroredStrategy)),
    "one replica": Way(
        by_strategy(lambda: tf.distribute.MirroredStrategy(["CPU:0"]))
    ),
    "attach": Way(
        by_attached_loop,
        1e-4,
        without=(*SCALES, *NEEDS_COMPUTE_LOSS, *NEEDS_LOSS),
    ),
    "loss scale": Way(
        by_scaled_loss, 1e-4, without=(*SCALES, "FOSI accumulated")
    ),
}


@functools.cache
def plain(name: str) -> tuple[Mapping[str, Array], Array]:
    """What one call of `fit` ends with, and how far the weights went."""
    case = OPTIMIZERS[name]
    with case.precision():
        model = case.compiled()
        before = model.get_weights()
        fit(model)
    moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
    return everything(model), flat(moved)


def flat(values: Any) -> Array:
    return np.concatenate([np.ravel(v).astype(float) for v in values])


def same_run(name: str, way: str, folder: pathlib.Path) -> None:
    """Fails unless a way of training ends as the plain one does."""
    case, how = OPTIMIZERS[name], WAYS[way]
    want, moved = plain(name)
    assert np.abs(moved).max() > 1e-3
    with case.precision():
        got = everything(how.run(case, folder))
    if how.gap:
        weights = [key for key in want if key.startswith("weight")]
        gap = flat([got[k] - want[k] for k in weights])
        assert np.linalg.norm(gap) <= how.gap * np.linalg.norm(moved)
        return
    assert list(got) == list(want)
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)


# Pairs of every row, for the quick run; those after the semicolon are slow, and
# so is one of three others.
QUICK = {
    ".keras": "narrow, our scale, FOSI accumulated, spectral; eigen",
    ".h5": "float64, FOSI in columns, wire",
    ".weights.h5": "subclassed, GaussNewton; Keras' scale, spectral",
    "state tree": "eigen; FOSI, spectral sums",
    "checkpoint": "accumulated, spectral sums; GaussNewton",
    "train step": "inverse, FOSI",
    "batch": "half, drawn",
    "steps": "FOSI; float64",
    "eager": "GaussNewton; FOSI, spectral",
    "loop": "Keras' scale; FOSI",
    "attach": "inverse",
    "loss scale": "inverse; FOSI",
    "one worker": "inverse",
    "one replica": "FOSI",
}


def pairs() -> Iterator[tuple[str, str, bool]]:
    """Optimizers and ways that can be compared; True for a slow one."""
    for i, (name, case) in enumerate(OPTIMIZERS.items()):
        for j, (way, how) in enumerate(WAYS.items()):
            fits = case.model in how.models and (case.near or not how.gap)
            quick, _, slow = QUICK[way].partition("; ")
            is_quick = name in quick.split(", ")
            if fits and name not in how.without:
                if is_quick or name in slow.split(", ") or (i + j) % 3 == 0:
                    yield name, way, not is_quick
            else:
                assert not is_quick, (name, way)
