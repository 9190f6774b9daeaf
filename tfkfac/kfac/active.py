"""Blocks of one training step, with recorded inputs and output gradients."""

import dataclasses
import functools
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, RowGradient
from tfkfac.blocks.statistics import (
    BatchSettings,
    batch_statistics,
    choose_subsample,
    records_of,
)
from tfkfac.capture.taps import Record, Tap, is_product
from tfkfac.compat.graphs import before_relu, is_copy
from tfkfac.compat.optimizers import variable_key
from tfkfac.distributed.plan import Plan
from tfkfac.fisher import types
from tfkfac.fisher.types import Choice, Statistics
from tfkfac.kfac.averages import Preconditioner
from tfkfac.kfac.settings import KFACSettings
from tfkfac.kfac.state import State
from tfkfac.loss.terms import LossTerms
from tfkfac.solvers.base import most_rows
from tfkfac.training.guards import count_each
from tfkfac.training.step import Step


@dataclasses.dataclass(frozen=True)
class ActiveBlock:
    """A curvature block with its gradients and records in the current step."""

    position: int
    """Position among all blocks."""
    block: Block
    indices: tuple[int | None, ...]
    """Index of each weight's gradient in the step; None without a gradient."""
    used: Block
    """The block that computes the statistics of this step."""
    records: Sequence[Record]
    """Inputs and output gradients recorded by the layer's calls."""

    rows: RowGradient | None = None
    """Rows (a, g) of the gradient `a^T g`, a stack of one; or None."""
    row_limit: int = 0
    """Largest number of rows that are cheaper than the dense gradient."""
    output_scale: tf.Tensor | None = None
    """Factor of D; the damping is divided by its square. None for 1."""

    @property
    def present(self) -> list[int]:
        """Indices of the gradients that are not missing."""
        return [i for i in self.indices if i is not None]

    def gradients(self, step: Step) -> list[tf.Tensor]:
        """Return one gradient per weight; zeros for a missing gradient."""
        return [
            tf.zeros(self.block.variables[place].shape, self.block.dtype)
            if i is None
            else step.gradients[i]
            for place, i in enumerate(self.indices)
        ]


@dataclasses.dataclass(frozen=True)
class ActiveGroup:
    """Active blocks of a group, and the rows of their state."""

    state: Preconditioner
    rows: Sequence[int]
    layers: Sequence[ActiveBlock]

    @property
    def positions(self) -> list[int]:
        """Positions of the layers among all blocks."""
        return [layer.position for layer in self.layers]

    @property
    def has_rows(self) -> bool:
        """True if the gradients are rows (a, g)."""
        return self.layers[0].rows is not None

    def matrices(self, step: Step) -> MatrixGradient:
        """Stack the dense gradients, divided by the unit of the loss."""
        W = tf.stack(
            [
                layer.block.to_matrix(layer.gradients(step))
                for layer in self.layers
            ]
        )
        W.set_shape([len(self.layers), *self.layers[0].block.gradient_shape])
        scale = tf.math.reciprocal_no_nan(step.loss.unit)
        return MatrixGradient(W).scaled(scale)

    def precondition(self, gradient: LayerGradient) -> LayerGradient:
        """Precondition gradients on a gradient worker."""
        return self.state.apply(self.rows, gradient)


def active_groups(
    layers: Sequence[ActiveBlock], state: State
) -> list[ActiveGroup]:
    """Group active blocks by their state."""
    by_position = {layer.position: layer for layer in layers}
    groups = []
    for group in state.preconditioners:
        places = enumerate(group.positions)
        rows = [row for row, i in places if i in by_position]
        if rows:
            active = [by_position[group.positions[row]] for row in rows]
            groups.append(ActiveGroup(group, rows, active))
    return groups


def active_blocks(step: Step, state: State) -> list[ActiveBlock]:
    """Return the blocks that have gradients and records in this step.

    Exclude blocks that do not support the calls of their layer in this step,
    and layers that affect no loss: only regularizers give them a gradient.
    Count gradients that match no recorded backward pass.
    """
    key_of = functools.partial(variable_key, step.job.inner_optimizer)
    pairs = zip(step.variables, step.gradients, strict=True)
    index = {key_of(v): i for i, (v, g) in enumerate(pairs) if g is not None}
    layers = {id(block.layer): block.layer for block in state.blocks}
    called = {key: Tap.pop_called(layer) for key, layer in layers.items()}
    calls = {key: Tap.calls(layer) for key, layer in layers.items()}
    blocks, explained = [], []
    for position, block in enumerate(state.blocks):
        indices = tuple(index.get(key_of(v)) for v in block.variables)
        if all(i is None for i in indices):
            continue
        used = block.used_as(calls[id(block.layer)])
        block_records = used.relevant(calls[id(block.layer)])
        if block.skip_reason:
            continue
        if not block_records:
            has_penalties = all(
                v.regularizer is not None
                for v, i in zip(block.variables, indices, strict=True)
                if i is not None
            )
            if has_penalties and called[id(block.layer)]:
                continue
            raise ValueError(
                f"Layer '{block.path}' has a gradient, but no call of it was "
                "recorded in this training step. Its weights are used without "
                "calling the layer, or inside a loop or a nested "
                "`tf.function`; or the optimizer was attached after the "
                "forward pass. Leave the layer to the rest optimizer with "
                f"skip_layers=['{block.path}']."
            )
        active = ActiveBlock(position, block, indices, used, ())
        is_present = [i is not None for i in indices]
        records, is_explained = records_of(
            used, block_records, active.gradients(step), is_present
        )
        if is_explained is not None:
            explained.append(([position], is_explained[None]))
        blocks.append(dataclasses.replace(active, records=records))
    if explained:
        count_each(
            tf.logical_not(state.counters.flags(explained)),
            state.counters.unexplained,
            state.counters.paths,
            "the applied gradient is neither the first nor the last gradient "
            "of the forward pass, nor the sum of all; factor G is computed "
            "from the nearest of these.",
        )
    return blocks


# rows; blocks with a lower row limit always use the dense gradient
_MIN_ROW_LIMIT = 16


def with_rows(
    layers: Sequence[ActiveBlock], state: State, step: Step, has_product: bool
) -> list[ActiveBlock]:
    """Represent gradients `W = a^T g` by (a, g) where that may be cheaper.

    For few rows, `(a A^-1)^T (g G^-1)` needs fewer multiplications than
    `A^-1 W G^-1`. W is then dropped from the step, so TensorFlow prunes its
    product. The blocks of a group have the same form. `has_product`: see
    `most_rows`.
    """
    by_position = {layer.position: layer for layer in layers}
    for group in active_groups(layers, state):
        specs = group.layers[0].block.factors
        if "A" not in specs or specs["G"].stack_shape:
            continue
        limit = most_rows(specs, step.group.size, has_product)
        if limit < _MIN_ROW_LIMIT:
            continue
        rows = [_rows(layer, step, limit) for layer in group.layers]
        present = [x for x in rows if x is not None]
        counts = {x.a.shape[1] for x in present}
        if len(present) == len(rows) and len(counts) == 1:
            for layer, W in zip(group.layers, present, strict=True):
                # The elements of `a^T g` are at most `sum |a| * sum |g|`.
                # Squared norms could overflow for a finite gradient.
                sums = [tf.reduce_sum(tf.abs(x)) for x in (W.a, W.g)]
                step.drop_gradients(layer.present, sums[0] * sums[1])
                by_position[layer.position] = dataclasses.replace(
                    layer, rows=W, row_limit=limit
                )
    return list(by_position.values())


def _rows(layer: ActiveBlock, step: Step, limit: int) -> RowGradient | None:
    """Return the rows of a gradient, or None for a dense gradient.

    The applied gradient must be exactly `a^T g` (`is_product`). Workers whose
    batches differ in size make the same choice.
    """
    if len(layer.records) != 1 or None in layer.indices:
        return None
    (record,), specs = layer.records, layer.block.factors
    if not is_product(layer.gradients(step), record.inputs, record.gradient):
        return None
    elements = record.gradient.shape.num_elements()
    if step.group.size == 1 and elements and elements > limit * specs["G"].size:
        return None
    a_and_g = layer.block.rows(record)
    return RowGradient(
        tf.reshape(a_and_g.a, [1, -1, specs["A"].size]),
        tf.reshape(a_and_g.g, [1, -1, specs["G"].size]),
    )


def observed(
    layers: Sequence[ActiveBlock], step: Step, plan: Plan
) -> list[ActiveBlock]:
    """Return the blocks whose statistics this replica computes."""
    rank = step.group.rank
    return [block for block in layers if plan.observes(rank, block.position)]


def local_statistics(
    layers: Sequence[ActiveBlock],
    step: Step,
    choice: Choice,
    state: State,
    plan: Plan,
    arguments: KFACSettings,
) -> Statistics:
    """Compute each block's statistics from a fraction of the local batch."""
    loss_scale = step.job.scaling.factor()
    settings = BatchSettings(
        arguments.weight_sharing,
        step.loss.row_scale,
        step.batch.weightless,
        step.loss.terms,
        choose_subsample(
            arguments.factor_batch_fraction,
            state.factor_updates,
            # Number of workers that sum their statistics
            plan.workers if plan.reduces_factors else 1,
        ),
        step.loss.weights,
        None if loss_scale is None else 1 / loss_scale,
    )
    # Reverse the layers: the order of the backward pass and of the messages.
    recorded = {
        block.position: (block.used, block.records)
        for block in reversed(observed(layers, step, plan))
    }
    likelihood = choice.likelihood
    if likelihood is None or choice.type == types.EMPIRICAL:
        statistics: Statistics = batch_statistics(recorded, settings)
    elif choice.type == types.TYPE2:
        statistics = types.type2(recorded, settings, likelihood)
    else:
        seeds = label_seeds(step, state, len(likelihood.outputs))
        statistics = types.monte_carlo(
            recorded,
            settings,
            likelihood,
            seeds,
            # Without an all-reduce of factors, sum over the local batch.
            lambda tensor: (
                step.group.all_reduce([tensor])[0]
                if plan.reduces_factors
                else tensor
            ),
        )
    return {
        position: {"A": by_name["G"], "G": by_name["A"]}
        if recorded[position][0].swapped
        else by_name
        for position, by_name in statistics.items()
    }


def label_seeds(step: Step, state: State, outputs: int) -> list[tf.Tensor]:
    """Return a random seed for the sampled labels of each output.

    Unique per step, replica and micro-batch; reproducible after a resume.
    """
    clock = step.job.clock
    batch = tf.constant(step.group.rank, tf.int64)
    if state.pending is not None:
        batch += step.group.size * state.pending.count
    return [tf.stack([clock, batch * outputs + i]) for i in range(outputs)]


def output_layer(
    layers: Sequence[ActiveBlock], terms: LossTerms
) -> ActiveBlock | None:
    """Return the layer that computes the outputs of a loss, or None."""
    for layer in layers:
        for record in layer.records:
            source = record.output
            if terms.call is None or source is None:
                continue
            if is_copy(before_relu(terms.call.y_pred), source):
                return layer
    return None
