"""Natural-gradient steps: precondition and clip the gradients.

A gradient is preconditioned as a matrix, or as rows (a, g) with `W = a^T g`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, RowGradient
from tfkfac.blocks.embedding import EmbeddingBlock, PositionEmbeddingBlock
from tfkfac.blocks.registry import Registry
from tfkfac.compat.functions import when
from tfkfac.compat.models import replica_variable
from tfkfac.compat.optimizers import is_decayed, knows_variable
from tfkfac.kfac.active import ActiveBlock, ActiveGroup
from tfkfac.kfac.length import (
    HINT_STEP,
    LOW_FACTOR,
    LOW_SCALED_FACTOR,
    MIN_CLIPPED,
    StepReport,
)
from tfkfac.kfac.placement import Exchange, Placement
from tfkfac.kfac.scales import Batch
from tfkfac.kfac.settings import KFACSettings
from tfkfac.kfac.state import State
from tfkfac.training.guards import count_each
from tfkfac.training.step import Gradients, Step

# Embedding blocks have no spectral steps and no hint on the scale of inputs.
TABLES = (EmbeddingBlock, PositionEmbeddingBlock)
MOST_ROWS = 640  # default of `max_factor_dim`


class Preconditioned(NamedTuple):
    """Preconditioned gradients P of a group, before the clip."""

    group: ActiveGroup
    gradient: LayerGradient
    """P; in spectral steps the direction D."""
    product: tf.Tensor
    """`<P, W>` per layer; in spectral steps `|Q|^2`. The squared Fisher length
    of P."""
    valid: tf.Tensor
    """Bool per layer, False if P was invalid and is replaced by W."""


class Natural:
    """Steps along the preconditioned gradient, bounded by `kl_clip`.

    Attributes:
        title: Suffix of the title of the summary.
        summed_scalars: Number of scalars that `scalars` returns.
        without_loss: Sentence for the warning about an unobserved loss.
        has_product: True if `<P, W>` of row gradients is computed.
        extra_scalars: Number of scalars sent with each direction.
        dense_layer_rows: Default of `max_factor_dim` for dense layers.
    """

    title = ""
    summed_scalars = 0
    without_loss = (
        "If it is a sum, or a mean over tokens or pixels, steps are far too "
        "short or too long."
    )
    has_momenta = False
    has_product = True
    extra_scalars = 0
    excluded_blocks: tuple[type[Block], ...] = ()
    dense_layer_rows = MOST_ROWS

    def __init__(self, settings: KFACSettings) -> None:
        self.settings = settings

    def plain_matrices(
        self, registry: Registry
    ) -> list[tuple[str, keras.Variable]]:
        """Path and variable of each uncovered matrix that this rule trains."""
        return []

    # ------------------------------------------------------------ the step
    def read(
        self,
        step: Step,
        layers: Sequence[ActiveBlock],
        state: State,
        advise: Callable[..., None],
        micro_batches: int,
    ) -> Batch | None:
        """Return the batch values that the step needs; None by default.

        Args:
            step: The step.
            layers: The active blocks.
            state: State of this replica.
            advise: Function of a warning and its key. It issues the first
                warning of each key; by default, the key is the text.
            micro_batches: Number of micro-batches of a step.
        """
        return None

    def scalars(self, step: Step, batch: Batch | None) -> list[tf.Tensor]:
        """Return scalars to sum over the workers."""
        return []

    def rescale(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        state: State,
        batch: Batch | None,
        sums: Sequence[tf.Tensor],
    ) -> Sequence[ActiveBlock]:
        """Change the unit of the loss and the scales of layers.

        `sums` are the sums of `scalars` and of `batch.moments` over the
        workers.
        """
        return layers

    def takes_rows(self, workers: int) -> bool:
        """True if gradients may be kept as rows with this number of workers."""
        return True

    def directions(
        self,
        groups: Sequence[ActiveGroup],
        step: Step,
        exchange: Exchange,
        damping: tf.Tensor,
    ) -> list[Preconditioned]:
        """Compute the directions of the blocks, before scaling."""
        # Rows: P is linear in the gradient. So each worker preconditions and
        # checks its local gradient, and the results are summed.
        by_rows = [group for group in groups if group.has_rows]
        rows = [scale_rows(group, step) for group in by_rows]
        preconditioned = apply_cheaper(
            lambda group, W: check(W, group.precondition(W), damping),
            by_rows,
            rows,
        )
        results = [
            Preconditioned(group, *result)
            for group, result in zip(by_rows, preconditioned, strict=True)
        ]
        if by_rows and step.group.size > 1:
            sums = step.group.all_reduce([x.gradient.matrix for x in results])
            products = []
            for Ws, P in zip(rows, sums, strict=True):
                pairs = zip(Ws, tf.split(P, len(Ws)), strict=True)
                inner = [W.inner(MatrixGradient(part)) for W, part in pairs]
                products.append(tf.concat(inner, 0))
            products = step.group.all_reduce(products)
            results = [
                x._replace(gradient=MatrixGradient(P), product=product)
                for x, P, product in zip(results, sums, products, strict=True)
            ]
        # Matrices: all workers have the reduced W. Workers with the
        # decomposition of a block compute its P and send it to the others, so
        # P is bitwise equal on all workers.
        dense = [group for group in groups if not group.has_rows]
        plain = [group.matrices(step) for group in dense]
        local = [
            [group.precondition(W).matrix] if group.state.is_stored else None
            for group, W in zip(dense, plain, strict=True)
        ]
        positions = [group.positions for group in dense]
        received = exchange.share_gradients(step.group, positions, local)
        return results + [
            Preconditioned(group, *check(W, MatrixGradient(P), damping))
            for group, W, (P,) in zip(dense, plain, received, strict=True)
        ]

    def gradients(
        self,
        directions: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        batch: Batch | None,
        sums: Sequence[tf.Tensor],
    ) -> Gradients:
        """Return the gradients for the inner optimizer.

        `sums` are the same sums as in `rescale`.
        """
        optimizer, report = step.job.inner_optimizer, state.report
        gradients, rate = step.gradients, optimizer.learning_rate
        if directions:
            # The squared length of the step in the Fisher metric,
            # `lr^2 |sum <P, W>|`, is about twice the change of the model's
            # predictions in nats (Distributed K-FAC, eq. 16).
            total = tf.abs(total_of([x.product for x in directions]))
            length = tf.square(tf.cast(rate, tf.float64)) * total
            limit, hint_rate = self.settings.kl_clip.get(), None
            factor = tf.ones_like(length)  # nu of the paper
            if limit is not None:
                kl_clip = self.settings.kl_clip.at(step.job.clock)
                kl_clip = tf.cast(kl_clip, tf.float64)
                ratio = tf.sqrt(tf.math.divide_no_nan(kl_clip, length))
                factor = tf.where(length > 0, tf.minimum(ratio, 1.0), 1.0)
                is_sgd = isinstance(optimizer, keras.optimizers.SGD)
                hint_rate = rate if is_sgd else None
            hint_due = report.record(factor, length, damping, hint_rate)
            layers = [layer for x in directions for layer in x.group.layers]
            when(hint_due, lambda: hint_at_clip(layers, step, report, limit))
            gradients = replace_gradients(directions, factor, gradients)
        weight_decay = self.settings.weight_decay
        if weight_decay:
            for i in decayed(gradients, step):
                w = replica_variable(step.variables[i])
                w.assign_sub(tf.cast(rate * weight_decay, w.dtype) * w)
        return gradients

    # --------------------------------------------------- binding and state
    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        """Return the bytes of the state that this rule adds, by name."""
        return {}


def is_vector(variable: keras.Variable) -> bool:
    """True for biases, norm scales and offsets, which do not decay.

    Biases of attention and of `GRU`s have two axes.
    """
    name = variable.name
    is_named = "bias" in name or name in ("gamma", "beta", "scale")
    return is_named or len(variable.shape) < 2


def decayed(gradients: Gradients, step: Step) -> list[int]:
    """Return the indices of the weights that `weight_decay` reduces."""
    inner = step.job.inner_optimizer
    return [
        i
        for i, (g, v) in enumerate(zip(gradients, step.variables, strict=True))
        if g is not None and knows_variable(inner, v) and not is_vector(v)
        if is_decayed(inner, v)
    ]


# Loss in nats per term above which no hint is printed, because many clipped
# steps are normal: of 14 healthy runs, only an autoencoder had clipped steps.
_HIGH_LOSS = 20.0
# Print a hint if the RMS of the inputs is above the first bound, or if their
# largest absolute value and the RMS of their norms are below the second. Inputs
# with one feature of many, or of norm 1, have a small RMS, too.
_MAX_INPUT_RMS, _MIN_INPUT = 3.0, 0.05


def hint_at_clip(
    layers: Sequence[ActiveBlock], step: Step, report: StepReport, limit: Any
) -> None:
    """Print the likely cause if the clip shortens most of the first steps."""
    head = "kl_clip has left less than {:.0%} of most of the first {} steps. "
    is_far = hint_at_inputs(
        layers,
        step,
        report,
        head.format(LOW_SCALED_FACTOR, HINT_STEP),
        ', or try KFAC(fisher="monte_carlo")',
    )
    loss = tf.math.divide_no_nan(step.weighted_loss(), step.loss.unit)
    is_low = step.group.size * loss < _HIGH_LOSS
    hint = f", KFAC(kl_clip={limit / 4:g})," if isinstance(limit, float) else ""
    message = (
        f"{head.format(LOW_FACTOR, HINT_STEP)}Try a smaller one{hint} or a "
        "larger damping; see `optimizer.last_step`."
    )
    is_limited = (report.clipped >= MIN_CLIPPED) & is_low & ~is_far
    count_each(is_limited, report.hints, [step.job.name], message)


def hint_at_inputs(
    layers: Sequence[ActiveBlock],
    step: Step,
    report: StepReport,
    head: str = "",
    advice: str = "",
) -> tf.Tensor:
    """Print a hint if the first layer has large or small inputs; return if so.

    Large inputs allow only short steps in all layers. With small inputs, the
    damping exceeds their curvature.
    """
    # `order` is largest for the first layer, where the backward pass ends.
    first = max(layers, key=lambda layer: max(r.order for r in layer.records))
    inputs, block = first.records[-1].inputs, first.block
    has_scale = "A" in block.factors and not isinstance(block, TABLES)
    is_far = tf.constant(False)
    # Skip sparse tensors, which have no elementwise square.
    if has_scale and isinstance(inputs, tf.Tensor) and inputs.dtype.is_floating:
        sizes = tf.abs(tf.cast(inputs, tf.float32))
        largest = tf.reduce_max(sizes)
        rms = tf.sqrt(tf.reduce_mean(tf.square(sizes)))
        norm = rms * math.sqrt(inputs.shape[-1] or 1)
        is_small = (largest > 0) & (tf.maximum(largest, norm) < _MIN_INPUT)
        is_far = (rms > _MAX_INPUT_RMS) | is_small
    message = (
        f"{head}The inputs of layer '{block.path}' are far from unit scale, "
        "which slows the training: normalise the inputs of the model, for "
        "example by `keras.layers.Normalization` or `keras.layers.Rescaling`"
        f"{advice}."
    )
    count_each(is_far, report.hints, [step.job.name], message)
    return is_far


def total_of(products: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of vectors, in float64."""
    wide = [tf.cast(vector, tf.float64) for vector in products]
    return tf.reduce_sum(tf.concat(wide, 0))


def apply_cheaper(
    compute: Callable[[ActiveGroup, LayerGradient], tuple[Any, ...]],
    groups: Sequence[ActiveGroup],
    rows: Sequence[Sequence[RowGradient]],
) -> list[tuple[Any, ...]]:
    """Call `compute` with the cheaper form of gradients: rows or matrices.

    `compute` returns a gradient, followed by tensors.
    """
    results: dict[int, tuple[Any, ...]] = {}
    undecided: dict[int, list[int]] = {}
    for i, (group, gradients) in enumerate(zip(groups, rows, strict=True)):
        num_rows, limit = gradients[0].a.shape[1], group.layers[0].row_limit
        if num_rows is None:
            # Round down to a power of two: similar blocks share a branch.
            limit = 1 << (limit.bit_length() - 1)
            undecided.setdefault(limit, []).append(i)
        else:
            results[i] = compute(group, joined(gradients, num_rows <= limit))

    def branch(indices: Sequence[int], by_rows: bool) -> list[tuple[Any, ...]]:
        pairs = [compute(groups[i], joined(rows[i], by_rows)) for i in indices]
        return [(P.matrix, *tensors) for P, *tensors in pairs]

    # Choose at run time. Layers of a group with different numbers of rows have
    # matrices.
    for limit, indices in undecided.items():
        is_small = tf.constant(True)
        for i in indices:
            counts = tf.stack([tf.shape(W.a)[1] for W in rows[i]])
            is_small &= tf.reduce_max(counts) <= limit
            is_small &= tf.reduce_all(tf.equal(counts, counts[0]))
        chosen = tf.cond(
            is_small,
            functools.partial(branch, indices, by_rows=True),
            functools.partial(branch, indices, by_rows=False),
        )
        for i, (matrix, *tensors) in zip(indices, chosen, strict=True):
            results[i] = (MatrixGradient(matrix), *tensors)
    return [results[i] for i in range(len(groups))]


def joined(gradients: Sequence[RowGradient], by_rows: bool) -> LayerGradient:
    """Join row gradients of the layers of a group, as rows or as matrices."""
    if not by_rows:
        return MatrixGradient(joined_stacks([W.matrix for W in gradients]))
    return RowGradient(
        joined_stacks([W.a for W in gradients]),
        joined_stacks([W.g for W in gradients]),
    )


def joined_stacks(stacks: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate stacks; one stack needs no operation."""
    return tf.concat(stacks, 0) if len(stacks) > 1 else stacks[0]


def scale_rows(group: ActiveGroup, step: Step) -> list[RowGradient]:
    """Divide rows by the unit of the loss; weight them by `step.share`."""
    rows = [layer.rows for layer in group.layers if layer.rows is not None]
    scale, share = tf.math.reciprocal_no_nan(step.loss.unit), step.share
    if share is None:
        return [W.scaled(scale) for W in rows]
    # Without terms (share 0), replace `a` and `g` by 0: they may be NaN.
    nonzero = tf.cast(share > 0, rows[0].a.dtype)
    factor = tf.cast(share * scale, rows[0].g.dtype)
    return [
        RowGradient(
            tf.math.multiply_no_nan(W.a, nonzero),
            tf.math.multiply_no_nan(W.g, factor),
        )
        for W in rows
    ]


def replace_gradients(
    directions: Sequence[Preconditioned],
    factor: tf.Tensor,
    gradients: Gradients,
) -> Gradients:
    """Replace the gradients of the blocks by `factor` times their direction."""
    replaced = list(gradients)
    for direction in directions:
        layers = direction.group.layers
        by_layer = direction.gradient.scaled(factor).by_layer()
        for layer, gradient in zip(layers, by_layer, strict=True):
            new = layer.block.from_gradient(gradient)
            for i, weights in zip(layer.indices, new, strict=True):
                if i is not None:
                    replaced[i] = weights
    return replaced


# P is valid if `|P| <= _SLACK |W| / min(damping, 1)^2`. The slack allows for a
# damping that has grown since the last inverse update.
_SLACK = 1e6


def check(
    W: LayerGradient, P: LayerGradient, damping: tf.Tensor
) -> tuple[LayerGradient, tf.Tensor, tf.Tensor]:
    """Fall back to the plain gradient if the preconditioned one is invalid.

    Each eigenvalue of a damped Fisher block is at least the damping, or its
    square if both factors get the whole damping. So
    `|P| <= |W| / min(damping, 1)^2`.

    Returns:
        P if valid, else W; the product `<P, W>` per layer; a bool per layer,
        True if P is valid.
    """
    size, plain_size = (tf.cast(x.bound(), tf.float64) for x in (P, W))
    ratio = tf.minimum(damping, 1.0) ** 4  # squared bound: `size` is |P|^2
    valid = tf.math.is_finite(size) & (size * ratio <= _SLACK**2 * plain_size)
    P = P.where(valid, W)
    return P, W.inner(P), valid
