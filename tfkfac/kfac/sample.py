"""The examples of a step that its quadratic model is made of."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfkfac.blocks.part import Examples, Part
from tfkfac.capture.forward import ForwardCall, ForwardTap
from tfkfac.loss.replay import find_call
from tfkfac.loss.terms import LossTerms
from tfkfac.training.step import Step


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the loss of a batch, or of some of its examples, is computed from.

    Attributes:
        call: How the model is called.
        arguments: Those of `compute_loss`, without the predictions.
        shares: This replica's weights of the losses in the mean.
        terms: The terms of the losses, of the whole batch.
        unit: What the loss is of a negative log-likelihood.
    """

    call: ForwardCall
    arguments: dict[str, Any]
    shares: Sequence[tf.Tensor]
    terms: Sequence[LossTerms]
    unit: tf.Tensor

    @classmethod
    def of(cls, step: Step) -> "Sample":
        """Takes the batch of a step, whose loss the replicas have compared.

        Raises:
            ValueError: If the loss was not computed by `compute_loss`.
        """
        model = step.job.model
        call = find_call(model, step.batch, ForwardTap.open(model).take())
        arguments = dict(step.batch.arguments)
        del arguments["y_pred"]
        return cls(
            dataclasses.replace(call, outputs=None),
            arguments,
            step.loss.shares,
            step.batch.terms,
            step.loss.unit,
        )

    def part(self, part: Part | None, model: str) -> "Sample":
        """Takes some of the examples.

        Args:
            part: Which ones; None is all.
            model: Name of the model, for messages.

        Raises:
            ValueError: If the batch cannot be divided.
        """
        if part is None:
            return self
        batch = (self.call.args, self.call.kwargs, self.arguments)
        leaves = [x for x in keras.tree.flatten(batch) if is_batch(x)]
        for leaf in leaves:
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise ValueError(
                    "Argument `quadratic_batch_fraction` must be 1.0 where "
                    "inputs are sparse or ragged, as those of model "
                    f"'{model}': {leaf}. "
                    f"Received: quadratic_batch_fraction={part.fraction}"
                )
        examples = Examples(tf.shape(leaves[0])[0], part)

        def take(leaf: Any) -> Any:
            whole = not is_batch(leaf) or leaf.shape[0] != leaves[0].shape[0]
            return leaf if whole else examples.of(leaf)

        args, kwargs, arguments = keras.tree.map_structure(take, batch)
        call = ForwardCall(args, kwargs, None)
        return dataclasses.replace(self, call=call, arguments=arguments)


def is_batch(leaf: Any) -> bool:
    """Whether a part of a batch has examples."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    return tf.is_tensor(leaf) and leaf.shape.rank != 0
