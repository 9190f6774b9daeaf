"""Batch statistics of a block: Kronecker factors from recorded rows."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.blocks.rows import Rows, Statistic, size_of
from tfkfac.blocks.subsample import Examples, Subsample, subsample_rows
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import Kind, each

K = TypeVar("K")


def batch_statistics(
    layers: Mapping[K, tuple[Block, Sequence[Record]]],
    sharing: str,
    scale: tf.Tensor | float = 1.0,
    weightless: Sequence[tf.Tensor] = (),
    terms: tf.Tensor | None = None,
    part: Subsample | None = None,
    unscale: tf.Tensor | None = None,
) -> dict[K, dict[str, Statistic]]:
    """Sums the factors of one batch over all recorded calls of each layer.

    With `B` examples, `S` shared positions and a loss that is the mean over
    `T` terms, "expand" gives `A = 1/(B S) sum a a^T` and `G = T sum c c^T`
    with the gradient `c` of that mean; "reduce" averages `a` and sums `c` over
    the positions first (Eschenhagen et al., 2023). The rows of several calls
    are pooled. `scale` makes a term's own gradient of what the tape has seen,
    the gradient of a mean times some constants.

    Args:
        layers: Blocks, with the records of their calls in this step.
        sharing: "expand", "reduce" or "average".
        scale: Factor of the gradients.
        weightless: Bools of shape `(B, positions)`, True where a sample
            weight is zero. What carries no loss does not count in A.
        terms: `T`. None is the leading dimension of the layer, and the
            gradients must be multiplied by it besides `scale`.
        part: The part of the examples that stands for all; None is all.
        unscale: Factor of the gradients before their products
            are taken, which overflow under a large loss scale. `scale`
            multiplies the sums of products.

    Returns:
        Sum and count of each factor by name, for each of the layers.
    """
    if part is not None:  # what variables hold is read once
        part = part._replace(turn=tf.convert_to_tensor(part.turn))
    context = _Context(
        sharing, tf.convert_to_tensor(scale), terms, part, unscale
    )
    rows = [
        _of_call(block, record, context, weightless)
        for block, records in layers.values()
        for record in records
    ]
    functions = [function for function, _, _ in rows]
    likes = [kind for _, kind, _ in rows]
    given = [tensors for _, _, tensors in rows]
    # What is not known is left out.
    known = tuple(() if t is None else (t,) for t in (terms, unscale))
    turn = () if part is None else (part.turn,)
    made = iter(each(functions, given, context.scale, *known, turn, like=likes))
    return {
        key: _pooled(block, list(itertools.islice(made, len(records))))
        for key, (block, records) in layers.items()
    }


def _pooled(
    block: Block, every: Sequence[dict[str, Statistic]]
) -> dict[str, Statistic]:
    """Adds up the calls of a layer."""
    shapes = block.factor_shapes
    for one in every:
        for name, statistic in one.items():
            statistic.total.set_shape(shapes[name])
    first, *others = every
    # The terms of a further call are the same terms.
    statistics = {"G": Statistic(_added(every, "G"), every[-1]["G"].count)}
    if "A" in first:
        count = sum((one["A"].count for one in others), first["A"].count)
        statistics["A"] = Statistic(_added(every, "A"), count)
    return statistics


def output_total(
    block: Block,
    records: Sequence[Record],
    sharing: str,
    part: Subsample | None,
) -> tf.Tensor:
    """Sums `g g^T` over the calls of a layer, as `batch_statistics` does."""
    totals = []
    for record in records:
        rows, _, examples = _rows(block, record, part)
        total = block.output_statistic(rows.g, sharing)
        totals.append(_times(total, _weight(examples, total.dtype)))
    return tf.add_n(totals)


class _Context(NamedTuple):
    """Arguments of `batch_statistics` that all calls of a layer share."""

    sharing: str
    scale: tf.Tensor
    terms: tf.Tensor | None
    part: Subsample | None
    unscale: tf.Tensor | None


def _added(every: Sequence[dict[str, Statistic]], name: str) -> tf.Tensor:
    first, *others = (one[name].total for one in every)
    return sum(others, first)


# Inputs, gradient and moments of a call.
_Given = tuple[Any, ...]


def _of_call(
    block: Block,
    record: Record,
    context: _Context,
    weightless: Sequence[tf.Tensor],
) -> tuple[Callable[..., dict[str, Statistic]], Kind | None, _Given]:
    """Function of one call's sums and counts, its kind and first argument."""
    plain = record.mask is None and not weightless
    alike, part = block.alike(record) if plain else None, context.part
    if alike is None:
        return lambda *_: _sums(block, record, context, weightless), None, ()

    def sums(
        given: _Given,
        scale: tf.Tensor,
        terms: Sequence[tf.Tensor],
        unscale: Sequence[tf.Tensor],
        turn: Sequence[tf.Tensor],
    ) -> dict[str, Statistic]:
        inputs, gradient, moments = given
        own = dataclasses.replace(
            record, inputs=inputs, gradient=gradient, moments=moments or None
        )
        known = _Context(
            context.sharing,
            scale,
            terms[0] if terms else None,
            None if part is None else part._replace(turn=turn[0]),
            unscale[0] if unscale else None,
        )
        return _sums(block, own, known, ())

    taken = None if part is None else (part.fraction, part.least)
    key = "statistics", alike.key, context.sharing, taken
    # Convolutions are placed.
    kind = Kind(key, alike.any_size, placed=not alike.any_size)
    moments = tuple(record.moments or ())
    return sums, kind, (record.inputs, record.gradient, moments)


def _sums(
    block: Block,
    record: Record,
    context: _Context,
    weightless: Sequence[tf.Tensor],
) -> dict[str, Statistic]:
    sharing, scale, terms, part, unscale = context
    rows, size, examples = _rows(block, record, part)
    count = tf.cast(size if terms is None else terms, block.dtype)
    factor = tf.cast(scale, block.dtype)
    if terms is None:
        factor *= count
    g = rows.g
    if unscale is not None:
        g *= tf.cast(unscale, g.dtype)
    total = block.output_statistic(g, sharing) * tf.square(factor)
    whole = _weight(examples, block.dtype)
    sums = {"G": Statistic(_times(total, whole), count)}
    if "A" in block.factors:
        weights = _row_weights(block, rows, weightless, size, examples)
        new = _input_statistic(block, rows, weights, sharing)
        sums["A"] = Statistic(*(_times(t, whole) for t in new))
    return sums


def _input_statistic(
    block: Block, rows: Rows, weights: tf.Tensor | None, sharing: str
) -> Statistic:
    """Sums up A, without the rows if all of them count alike."""
    if rows.gram is not None and weights is None and sharing == "expand":
        return rows.gram()
    return block.input_statistic(rows.a, weights, sharing)


def _rows(
    block: Block, record: Record, part: Subsample | None
) -> tuple[Rows, int | tf.Tensor, Examples | None]:
    """Rows, the examples of the batch, and those taken if not all are."""
    if part is not None:
        return subsample_rows(block, record, part)
    rows = block.rows(record)
    return rows, size_of(rows.g, 0), None


def _weight(examples: Examples | None, dtype: tf.DType) -> tf.Tensor | None:
    """Factor from a sum over some of the examples to one over all."""
    return None if examples is None else tf.cast(examples.weight, dtype)


def _times(total: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    return total if weight is None else total * tf.cast(weight, total.dtype)


def _row_weights(
    block: Block,
    rows: Rows,
    weightless: Sequence[tf.Tensor],
    size: int | tf.Tensor,
    examples: Examples | None,
) -> tf.Tensor | None:
    """1 for rows that carry loss, else 0; None when nothing says otherwise.

    A padded position, or one of weight zero, may still carry loss: a later
    layer may ignore the mask, another output may have another weight. So it is
    left out only if it has no gradient either.
    """
    if not weightless and rows.mask is None:
        return None
    shape = tf.stack([size, tf.shape(rows.g)[1]])
    suspects = [_spread(w, shape) for w in weightless]
    if examples is not None:
        suspects = [examples.of(suspect) for suspect in suspects]
    if rows.mask is not None:
        suspects.append(tf.logical_not(rows.mask))
    features = list(range(2, rows.g.shape.rank))
    idle = tf.reduce_all(tf.equal(rows.g, 0), features)
    suspect = tf.reduce_any(tf.stack(suspects), 0)
    return tf.cast(tf.logical_not(tf.logical_and(suspect, idle)), block.dtype)


def _spread(weightless: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Zero weights of a loss, `(B, positions)`, as those of a layer's rows.

    The layer may have other positions than the loss, and may see the batch
    folded with other dimensions.
    """

    def by_position() -> tf.Tensor:
        return tf.reshape(weightless, shape)

    def by_example() -> tf.Tensor:
        example = tf.range(shape[0]) * tf.shape(weightless)[0]
        example //= tf.maximum(shape[0], 1)
        whole = tf.gather(tf.reduce_all(weightless, 1), example)
        return tf.broadcast_to(whole[:, None], shape)

    same = tf.equal(tf.size(weightless), tf.reduce_prod(shape))
    return tf.cond(same, by_position, by_example)
