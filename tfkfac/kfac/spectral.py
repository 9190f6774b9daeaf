"""Spectral steps: steepest descent in the operator norm of K-FAC's metric.

For each block, with its gradient W as a matrix of inputs by outputs, and
damped factors `A = L_A L_A^T`, `R_A = L_A^-T`, likewise for G:

    M = mu M + W,  N = W + mu M        Nesterov momentum
    X = R_A^T N R_G                    whitened
    Q = U V^T of X = U S V^T           polar factor of each block of columns
    D = R_A Q R_G^T

so that all directions of X have the same length (Muon, Jordan et al., 2024, is
the case `A = G = I`). Polynomials of the singular values approximate the polar
factor (Amsel et al., 2025). Vectors are divided by their norm. D is zero where
N is zero: weights without a gradient do not move. A matrix without a block has
the identity in place of both factors.

All D get the same root mean square: `0.2 r s` at the learning rate s, with r of
`length.py`, or 0.01 s if the loss is unknown. The last layer's D is multiplied
by its `output_scale`. Weights decay by `weight_decay r s`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, MatrixGradient, RowGradient
from tfkfac.blocks.registry import Registry
from tfkfac.compat.functions import shared_call, when
from tfkfac.compat.optimizers import variable_key
from tfkfac.kfac.active import ActiveBlock, ActiveGroup, output_layer
from tfkfac.kfac.averages import (
    MAX_ELEMENTS,
    PlainMatrix,
    chunks,
    extents_shape,
    per_row,
    plain_matrices,
)
from tfkfac.kfac.length import HINT_STEP, RMS, WARMUP
from tfkfac.kfac.natural import (
    TABLES,
    Natural,
    Preconditioned,
    apply_cheaper,
    decayed,
    hint_at_inputs,
    joined_stacks,
    replace_gradients,
    scale_rows,
    total_of,
)
from tfkfac.kfac.placement import Exchange, Placement
from tfkfac.kfac.scales import Batch, Moments
from tfkfac.kfac.state import State
from tfkfac.linalg.polar import polar_factors
from tfkfac.linalg.tensors import rounding, row_squares, row_sums, select
from tfkfac.saving.slots import planned
from tfkfac.training.step import Gradients, Step

# Default of the momentum mu; other values were not compared.
_MOMENTUM = 0.9
# Maximum number of columns that are orthogonalised together. Without this
# limit: 0.95 times the final loss for 1.05 times the CPU seconds (geometric
# means of seven tiny problems); on the VAE 1.6 times the CPU seconds.
BLOCK = 32
# Number of polynomials: 5 bring all singular values above 1e-3 of the norm to
# within 12.5 % of 1, 7 to within 0.2 % (tests/linalg/test_polar.py).
ITERATIONS = 5
# RMS of a step if the loss is unknown and the learning rate is 1. Compared with
# Adam(1e-3), the final loss of four small models is lower, and of a fifth 1.4 %
# higher. With an RMS of 0.02, training of a denoiser diverges.
_UNSEEN_RMS = 0.01


class Spectral(Natural):
    """Steps along the orthogonalised, whitened momentum."""

    title = ", spectral steps"
    summed_scalars = 2  # L - H and n, see `length.py`
    without_loss = (
        f"Without the loss, spectral steps have the root mean square "
        f"{_UNSEEN_RMS} times the learning rate; pass the loss through "
        "`optimizer.scale_loss` under the tape."
    )
    has_momenta = True
    has_product = False
    extra_scalars = 1  # |Q|^2 of each block
    # Exclude embedding tables: few examples use a row, but an orthogonalised
    # step would move all rows by the same length.
    excluded_blocks = TABLES
    # A step of 784-512-512-10 takes 0.7 times the CPU time that it takes with a
    # limit of 640. Rank 32 takes 0.9 times that of rank 64, but the test error
    # of an autoencoder is 3 % larger (one seed). Convolutions train worse with
    # this limit.
    dense_layer_rows = 127

    @property
    def mu(self) -> float:
        """Decay of the momentum."""
        momentum = self.settings.momentum
        return _MOMENTUM if momentum is None else momentum

    @override
    def plain_matrices(
        self, registry: Registry
    ) -> list[tuple[str, keras.Variable]]:
        return plain_matrices(registry.leftovers)

    @override
    def read(
        self,
        step: Step,
        layers: Sequence[ActiveBlock],
        state: State,
        advise: Callable[..., None],
        micro_batches: int,
    ) -> Batch:
        assert state.length is not None
        losses = step.loss.losses
        last_layers = [output_layer(layers, terms) for terms in losses]
        moments = Moments(step.loss, last_layers, step.job.clock < WARMUP)
        has_moments = bool(moments.values.shape[0])
        if has_moments:
            with tf.init_scope():
                size = state.length.scale_sums.read_value().shape[0]
            if size not in (0, sum(moments.averaged_sizes)):
                calls = [x.call for x in losses if x.call is not None]
                labels = [(c.loss.name, tuple(c.y_true.shape)) for c in calls]
                advise(
                    "The losses and the sizes of their labels should not "
                    f"change during a training: optimizer '{step.job.name}' "
                    "restarts its averages over labels and weights. Received: "
                    f"losses with labels of shapes {labels}"
                )
        return Batch.of(
            step, moments if has_moments else None, advise, micro_batches
        )

    @override
    def scalars(self, step: Step, batch: Batch | None) -> list[tf.Tensor]:
        assert batch is not None
        return [step.weighted_excess(), batch.labels]

    @override
    def rescale(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        state: State,
        batch: Batch | None,
        sums: Sequence[tf.Tensor],
    ) -> Sequence[ActiveBlock]:
        assert batch is not None and state.length is not None
        if batch.moments is None:
            return layers
        # Multiply the unit by the mean weight and the spread of the labels.
        factor, deviations, step.output_changes = batch.moments.update(
            state.length.scale_sums, sums[-1]
        )
        step.multiply_unit(factor)
        # Only the last layer has the unit of the labels. With s_y, the standard
        # deviation of the labels:
        # `output_scale = max(s_y, min(1, sqrt(inputs) rms(kernel)))`. A layer
        # that also has outputs without a unit, such as logits, is not scaled.
        scales: dict[int, tf.Tensor] = {}
        pairs = [*zip(batch.moments.layers, deviations, strict=True)]
        unscaled = {
            last.position
            for last, deviation in pairs
            if last is not None and deviation is None
        }
        for last, deviation in pairs:
            if last is None or deviation is None:
                continue
            if last.position not in unscaled:
                kernel = tf.convert_to_tensor(last.block.variables[0])
                squares = tf.reduce_sum(tf.square(kernel)) / kernel.shape[-1]
                size = tf.minimum(tf.sqrt(tf.cast(squares, tf.float64)), 1.0)
                least = scales.get(last.position, size)
                scales[last.position] = tf.maximum(deviation, least)
        return [
            dataclasses.replace(layer, output_scale=scales.get(layer.position))
            for layer in layers
        ]

    @override
    def takes_rows(self, workers: int) -> bool:
        # Several workers all-reduce W as a matrix.
        return workers == 1

    @override
    def directions(
        self,
        groups: Sequence[ActiveGroup],
        step: Step,
        exchange: Exchange,
        damping: tf.Tensor,
    ) -> list[Preconditioned]:
        # Workers with the decomposition of a block compute D and `|Q|^2`, and
        # send them. Chunks, one after the other, bound the memory for X and Q.
        if not groups:
            return []
        groups = sorted(groups, key=lambda group: not group.has_rows)
        plain: list[Sequence[LayerGradient]] = []
        local: list[Sequence[tf.Tensor] | None] = []
        computed: list[tf.Tensor] = []
        sizes = [
            sum(math.prod(layer.block.gradient_shape) for layer in group.layers)
            for group in groups
        ]
        for chunk in chunks(groups, sizes, MAX_ELEMENTS):
            with tf.control_dependencies(computed):
                gradients, results = orthogonalize(chunk, step, self.mu)
            plain += gradients
            local += results
            computed = [pair[0] for pair in results if pair] or computed
        positions = [group.positions for group in groups]
        shared = exchange.share_gradients(step.group, positions, local)
        # Reshape a received `|Q|^2`, a vector of one element per layer.
        pairs = [(D, tf.reshape(square, [-1])) for D, square in shared]
        return check_directions(groups, plain, pairs)

    @override
    def gradients(
        self,
        directions: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        batch: Batch | None,
        sums: Sequence[tf.Tensor],
    ) -> Gradients:
        plain = plain_directions(step, state.plain, self.mu)
        present = [D for D in plain if D is not None]
        if not directions and not present:
            return step.gradients
        assert batch is not None and state.length is not None
        squares = [direction.product for direction in directions]
        if not squares:  # without blocks the metric is the identity
            squares = [tf.reduce_sum(tf.square(D))[None] for D in present]
        square = total_of(squares)
        if step.batch.value is None:
            factor = tf.constant(_UNSEEN_RMS / RMS, tf.float64)
        else:
            measure, unit_factor = batch.curvature, step.unit_factor

            def curvature() -> tuple[tf.Tensor, tf.Tensor]:
                factor = tf.ones([], tf.float64)
                form, q = measure(replace_gradients(directions, factor, plain))
                return form if unit_factor is None else form / unit_factor, q

            excess, labels, *_ = (tf.cast(x, tf.float64) for x in sums)
            factor = state.length.rate(
                square,
                tf.math.divide_no_nan(excess, step.loss.unit),
                labels,
                curvature,
                step.job.plan.count_updates(step.job.clock),
                batch.power,
                batch.vanishes,
            )
        state.length.factor.assign(tf.cast(factor, tf.float32))
        rate = tf.cast(step.job.inner_optimizer.learning_rate, tf.float64)
        length = tf.square(rate * factor) * square
        report = state.report
        report.assign(length=length, damping=damping, clip_factor=factor)
        layers = [layer for x in directions for layer in x.group.layers]
        if layers:
            is_hint_step = tf.equal(report.steps, HINT_STEP)
            when(is_hint_step, lambda: hint_at_inputs(layers, step, report))
        gradients = [
            gradient if D is None else D * tf.cast(factor, D.dtype)
            for gradient, D in zip(step.gradients, plain, strict=True)
        ]
        gradients = replace_gradients(directions, factor, gradients)
        weight_decay = self.settings.weight_decay
        if weight_decay:
            for i in decayed(gradients, step):
                w = tf.convert_to_tensor(step.variables[i])
                decay = tf.cast(weight_decay * factor, w.dtype)
                gradients[i] = gradients[i] + decay * w
        return fit_outputs(gradients, step, state)

    @override
    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        with planned():
            total = sum(
                PlainMatrix(path, variable).bytes
                for path, variable in self.plain_matrices(placement.registry)
            )
        for i, block in enumerate(placement.blocks):
            if placement.plan.preconditions(rank, i):
                shape = block.gradient_shape
                elements = math.prod(shape) + math.prod(extents_shape(shape))
                total += elements * block.dtype.size
        return {"momenta": total}


def fit_outputs(gradients: Gradients, step: Step, state: State) -> Gradients:
    """Replace the step by the fits of outputs that are due."""
    if not step.output_changes:
        return gradients
    any_due = tf.reduce_any([due for due, *_ in step.output_changes.values()])
    rate = tf.convert_to_tensor(step.job.inner_optimizer.learning_rate)

    def fit() -> list[Any]:
        # Forget the momenta and rho of the outputs before the fit.
        assert state.length is not None
        state.length.steps.assign(0)
        for preconditioner in state.preconditioners:
            preconditioner.reset_momenta()
        for matrix in state.plain:
            matrix.reset()
        replaced = []
        for i in present:
            gradient = gradients[i]
            if isinstance(gradient, tf.IndexedSlices):
                zeros = tf.zeros_like(gradient.values)
                gradient = tf.IndexedSlices(
                    zeros, gradient.indices, gradient.dense_shape
                )
            else:
                gradient = tf.zeros_like(gradient)
            if i in step.output_changes:
                due, factor, offset = step.output_changes[i]
                w = tf.convert_to_tensor(step.variables[i])
                change = factor * tf.cast(w, tf.float64) + offset
                # SGD multiplies the gradient by the learning rate.
                change = tf.math.divide_no_nan(
                    tf.cast(-change, w.dtype), tf.cast(rate, w.dtype)
                )
                gradient = select(due, change, gradient)
            replaced.append(gradient)
        return replaced

    present = [i for i, g in enumerate(gradients) if g is not None]
    results = iter(
        tf.cond(any_due, fit, lambda: [gradients[i] for i in present])
    )
    return [None if g is None else next(results) for g in gradients]


def orthogonalize(
    groups: Sequence[ActiveGroup], step: Step, mu: float
) -> tuple[list[Sequence[LayerGradient]], list[Sequence[tf.Tensor] | None]]:
    """Return W of all groups; D and `|Q|^2` of groups stored on this worker."""
    by_rows = [group for group in groups if group.has_rows]
    dense = [group for group in groups if not group.has_rows]
    rows = [scale_rows(group, step) for group in by_rows]
    matrices = [group.matrices(step) for group in dense]
    plain: list[Sequence[LayerGradient]] = [*rows, *([W] for W in matrices)]
    by_gradient = apply_cheaper(
        lambda group, W: (group.precondition(W),), by_rows, rows
    )
    whitened: list[tf.Tensor | None] = [X.matrix for (X,) in by_gradient]
    whitened += [
        group.precondition(W).matrix if group.state.is_stored else None
        for group, W in zip(dense, matrices, strict=True)
    ]
    nesterov, sizes = {}, {}
    for i, (group, gradients, X) in enumerate(
        zip(groups, plain, whitened, strict=True)
    ):
        if X is not None and group.state.is_stored:
            W_sizes = joined_stacks([extents(W) for W in gradients])
            nesterov[i], sizes[i] = group.state.add_gradient(
                group.rows, X, W_sizes, mu
            )
    results: list[Sequence[tf.Tensor] | None] = [None] * len(groups)
    factors = orthogonal_factors([*nesterov.values()])
    for i, Q in zip(nesterov, factors, strict=True):
        D = groups[i].state.apply_back(groups[i].rows, Q)
        results[i] = with_size(D, Q, sizes[i])
    return plain, results


def orthogonal_factors(matrices: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the polar factor of each block of columns of the matrices."""
    return shared_call(
        ("polar", BLOCK, ITERATIONS),
        lambda *values: polar_factors(values, BLOCK, ITERATIONS),
        *matrices,
        placed=True,  # oneDNN kernels are faster for batched products
    )


def extents(W: LayerGradient) -> tf.Tensor:
    """Return the largest absolute element of each row, then of each column.

    For a product `a^T g`, return upper bounds, which are 0 only where all
    products `|a| |g|` are.
    """
    if isinstance(W, RowGradient):
        a, g = tf.abs(W.a), tf.abs(W.g)
        rows = tf.linalg.matvec(a, tf.reduce_max(g, -1), transpose_a=True)
        columns = tf.linalg.matvec(g, tf.reduce_max(a, -1), transpose_a=True)
    else:
        sizes = tf.abs(W.matrix)
        rows, columns = tf.reduce_max(sizes, -1), tf.reduce_max(sizes, -2)
    return tf.concat([rows, columns], -1)


def with_size(
    D: tf.Tensor, Q: tf.Tensor, N_sizes: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Scale a stack D to the RMS `RMS`, and Q likewise; return D and `|Q|^2`.

    D is set to zero where the extents of N, see `extents`, are zero.
    """
    # Columns below the rounding error count as zero: orthogonalisation would
    # make them long. Rows with only rounding errors (a bias before a
    # normalisation) are kept: A mixes other rows of the gradient into them.
    rows, columns = tf.split(N_sizes, D.shape[-2:], -1)
    largest = tf.reduce_max(columns, -1, keepdims=True)
    is_used = columns > rounding(columns.dtype) * largest
    used = tf.expand_dims(rows > 0, -1) & tf.expand_dims(is_used, -2)
    D *= tf.cast(used, D.dtype)
    norm, Q_norm = (tf.sqrt(2 * row_squares(x)) for x in (D, Q))
    scale = tf.math.divide_no_nan(tf.constant(_unit_norm(D), D.dtype), norm)
    # Add NaN for an infinite D, whose scale is 0.
    square = tf.square(scale * Q_norm) + 0 * norm
    return D * per_row(scale, D), square


def _unit_norm(stack: tf.Tensor) -> float:
    """Return the norm of a stacked matrix with the root mean square `RMS`."""
    return RMS * math.sqrt(math.prod(stack.shape[1:]))


def check_directions(
    groups: Sequence[ActiveGroup],
    plain: Sequence[Sequence[LayerGradient]],
    pairs: Sequence[tuple[tf.Tensor, tf.Tensor]],
) -> list[Preconditioned]:
    """Replace invalid directions; `pairs` has (D, `|Q|^2`) per group.

    The fallback is W with the RMS of D, or zero if W is not finite.
    """
    valid = [tf.math.is_finite(square) for _, square in pairs]
    all_valid = tf.reduce_all(tf.concat(valid, 0))

    def replace() -> list[tuple[tf.Tensor, tf.Tensor]]:
        results = []
        for gradients, (D, square), flags in zip(
            plain, pairs, valid, strict=True
        ):
            W = joined_stacks([gradient.matrix for gradient in gradients])
            norm = tf.sqrt(tf.cast(row_sums(tf.square(W)), tf.float64))
            scale = tf.math.divide_no_nan(_unit_norm(D), norm)
            scale = tf.where(tf.math.is_finite(scale), scale, 0.0)
            unit = tf.math.multiply_no_nan(
                W, per_row(tf.cast(scale, W.dtype), W)
            )
            unit_square = tf.constant(_unit_norm(D) ** 2, square.dtype)
            unit_square *= tf.cast(scale > 0, square.dtype)
            results.append(
                (select(flags, D, unit), select(flags, square, unit_square))
            )
        return results

    results = tf.cond(all_valid, lambda: pairs, replace)
    directions = []
    for group, (D, square), flags in zip(groups, results, valid, strict=True):
        scales = [layer.output_scale for layer in group.layers]
        if any(scale is not None for scale in scales):
            factors = [
                1.0 if x is None else tf.cast(x, D.dtype) for x in scales
            ]
            scale = tf.stack(factors)
            D, square = D * per_row(scale, D), square * tf.square(scale)
        directions.append(
            Preconditioned(group, MatrixGradient(D), square, flags)
        )
    return directions


def plain_directions(
    step: Step, matrices: Sequence[PlainMatrix], momentum: float
) -> Gradients:
    """Return the directions of uncovered matrices; None for other variables."""
    inner = step.job.inner_optimizer
    indices = {variable_key(inner, v): i for i, v in enumerate(step.variables)}
    scale = tf.math.reciprocal_no_nan(step.loss.unit)
    momenta: dict[int, tf.Tensor] = {}
    for matrix in matrices:
        variable = matrix.variable
        if variable is None:
            continue
        index = indices.get(variable_key(inner, variable))
        gradient = None if index is None else step.gradients[index]
        if index is not None and gradient is not None:
            dense = tf.convert_to_tensor(gradient)
            momenta[index] = matrix.add(dense, scale, momentum)
    result: Gradients = [None] * len(step.gradients)
    factors = orthogonal_factors([*momenta.values()])
    for (index, N), Q in zip(momenta.items(), factors, strict=True):
        D, square = with_size(Q, Q, extents(MatrixGradient(N)))
        D = select(tf.math.is_finite(square), D, tf.zeros_like(D))
        result[index] = tf.reshape(D, step.variables[index].shape)
    return result
