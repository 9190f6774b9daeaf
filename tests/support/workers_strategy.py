"""What the tests of the strategies run, alone and on every worker."""

import contextlib
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfkfac
from tests.support.strategies import local_ranks, strategy

BATCH = 8


def scope(kind: str | None) -> Any:
    keras.utils.set_random_seed(0)
    return strategy(kind).scope() if kind else contextlib.nullcontext()


def regression(rows: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, np.tanh(x[:, :3] * x[:, 1:])


def as_dataset(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


@functools.cache
def prepared(kind: str | None, name: str) -> tuple[Any, list[Any]]:
    """A model built and compiled, and the values of all its variables."""
    with scope(kind):
        model = MODELS[name]()
        model.optimizer.build(model.trainable_variables)
    return model, [v.numpy() for v in state(model)]


def state(model: Any) -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


def fresh(kind: str | None, name: str) -> Any:
    """The model as it was in the beginning: making a new one takes longer."""
    model, initial = prepared(kind, name)
    for variable, value in zip(state(model), initial, strict=True):
        variable.assign(value)
    return model


def build_regression() -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def train(
    kind: str | None,
    rows: int = 24,
    dataset: bool = False,
    validate: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fits, evaluates and predicts with a small regression model."""
    model = fresh(kind, "regression")
    x, y = regression(rows)
    pairs: Any = (x, y)
    validation: Any = regression(11, seed=1)
    sizes: Any = {"verbose": 0, "batch_size": BATCH}
    if dataset:
        pairs, x = (as_dataset(x, y),), as_dataset(x)
        validation = as_dataset(*validation)
        del sizes["batch_size"]
    if validate:
        options["validation_data"] = validation
    history = model.fit(*pairs, shuffle=False, **sizes, **options)
    metrics = model.evaluate(*pairs, **sizes)
    outputs = model.predict(x, **sizes)
    return {
        "history": history.history,
        "metrics": metrics,
        "outputs": outputs,
        "expected_outputs": model(regression(rows)[0]).numpy(),
        "weights": model.get_weights(),
    }


def train_with_extras(kind: str | None) -> dict[str, Any]:
    """Sample weights and callbacks; three epochs that end after two."""
    return train(
        kind,
        rows=16,
        sample_weight=np.random.default_rng(2).uniform(size=16),
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda e, r: r / (1 + e)),
            keras.callbacks.EarlyStopping("val_loss", min_delta=1e9),
        ],
        validate=True,
        epochs=3,
    )


def build_two_heads() -> Any:
    """Dictionaries in and out, with dtypes that have no mean."""
    layers = keras.layers
    inputs = {
        "image": keras.Input((2, 2), dtype="uint8", name="image"),
        "flag": keras.Input((1,), dtype="bool", name="flag"),
        "word": keras.Input((1,), dtype="string", name="word"),
        "token": keras.Input((1,), dtype="int64", name="token"),
    }
    words = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    features = [
        layers.Flatten()(layers.Rescaling(1 / 255)(inputs["image"])),
        keras.ops.cast(inputs["flag"], "float32"),
        words(inputs["word"]),
        layers.Flatten()(layers.Embedding(5, 3)(inputs["token"])),
    ]
    joined = layers.Concatenate()(features)
    number = layers.Dense(1, name="number")(joined)
    label = layers.Dense(2, "softmax", name="label")(joined)
    model = keras.Model(inputs, {"number": number, "label": label})
    model.compile(
        "adam",
        {"number": "mse", "label": "sparse_categorical_crossentropy"},
        loss_weights={"number": 0.5, "label": 2.0},
        metrics={"number": ["mae"], "label": ["accuracy"]},
    )
    return model


MODELS = {"regression": build_regression, "two heads": build_two_heads}


def train_structures(kind: str | None, rows: int = 16) -> dict[str, Any]:
    """Fits, evaluates and predicts with dictionaries."""
    model = fresh(kind, "two heads")
    features, targets = structures(rows)
    sizes = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(features, targets, shuffle=False, **sizes)
    return {
        "history": history.history,
        "metrics": model.evaluate(features, targets, **sizes),
        "outputs": model.predict(features, **sizes),
        "weights": model.get_weights(),
    }


def structures(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)
    features = {
        "image": rng.integers(256, size=(rows, 2, 2)).astype("uint8"),
        "flag": rng.integers(2, size=(rows, 1)).astype(bool),
        "word": tf.constant(rng.choice(["a", "b"], size=(rows, 1))),
        "token": rng.integers(5, size=(rows, 1)),
    }
    targets = {
        "number": rng.normal(size=(rows, 1)).astype("float32"),
        "label": rng.integers(2, size=(rows, 1)),
    }
    return features, targets


def reductions(kind: str) -> dict[str, Any]:
    """All sorts of reduce, on values of 1, 2, ... by replica."""
    replicas = strategy(kind)

    def by_replica(shape: Any = (), uneven: bool = False) -> Any:
        def make() -> Any:
            context = tf.distribute.get_replica_context()
            number = context.replica_id_in_sync_group + 1
            rows = [number] if uneven else []
            return tf.ones([*rows, *shape]) * tf.cast(number, tf.float32)

        return replicas.run(make)

    @tf.function
    def in_graph() -> Any:
        pair = {"scalar": by_replica(), "vector": by_replica((3,))}
        return replicas.reduce("MEAN", pair, axis=0)

    mean, total = tf.distribute.ReduceOp.MEAN, tf.distribute.ReduceOp.SUM
    pair = (by_replica((2,)), [by_replica()])
    found = {
        "structure, sum": replicas.reduce("SUM", pair),
        "structure, mean": replicas.reduce(mean, pair),
        "scalar, axis": replicas.reduce("mean", by_replica(), axis=0),
        "keywords": replicas.reduce(reduce_op=total, value=by_replica()),
        "uneven, axis": replicas.reduce(mean, by_replica(uneven=True), axis=0),
        "uneven, shape": replicas.reduce(
            "MEAN", by_replica((2,), uneven=True)
        ).shape[1:],
        "in graph": in_graph(),
    }
    return tf.nest.map_structure(np.asarray, found)


# ------------------------------------------------------------------- faults
class Full(keras.callbacks.Callback):
    """A disk that is full after some batches."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 3:
            raise OSError(28, "No space left on device")


def fail(worker: int) -> list[str]:
    """How `fit` ends, of any optimizer, where one worker fails in it."""
    with strategy("multi").scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert isinstance(strategy("multi"), tfkfac.MultiWorkerMirroredStrategy)
    callbacks = [Full()] if local_ranks("multi") == [worker] else []
    x = np.ones((40, 3), "float32")
    try:
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=callbacks)
    except (OSError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    return []
