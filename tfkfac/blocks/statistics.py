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

    It is a share of the examples in (0, 1], but at least so many if there are
    as many. `turn`, int64, is the number of parts taken before: the next one
    has other examples.
    """

    fraction: float
    turn: tf.Tensor
    least: int = 1


def choose_subsample(
    fraction: float | None, turn: tf.Tensor, workers: int
) -> Subsample | None:
    """The part of a worker's batch, None if it is all of it.

    A fraction of None is the measured part, for so many workers whose
    statistics are added up.
    """
    if fraction is None:
        return Subsample(_QUARTER, turn, math.ceil(_LEAST / workers))
    return Subsample(fraction, turn) if fraction < 1 else None


class Examples:
    """Some examples of a batch, evenly spaced and never none of several.

    Not the first ones: batches may be sorted, and the first axis of a layer
    may be time or patches. Turn by turn each example is taken as often as any
    other, so that what they come to, times `weight`, has no bias. That is the
    number of examples of the batch that each stands for, float64.
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

    def of(self, tensor: tf.Tensor | None) -> tf.Tensor | None:
        """Takes them of a tensor with the batch, or 1 for all, first."""
        if tensor is None:
            return None
        taken = shared_call(
            "take examples", _take, tensor, self._indices, any_size=True
        )
        taken.set_shape([None, *tensor.shape[1:]])
        return taken


def _take(tensor: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    size = tf.shape(tensor, tf.int64)[0]
    return tf.gather(tensor, indices % tf.maximum(size, 1))


def _is_plain(record: Record) -> bool:
    """True if only input, gradient and mask can be of single examples."""
    others = tf.nest.flatten(dict(record.kwargs))
    return isinstance(record.inputs, tf.Tensor) and all(
        isinstance(value, (bool, int, float, str, type(None)))
        for value in others
    )


K = TypeVar("K")


class View(NamedTuple):
    """Part and weights of a batch, of which statistics are taken.

    Attributes:
        sharing: "expand", "reduce" or "average".
        scale: Factor of the gradients. It makes a term's own gradient of what
            the tape has seen, the gradient of a mean times some constants.
        weightless: Bools of shape `(B, positions)`, True where a sample
            weight is zero. What carries no loss does not count in A.
        terms: The number `T`. None is the leading dimension of the layer, and
            the gradients must be multiplied by it besides `scale`.
        part: The part of the examples that stands for all; None is all.
        weights: Weight of the Fisher matrix of a term of each loss; empty if
            there is one loss.
        unscale: Factor of the gradients before their products are taken,
            which overflow under a large loss scale; None is 1.
    """

    sharing: str
    scale: tf.Tensor | float = 1.0
    weightless: Sequence[tf.Tensor] = ()
    terms: tf.Tensor | None = None
    part: Subsample | None = None
    weights: Sequence[tf.Tensor] = ()
    unscale: tf.Tensor | None = None

    def numbers(self) -> dict[str, tf.Tensor]:
        """Its numbers as tensors, without those that a step does not know."""
        turn = None if self.part is None else self.part.turn
        named = {
            "scale": self.scale,
            "terms": self.terms,
            "unscale": self.unscale,
            "turn": turn,
        }
        known = {name: x for name, x in named.items() if x is not None}
        return {name: tf.convert_to_tensor(x) for name, x in known.items()}

    def with_numbers(self, numbers: Mapping[str, tf.Tensor]) -> "View":
        """The same view with such tensors in their places."""
        own, part = dict(numbers), self.part
        if part is not None:
            part = part._replace(turn=own.pop("turn"))
        return self._replace(part=part, **own)


def batch_statistics(
    layers: Mapping[K, tuple[Block, Sequence[Record]]], view: View
) -> dict[K, dict[str, Statistic]]:
    """Sums the factors of one batch over all recorded calls of each layer.

    With `B` examples, `S` shared positions and a loss that is the mean over
    `T` terms, "expand" gives `A = 1/(B S) sum a a^T` and `G = T sum c c^T`
    with the gradient `c` of that mean; "reduce" averages `a` and sums `c` over
    the positions first (Eschenhagen et al., 2023). The rows of several calls
    are pooled.

    Returns:
        Sum and count of each factor by name, for each of the layers.
    """
    if not layers:
        return {}
    numbers = view.numbers()  # what variables hold is read once
    view = view.with_numbers(numbers)
    rows = [
        _of_call(block, record, view)
        for block, records in layers.values()
        for record in records
    ]
    functions, likes, given = map(list, zip(*rows, strict=True))
    made = iter(each(functions, given, numbers, like=likes))
    return {
        key: _pooled(block, list(itertools.islice(made, len(records))))
        for key, (block, records) in layers.items()
    }


def _pooled(
    block: Block, every: Sequence[dict[str, Statistic]]
) -> dict[str, Statistic]:
    """Adds up the calls of a layer."""
    shapes, pooled = block.factor_shapes, {}
    for name in every[0]:
        own = [one[name] for one in every]
        for statistic in own:
            statistic.total.set_shape(shapes[name])
        total = _added([statistic.total for statistic in own])
        # The terms of a further call are the same terms.
        count = own[-1].count
        if name == "A":
            count = _added([statistic.count for statistic in own])
        pooled[name] = Statistic(total, count)
    return pooled


def output_total(
    block: Block, records: Sequence[Record], view: View
) -> tf.Tensor:
    """Sums `g g^T` over the calls of a layer, as `batch_statistics` does."""
    totals = []
    for record in records:
        rows, _, examples = _rows(block, record, view.part)
        total = block.output_statistic(rows.g, view.sharing)
        totals.append(_of_all(total, examples))
    return tf.add_n(totals)


def _added(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    first, *others = tensors
    return sum(others, first)


# Inputs, gradient and moments of a call.
_Given = tuple[Any, ...]


def _of_call(
    block: Block, record: Record, view: View
) -> tuple[Callable[..., dict[str, Statistic]], Kind | None, _Given]:
    """Function of one call's sums and counts, its kind and first argument."""
    plain = record.mask is None and not view.weightless
    alike, part = block.alike(record) if plain else None, view.part
    if alike is None:
        return lambda *_: _sums(block, record, view), None, ()

    def sums(
        given: _Given, numbers: Mapping[str, tf.Tensor]
    ) -> dict[str, Statistic]:
        inputs, gradient, moments = given
        own = dataclasses.replace(
            record, inputs=inputs, gradient=gradient, moments=moments or None
        )
        return _sums(block, own, view.with_numbers(numbers))

    taken = None if part is None else (part.fraction, part.least)
    key = "statistics", alike.key, view.sharing, taken
    # Convolutions are placed.
    kind = Kind(key, alike.any_size, placed=not alike.any_size)
    moments = tuple(record.moments or ())
    return sums, kind, (record.inputs, record.gradient, moments)


def _sums(block: Block, record: Record, view: View) -> dict[str, Statistic]:
    rows, size, examples = _rows(block, record, view.part)
    terms = size if view.terms is None else view.terms
    count = tf.cast(terms, block.dtype)
    factor = tf.cast(view.scale, block.dtype)
    if view.terms is None:
        factor *= count
    g = rows.g
    if view.unscale is not None:
        g *= tf.cast(view.unscale, g.dtype)
    total = block.output_statistic(g, view.sharing) * tf.square(factor)
    sums = {"G": Statistic(_of_all(total, examples), count)}
    if "A" in block.factors:
        weights = _row_weights(block, rows, view.weightless, size, examples)
        if rows.gram and weights is None and view.sharing == "expand":
            new = rows.gram()  # all rows count alike
        else:
            new = block.input_statistic(rows.a, weights, view.sharing)
        sums["A"] = Statistic(*(_of_all(x, examples) for x in new))
    return sums


def _rows(
    block: Block, record: Record, part: Subsample | None
) -> tuple[Rows, int | tf.Tensor, Examples | None]:
    """Rows, the examples of the batch, and those taken if not all are.

    They are chosen before there are rows, if the record can be taken apart by
    examples: that is what makes it cheap.
    """
    if part is not None and block.examples_first and _is_plain(record):
        size = size_of(record.gradient, 0)
        examples = Examples(size, part)
        cut = dataclasses.replace(
            record,
            inputs=examples.of(record.inputs),
            gradient=examples.of(record.gradient),
            mask=examples.of(record.mask),
        )
        return block.rows(cut), size, examples
    rows = block.rows(record)
    size = size_of(rows.g, 0)
    if part is None:
        return rows, size, None
    examples = Examples(size, part)
    parts = (examples.of(tensor) for tensor in (rows.a, rows.g, rows.mask))
    return Rows(*parts), size, examples


def _of_all(total: tf.Tensor, examples: Examples | None) -> tf.Tensor:
    """Sum over all examples, where it is one over those that were taken."""
    if examples is None:
        return total
    return total * tf.cast(examples.weight, total.dtype)


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

    The gradients of the weights may be off by a factor, as clipping makes
    them. A flag says whether the records explain them; None if there was no
    choice.
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
    """Place of the first choice that makes the gradient, or its direction.

    It is that of the nearest if a flag says that there is none.
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
