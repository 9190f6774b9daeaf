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

where B is the number of blocks, s the learning rate divided by the largest
one of its schedule in the run, at most 1, and L the negative log-likelihood
of a term of the loss, 0 if it is unknown or not finite. By Cauchy and
Schwarz, `<D, N> / sqrt(<P, N>)` is a lower bound of the Fisher length of D;
`sqrt(damping) |D|` is another. The larger one counts.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import MatrixGradient
from tfkfac.compat.functions import each, fields, shared_call
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.averages import SPECTRAL, Momentum
from tfkfac.kfac.bank import Clip, State
from tfkfac.kfac.exchange import Exchange
from tfkfac.kfac.natural import (
    ANY_SIZE,
    TABLES,
    Natural,
    Pair,
    Preconditioned,
    apply_rows,
    matrix_pairs,
    put_back,
    row_parts,
    set_shapes,
)
from tfkfac.kfac.placement import Placement
from tfkfac.linalg.polar import polar_factors
from tfkfac.linalg.tensors import all_finite, are_finite, select, stack_scalars
from tfkfac.saving.slots import Slots
from tfkfac.shell.rest import known_rate, share_of_largest, update_largest
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step

# Default of mu. No study compares it with other values.
_MOMENTUM = 0.9
# Maximum number of columns of P that are orthogonalised together. Whole
# matrices ended with 0.95 times the loss on seven tiny problems, for 1.05
# times the CPU seconds (geometric means), 1.6 times on the VAE.
BLOCK = 32
# Number of polynomials: 5 bring all singular values above 1e-3 of the norm to
# within 12.5 % of 1, 7 to within 0.2 % (tests/linalg/test_polar.py).
ITERATIONS = 5


class Spectral(Natural):
    """Steps along the orthogonalised, preconditioned momentum."""

    title = ", spectral steps"
    sees_loss = True
    has_momenta = True
    beside = 2  # <D, N> and <P, N>
    # Of a table each row sees little of the data, and orthogonalised it would
    # move as much as one that sees all.
    left_out = TABLES

    @override
    def takes_rows(self, workers: int) -> bool:
        # The gradient itself is needed, too: several have it reduced at once.
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
        made: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        loss: tf.Tensor,
    ) -> Gradients:
        if not made:
            return step.gradients
        squares = [2 * one.gradient.bound() for one in made]
        clip = spectral_length(
            [one.product for one in made],
            squares,
            tf.math.divide_no_nan(loss, step.loss.unit),
            damping,
            state.section(LargestRate),
            step.job.inner_optimizer.learning_rate,
        )
        state.report.assign(length=clip.length, damping=damping)
        return put_back(made, clip.factor, step.gradients)

    @override
    def sections(self, job: Job) -> Sequence[Slots]:
        return (LargestRate(known_rate(job.inner_optimizer)),)

    @override
    def update_rates(self, job: Job, states: Sequence[State]) -> None:
        super().update_rates(job, states)
        for state in states:
            kept = state.section(LargestRate).value
            update_largest(kept, job.inner_optimizer, self._end)

    @override
    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        return {"momenta": placement.momentum_bytes(rank)}


class LargestRate(Slots):
    """The learning rate that those of spectral steps are shares of.

    A number is what callbacks reduce, before and after a model is saved. That
    of a schedule is known when training begins.
    """

    def __init__(self, rate: float) -> None:
        super().__init__("rate", part=SPECTRAL)
        self.value = self.slot("largest_rate", (), "float64", rate)


def orthogonalize(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    momentum: float,
) -> list[Preconditioned]:
    """Compute the directions D.

    All workers have the W. Those with decompositions have the momenta N, and
    make `P = A^-1 N G^-1` and D of them; with D travel `<D, N>` and `<P, N>`.
    """
    if not layers:
        return []
    by_rows = [one for one in layers if one.rows is not None]
    others = [one for one in layers if one.rows is None]
    layers = [*by_rows, *others]
    pairs = zip(
        row_pairs(by_rows, step), matrix_pairs(others, step), strict=True
    )
    plain, applied = ([*rows, *matrices] for rows, matrices in pairs)
    momenta = [one.state.momentum for one in layers]
    moved = each(Momentum.add, momenta, plain, applied, momentum)
    N, P = fields(moved, 2)
    for column in (N, P):
        set_shapes(layers, column)
    own = [i for i, matrix in enumerate(P) if matrix is not None]
    D = shared_call(
        ("polar", BLOCK, ITERATIONS),
        lambda *some: polar_factors(some, BLOCK, ITERATIONS),
        *(P[i] for i in own),
        placed=True,  # oneDNN has quicker kernels for batches of products
    )
    products = each(
        _products, D, [N[i] for i in own], [P[i] for i in own], like=ANY_SIZE
    )
    places = [one.position for one in layers]
    made = {places[i]: pair for i, *pair in zip(own, D, products, strict=True)}
    shared = exchange.share_gradients(step.group, made, places)
    return _sound_directions(layers, plain, [shared[i] for i in places])


def row_pairs(
    layers: Sequence[ActiveBlock], step: Step
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The W and `A^-1 W G^-1` of blocks with rows."""

    def matrices(pairs: Sequence[Pair]) -> list[tuple[Any, ...]]:
        return [(new, old.matrix) for old, new in pairs]

    made = apply_rows(row_parts(layers, step), matrices)
    return [plain for _, plain in made], [new.matrix for new, _ in made]


def _products(D: tf.Tensor, N: tf.Tensor, P: tf.Tensor) -> tf.Tensor:
    """`<D, N>` and `<P, N>`."""
    return tf.stack([tf.reduce_sum(D * N), tf.reduce_sum(P * N)])


def _sound_directions(
    layers: Sequence[ActiveBlock],
    plain: Sequence[tf.Tensor],
    came: Sequence[Sequence[tf.Tensor]],
) -> list[Preconditioned]:
    """Directions with their products; those that are wrong are replaced."""
    directions, products = fields(came, 2)
    # Nothing but a finite D has a finite `<D, N>`.
    sound = are_finite(products)
    flags = tf.unstack(sound)
    made = tf.cond(
        tf.reduce_all(sound),
        lambda: came,
        lambda: each(
            _replace_direction,
            flags,
            plain,
            directions,
            products,
            like=ANY_SIZE,
        ),
    )
    set_shapes(layers, [matrix for matrix, _ in made])
    return [
        Preconditioned(one, MatrixGradient(new), both, flag)
        for one, (new, both), flag in zip(layers, made, flags, strict=True)
    ]


def _replace_direction(
    sound: tf.Tensor, plain: tf.Tensor, direction: tf.Tensor, both: tf.Tensor
) -> list[tf.Tensor]:
    """A direction D with its two products; W over its norm if it is not sound.

    These are what they would be if the Fisher matrix was the identity. A W
    whose square is not finite either makes no step.
    """
    norm = tf.norm(plain)
    unit = tf.math.divide_no_nan(plain, norm)
    numbers = tf.stack([norm, tf.square(norm)])
    usable = all_finite([unit, numbers])
    unit = select(usable, unit, tf.zeros_like(unit))
    numbers = select(usable, numbers, tf.zeros_like(numbers))
    return [select(sound, direction, unit), select(sound, both, numbers)]


# Fisher length of a spectral step: at least so long, or so large a share of
# the loss that its square is. Measured on tiny models of 13 kinds.
_LEAST, _SHARE = 0.07, 0.005
# And so long of each block: the square is a sum over blocks. It is fitted to a
# MobileNet of 87 blocks, which 0.07 trains too slowly.
_OF_BLOCK = 0.02


def spectral_length(
    products: Sequence[tf.Tensor],
    squares: Sequence[tf.Tensor],
    loss: tf.Tensor,
    damping: tf.Tensor,
    largest: LargestRate,
    rate: tf.Tensor,
) -> Clip:
    """Compute the length of a spectral step.

    Args:
        products: `<D, N>` and `<P, N>` of each block.
        squares: `|D|^2` of each block.
        loss: The negative log-likelihood L of a term.
        damping: The damping.
        largest: The largest learning rate.
        rate: The learning rate, by which the inner optimizer multiplies.

    Returns:
        The factor on all D, and the squared length of the step.
    """
    numbers = tf.stack([tf.cast(pair, tf.float64) for pair in products])
    decrease, product = tf.unstack(tf.reduce_sum(numbers, 0))
    decrease = tf.maximum(decrease, 0)
    square = tf.math.divide_no_nan(tf.square(decrease), product)
    bound = tf.reduce_sum(stack_scalars(squares))
    bound *= tf.cast(damping, tf.float64)
    # Gradients may be finite where the loss is not.
    loss = tf.where(tf.math.is_finite(loss), loss, tf.zeros_like(loss))
    rate = tf.cast(rate, tf.float64)
    least = max(_LEAST, _OF_BLOCK * math.sqrt(len(products)))
    kappa = tf.sqrt(tf.maximum(_SHARE * loss, least**2))
    kappa *= share_of_largest(rate, largest.value)
    length = tf.sqrt(tf.maximum(square, bound))
    factor = tf.math.divide_no_nan(kappa, length * rate)
    return Clip(factor, tf.square(kappa))
