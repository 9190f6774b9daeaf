"""The choice of the type of the Fisher matrix for a step."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.capture.model_taps import Pullback
from tfkfac.fisher.likelihood import Likelihood, find_likelihood
from tfkfac.fisher.types import EMPIRICAL, MONTE_CARLO
from tfkfac.loss.terms import LossTerms


class Choice(NamedTuple):
    """A type of the Fisher matrix, and what it needs.

    Attributes:
        type: Its name.
        likelihood: The outputs of the step; None if it needs none.
        reason: Why it was chosen; empty if the user did.
        applies: Whether it is that of the step, a scalar bool, and not the
            empirical one: if the losses are of the likelihood. None is always.
    """

    type: str
    likelihood: Likelihood | None = None
    reason: str = ""
    applies: tf.Tensor | None = None

    def without_tensors(self) -> "Choice":
        """The same to remember, when the trace has gone."""
        return Choice(self.type, reason=self.reason)


def choose(
    wanted: str | None,
    losses: Sequence[LossTerms],
    calls: Sequence[Pullback],
) -> Choice:
    """Chooses the type for a step.

    Args:
        wanted: What the user wants, and not "empirical". None is "monte_carlo"
            where the loss has a distribution and not of classes alone, else
            "empirical".
        losses: The terms of the losses of the step.
        calls: The calls of the model.

    Raises:
        ValueError: If it needs a distribution and there is none.
    """
    found = find_likelihood(losses, calls)
    if wanted is not None:
        if isinstance(found, str):
            raise ValueError(
                f'Argument `fisher="{wanted}"` needs the predictive '
                f"distribution of the model, but {found}. Compute the loss "
                "with `model.compute_loss(x=x, y=y, y_pred=model(x, "
                "training=True))`, as Keras' `train_step` does, declare its "
                "distribution by `tfkfac.register_distribution`, or use "
                'fisher="empirical".'
            )
        return Choice(wanted, found, applies=found.applies(to_classes=True))
    if isinstance(found, str):
        return Choice(EMPIRICAL, reason=found)
    if found.is_categorical:
        return Choice(EMPIRICAL, reason="the labels are classes")
    reason = "the labels are not classes alone"
    applies = found.applies(to_classes=False)
    if applies is not None:
        reason = "where the loss is a likelihood, and not of classes alone"
    return Choice(MONTE_CARLO, found, reason, applies)
