"""The loss batch of a step: its examples, terms, and those without loss."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ModelTap
from tfkfac.capture.trace import (
    capturing,
    current_store,
    replica_id,
    visible_stores,
)
from tfkfac.compat.losses import LossCall, observed_losses
from tfkfac.loss.shares import LossMeasure
from tfkfac.loss.terms import LossTerms, mean_over, read_terms
from tfkfac.loss.units import is_open


@dataclasses.dataclass(frozen=True)
class LossBatch:
    """The batch of a loss.

    Attributes:
        terms: The terms of each of its losses; none if they were not seen.
        weightless: For each output with sample weights, bool
            `(examples, positions)`, True where the weight is zero.
        arguments: Arguments of `compute_loss`.
        ordinal: Number of batches that were seen before in the same step.
        measure: Measure of the loss by all replicas, if it has been weighed.
    """

    terms: tuple[LossTerms, ...] = ()
    weightless: tuple[tf.Tensor, ...] = ()
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ordinal: int = 0
    measure: LossMeasure | None = None


class LossTap(ModelTap[LossBatch]):
    """Notes the batch that a model's `compute_loss` is called with.

    In a custom loop without `compute_loss` nothing is noted: the leading
    dimension of each layer's input is the batch, and no weight is zero.
    """

    method = "compute_loss"

    def __init__(self, model: keras.Model) -> None:
        self._signature = inspect.signature(model.compute_loss)
        self._written = object()  # the place of what is noted of variables
        super().__init__(model)

    @override
    def _call(
        self, below: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return below(*args, **kwargs)
        with observed_losses(is_open) as calls:
            loss = below(*args, **kwargs)
        model, before = self._model(), self.take()
        arguments = self._signature.bind(*args, **kwargs).arguments
        terms = read_terms(model, calls) if model is not None else ()
        self._note_written(calls)
        ordinal = before[-1].ordinal + 1 if before else 0
        self.note(loss_batch(arguments, terms, ordinal))
        return loss

    def written(self) -> list[tf.Tensor]:
        """Handles of the variables that the losses of this trace write."""
        stores = visible_stores(self._eager)
        if self._eager not in stores:
            stores.append(self._eager)
        key = id(self._written), replica_id()
        return [handle for store in stores for handle in store.get(key, ())]

    def _note_written(self, calls: Sequence[LossCall]) -> None:
        """Notes the variables that losses have written, each once."""
        store, key = current_store(self._eager), id(self._written)
        known = store.setdefault((key, replica_id()), [])
        new = [handle for call in calls for handle in call.written]
        known += [h for h in new if all(h is not other for other in known)]


def loss_batch(
    arguments: dict[str, Any],
    terms: tuple[LossTerms, ...] = (),
    ordinal: int = 0,
) -> LossBatch:
    """Reads the batch off a call of `compute_loss`.

    Args:
        arguments: Its arguments.
        terms: The terms of the losses that it has called. Without any it is
            taken for a mean over the examples.
        ordinal: Number of batches that were seen before in the same step.
    """
    sources = [arguments.get(name) for name in ("x", "y_pred", "y")]
    tensors = [
        t
        for t in keras.tree.flatten(sources)
        if tf.is_tensor(t) and t.shape.rank
    ]
    if tensors and not terms:
        terms = (mean_over(tf.shape(tensors[0])[0]),)
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
    return LossBatch(terms, weightless, arguments, ordinal)
