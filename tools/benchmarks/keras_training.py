"""Training in Keras, a step at a time."""

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.data import make_batch
from benchmarks.keras_models import build
from benchmarks.task import Task

# Small: the loss stays finite however many steps are timed.
RATE = 1e-4
# The batches of an epoch of `fit`; the last has a third of the rows.
EPOCH = 25
# When FOSI estimates its directions, once.
FOSI_ESTIMATION = 2

# By name, the constructors; the first argument is the learning rate.
FIRST_ORDER_TYPES: dict[str, Callable[..., Any]] = {
    "sgd": lambda rate, **k: keras.optimizers.SGD(
        rate, **{"momentum": 0.9, **k}
    ),
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "muon": keras.optimizers.Muon,
}


class KerasTraining:
    """A model, its optimizer and a batch.

    On several workers (`TF_CONFIG`) the batch is that of all of them together.
    """

    def __init__(self, task: Task) -> None:
        keras.utils.set_random_seed(0)
        self._mode = task.mode
        self._strategy = _strategy()
        with self._strategy.scope():
            self._model = build(task.model)
            self._optimizer = make_optimizer(task.optimizer, task.arguments)
        self._loss = make_loss(task.model)
        self._batch = make_batch(task.model, task.batch)

    def run(self, end_of_step: Callable[[], bool]) -> None:
        """Compiles; trains until `end_of_step`, after each step, says no."""
        with self._strategy.scope():
            self._model.compile(self._optimizer, self._loss)
            # Variables made in the first trace would cost Keras' optimizers,
            # though not ours, a second one.
            self._optimizer.build(self._model.trainable_variables)
        if self._mode == "fit":
            self._fit(end_of_step)
            return
        step = self._one_batch if self._mode == "batch" else self._own_step()
        x, y = (tf.constant(part) for part in self._batch)
        step(x, y)
        while end_of_step():
            step(x, y)

    def _one_batch(self, x: tf.Tensor, y: tf.Tensor) -> None:
        self._model.train_on_batch(x, y)

    def _own_step(self) -> Callable[[tf.Tensor, tf.Tensor], None]:
        model, optimizer = self._model, self._optimizer

        def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(
                    x=x, y=y, y_pred=model(x, training=True)
                )
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        signature = None
        if self._mode == "dynamic":  # the number of rows is known in the step
            signature = [
                tf.TensorSpec([None, *part.shape[1:]], part.dtype)
                for part in self._batch
            ]
        traced = tf.function(train, input_signature=signature, autograph=False)
        return lambda x, y: traced(x, y).numpy()

    def _fit(self, end_of_step: Callable[[], bool]) -> None:
        x, y = self._batch
        rest = max(len(x) // 3, self._strategy.num_replicas_in_sync)
        last = tf.data.Dataset.from_tensors((x[:rest], y[:rest]))

        def note(batch: int, logs: Any) -> None:
            self._model.stop_training = not end_of_step()

        full = tf.data.Dataset.from_tensors((x, y)).repeat(EPOCH - 1)
        self._model.fit(
            full.concatenate(last).repeat(),
            steps_per_epoch=10**9,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)],
        )

    def set_intervals(self, factor: int, inverse: int) -> None:
        """Sets those of K-FAC; other optimizers have none."""
        if hasattr(self._optimizer, "factor_update_interval"):
            self._optimizer.factor_update_interval = factor
            self._optimizer.inverse_update_interval = inverse

    def facts(self) -> dict[str, Any]:
        """What the optimizer says of its own cost."""
        facts = {}
        if hasattr(self._optimizer, "state_bytes"):
            facts["state_bytes"] = self._optimizer.state_bytes()["total"]
            if self._strategy.num_replicas_in_sync > 1:
                facts["communication_bytes"] = (
                    self._optimizer.communication_bytes()
                )
        return facts


def make_optimizer(name: str, arguments: dict[str, Any]) -> Any:
    """Makes one of the Keras optimizers of `variants.FAMILIES`."""
    if name in FIRST_ORDER_TYPES:
        return FIRST_ORDER_TYPES[name](RATE, **arguments)
    import tfkfac

    family, _, kind = name.partition("-")
    if family == "kfac":
        plain = "step" not in arguments
        return tfkfac.KFAC(
            FIRST_ORDER_TYPES["sgd"](RATE) if plain else None,
            solver=kind,
            factor_update_interval=10,
            inverse_update_interval=100,
            **arguments,
        )
    once = {"warmup_steps": FOSI_ESTIMATION, "update_interval": 10**6}
    return tfkfac.FOSI(FIRST_ORDER_TYPES[kind](RATE), **{**once, **arguments})


def make_loss(model: str) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """The loss of a model, from its logits."""
    if model == "M4":
        return pixels_cross_entropy
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pixels_cross_entropy(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """The binary cross-entropy of each image, summed over its pixels."""
    losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
    return tf.reduce_sum(losses, -1)


def _strategy() -> tf.distribute.Strategy:
    """That of the cluster this process belongs to, if any."""
    if "TF_CONFIG" not in os.environ:
        return tf.distribute.get_strategy()
    import tfkfac

    return tfkfac.MultiWorkerMirroredStrategy()
