"""Natural gradient steps: gradients, preconditioned and clipped.

They are preconditioned as matrices or by their rows. Other kinds of steps are
said by what they do otherwise than these.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.blocks import Block, LayerGradient, MatrixGradient, RowGradient
from tfkfac.blocks.embedding import EmbeddingBlock, PositionEmbeddingBlock
from tfkfac.compat.functions import Kind, each, fields, when
from tfkfac.compat.optimizers import rate_of
from tfkfac.kfac.active import ActiveBlock
from tfkfac.kfac.averages import Decomposition
from tfkfac.kfac.bank import (
    FIRST,
    LITTLE,
    MANY,
    SHORT,
    Clip,
    Counters,
    State,
    StepReport,
)
from tfkfac.kfac.exchange import Exchange
from tfkfac.kfac.placement import Placement
from tfkfac.linalg.tensors import stack_scalars
from tfkfac.saving.slots import Slots
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.shell.rest import follows, has_schedule, largest_rate
from tfkfac.solvers.base import most_rows
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step

# Blocks of tables of which each example reads some rows.
TABLES = (EmbeddingBlock, PositionEmbeddingBlock)
# Kind of what does the same for tensors of all sizes.
ANY_SIZE = Kind(any_size=True)


class Preconditioned(NamedTuple):
    """The preconditioned gradient P of a block, before the clip."""

    layer: ActiveBlock
    gradient: LayerGradient
    """P."""
    product: tf.Tensor
    """`<P, W>` with its gradient W; `<D, N>` and `<P, N>` of a direction D."""
    sound: tf.Tensor
    """False if W is in the place of a P that cannot be right."""


class Natural:
    """Steps along the preconditioned gradient that `kl_clip` bounds.

    Attributes:
        title: What the title of a summary says of these steps.
        sees_loss: Whether they need the loss.
        has_momenta: Whether blocks keep momenta.
        beside: Count of the numbers that travel beside each direction.
        left_out: Classes of blocks that they leave to the rest optimizer.
    """

    title = ""
    sees_loss = False
    has_momenta = False
    beside = 0
    left_out: tuple[type[Block], ...] = ()

    def __init__(
        self,
        damping: Hyperparameter,
        clip: Hyperparameter,
        momentum: float | None,
    ) -> None:
        self.momentum = momentum
        self.damping = damping
        self._clip = clip
        self._end: int | None = None
        self._knows_rates = False

    # ------------------------------------------------------------ the step
    def takes_rows(self, workers: int) -> bool:
        """True if so many workers can do without whole gradients."""
        return True

    def directions(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        exchange: Exchange,
        damping: tf.Tensor,
    ) -> list[Preconditioned]:
        """The directions that the weights of some blocks are moved in."""
        return precondition(layers, step, exchange, damping)

    def gradients(
        self,
        made: Sequence[Preconditioned],
        step: Step,
        state: State,
        damping: tf.Tensor,
        loss: tf.Tensor,
    ) -> Gradients:
        """Gradients for the inner optimizer, with the length of the step.

        Args:
            made: The directions.
            step: The step.
            state: The state of this replica.
            damping: The damping, float64.
            loss: The mean loss of the group, 0 unless `sees_loss`.
        """
        del loss
        if not made:
            return step.gradients
        products = [one.product for one in made]
        rate = step.job.inner_optimizer.learning_rate
        limit = None
        if self._clip.get() is not None:
            limit = self._clip.at(step.job.clock)
        clip = clip_step(products, limit, rate)
        inner, shown = step.job.inner_optimizer, None
        if limit is not None and isinstance(inner, keras.optimizers.SGD):
            shown = rate
            if has_schedule(inner):  # which may warm up
                largest = tf.convert_to_tensor(state.report.largest_rate)
                shown = tf.maximum(tf.cast(rate, largest.dtype), largest)
        ruled = state.report.record(clip, damping, shown)
        layers, limit = [one.layer for one in made], self._clip.get()
        when(ruled, lambda: hint_at_clip(layers, step, state.report, limit))
        return put_back(made, clip.factor, step.gradients)

    # --------------------------------------------------- binding and state
    def expect(self, end: int, job: Job, states: Sequence[State]) -> None:
        """Receives the step where the run that `fit` announces ends."""
        self._end, self._knows_rates = end, False
        self.find_rates(job, states)

    def find_rates(self, job: Job, states: Sequence[State]) -> None:
        """Finds the largest rates of schedules, once for a run."""
        if self._knows_rates:
            return
        with tf.init_scope():
            self.update_rates(job, states)
        self._knows_rates = bool(states)

    def update_rates(self, job: Job, states: Sequence[State]) -> None:
        """Updates the largest rates of schedules that others are shares of."""
        for optimizer in (job.inner_optimizer, job.rest_optimizer):
            if optimizer is not None and follows(optimizer):
                rate_of(optimizer).measure(self._end)
        if has_schedule(job.inner_optimizer):
            largest = largest_rate(job.inner_optimizer, self._end)
            for state in states:
                state.report.largest_rate.assign(largest)

    def sections(self, job: Job) -> Sequence[Slots]:
        """State that it keeps between steps, of one replica."""
        return ()

    def bytes(self, placement: Placement, rank: int) -> dict[str, int]:
        """Bytes of the state of these steps, by name."""
        return {}


# Root mean square of inputs far from unit scale, and a loss, in nats of a term,
# that takes many steps: of 14 healthy runs the clip ruled an autoencoder's.
_FAR, _HIGH = 3.0, 20.0


def hint_at_clip(
    layers: Sequence[ActiveBlock],
    step: Step,
    report: StepReport,
    limit: Any,
) -> None:
    """Name the cause of short first steps, or of steps ruled by the clip."""
    head = "kl_clip has left less than {:.0%} of most of the first {} steps. "
    names, is_far = [step.job.name], tf.constant(False)
    # The backward pass ends with the first layer.
    first = max(layers, key=lambda layer: max(r.order for r in layer.records))
    inputs, block = first.records[-1].inputs, first.block
    has_scale = "A" in block.factors and not isinstance(block, TABLES)
    if has_scale and tf.is_tensor(inputs) and inputs.dtype.is_floating:
        squares = tf.square(tf.cast(inputs, tf.float32))
        is_far = tf.sqrt(tf.reduce_mean(squares)) > _FAR
        text = (
            f"{head.format(SHORT, FIRST)}The inputs of layer '{block.path}' "
            "are far from unit scale: normalise the inputs of the model, or "
            'try KFAC(fisher="monte_carlo").'
        )
        count_each(is_far, report.hints, names, text)
    loss = tf.math.divide_no_nan(step.own_loss(), step.loss.unit)
    is_low = step.group.size * loss < _HIGH
    less = f", KFAC(kl_clip={limit / 4:g})," if isinstance(limit, float) else ""
    text = (
        f"{head.format(LITTLE, FIRST)}Try a smaller one{less} or a larger "
        "damping; see `optimizer.last_step`."
    )
    is_ruled = (report.clipped >= MANY) & is_low & ~is_far
    count_each(is_ruled, report.hints, names, text)


def clip_step(
    products: Sequence[tf.Tensor], kl_clip: tf.Tensor | None, learning_rate: Any
) -> Clip:
    """`nu = min(1, sqrt(kl_clip / (lr^2 |sum <P, W>|)))`.

    `lr^2 <P, W>` is the squared length of a step in the Fisher metric, about
    twice the change of the model's predictions in nats (Distributed K-FAC,
    eq. 16). All preconditioned gradients P are scaled by the same factor, 1 if
    there is nothing to clip. The products are `<P, W>` of each block.
    """
    total = tf.abs(tf.reduce_sum(stack_scalars(products)))
    length = tf.square(tf.cast(learning_rate, tf.float64)) * total
    if kl_clip is None:
        return Clip(tf.ones_like(length), length)
    clipped = tf.sqrt(
        tf.math.divide_no_nan(tf.cast(kl_clip, tf.float64), length)
    )
    factor = tf.where(length > 0, tf.minimum(clipped, 1.0), 1.0)
    return Clip(factor, length)


def precondition(
    layers: Sequence[ActiveBlock],
    step: Step,
    exchange: Exchange,
    damping: tf.Tensor,
) -> list[Preconditioned]:
    """Gradient workers apply -> receivers receive.

    The gradients are reduced. The damping says how long P can be.
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
    """The P of blocks without rows: the same bits on all workers.

    All workers have the W, those with decompositions make the P.
    """
    plain, own = matrix_pairs(layers, step)
    places = [one.position for one in layers]
    made = {i: [P] for i, P in zip(places, own, strict=True) if P is not None}
    shared = exchange.share_gradients(step.group, made, places)
    finished = each(
        _finish_matrix,
        plain,
        [shared[i][0] for i in places],
        damping,
        like=ANY_SIZE,
    )
    set_shapes(layers, [matrix for matrix, _, _ in finished])
    return [
        Preconditioned(one, MatrixGradient(new), product, flag)
        for one, (new, product, flag) in zip(layers, finished, strict=True)
    ]


def matrix_pairs(
    layers: Sequence[ActiveBlock], step: Step
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """The W of blocks, and the `A^-1 W G^-1` of those decomposed here."""
    scales = _casts(_inverse(step.loss.unit), layers)
    matrices = each(
        [one.block.to_matrix for one in layers],
        [[step.gradients[k] for k in one.indices] for one in layers],
        like=[_form("matrix", one) for one in layers],
    )
    kept = [one.state.decomposition for one in layers]
    applied = each(Decomposition.precondition, kept, matrices, scales)
    plain = [
        matrix * scale if both is None else both[0]
        for matrix, scale, both in zip(matrices, scales, applied, strict=True)
    ]
    own = [both and both[1] for both in applied]
    for column in (plain, own):
        set_shapes(layers, column)
    return plain, own


def set_shapes(
    layers: Sequence[ActiveBlock], matrices: Sequence[tf.Tensor | None]
) -> None:
    """Says the shapes of gradient matrices that calls have returned."""
    for one, matrix in zip(layers, matrices, strict=True):
        if matrix is not None:
            matrix.set_shape(one.block.gradient_shape)


def _form(what: str, one: ActiveBlock) -> Kind | None:
    """Kind of blocks between matrices and gradients of weights."""
    form = one.block.form
    return None if form is None else Kind((what, form))


def precondition_rows(
    layers: Sequence[ActiveBlock], step: Step, damping: tf.Tensor
) -> list[Preconditioned]:
    """The same of blocks with rows, where all workers are gradient workers.

    P is linear in the gradient: several workers add up theirs, and each looks
    at its own.
    """
    parts = row_parts(layers, step)

    def finish(pairs: Sequence[Pair]) -> list[_Made]:
        return _finish(pairs, damping)

    gradients, products, sound = fields(apply_rows(parts, finish), 3)
    if step.group.size > 1:
        sums = step.group.all_reduce([new.matrix for new in gradients])
        gradients = [MatrixGradient(total) for total in sums]
        pairs = zip(parts, gradients, strict=True)
        inner = [part.rows.inner(new) for part, new in pairs]
        products = step.group.all_reduce(inner)
    return [
        Preconditioned(*one)
        for one in zip(layers, gradients, products, sound, strict=True)
    ]


# W and `A^-1 W G^-1` of a block, in one form.
Pair = tuple[LayerGradient, LayerGradient]
# P, `<P, W>`, and whether P is sound.
_Made = tuple[LayerGradient, tf.Tensor, tf.Tensor]


class RowPart(NamedTuple):
    """A block on one worker: `most` rows of W are cheaper than the matrix."""

    decomposition: Decomposition
    rows: RowGradient
    most: int

    def by_rows(self) -> Pair:
        """W and P, as rows."""
        return self.rows, self.decomposition.apply(self.rows)

    def by_matrix(self) -> Pair:
        """W and P, as matrices."""
        plain = MatrixGradient(self.rows.matrix)
        return plain, self.decomposition.apply(plain)

    @property
    def limit(self) -> int | None:
        """The most rows, where only the step knows how many there are.

        A power of two, so that blocks that differ little decide as one.
        """
        if self.rows.a.shape[0] is not None:
            return None
        return 1 << (self.most.bit_length() - 1)


def row_parts(layers: Sequence[ActiveBlock], step: Step) -> list[RowPart]:
    """Decompositions and rows of blocks, in units of the loss."""
    return [
        RowPart(
            one.state.decomposition,
            _in_units(one.rows, step),
            most_rows(one.block.factors, step.group.size),
        )
        for one in layers
        if one.rows is not None and one.state.decomposition is not None
    ]


def apply_rows(
    parts: Sequence[RowPart],
    make: Callable[[Sequence[Pair]], list[tuple[Any, ...]]],
) -> list[tuple[Any, ...]]:
    """Preconditions the gradient of each block, the cheaper way.

    Args:
        parts: The blocks.
        make: Function of some pairs of W and `A^-1 W G^-1`. What it makes of
            each begins with a gradient and goes on with tensors.

    Returns:
        What is made of all pairs.
    """
    made: dict[int, tuple[Any, ...]] = {}
    for limit in dict.fromkeys(part.limit for part in parts):
        members = [i for i, part in enumerate(parts) if part.limit == limit]
        some = [parts[i] for i in members]
        if limit is None:
            results = make(
                [
                    p.by_rows()
                    if p.rows.a.shape[0] <= p.most
                    else p.by_matrix()
                    for p in some
                ]
            )
        else:
            results = _decide(some, limit, make)
        made.update(zip(members, results, strict=True))
    return [made[i] for i in range(len(parts))]


def _finish(pairs: Sequence[Pair], damping: tf.Tensor) -> list[_Made]:
    """Replaces unusable P by W; returns them with `<P, W>`."""
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
    parts: Sequence[RowPart],
    limit: int,
    make: Callable[[Sequence[Pair]], list[tuple[Any, ...]]],
) -> list[tuple[Any, ...]]:
    """The same where the number of rows is known in the step only."""

    def tensors(pairs: Sequence[Pair]) -> list[tuple[tf.Tensor, ...]]:
        return [(gradient.matrix, *rest) for gradient, *rest in make(pairs)]

    counts = tf.stack([tf.shape(part.rows.a)[0] for part in parts])
    found = tf.cond(
        tf.reduce_max(counts) <= limit,
        lambda: tensors([part.by_rows() for part in parts]),
        lambda: tensors([part.by_matrix() for part in parts]),
    )
    return [(MatrixGradient(matrix), *rest) for matrix, *rest in found]


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


def _casts(number: tf.Tensor, layers: Sequence[ActiveBlock]) -> list[tf.Tensor]:
    """A number in the dtype of each block, made once for all of a dtype."""
    dtypes = [one.block.dtype for one in layers]
    casts = {dtype: tf.cast(number, dtype) for dtype in set(dtypes)}
    return [casts[dtype] for dtype in dtypes]


def put_back(
    made: Sequence[Preconditioned], factor: tf.Tensor, gradients: Gradients
) -> Gradients:
    """Puts preconditioned gradients, times a factor, in their places."""
    replaced = list(gradients)
    layers = [one.layer for one in made]
    parts = each(
        [_weights(one) for one in layers],
        [one.gradient for one in made],
        _casts(factor, layers),
        like=[
            _form("weights", one.layer)
            if isinstance(one.gradient, MatrixGradient)
            else None
            for one in made
        ],
    )
    for one, new in zip(made, parts, strict=True):
        for i, part in zip(one.layer.indices, new, strict=True):
            replaced[i] = part
    return replaced


def _weights(
    one: ActiveBlock,
) -> Callable[[LayerGradient, tf.Tensor], list[tf.Tensor]]:
    """Function from P, times a factor, to the parts of the weights."""
    return lambda P, factor: one.block.from_gradient(P.scaled(factor))


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

    Returns:
        The gradients, in the forms that they have, and for each whether it is
        the preconditioned one.
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


def renew_unsound(counters: Counters, made: Sequence[Preconditioned]) -> None:
    """Counts plain gradients, and has their blocks decomposed anew at once."""
    sound = {one.layer.position: one.sound for one in made}
    unsound = tf.logical_not(counters.flags(sound))
    count_each(
        unsound,
        counters.plain,
        counters.paths,
        "the preconditioned gradient is not finite or far too long, the plain "
        "one takes its place; the next step decomposes the factors anew.",
    )
    counters.request_decomposition(unsound)
