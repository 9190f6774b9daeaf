"""Types of the Fisher matrix: whose gradients the factors G are made of.

- "empirical": those of the loss at the labels of the batch.
- "monte_carlo": those at labels drawn from the model's own predictions
  (Martens & Grosse, 2015, section 5). One more backward pass to the
  pre-activations.
- "type2": the columns of a square root of each example's Fisher matrix at the
  outputs, all of them (Botev et al., 2017): K-FAC of the generalised
  Gauss-Newton matrix, without noise. A backward pass for each output.

The inputs, and with them A, are the same for all. The passes go through what
the training step has recorded (`capture/model_taps.py`), and not through a
second forward pass on a part of the batch: that would trace the model twice,
would draw other masks of dropout, and has other batch statistics.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.blocks.statistics import View, batch_statistics, output_total
from tfkfac.capture.model_taps import Pullback
from tfkfac.capture.taps import Record
from tfkfac.compat.graphs import Sum
from tfkfac.fisher.distributions import Likelihood, Output, find_likelihood
from tfkfac.loss.terms import LossTerms

EMPIRICAL, MONTE_CARLO, TYPE2 = "empirical", "monte_carlo", "type2"
TYPES = (EMPIRICAL, MONTE_CARLO, TYPE2)

Statistics = Mapping[int, Mapping[str, Statistic]]
Layers = Mapping[int, tuple[Block, Sequence[Record]]]
# Most backward passes of a factor update.
_MOST_COLUMNS = 1024


def weighted(
    view: View, outputs: Sequence[Output]
) -> list[tuple[Output, tf.Tensor | None]]:
    """The outputs with the weights of their losses."""
    weights = view.loss_weights or [None] * len(outputs)
    return list(zip(outputs, weights, strict=True))


def empirical(layers: Layers, view: View) -> Statistics:
    """Statistics of the gradients of the loss."""
    return batch_statistics(layers, view)


def monte_carlo(
    layers: Layers,
    view: View,
    likelihood: Likelihood,
    seeds: Sequence[tf.Tensor],
    total: Sum,
) -> Statistics:
    """Statistics of the gradients that drawn labels make.

    A layer that no output depends on, as one that only a loss of its own
    trains, keeps the gradient of the loss. Each output has a seed; `total`
    adds up over the replicas, for synchronised layers.
    """
    outputs = weighted(view, likelihood.outputs)
    gradients = [
        output.sample(seed, weight)
        for (output, weight), seed in zip(outputs, seeds, strict=True)
    ]
    pulled = _pull(layers, likelihood, likelihood.outputs, gradients, total)
    drawn = {i: (layers[i][0], records) for i, records in pulled.items()}
    rest = {i: layer for i, layer in layers.items() if i not in pulled}
    # What drawn labels make is the own gradient of a term.
    plain = view._replace(scale=1.0, unscale=None)
    made = batch_statistics(drawn, plain) | batch_statistics(rest, view)
    return {i: made[i] for i in layers}


def type2(layers: Layers, view: View, likelihood: Likelihood) -> Statistics:
    """Statistics of the columns of the root of the outputs' Fisher matrix.

    Raises:
        ValueError: If there are too many outputs, or not a fixed number.
    """
    sums: dict[int, tf.Tensor] = {}
    for output, weight in weighted(view, likelihood.outputs):
        added = _squares(layers, view, likelihood, output, weight)
        for position, squares in added.items():
            sums[position] = sums.get(position, 0) + squares
    statistics = batch_statistics(layers, view)
    for position, total in sums.items():
        made = statistics[position]
        made["G"] = Statistic(total, made["G"].count)
    return statistics


def _squares(
    layers: Layers,
    view: View,
    likelihood: Likelihood,
    output: Output,
    weight: tf.Tensor | None,
) -> dict[int, tf.Tensor]:
    """Sums of G over the columns of one output, for each block."""
    size = output.size
    if size is None or size > _MOST_COLUMNS:
        raise ValueError(
            'Argument `fisher="type2"` takes a backward pass for each output '
            f"of an example, at most {_MOST_COLUMNS:,}. Received: a model "
            f"with outputs of shape {output.predictions.shape}. Use "
            'fisher="monte_carlo", which has the same mean.'
        )
    reached: set[int] = set()

    def add(index: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        column = output.column(index, weight)
        pulled = _pull(layers, likelihood, [output], [column], _refuse_sums)
        reached.update(pulled)
        added = [
            output_total(layers[i][0], pulled[i], view)
            if i in pulled
            else tf.zeros_like(old)
            for i, old in zip(layers, sums, strict=True)
        ]
        return index + 1, *(s + a for s, a in zip(sums, added, strict=True))

    nothing = [
        tf.zeros(block.factor_shapes["G"], block.dtype)
        for block, _ in layers.values()
    ]
    _, *sums = tf.while_loop(
        lambda index, *_: index < size, add, (tf.constant(0), *nothing)
    )
    found = zip(layers, sums, strict=True)
    return {i: value for i, value in found if i in reached}


def _refuse_sums(_: tf.Tensor) -> tf.Tensor:
    raise ValueError(
        'Argument `fisher="type2"` does not go with layers that are '
        "synchronised over several replicas. Use "
        'fisher="monte_carlo", which has the same mean.'
    )


def _pull(
    layers: Layers,
    likelihood: Likelihood,
    outputs: Sequence[Output],
    gradients: Sequence[tf.Tensor],
    total: Sum,
) -> dict[int, list[Record]]:
    """Records with the gradients of some outputs, of blocks they depend on."""
    flat = [record for _, records in layers.values() for record in records]
    found = likelihood.pullback.pull(
        [output.predictions for output in outputs],
        gradients,
        [record.output for record in flat],
        total,
    )
    new = iter(zip(flat, found, strict=True))
    pulled = {}
    for position, (_, records) in layers.items():
        own = list(itertools.islice(new, len(records)))
        if any(gradient is not None for _, gradient in own):
            pulled[position] = [
                dataclasses.replace(
                    record,
                    gradient=tf.zeros_like(record.gradient)
                    if gradient is None
                    else gradient,
                )
                for record, gradient in own
            ]
    return pulled


class Choice(NamedTuple):
    """A type of the Fisher matrix, with its likelihood if it needs one.

    Attributes:
        reason: Why it was chosen; empty if the user did.
        applies: True in a step of this type, where the losses are of the
            likelihood, a scalar bool; else it is empirical. None is always.
    """

    type: str
    likelihood: Likelihood | None = None
    reason: str = ""
    applies: tf.Tensor | None = None

    def without_tensors(self) -> "Choice":
        """The choice without its tensors, to keep after the trace."""
        return Choice(self.type, reason=self.reason)


def choose_type(
    wanted: str | None,
    losses: Sequence[LossTerms],
    calls: Sequence[Pullback],
) -> Choice:
    """Chooses the type for a step, by its losses and the calls of the model.

    What the user wants is not "empirical". None is "monte_carlo" where the
    loss has a distribution and not of classes alone, else "empirical".

    Raises:
        ValueError: If it needs a distribution and there is none.
    """
    likelihood = find_likelihood(losses, calls)
    if wanted is not None:
        if isinstance(likelihood, str):
            raise ValueError(
                f'Argument `fisher="{wanted}"` needs the predictive '
                f"distribution of the model, but {likelihood}. Compute the "
                "loss with `model.compute_loss(x=x, y=y, y_pred=model(x, "
                "training=True))`, as Keras' `train_step` does, declare its "
                "distribution by `tfkfac.register_distribution`, or use "
                'fisher="empirical".'
            )
        return Choice(
            wanted, likelihood, applies=likelihood.applies(to_classes=True)
        )
    if isinstance(likelihood, str):
        return Choice(EMPIRICAL, reason=likelihood)
    if likelihood.is_categorical:
        return Choice(EMPIRICAL, reason="the labels are classes")
    reason = "the labels are not classes alone"
    applies = likelihood.applies(to_classes=False)
    if applies is not None:
        reason = "where the loss is a likelihood, and not of classes alone"
    return Choice(MONTE_CARLO, likelihood, reason, applies)
