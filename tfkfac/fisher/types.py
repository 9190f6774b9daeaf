"""Types of the Fisher matrix: the gradients from which G is computed.

- "empirical": gradients of the loss at the labels of the batch.
- "monte_carlo": gradients of the loss at labels sampled from the model's
  predictions (Martens & Grosse, 2015, section 5). One additional backward
  pass to the pre-activations.
- "type2": gradients for all columns of a square root of each example's Fisher
  matrix at the outputs (Botev et al., 2017). G is exact, without sampling
  noise: K-FAC of the generalised Gauss-Newton matrix. One backward pass for
  each output.

All types have the same inputs and the same A. The backward passes reuse the
forward pass recorded by `capture/model_taps.py`. A second forward pass would
trace the model twice and have other dropout masks and batch moments.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.blocks.statistics import (
    BatchSettings,
    batch_statistics,
    output_total,
)
from tfkfac.capture.model_taps import Pullback
from tfkfac.capture.taps import Record
from tfkfac.compat.graphs import Sum
from tfkfac.fisher.distributions import Likelihood, Output, find_likelihood
from tfkfac.loss.terms import LossTerms

EMPIRICAL, MONTE_CARLO, TYPE2 = "empirical", "monte_carlo", "type2"
TYPES = (EMPIRICAL, MONTE_CARLO, TYPE2)

Statistics = Mapping[int, Mapping[str, Statistic]]
Layers = Mapping[int, tuple[Block, Sequence[Record]]]
# Maximum number of backward passes in a factor update of type "type2".
_MAX_COLUMNS = 1024


def weighted(
    settings: BatchSettings, outputs: Sequence[Output]
) -> list[tuple[Output, tf.Tensor | None]]:
    """Pair each output with the weight of its loss."""
    weights = settings.loss_weights or [None] * len(outputs)
    return list(zip(outputs, weights, strict=True))


def monte_carlo(
    layers: Layers,
    settings: BatchSettings,
    likelihood: Likelihood,
    seeds: Sequence[tf.Tensor],
    total: Sum,
) -> Statistics:
    """Statistics from the gradients of the loss for sampled labels.

    A layer that no output depends on, for example with `add_loss` alone, uses
    the gradient of the loss. `total` sums over the replicas, for synchronised
    layers.
    """
    outputs = weighted(settings, likelihood.outputs)
    gradients = [
        output.sample(seed, weight)
        for (output, weight), seed in zip(outputs, seeds, strict=True)
    ]
    pulled = _backprop(layers, likelihood, likelihood.outputs, gradients, total)
    sampled = {i: (layers[i][0], records) for i, records in pulled.items()}
    other_layers = {i: layer for i, layer in layers.items() if i not in pulled}
    # Do not rescale gradients for sampled labels: they are per term already.
    unscaled = settings._replace(scale=1.0, unscale=None)
    statistics = batch_statistics(sampled, unscaled)
    statistics |= batch_statistics(other_layers, settings)
    return {i: statistics[i] for i in layers}


def type2(
    layers: Layers, settings: BatchSettings, likelihood: Likelihood
) -> Statistics:
    """Statistics from all columns of a root of the outputs' Fisher matrix."""
    sums: dict[int, tf.Tensor] = {}
    for output, weight in weighted(settings, likelihood.outputs):
        totals = _output_totals(layers, settings, likelihood, output, weight)
        for position, total in totals.items():
            sums[position] = sums.get(position, 0) + total
    statistics = batch_statistics(layers, settings)
    for position, total in sums.items():
        factors = statistics[position]
        factors["G"] = Statistic(total, factors["G"].count)
    return statistics


def _output_totals(
    layers: Layers,
    settings: BatchSettings,
    likelihood: Likelihood,
    output: Output,
    weight: tf.Tensor | None,
) -> dict[int, tf.Tensor]:
    """Sum `g g^T` of each block over the root's columns of one output."""
    size = output.size
    if size is None or size > _MAX_COLUMNS:
        raise ValueError(
            'Argument `fisher="type2"` takes a backward pass for each output '
            f"of an example, at most {_MAX_COLUMNS:,}. Received: a model "
            f"with outputs of shape {output.predictions.shape}. Use "
            'fisher="monte_carlo", which has the same mean.'
        )
    reached: set[int] = set()

    def add(index: tf.Tensor, *sums: tf.Tensor) -> tuple[tf.Tensor, ...]:
        column = output.column(index, weight)
        pulled = _backprop(layers, likelihood, [output], [column], _refuse_sums)
        reached.update(pulled)
        totals = [
            output_total(layers[i][0], pulled[i], settings)
            if i in pulled
            else tf.zeros_like(old)
            for i, old in zip(layers, sums, strict=True)
        ]
        return index + 1, *(s + t for s, t in zip(sums, totals, strict=True))

    zeros = [
        tf.zeros(block.factor_shapes["G"], block.dtype)
        for block, _ in layers.values()
    ]
    _, *sums = tf.while_loop(
        lambda index, *_: index < size, add, (tf.constant(0), *zeros)
    )
    totals = zip(layers, sums, strict=True)
    return {i: total for i, total in totals if i in reached}


def _refuse_sums(_: tf.Tensor) -> tf.Tensor:
    raise ValueError(
        'Argument `fisher="type2"` does not support layers that are '
        "synchronised over several replicas. Use "
        'fisher="monte_carlo", which has the same mean.'
    )


def _backprop(
    layers: Layers,
    likelihood: Likelihood,
    outputs: Sequence[Output],
    gradients: Sequence[tf.Tensor],
    total: Sum,
) -> dict[int, list[Record]]:
    """Return records with new gradients, for layers that affect the outputs."""
    flat = [record for _, records in layers.values() for record in records]
    new_gradients = likelihood.pullback.pull(
        [output.predictions for output in outputs],
        gradients,
        [record.output for record in flat],
        total,
    )
    pairs = iter(zip(flat, new_gradients, strict=True))
    pulled = {}
    for position, (_, records) in layers.items():
        calls = list(itertools.islice(pairs, len(records)))
        if any(gradient is not None for _, gradient in calls):
            pulled[position] = [
                dataclasses.replace(
                    record,
                    gradient=tf.zeros_like(record.gradient)
                    if gradient is None
                    else gradient,
                )
                for record, gradient in calls
            ]
    return pulled


class Choice(NamedTuple):
    """Type of the Fisher matrix of a step, and why it was chosen.

    `reason` is empty if the user chose the type.
    """

    type: str
    likelihood: Likelihood | None = None
    reason: str = ""


def choose_type(
    requested: str | None,
    losses: Sequence[LossTerms],
    calls: Sequence[Pullback],
) -> Choice:
    """Choose the type of the Fisher matrix for a step.

    A `requested` type of None is "monte_carlo" if the distributions of the
    losses are known and not all labels are classes, else "empirical".
    """
    likelihood = find_likelihood(losses, calls)
    if requested is not None:
        if isinstance(likelihood, str):
            raise ValueError(
                f'Argument `fisher="{requested}"` needs the predictive '
                f"distribution of the model, but {likelihood}. Compute the "
                "loss with `model.compute_loss(x=x, y=y, y_pred=model(x, "
                "training=True))`, as Keras' `train_step` does, register its "
                "distribution by `tfkfac.register_distribution`, or use "
                'fisher="empirical".'
            )
        return Choice(requested, likelihood)
    if isinstance(likelihood, str):
        return Choice(EMPIRICAL, reason=likelihood)
    if all(x.distribution.categorical for x in likelihood.outputs):
        return Choice(EMPIRICAL, reason="the labels are classes")
    return Choice(MONTE_CARLO, likelihood, "not all labels are classes")
