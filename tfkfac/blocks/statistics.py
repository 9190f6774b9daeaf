"""Batch statistics of a block: sums of the Kronecker factors A and G.

A training step may run several backward passes through the same layer call: to
apply the sum of two gradients, for another model as in a GAN, or for a loss
that contains a gradient. Each pass adds a record to the call. `records_of`
selects the records that reproduce the applied gradient.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfkfac.blocks.base import Block
from tfkfac.blocks.patches import Patches
from tfkfac.blocks.rows import Rows, Statistic
from tfkfac.capture.taps import Record
from tfkfac.compat.functions import TraceKey, shared_call
from tfkfac.compat.graphs import in_xla, once_per_graph
from tfkfac.linalg.tensors import size_of

# Default subsample: 1/4 of the batch, at least 64 examples over all workers.
# Statistics of fewer examples cost accuracy and hardly save time.
_DEFAULT_FRACTION, _MIN_EXAMPLES = 0.25, 64


class Subsample(NamedTuple):
    """Subsample of each batch for the statistics."""

    fraction: float  # fraction of the examples, in (0, 1]
    offset: tf.Tensor  # int64, number of earlier subsamples
    min_examples: int = 1  # lower bound, in batches that have as many

    def is_whole(self, size: int | tf.Tensor) -> bool:
        """True if a batch of a static size is used as a whole."""
        return isinstance(size, int) and (
            size <= self.min_examples or self.fraction == 1
        )


def choose_subsample(
    fraction: float | None, offset: tf.Tensor, workers: int
) -> Subsample | None:
    """Return the subsample of a worker's batch; None for the whole batch.

    A `fraction` of None is the default subsample. `workers` is the number of
    workers that sum their statistics.
    """
    if fraction is None:
        min_examples = math.ceil(_MIN_EXAMPLES / workers)
        return Subsample(_DEFAULT_FRACTION, offset, min_examples)
    return Subsample(fraction, offset) if fraction < 1 else None


class Examples:
    """Select evenly spaced examples of a batch for the statistics.

    The first examples would be biased: batches may be sorted, and the first
    axis of a layer may include time or patches. Over successive offsets, each
    example is selected equally often. `weight` is the batch size divided by
    the number of selected examples, float64.
    """

    def __init__(self, size: int | tf.Tensor, subsample: Subsample) -> None:
        self._is_whole = subsample.is_whole(size)

        def choose(
            size: tf.Tensor, offset: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            count = subsample.fraction * tf.cast(size, tf.float64)
            count = tf.cast(tf.math.ceil(count), tf.int64)
            count = tf.maximum(count, tf.minimum(size, subsample.min_examples))
            # Avoid a division by zero for an empty batch.
            period, divisor = tf.maximum(size, 1), tf.maximum(count, 1)
            first = offset * count % period
            indices = (first + tf.range(count) * size) // divisor
            return indices, tf.cast(size, tf.float64) / tf.cast(
                divisor, tf.float64
            )

        offset = tf.convert_to_tensor(subsample.offset, tf.int64)
        settings = "examples", subsample.fraction, subsample.min_examples
        # Layers of equal batch sizes have the same examples.
        self._indices, self.weight = once_per_graph(
            (
                *settings,
                size if isinstance(size, int) else size.ref(),
                offset.ref(),
            ),
            lambda: shared_call(
                settings, choose, tf.cast(size, tf.int64), offset, any_size=True
            ),
        )

    def of(self, tensor: Any) -> Any:
        """Select examples of a tensor, whose first axis has batch size or 1."""
        if tensor is None:
            return None
        if isinstance(tensor, Patches):
            return tensor.select(self.of)
        if self._is_whole:
            return tensor

        def gather(tensor: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
            size = tf.shape(tensor, tf.int64)[0]
            return tf.gather(tensor, indices % tf.maximum(size, 1))

        selected = shared_call(
            "take examples", gather, tensor, self._indices, any_size=True
        )
        selected.set_shape([None, *tensor.shape[1:]])
        return selected


K = TypeVar("K")


class BatchSettings(NamedTuple):
    """Settings of the batch statistics: weight sharing, scales, subsample."""

    sharing: str  # "expand", "reduce" or "average"
    # Factor that converts recorded gradients, of the mean loss times constants,
    # to gradients of a single loss term.
    scale: tf.Tensor | float = 1.0
    # Bools `(B, positions)`, True where a sample weight is zero. Rows without
    # loss do not count in A.
    weightless: Sequence[tf.Tensor] = ()
    # Number of loss terms `T`. None is the size of the layer's first axis;
    # gradients are then multiplied by this size, too.
    terms: tf.Tensor | None = None
    subsample: Subsample | None = None
    # Weight of a term's Fisher matrix, for each loss; empty for one loss.
    loss_weights: Sequence[tf.Tensor] = ()
    # Factor of gradients before their products, which may overflow with loss
    # scaling; None is 1.
    unscale: tf.Tensor | None = None

    def scalars(self) -> dict[str, tf.Tensor]:
        """The scalar fields that are not None, as tensors by name."""
        fields = {
            "scale": self.scale,
            "terms": self.terms,
            "unscale": self.unscale,
            "offset": self.subsample and self.subsample.offset,
        }
        present = {name: x for name, x in fields.items() if x is not None}
        return {name: tf.convert_to_tensor(x) for name, x in present.items()}

    def with_scalars(self, scalars: Mapping[str, tf.Tensor]) -> "BatchSettings":
        """Return a copy with the given values of the scalar fields."""
        values, subsample = dict(scalars), self.subsample
        if subsample is not None:
            subsample = subsample._replace(offset=values.pop("offset"))
        return self._replace(subsample=subsample, **values)


def batch_statistics(
    layers: Mapping[K, tuple[Block, Sequence[Record]]], settings: BatchSettings
) -> dict[K, dict[str, Statistic]]:
    """Compute the factors of one batch from all calls of each layer.

    With `B` examples, `S` shared positions and a loss that is the mean over
    `T` terms, "expand" gives `A = 1/(B S) sum a a^T` and `G = T sum c c^T`,
    where `c` is the gradient of this mean. "reduce" first averages `a` and
    sums `c` over the positions (Eschenhagen et al., 2023). The rows of several
    calls, each with one record, are pooled.
    """
    if not layers:
        return {}
    # Read the variables of the settings once, not for each layer.
    settings = settings.with_scalars(settings.scalars())
    counts = collections.Counter(
        _trace_key(block, record, settings)
        for block, records in layers.values()
        for record in records
    )
    results = {}
    for layer, (block, records) in layers.items():
        statistics = []
        for record in records:
            key = _trace_key(block, record, settings)
            # Inline a call whose key is unique: sharing would only slow down
            # tracing. Exception: with fixed sizes, a shared function gives
            # convolutions oneDNN kernels. Under XLA, sharing saves nothing.
            if key is None or in_xla() or (key.any_size and counts[key] == 1):
                statistics.append(_sums(block, record, settings))
            else:
                statistics.append(_shared_sums(block, record, settings, key))
        # Add up the statistics of all calls of the layer.
        shapes, pooled = block.factor_shapes, {}
        for name in statistics[0]:
            calls = [call[name] for call in statistics]
            for call in calls:
                call.total.set_shape(shapes[name])
            # All calls contribute to the same loss terms: do not add their
            # counts of terms, only the counts of rows in A.
            total, count = calls[0]
            for call in calls[1:]:
                total += call.total
                count = count + call.count if name == "A" else call.count
            pooled[name] = Statistic(total, count)
        results[layer] = pooled
    return results


def _trace_key(
    block: Block, record: Record, settings: BatchSettings
) -> TraceKey | None:
    """Trace key of the statistics of a call; None if they are not shared."""
    if record.mask is not None or settings.weightless:
        return None
    key = block.trace_key(record)
    if key is None:
        return None
    subsample, rank = settings.subsample, record.inputs.shape.rank
    if subsample is not None:
        subsample = subsample._replace(offset=None)
    return key._replace(key=(key.key, rank, settings.sharing, subsample))


def output_total(
    block: Block, records: Sequence[Record], settings: BatchSettings
) -> tf.Tensor:
    """Sum `g g^T` over the calls of a layer, without scales of `settings`."""
    totals = []
    for record in records:
        rows, _, examples = _rows(block, record, settings.subsample)
        total = block.output_statistic(rows.g, settings.sharing)
        totals.append(_rescale(total, examples))
    return tf.add_n(totals)


def _shared_sums(
    block: Block, record: Record, settings: BatchSettings, key: TraceKey
) -> dict[str, Statistic]:
    """Compute `_sums` in a traced function, shared by equal keys."""

    def sums(
        inputs: tf.Tensor,
        gradient: tf.Tensor,
        moments: Any,
        scalars: Mapping[str, tf.Tensor],
    ) -> dict[str, Statistic]:
        traced = dataclasses.replace(
            record, inputs=inputs, gradient=gradient, moments=moments or None
        )
        return _sums(block, traced, settings.with_scalars(scalars))

    return shared_call(
        ("statistics", key.key),
        sums,
        record.inputs,
        record.gradient,
        tuple(record.moments or ()),
        settings.scalars(),
        any_size=key.any_size,
        placed=not key.any_size,
    )


def _sums(
    block: Block, record: Record, settings: BatchSettings
) -> dict[str, Statistic]:
    """Return the statistics of one call: G, and A if the block has A."""
    rows, size, examples = _rows(block, record, settings.subsample)
    terms = size if settings.terms is None else settings.terms
    count = tf.cast(terms, block.dtype)
    factor = tf.cast(settings.scale, block.dtype)
    if settings.terms is None:
        factor *= count
    g = rows.g
    if settings.unscale is not None:
        g *= tf.cast(settings.unscale, g.dtype)
    total = block.output_statistic(g, settings.sharing) * tf.square(factor)
    sums = {"G": Statistic(_rescale(total, examples), count)}
    if "A" in block.factors:
        weights = _row_weights(block, rows, settings.weightless, size, examples)
        if rows.gram and weights is None and settings.sharing == "expand":
            statistic = rows.gram()
        else:
            statistic = block.input_statistic(rows.a, weights, settings.sharing)
        sums["A"] = Statistic(*(_rescale(x, examples) for x in statistic))
    return sums


def _rows(
    block: Block, record: Record, subsample: Subsample | None
) -> tuple[Rows, int | tf.Tensor, Examples | None]:
    """Return the rows of a call, the batch size, and the selected examples."""
    # The input must be the only tensor of the call.
    is_plain = isinstance(record.inputs, tf.Tensor) and all(
        isinstance(value, (bool, int, float, str, type(None)))
        for value in tf.nest.flatten(dict(record.kwargs))
    )
    if subsample is not None and block.examples_first and is_plain:
        # Subsample before the conversion to rows, which saves time.
        size = size_of(record.gradient, 0)
        if not subsample.is_whole(size):
            examples = Examples(size, subsample)
            selected = dataclasses.replace(
                record,
                inputs=examples.of(record.inputs),
                gradient=examples.of(record.gradient),
                mask=examples.of(record.mask),
            )
            return block.rows(selected), size, examples
    rows = block.rows(record)
    is_sliced = isinstance(rows.g, Patches)
    size = rows.g.examples if is_sliced else size_of(rows.g, 0)
    if subsample is None or subsample.is_whole(size):
        return rows, size, None
    examples = Examples(size, subsample)
    tensors = (examples.of(tensor) for tensor in (rows.a, rows.g, rows.mask))
    return Rows(*tensors), size, examples


def _rescale(total: tf.Tensor, examples: Examples | None) -> tf.Tensor:
    """Rescale a sum over the selected examples to the whole batch."""
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
    """Return the weights of the rows in A, 1 or 0; None if all are 1.

    A padded or weightless row with a nonzero gradient counts: a later layer may
    ignore the mask, or another output may have another sample weight.
    """
    if not weightless and rows.mask is None:
        return None
    if isinstance(rows.g, Patches):
        no_gradient = rows.g.are_zero()
    else:
        features = list(range(2, rows.g.shape.rank))
        no_gradient = tf.reduce_all(tf.equal(rows.g, 0), features)
    shape = tf.stack([size, tf.shape(no_gradient)[1]])
    flags = [_broadcast_positions(w, shape) for w in weightless]
    if examples is not None:
        flags = [examples.of(flag) for flag in flags]
    if rows.mask is not None:
        flags.append(tf.logical_not(rows.mask))
    no_weight = tf.reduce_any(tf.stack(flags), 0)
    return tf.cast(
        tf.logical_not(tf.logical_and(no_weight, no_gradient)), block.dtype
    )


def _broadcast_positions(weightless: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Reshape or broadcast flags `(B, positions)` of a loss to layer rows.

    If the number of rows differs from the number of flags, a row has the flag
    of its example: true if all positions of the example have no weight.
    """
    # Use int64: the product below exceeds int32 from 46,342 examples on.
    shape = tf.cast(shape, tf.int64)
    size, rows = tf.size(weightless, tf.int64), tf.reduce_prod(shape)
    # XLA compiles this for any sizes, unlike a `tf.reshape` in a `tf.cond`.
    row = tf.minimum(tf.range(rows), size - 1)
    by_row = tf.gather(tf.reshape(weightless, [-1]), row)
    example = tf.range(shape[0]) * tf.shape(weightless, tf.int64)[0]
    example //= tf.maximum(shape[0], 1)
    by_example = tf.gather(tf.reduce_all(weightless, 1), example)
    return tf.where(
        tf.equal(size, rows), tf.reshape(by_row, shape), by_example[:, None]
    )


# Records of each call of a layer, in the order of the backward passes.
Calls = Sequence[Sequence[Record]]

# Gradients count as equal up to this squared relative distance.
_TOLERANCE = 1e-4


def records_of(
    block: Block,
    calls: Calls,
    gradients: Sequence[tf.Tensor],
    is_present: Sequence[bool],
) -> tuple[list[Record], tf.Tensor | None]:
    """Merge records into one per call that yields the applied gradient.

    The candidates are the last pass of each call, all passes, and the first
    pass (as in TensorFlow's DCGAN tutorial). The applied gradients may differ
    by a factor, for example after clipping. The result is the first candidate
    that is equal, else the first parallel one, else the one with the smallest
    angle. Also returns a scalar bool, False if no candidate is equal or
    parallel; None if each call has one record.
    """
    if all(len(records) == 1 for records in calls):
        return [records[0] for records in calls], None
    lengths = [len(records) for records in calls]
    last_pass = [float(i == n - 1) for n in lengths for i in range(n)]
    first_pass = [float(i == 0) for n in lengths for i in range(n)]
    all_passes = [1.0] * len(last_pass)
    choices = tf.constant([last_pass, all_passes, first_pass], block.dtype)
    recorded = [block.gradient(block.rows(r)) for r in chain(*calls)]
    if not all(is_present):  # compare the weights that have a gradient
        ones = [
            tf.fill(v.shape, tf.cast(flag, block.dtype))
            for v, flag in zip(block.variables, is_present, strict=True)
        ]
        recorded = [W * block.to_matrix(ones) for W in recorded]
    rows = [tf.reshape(x, [1, -1]) for x in recorded]
    rows.append(tf.reshape(block.to_matrix(gradients), [1, -1]))
    matrix = tf.concat(rows, 0)
    products = tf.matmul(matrix, matrix, transpose_b=True)
    # Dot products of the applied gradient g and the sum s of each candidate.
    gram, dots, gg = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    ss = tf.reduce_sum(tf.matmul(choices, gram) * choices, 1)
    sg = tf.linalg.matvec(choices, dots)
    squared_errors = gg - 2 * sg + ss
    squared_cosines = tf.math.divide_no_nan(tf.square(sg), ss * gg)
    # Reject the opposite direction: a negative multiple is another gradient.
    squared_sines = tf.where(
        sg > 0, 1 - squared_cosines, tf.ones_like(squared_cosines)
    )
    same = squared_errors <= _TOLERANCE * gg
    parallel = squared_sines <= _TOLERANCE
    best = tf.argmin(squared_sines)
    for flags in (parallel, same):
        first = tf.argmax(tf.cast(flags, tf.int32))
        best = tf.where(tf.reduce_any(flags), first, best)
    explains = tf.reduce_any(tf.logical_or(same, parallel))
    weights = tf.split(choices[best], lengths)
    merged = []
    for records, chosen in zip(calls, weights, strict=True):
        # Sum the gradients of the records whose weight is 1.
        terms = [
            tf.math.multiply_no_nan(r.gradient, tf.cast(w, r.gradient.dtype))
            for r, w in zip(
                records, tf.unstack(chosen, len(records)), strict=True
            )
        ]
        merged.append(
            dataclasses.replace(records[-1], gradient=tf.add_n(terms))
        )
    return merged, explains
