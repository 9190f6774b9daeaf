"""Spectral steps: along the orthogonalised momentum.

For each block, with its gradient W as a matrix of inputs by outputs:

    M = mu M + W,  N = W + mu M        Nesterov momentum
    P = A^-1 N G^-1                    preconditioned
    D = U V^T of P = U S V^T           polar factor of each block of columns

so that all directions of a block have the same length (Muon: Jordan et al.,
2024). Polynomials of the singular values approximate the polar factor (Amsel
et al., 2025). Vectors are divided by their norm. P is zero in the rows and
columns where N is zero or below its rounding errors: weights without a
gradient do not move.

All D together get the length for which the loss decreases, to first order, as
much as along a natural-gradient step with the Fisher length

    kappa s,   kappa = max(0.07, 0.02 sqrt(B), sqrt(0.005 L)),

where B is the number of blocks, s the learning rate and L the negative
log-likelihood of a term of the loss, 0 if it is not finite. By Cauchy and
Schwarz, `<D, N> / sqrt(<P, N>)` is a lower bound of the Fisher length of D;
`sqrt(damping) |D|` is another. The larger bound is used. If the loss is
unknown, all D together get the root mean square 0.01 s.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, MatrixGradient
from tfkfac.compat.functions import shared_call, when
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.exchange import Exchange
from tfkfac.kfac.natural import (
    TABLES,
    Natural,
    Preconditioned,
    apply_cheaper,
    far_inputs,
    matrix_pairs,
    replace_gradients,
    scale_rows,
)
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.state import FIRST, Clip, State, StepReport
from tfkfac.linalg.polar import polar_factors
from tfkfac.linalg.tensors import all_finite, are_finite, select, stack_scalars
from tfkfac.training.guards import count_each
from tfkfac.training.step import Gradients, Step

# Default of mu. No study compares it with other values.
_MOMENTUM = 0.9
# Maximum number of columns of P that are orthogonalised together. Without this
# limit: 0.95 times the final loss for 1.05 times the CPU seconds (geometric
# means of seven tiny problems); on the VAE 1.6 times the CPU seconds.
BLOCK = 32
# Number of polynomials: 5 bring all singular values above 1e-3 of the norm to
# within 12.5 % of 1, 7 to within 0.2 % (tests/linalg/test_polar.py).
ITERATIONS = 5
# RMS of a step at the learning rate 1 if the loss is unknown. On six small
# models 0.003 and 0.01 end below Adam(1e-3); 0.02 diverges on a denoiser.
_RMS = 0.01


class Spectral(Natural):
    """Steps along the orthogonalised, preconditioned momentum."""

    title = ", spectral steps"
    needs_loss = True
    without_loss = (
        f"Without the loss, spectral steps have the root mean square {_RMS} "
        "times the learning rate; pass the loss through "
        "`optimizer.scale_loss` under the tape."
    )
    has_momenta = True
    extra_scalars = 2  # per block: <D, N> and <P, N>
    # Few examples use a row of an embedding table, but an orthogonalised step
    # would move all rows by the same length.
    excluded_blocks = TABLES

    @override
    def takes_rows(self, workers: int) -> bool:
        # The momentum also needs W, which several workers reduce as a matrix.
        return workers == 1

    @override
    def directions(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        exchange: Exchange,
        damping: tf.Tensor,
    ) -> list[Preconditioned]:
        momentum = _MOMENTUM if self.momentum is None else self.momentum
        return orthogonalize(layers, step, exchange, momentum)

    @override
    def gradients(
        self,
        directions: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        loss: tf.Tensor,
    ) -> Gradients:
        if not directions:
            return step.gradients
        squares = [2 * direction.gradient.bound() for direction in directions]
        if step.batch.value is None:
            factor = rms_factor(directions, squares)
            clip = Clip(factor, tf.constant(math.nan, tf.float64))
        else:
            clip = spectral_length(
                [direction.product for direction in directions],
                squares,
                tf.math.divide_no_nan(loss, step.loss.unit),
                damping,
            )
        rate = tf.cast(step.job.inner_optimizer.learning_rate, tf.float64)
        length = tf.square(rate) * clip.length
        state.report.assign(length=length, damping=damping)
        layers, report = [x.layer for x in directions], state.report
        is_late = tf.equal(report.steps, FIRST)
        when(is_late, lambda: hint_at_inputs(layers, step, report))
        return replace_gradients(directions, clip.factor, step.gradients)

    @override
    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        return {"momenta": placement.momentum_bytes(rank)}


def orthogonalize(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    momentum: float,
) -> list[Preconditioned]:
    """Compute the directions D.

    All workers have W. Workers with the decomposition of a block also have its
    momentum, compute `P = A^-1 N G^-1` and D, and send D, `<D, N>`, `<P, N>`.
    """
    if not layers:
        return []
    by_rows = [layer for layer in layers if layer.rows is not None]
    others = [layer for layer in layers if layer.rows is None]
    layers = [*by_rows, *others]
    pairs = zip(
        row_pairs(by_rows, step), matrix_pairs(others, step), strict=True
    )
    plain, applied = ([*rows, *matrices] for rows, matrices in pairs)
    local: list[tuple[ActiveBlock, tf.Tensor, tf.Tensor]] = []
    for layer, W, P in zip(layers, plain, applied, strict=True):
        if layer.state.momentum is not None and P is not None:
            N, P = layer.state.momentum.add(W, P, momentum)
            for matrix in (N, P):
                matrix.set_shape(layer.block.gradient_shape)
            local.append((layer, N, P))
    local_D = shared_call(
        ("polar", BLOCK, ITERATIONS),
        lambda *matrices: polar_factors(matrices, BLOCK, ITERATIONS),
        *(P for _, _, P in local),
        placed=True,  # oneDNN kernels are faster for batched products
    )
    sent = {}
    for (layer, N, P), D in zip(local, local_D, strict=True):
        products = shared_call("products", _products, D, N, P, any_size=True)
        sent[layer.position] = [D, products]
    places = [layer.position for layer in layers]
    shared = exchange.share_gradients(step.group, sent, places)
    return _check_directions(layers, plain, [shared[i] for i in places])


def row_pairs(
    layers: Sequence[ActiveBlock], step: Step
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return W and `A^-1 W G^-1` of blocks with rows, as matrices."""

    def matrices(layer: ActiveBlock, W: LayerGradient) -> tuple[Any, ...]:
        return layer.precondition(W), W.matrix

    rows = [scale_rows(layer, step) for layer in layers]
    results = apply_cheaper(matrices, layers, rows)
    return [W for _, W in results], [P.matrix for P, _ in results]


def _products(D: tf.Tensor, N: tf.Tensor, P: tf.Tensor) -> tf.Tensor:
    """Return the vector of `<D, N>` and `<P, N>`."""
    return tf.stack([tf.reduce_sum(D * N), tf.reduce_sum(P * N)])


def _check_directions(
    layers: Sequence[ActiveBlock],
    plain: Sequence[tf.Tensor],
    shared: Sequence[Sequence[tf.Tensor]],
) -> list[Preconditioned]:
    """Replace invalid directions; `shared` has (D, products) per block."""
    # `<D, N>` is finite only if D is finite.
    valid = are_finite([products for _, products in shared])
    flags = tf.unstack(valid)

    def replace() -> list[list[tf.Tensor]]:
        return [
            shared_call(
                "direction", _replace_direction, flag, W, *pair, any_size=True
            )
            for flag, W, pair in zip(flags, plain, shared, strict=True)
        ]

    results = tf.cond(tf.reduce_all(valid), lambda: shared, replace)
    directions = []
    for layer, (D, products), flag in zip(layers, results, flags, strict=True):
        D.set_shape(layer.block.gradient_shape)
        gradient = MatrixGradient(D)
        directions.append(Preconditioned(layer, gradient, products, flag))
    return directions


def _replace_direction(
    valid: tf.Tensor, plain: tf.Tensor, D: tf.Tensor, products: tf.Tensor
) -> list[tf.Tensor]:
    """Return D and its products if valid, else `W / |W|` and its products.

    For an identity Fisher matrix and `N = W`, these are `|W|` and `|W|^2`. All
    are zero if `|W|^2` is not finite.
    """
    norm = tf.norm(plain)
    unit = tf.math.divide_no_nan(plain, norm)
    pair = tf.stack([norm, tf.square(norm)])
    usable = all_finite([unit, pair])
    unit = select(usable, unit, tf.zeros_like(unit))
    pair = select(usable, pair, tf.zeros_like(pair))
    return [select(valid, D, unit), select(valid, products, pair)]


# Fisher length of a step at the learning rate 1, with the loss L in nats:
# `kappa^2 = max(_SQUARED_LENGTH_PER_LOSS * L, _MIN_FISHER_LENGTH^2)`. Fitted to
# tiny models of 13 types.
_MIN_FISHER_LENGTH, _SQUARED_LENGTH_PER_LOSS = 0.07, 0.005
# Minimum Fisher length per block: kappa is at least `0.02 sqrt(blocks)`. Fitted
# to a MobileNet with 87 blocks, for which 0.07 is too short.
_MIN_PER_BLOCK = 0.02


def hint_at_inputs(
    layers: Sequence[ActiveBlock], step: Step, report: StepReport
) -> None:
    """Print a hint if the inputs of the model are far from unit scale.

    Orthogonalised steps move all layers by the same length, so the length that
    the first one allows is short for the others.
    """
    path, is_far = far_inputs(layers)
    text = (
        f"the inputs of layer '{path}' are far from unit scale, which makes "
        "steps short: normalise the inputs of the model, for example by "
        "`keras.layers.Normalization` or `keras.layers.Rescaling`."
    )
    count_each(is_far, report.hints, [step.job.name], text)


def rms_factor(
    directions: Sequence[Preconditioned], squares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Compute the common factor of all D for steps with the RMS `_RMS`."""
    size = sum(
        math.prod(variable.shape)
        for direction in directions
        for variable in direction.layer.block.variables
    )
    mean = tf.reduce_sum(stack_scalars(squares)) / size
    return tf.math.divide_no_nan(_RMS, tf.sqrt(tf.cast(mean, tf.float64)))


def spectral_length(
    products: Sequence[tf.Tensor],
    squares: Sequence[tf.Tensor],
    loss: tf.Tensor,
    damping: tf.Tensor,
) -> Clip:
    """Compute the length of a spectral step at the learning rate 1.

    Args:
        products: `<D, N>` and `<P, N>` of each block.
        squares: `|D|^2` of each block.
        loss: The negative log-likelihood L of a term, in nats.
        damping: The damping.

    Returns:
        The common factor of all D, and the squared Fisher length of the step.
    """
    pairs = tf.stack([tf.cast(pair, tf.float64) for pair in products])
    decrease, product = tf.unstack(tf.reduce_sum(pairs, 0))
    decrease = tf.maximum(decrease, 0)
    square = tf.math.divide_no_nan(tf.square(decrease), product)
    bound = tf.reduce_sum(stack_scalars(squares))
    bound *= tf.cast(damping, tf.float64)
    # The gradients may be finite although the loss is not.
    loss = tf.where(tf.math.is_finite(loss), loss, tf.zeros_like(loss))
    least = max(_MIN_FISHER_LENGTH, _MIN_PER_BLOCK * math.sqrt(len(products)))
    kappa = tf.sqrt(tf.maximum(_SQUARED_LENGTH_PER_LOSS * loss, least**2))
    length = tf.sqrt(tf.maximum(square, bound))
    factor = tf.math.divide_no_nan(kappa, length)
    return Clip(factor, tf.square(kappa))
