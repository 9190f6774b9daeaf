"""Gradients of the blocks, preconditioned: as matrices or by their rows."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkfac.blocks import LayerGradient, MatrixGradient, RowGradient
from tfkfac.compat.together import Call, together
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.bank import Counters
from tfkfac.kfac.exchange import Exchange
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.solvers import Decomposition, most_rows
from tfkfac.training.guards import count_each
from tfkfac.training.step import Gradients, Step


class Preconditioned(NamedTuple):
    """The preconditioned gradient P of a block, before the clip.

    Attributes:
        layer: The block.
        gradient: P.
        product: `<P, W>` with its gradient.
        sound: Whether P could be used; if not, W is in its place.
    """

    layer: ActiveBlock
    gradient: LayerGradient
    product: tf.Tensor
    sound: tf.Tensor


def precondition(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    damping: tf.Tensor,
) -> list[Preconditioned]:
    """Gradient workers apply -> receivers receive.

    Args:
        layers: The blocks of the step.
        step: The step, its gradients reduced.
        exchange: What is sent.
        damping: The damping, for what P can be.
    """
    by_rows = [one for one in layers if one.rows is not None]
    others = [one for one in layers if one.rows is None]
    return [
        *precondition_rows(by_rows, step, damping),
        *precondition_matrices(others, step, exchange, damping),
    ]


def precondition_matrices(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    damping: tf.Tensor,
) -> list[Preconditioned]:
    """What blocks without rows take: the same bits on all workers."""
    plain, own = _apply_own(layers, step)
    places = [one.position for one in layers]
    shared = exchange.share_gradients(step.group, own, places)
    finished = together(
        [
            Call(
                "finish",
                _finish_matrix,
                (plain[i], shared[i], damping),
                any_size=True,
            )
            for i in places
        ]
    )
    for one, (matrix, _, _) in zip(layers, finished, strict=True):
        matrix.set_shape(one.block.gradient_shape)
    return [
        Preconditioned(one, MatrixGradient(new), product, flag)
        for one, (new, product, flag) in zip(layers, finished, strict=True)
    ]


def _apply_own(
    layers: Sequence[ActiveBlock], step: Step
) -> tuple[dict[int, tf.Tensor], dict[int, tf.Tensor]]:
    """The W of all blocks, and P of those whose decompositions are here."""
    scale = _casts(_inverse(step.loss.unit), layers)
    matrices = together([_matrix(one, step.gradients) for one in layers])
    plain, applied = {}, {}
    for one, matrix in zip(layers, matrices, strict=True):
        i, kept = one.position, one.state.decomposition
        if kept is None:
            plain[i] = matrix * scale[one.block.dtype]
        else:
            applied[i] = kept.applying(matrix, scale[one.block.dtype])
    own = {}
    for i, made in zip(applied, together(list(applied.values())), strict=True):
        plain[i], own[i] = made
    for one in layers:
        for named in (plain, own):
            if one.position in named:
                named[one.position].set_shape(one.block.gradient_shape)
    return plain, own


def precondition_rows(
    layers: Sequence[ActiveBlock], step: Step, damping: tf.Tensor
) -> list[Preconditioned]:
    """The same of blocks with rows, where all workers are gradient workers.

    P is linear in the gradient: several workers add up theirs, and each looks
    at its own.
    """
    workers = step.group.size
    parts = [
        _Part(
            one.state.decomposition,
            _in_units(one.rows, step),
            most_rows(one.block.factors, workers),
        )
        for one in layers
        if one.rows is not None and one.state.decomposition is not None
    ]
    gradients, products, sound = _apply(parts, damping)
    if workers > 1:
        sums = step.group.all_reduce([new.matrix for new in gradients])
        gradients = [MatrixGradient(total) for total in sums]
        products = step.group.all_reduce(
            [
                part.rows.inner(new)
                for part, new in zip(parts, gradients, strict=True)
            ]
        )
    return [
        Preconditioned(*one)
        for one in zip(layers, gradients, products, sound, strict=True)
    ]


# W and P of a block, in one form.
_Pair = tuple[LayerGradient, LayerGradient]
# P, `<P, W>`, and whether P is sound.
_Made = tuple[LayerGradient, tf.Tensor, tf.Tensor]


class _Part(NamedTuple):
    """A block on one worker.

    Attributes:
        decomposition: That of its factors.
        rows: The rows of its gradient W.
        most: Up to how many rows they are cheaper than the matrix.
    """

    decomposition: Decomposition
    rows: RowGradient
    most: int

    def by_rows(self) -> _Pair:
        """W and P, as rows."""
        return self.rows, self.decomposition.apply(self.rows)

    def by_matrix(self) -> _Pair:
        """W and P, as matrices."""
        plain = MatrixGradient(self.rows.matrix)
        return plain, self.decomposition.apply(plain)


def _apply(
    parts: Sequence[_Part], damping: tf.Tensor
) -> tuple[list[LayerGradient], list[tf.Tensor], list[tf.Tensor]]:
    """P, `<P, W>` and whether P is sound of each block, the cheaper way."""
    known: dict[int, _Pair] = {}
    undecided: dict[int, list[int]] = {}
    for i, part in enumerate(parts):
        count = part.rows.a.shape[0]
        if count is None:
            # A power of two, so that blocks that differ little decide as one.
            limit = 1 << (part.most.bit_length() - 1)
            undecided.setdefault(limit, []).append(i)
        else:
            few = count <= part.most
            known[i] = part.by_rows() if few else part.by_matrix()
    made = dict(zip(known, _finish(list(known.values()), damping), strict=True))
    for limit, members in undecided.items():
        results = _decide([parts[i] for i in members], limit, damping)
        made.update(zip(members, results, strict=True))
    ordered = [made[i] for i in range(len(parts))]
    return (
        [new for new, _, _ in ordered],
        [product for _, product, _ in ordered],
        [sound for _, _, sound in ordered],
    )


def _finish(pairs: Sequence[_Pair], damping: tf.Tensor) -> list[_Made]:
    """The sound ones of some P, and their `<P, W>`."""
    plain = [old for old, _ in pairs]
    made, sound = sound_ones([new for _, new in pairs], plain, damping)
    return [
        (new, old.inner(new), flag)
        for new, old, flag in zip(made, plain, sound, strict=True)
    ]


def _finish_matrix(
    plain: tf.Tensor, made: tf.Tensor, damping: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The same of one block, P as a matrix."""
    pair = MatrixGradient(plain), MatrixGradient(made)
    ((new, product, sound),) = _finish([pair], damping)
    return new.matrix, product, sound


def _decide(
    parts: Sequence[_Part], limit: int, damping: tf.Tensor
) -> list[_Made]:
    """The same where the number of rows is known in the step only."""

    def finish(pairs: Sequence[_Pair]) -> list[tuple[tf.Tensor, ...]]:
        return [
            (new.matrix, product, sound)
            for new, product, sound in _finish(pairs, damping)
        ]

    counts = tf.stack([tf.shape(part.rows.a)[0] for part in parts])
    found = tf.cond(
        tf.reduce_max(counts) <= limit,
        lambda: finish([part.by_rows() for part in parts]),
        lambda: finish([part.by_matrix() for part in parts]),
    )
    return [
        (MatrixGradient(matrix), product, sound)
        for matrix, product, sound in found
    ]


def _in_units(rows: RowGradient, step: Step) -> RowGradient:
    """Rows of the negative log-likelihood, weighed by this worker's share."""
    scale, share = _inverse(step.loss.unit), step.share
    if share is None:
        return rows.scaled(scale)
    # Without a share there may be NaN on both sides.
    there = tf.cast(share > 0, rows.a.dtype)
    return RowGradient(
        tf.math.multiply_no_nan(rows.a, there),
        tf.math.multiply_no_nan(rows.g, tf.cast(share * scale, rows.g.dtype)),
    )


def _inverse(unit: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.ones_like(unit), unit)


def _casts(
    number: tf.Tensor, layers: Sequence[ActiveBlock]
) -> dict[tf.DType, tf.Tensor]:
    """A number in the dtypes of the blocks, once in each."""
    return {d: tf.cast(number, d) for d in {one.block.dtype for one in layers}}


def put_back(
    made: Sequence[Preconditioned], factor: tf.Tensor, gradients: Gradients
) -> Gradients:
    """Puts preconditioned gradients in the places of the gradients.

    Args:
        made: The preconditioned gradients.
        factor: What they are multiplied by.
        gradients: All gradients of the step.
    """
    replaced = list(gradients)
    factors = _casts(factor, [one.layer for one in made])
    parts = together([_weights(one, factors) for one in made])
    for one, new in zip(made, parts, strict=True):
        for i, part in zip(one.layer.indices, new, strict=True):
            replaced[i] = part
    return replaced


def _matrix(one: ActiveBlock, gradients: Gradients) -> Call[tf.Tensor]:
    """The call that makes a matrix of the gradients of a block's weights."""
    block, own = one.block, [gradients[k] for k in one.indices]
    if block.form is None:
        return Call(one.position, lambda: block.to_matrix(own))
    return Call(("matrix", block.form), block.to_matrix, (own,))


def _weights(
    made: Preconditioned, factors: Mapping[tf.DType, tf.Tensor]
) -> Call[list[tf.Tensor]]:
    """The call that makes them of what is preconditioned, times a factor."""
    block, gradient = made.layer.block, made.gradient
    factor = factors[block.dtype]

    def of_matrix(matrix: tf.Tensor, factor: tf.Tensor) -> list[tf.Tensor]:
        return block.from_matrix(matrix * factor)

    if block.form is None or not isinstance(gradient, MatrixGradient):
        whole = gradient.scaled(factor)
        return Call(made.layer.position, lambda: block.from_gradient(whole))
    given = gradient.matrix, factor
    return Call(("weights", block.form), of_matrix, given)


# How much longer than the longest possible one a gradient may be: the damping
# may have grown since the decomposition was made.
_SLACK = 1e6


def sound_ones(
    made: Sequence[LayerGradient],
    plain: Sequence[LayerGradient],
    damping: tf.Tensor,
) -> tuple[list[LayerGradient], list[tf.Tensor]]:
    """Puts plain gradients in the place of what is made of them and is wrong.

    A decomposition that is not finite, or far too large, would turn the
    weights into NaN in one step. It is found where it is used, by what it has
    made.

    No eigenvalue of a damped Fisher matrix is less than the damping (its
    square, where both factors get all of it), so its inverse makes no gradient
    longer than by the inverse of that.

    Args:
        made: The preconditioned gradients.
        plain: The gradients, in the same forms.
        damping: The damping.

    Returns:
        The gradients, and for each whether it is the preconditioned one.
    """
    if not made:
        return [], []
    sizes, plain_sizes = (
        stack_scalars([gradient.bound() for gradient in gradients])
        for gradients in (made, plain)
    )
    least = tf.minimum(damping, 1.0) ** 4  # of squared lengths
    sound = tf.math.is_finite(sizes) & (
        sizes * least <= _SLACK**2 * plain_sizes
    )
    flags = tf.unstack(sound)
    kept = [
        new.where(flag, old)
        for new, flag, old in zip(made, flags, plain, strict=True)
    ]
    return kept, flags


def renew_unsound(counters: Counters, sound: dict[int, tf.Tensor]) -> None:
    """Counts plain gradients, and has their blocks decomposed anew at once.

    Args:
        counters: What has happened to all blocks.
        sound: Whether what was made of a block's gradient is, by position.
    """
    unsound = tf.logical_not(counters.by_position(sound, otherwise=True))
    count_each(
        unsound,
        counters.plain,
        counters.paths,
        "the preconditioned gradient is not finite or far too long, the plain "
        "one takes its place; the next step decomposes the factors anew.",
    )
    counters.ask(unsound)
