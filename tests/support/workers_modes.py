"""What the tests of the distribution modes run, alone and on every worker.

`train` runs one small job and returns all there is to know about it. The same
function gives what a single process gets, which sees each step's rows of all
workers as one batch.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tests.support.printed  # noqa: F401
import tfkfac
from tests.support.dtypes import floats
from tests.support.graphs import collectives, count_ops
from tests.support.options import nested
from tests.support.reference import Array
from tests.support.strategies import copies, local_ranks, strategy
from tests.support.worker_parts import (
    CLASSES,
    DEFAULTS,
    FEEDS,
    INNERS,
    MODELS,
    OBJECTS,
    TEXTS,
    Feed,
    cnn,
    exact_polar_factors,
    images,
    sentences,
    shares,
)
from tfkfac.distributed import collectives as communication
from tfkfac.kfac import method, placement
from tfkfac.kfac.spectral import LargestRate


class Noted(tfkfac.KFAC):
    """Remembers the graph of each trace of its step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs: list[Any] = []

    def apply(self, *args: Any, **kwargs: Any) -> None:
        self.graphs.append(tf.compat.v1.get_default_graph())
        super().apply(*args, **kwargs)


class Setter(keras.callbacks.Callback):
    """Changes hyperparameters between steps."""

    def __init__(self, changes: dict[int, dict[str, float]]) -> None:
        super().__init__()
        self.changes = changes

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        for name, value in self.changes.get(batch, {}).items():
            setattr(self.model.optimizer, name, value)


# ---------------------------------------------------------------- training
@contextlib.contextmanager
def labels_given() -> Iterator[None]:
    """Takes the least likely class of each row for the one that is drawn."""

    def sample(_: Any, logits: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        least = tf.one_hot(tf.argmin(logits, -1), CLASSES, dtype=logits.dtype)
        return tf.nn.softmax(logits) - least

    with mock.patch.object(tfkfac.fisher.Categorical, "sample", sample):
        yield


def train(
    kind: str | None,
    model: str,
    inner: str = "sgd",
    feed: str | Feed = "uneven",
    dtype: str = "float64",
    poison: tuple[int, int] | None = None,
    changes: dict[int, dict[str, float]] | None = None,
    eager: bool = False,
    given_labels: bool = False,
    turns: bool = False,
    stages: bool = False,
    factor_rank: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a new model for the steps of a feed.

    Args:
        kind: "multi", "mirrored", or None for a single process.
        model: One of `MODELS`; and so `inner`, of `INNERS`.
        feed: One of `FEEDS`, or the rows of each quarter of the workers.
        dtype: Keras' default dtype.
        poison: Step, and the worker whose rows are NaN in it.
        changes: Values for the optimizer's attributes before a step.
        eager: Whether to run without a graph.
        given_labels: Whether the labels of the Fisher matrix are not drawn.
        turns: Whether small decompositions have turns too.
        stages: Whether a tensor of any size has a message of its own.
        factor_rank: Rank of wide factors, in place of the constant.
        **options: Arguments of `KFAC`; a value may be one of `OBJECTS`.
    """
    workers = strategy(kind).num_replicas_in_sync
    with contextlib.ExitStack() as during:
        during.enter_context(floats(dtype))
        if factor_rank is not None:
            during.enter_context(
                mock.patch.object(method, "FACTOR_RANK", factor_rank)
            )
        if options.get("step") == "spectral":
            during.enter_context(exact_polar_factors())
        if given_labels:
            during.enter_context(labels_given())
        if turns:
            small = {"_MIN_OPERATIONS": 1, "_SLACK": 1}
            during.enter_context(mock.patch.multiple(placement, **small))
        if stages:
            bucket = mock.patch.object(communication, "BUCKET_BYTES", 1)
            during.enter_context(bucket)
        network = compiled(kind, model, inner, options)
        network.run_eagerly = eager
        x, y = (sentences if model in TEXTS else images)()
        if model not in TEXTS:
            x = x.astype(dtype)
        rows = FEEDS[feed]() if isinstance(feed, str) else feed
        steps = shares(rows, workers)
        start = network.get_weights()
        network.fit(
            dataset(kind, x, y, steps, poison),
            steps_per_epoch=len(steps),
            shuffle=False,
            verbose=0,
            callbacks=[Setter(changes or {})],
        )
    return {"start": start} | describe(kind, network)


def compiled(
    kind: str | None, model: str, inner: str, options: dict[str, Any]
) -> Any:
    with strategy(kind).scope():
        arguments = {
            name: OBJECTS[value]() if value in OBJECTS else value
            for name, value in (DEFAULTS | options).items()
        }
        keras.utils.set_random_seed(0)
        network = MODELS[model]()
        network.compile(
            Noted(INNERS[inner](), **nested(arguments)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return network


def dataset(
    kind: str | None,
    x: Array,
    y: Array,
    steps: list[list[list[int]]],
    poison: tuple[int, int] | None,
) -> Any:
    """Exactly these rows for each worker of this process in each step."""

    def batches() -> Iterator[tuple[Array, Array]]:
        for number, step in enumerate(steps):
            for rank in local_ranks(kind):
                bad = np.nan if poison == (number, rank) else 0
                rows = np.array(step[rank], int)
                yield x[rows] + np.asarray(bad, x.dtype), y[rows]

    def make(context: Any = None) -> tf.data.Dataset:
        signature = [
            tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)
        ]
        return tf.data.Dataset.from_generator(
            batches, output_signature=tuple(signature)
        )

    if kind is None:
        return make()
    return strategy(kind).distribute_datasets_from_function(make)


def loop(kind: str) -> dict[str, Any]:
    """A custom loop, on even batches: nothing but `attach` is needed."""
    replicas = strategy(kind)
    workers = replicas.num_replicas_in_sync
    steps = shares(FEEDS["even"](), workers)
    with floats("float64"):
        with replicas.scope():
            keras.utils.set_random_seed(0)
            network = cnn()
            optimizer = tfkfac.KFAC(INNERS["sgd"](), **DEFAULTS).attach(network)
        variables = network.trainable_variables
        start = network.get_weights()

        def step(batch: Any) -> None:
            x, y = batch
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, network(x, training=True), from_logits=True
                )
                loss = tf.reduce_mean(losses) / workers
            gradients = tape.gradient(loss, [v.value for v in variables])
            optimizer.apply(gradients, variables)

        @tf.function
        def train_step(iterator: Any) -> None:
            replicas.run(step, args=(next(iterator),))

        iterator = iter(dataset(kind, *images(), steps, None))
        for _ in steps:
            train_step(iterator)
    return {
        "start": start,
        "weights": network.get_weights(),
        "copies": copies(kind, variables),
    }


def fit(kind: str) -> dict[str, Any]:
    """Plain `fit` on global batches of 8 rows, the last of a single one."""
    x, y = (a[:17] for a in images())
    with floats("float64"):
        # A clip would undo a wrong weight of the last row.
        network = compiled(kind, "cnn", "sgd", {"kl_clip": None})
        start = network.get_weights()
        network.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "start": start,
        "weights": network.get_weights(),
        "copies": copies(kind, network.variables),
    }


def disagreements(kind: str) -> list[str]:
    """Errors when the last worker has other arguments than the rest."""
    last = max(local_ranks(kind))
    others: list[dict[str, Any]] = [
        {"damping": 1.0 + last, "distribution": "dp_kfac"},
        {"distribution": "comm_opt" if last else "mem_opt"},
    ]
    said = []
    for options in others:
        try:
            train(kind, "small", **options)
        except ValueError as error:
            said.append(str(error))
    return said


# --------------------------------------------------------------- reporting
def describe(kind: str | None, model: Any) -> dict[str, Any]:
    """All that the tests want to know of a trained model."""
    optimizer = model.optimizer
    text: list[str] = []
    optimizer.summary(print_fn=text.append)
    graph = optimizer.graphs[-1].as_graph_def(add_shapes=True)
    placed = optimizer.method.placement.distribution
    return {
        "weights": model.get_weights(),
        "copies": copies(kind, [*model.variables, *optimizer.variables]),
        "iterations": int(optimizer.iterations.numpy()),
        "skipped": [int(v) for v in optimizer.method.job.skipped],
        "updates": [
            (int(s.factor_updates), int(s.inverse_updates))
            for s in optimizer.method.states
        ],
        "factors": optimizer.factors(),
        "shapes": [
            (b.path, dict(b.factor_shapes))
            for b in optimizer.method.placement.blocks
        ],
        "state_bytes": optimizer.state_bytes(),
        "kept": [kept_bytes(state) for state in optimizer.method.states],
        "communication_bytes": optimizer.communication_bytes(),
        "collectives": collectives(graph),
        "decompositions": count_ops(graph, ("Cholesky", "SelfAdjointEigV2")),
        "summary": "\n".join(text),
        "placed": (placed.mode, placed.gradient_worker_fraction),
        "distribution": optimizer.distribution,
        "last_step": optimizer.last_step,
        "traces": len(optimizer.graphs),
    }


def kept_bytes(state: Any) -> dict[str, int]:
    """Bytes of the variables that a worker has, but for single numbers."""

    def size(variables: Sequence[tf.Variable]) -> int:
        return sum(v.shape.num_elements() * v.dtype.size for v in variables)

    kept = state.preconditioners
    pending = {}
    if state.pending is not None:
        variables = [v for v in state.pending.variables if v.shape.rank]
        pending["accumulation"] = size(variables)
    momenta = {}
    if any(isinstance(s, LargestRate) for s in state.sections):
        found = [p.momentum.variables for p in kept if p.momentum]
        momenta["momenta"] = sum(map(size, found))
    return {
        **pending,
        **momenta,
        "factors": sum(size(p.factors.averages) for p in kept if p.factors),
        "decompositions": sum(
            size(p.decomposition.tensors) for p in kept if p.decomposition
        ),
        "total": size([v for v in state.variables if v.shape.rank])
        - size(state.counters.variables),  # a number of each block
    }
