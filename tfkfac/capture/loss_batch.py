"""The loss batch: its size, and which of its examples carry loss.

Keras' loss is a mean over the examples of a replica, divided by the number of
replicas and multiplied by the loss scale. What the taps see must be multiplied
by all three to be the gradient of one example's own loss, so that the factors
have the scale of the Fisher matrix whatever the batch size.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_tap import ModelTap
from tfkfac.capture.trace import capturing, current_store, visible_stores


@dataclasses.dataclass(frozen=True)
class LossBatch:
    """The batch over which the loss was averaged.

    Attributes:
        examples: Scalar integer, or None if it was not seen.
        weightless: For each output with sample weights, bool
            `(examples, positions)`, True where the weight is zero.
        arguments: What `compute_loss` was called with.
    """

    examples: tf.Tensor | None = None
    weightless: tuple[tf.Tensor, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class LossTap(ModelTap):
    """Notes the batch that a model's `compute_loss` is called with.

    In a custom loop without `compute_loss` nothing is noted: the leading
    dimension of each layer's input is the batch, and no weight is zero.
    """

    method = "compute_loss"

    def __init__(self, model: keras.Model) -> None:
        self._signature = inspect.signature(model.compute_loss)
        super().__init__(model)

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if capturing():
            arguments = self._signature.bind(*args, **kwargs).arguments
            batch = loss_batch(arguments)
            current_store(self._eager)[self._key()] = batch
        return below(*args, **kwargs)

    def take(self) -> LossBatch:
        """Returns this replica's batch of the current trace."""
        key = self._key()
        batches = [
            store.pop(key)
            for store in visible_stores(self._eager)
            if key in store
        ]
        return batches[0] if batches else LossBatch()


def loss_batch(arguments: dict[str, Any]) -> LossBatch:
    """Reads the batch off the arguments of `compute_loss`."""
    sources = [arguments.get(name) for name in ("x", "y_pred", "y")]
    tensors = [
        t
        for t in keras.tree.flatten(sources)
        if tf.is_tensor(t) and t.shape.rank
    ]
    examples = tf.shape(tensors[0])[0] if tensors else None
    weights = [
        tf.convert_to_tensor(w)
        for w in keras.tree.flatten(arguments.get("sample_weight"))
        if w is not None
    ]
    weightless = tuple(
        tf.reshape(w == 0, [tf.shape(w)[0], tf.reduce_prod(tf.shape(w)[1:])])
        for w in weights
        if w.shape.rank
    )
    return LossBatch(examples, weightless, arguments)


def example_scale(loss_scale: tf.Tensor | None) -> tf.Tensor | float:
    """Factor from a tape's gradient times the batch to an example's own."""
    replicas = float(tf.distribute.get_strategy().num_replicas_in_sync)
    return replicas if loss_scale is None else replicas / loss_scale
