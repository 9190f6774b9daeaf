"""Batch statistics of a block: Kronecker factors from recorded rows.

They may be of a subsample of the examples, and are of the backward pass that is
applied, where there were several. Somebody may take two gradients of one
forward pass: of two losses, of which the sum is applied; of one loss for
another model, as in a GAN; of a loss that itself has a gradient in it. Each
leaves a record for the same call of a layer. The gradient that is applied
decides: it is the product of the inputs with the recorded gradients of the last
pass of each call, of the first (as in the GAN of TensorFlow's tutorial), or of
all.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.blocks.rows import Rows, Statistic, size_of
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import Kind, each, shared_call

# The measured part: a quarter, but so many of all workers together. Factors of
# a few examples cost accuracy, and a small batch's are cheap.
_QUARTER, _LEAST = 0.25, 64


class Subsample(NamedTuple):
    """The part of each batch that statistics are taken of.

    Attributes:
        fraction: Share of the examples, in (0, 1].
        turn: Number of parts taken before, int64. The next one has other
            examples.
        least: Least number of examples, if there are as many.
    """

    fraction: float
    turn: tf.Tensor
    least: int = 1


def choose_subsample(
    fraction: float | None, turn: tf.Tensor, workers: int
) -> Subsample | None:
    """The part of a worker's batch; None is all of it.

    Args:
        fraction: Share of the examples; None is the measured part.
        turn: Number of parts taken before, int64.
        workers: Number of workers whose statistics are added up.
    """
    if fraction is None:
        return Subsample(_QUARTER, turn, math.ceil(_LEAST / workers))
    return Subsample(fraction, turn) if fraction < 1 else None


class Examples:
    """Some examples of a batch, evenly spaced and never none of several.

    Not the first ones: batches may be sorted, and the first axis of a layer
    may be time or patches. Turn by turn each example is taken as often as any
    other, so that what they come to, times `weight`, has no bias.

    Attributes:
        weight: Number of examples of the batch that each stands for, float64.

    Args:
        size: Number of examples of the batch.
        part: The part to take.
    """

    def __init__(self, size: int | tf.Tensor, part: Subsample) -> None:
        def choose(
            size: tf.Tensor, turn: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            share = part.fraction * tf.cast(size, tf.float64)
            count = tf.cast(tf.math.ceil(share), tf.int64)
            count = tf.maximum(count, tf.minimum(size, part.least))
            # Nothing is taken of an empty batch, and divided by.
            some, divisor = tf.maximum(size, 1), tf.maximum(count, 1)
            indices = (turn * count % some + tf.range(count) * size) // divisor
            return indices, tf.cast(size, tf.float64) / tf.cast(
                divisor, tf.float64
            )

        self._indices, self.weight = shared_call(
            ("examples", part.fraction, part.least),
            choose,
            tf.cast(size, tf.int64),
            tf.convert_to_tensor(part.turn, tf.int64),
            any_size=True,
        )

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Takes them of a tensor with the batch, or 1 for all, first."""
        taken = shared_call(
            "take examples", _take, tensor, self._indices, any_size=True
        )
        taken.set_shape([None, *tensor.shape[1:]])
        return taken

    def of_optional(self, tensor: tf.Tensor | None) -> tf.Tensor | None:
        """The same, and None of None."""
        return None if tensor is None else self.of(tensor)


def _take(tensor: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    size = tf.shape(tensor, tf.int64)[0]
    return tf.gather(tensor, indices % tf.maximum(size, 1))


def subsample_rows(
    block: Block, record: Record, part: Subsample
) -> tuple[Rows, int | tf.Tensor, Examples]:
    """Rows of some of the examples of a call.

    They are chosen before there are rows, if the record can be taken apart by
    examples: that is what makes it cheap.

    Args:
        block: The block.
        record: The record of the call.
        part: The part to take.

    Returns:
        The rows, the number of examples of the whole batch, and the examples
        that have been taken.
    """
    if block.examples_first and _is_plain(record):
        size = size_of(record.gradient, 0)
        examples = Examples(size, part)
        cut = dataclasses.replace(
            record,
            inputs=examples.of(record.inputs),
            gradient=examples.of(record.gradient),
            mask=examples.of_optional(record.mask),
        )
        return block.rows(cut), size, examples
    rows = block.rows(record)
    size = size_of(rows.g, 0)
    examples = Examples(size, part)
    some = Rows(
        examples.of_optional(rows.a),
        examples.of(rows.g),
        examples.of_optional(rows.mask),
    )
    return some, size, examples


def _is_plain(record: Record) -> bool:
    """True if only input, gradient and mask can be of single examples."""
    others = tf.nest.flatten(dict(record.kwargs))
    return isinstance(record.inputs, tf.Tensor) and all(
        isinstance(value, (bool, int, float, str, type(None)))
        for value in others
    )


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


# The records of each call of a layer, in the order in which they came.
Calls = Sequence[Sequence[Record]]

# Squared relative distance of a gradient from what it should be.
_TOLERANCE = 1e-4


def records_of(
    block: Block, calls: Calls, gradients: Sequence[tf.Tensor]
) -> tuple[list[Record], tf.Tensor | None]:
    """Returns one record of each call, of the pass that is applied.

    Args:
        block: The block.
        calls: Records of the calls of its layer.
        gradients: The gradients of its weights on this replica. They may be
            off by a factor, as clipping makes them.

    Returns:
        The records, and whether they explain the gradients; None if there was
        no choice.
    """
    if all(len(records) == 1 for records in calls):
        return [records[0] for records in calls], None
    lengths = [len(records) for records in calls]
    last = [float(i == n - 1) for n in lengths for i in range(n)]
    first = [float(i == 0) for n in lengths for i in range(n)]
    every = [1.0] * len(last)
    choices = tf.constant([last, every, first], block.dtype)
    parts = [block.gradient(block.rows(r)) for r in chain(*calls)]
    best, explains = _compare(parts, block.to_matrix(gradients), choices)
    chosen = tf.split(choices[best], lengths)
    merged = [
        _merge(records, tf.unstack(own, len(records)))
        for records, own in zip(calls, chosen, strict=True)
    ]
    return merged, explains


def _compare(
    parts: Sequence[tf.Tensor], gradient: tf.Tensor, choices: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """The first choice that makes the gradient, or else its direction.

    Returns:
        Its place, or that of the nearest, and whether there is one.
    """
    rows = [tf.reshape(part, [1, -1]) for part in (*parts, gradient)]
    matrix = tf.concat(rows, 0)
    products = tf.matmul(matrix, matrix, transpose_b=True)
    gram, along, size = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    lengths = tf.reduce_sum(tf.matmul(choices, gram) * choices, 1)
    cosines = tf.linalg.matvec(choices, along)
    errors = size - 2 * cosines + lengths
    shares = tf.math.divide_no_nan(tf.square(cosines), lengths * size)
    # The opposite direction is another one.
    sines = tf.where(cosines > 0, 1 - shares, tf.ones_like(shares))
    same, parallel = errors <= _TOLERANCE * size, sines <= _TOLERANCE
    best = tf.where(
        tf.reduce_any(same),
        _first(same),
        tf.where(tf.reduce_any(parallel), _first(parallel), tf.argmin(sines)),
    )
    return best, tf.reduce_any(tf.logical_or(same, parallel))


def _first(flags: tf.Tensor) -> tf.Tensor:
    """Place of the first flag that is set."""
    return tf.argmax(tf.cast(flags, tf.int32))


def _merge(records: Sequence[Record], chosen: Sequence[tf.Tensor]) -> Record:
    """One record of a call, its gradient the sum of the chosen ones."""
    gradients = [
        tf.math.multiply_no_nan(r.gradient, tf.cast(c, r.gradient.dtype))
        for r, c in zip(records, chosen, strict=True)
    ]
    return dataclasses.replace(records[-1], gradient=tf.add_n(gradients))
