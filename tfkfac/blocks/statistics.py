"""Batch statistics of a block: Kronecker factors from recorded rows."""

from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks.base import Block, Record, Rows, Statistic


def batch_statistics(
    block: Block,
    records: Sequence[Record],
    sharing: str,
    scale: tf.Tensor | float = 1.0,
    carries: tf.Tensor | None = None,
    examples: tf.Tensor | None = None,
) -> dict[str, Statistic]:
    """Sums the factors of one batch over all recorded calls of a layer.

    With `B` examples and `S` shared positions, "expand" gives
    `A = 1/(B S) sum a a^T` and `G = 1/B sum g g^T`; "reduce" averages `a` and
    sums `g` over the positions first (Eschenhagen et al., 2023). The rows of
    several calls are pooled. The tape sees gradients of the mean loss, which
    are `1/B` of an example's own: `scale` undoes what is left of that, the
    loss scale and the number of replicas.

    Args:
        block: The block.
        records: Records of the layer's calls in this step.
        sharing: "expand" or "reduce".
        scale: What the gradients must be multiplied by, besides `B`.
        carries: Bool of shape `(B,)`, False for examples whose loss has
            weight zero. They do not count in A.
        examples: `B`, when it is not the leading dimension of the layer.

    Returns:
        Sum and count of each factor by name.
    """
    statistics: dict[str, Statistic] = {}
    for record in records:
        rows = block.rows(record)
        batch = tf.shape(rows.g)[0] if examples is None else examples
        batch = tf.cast(batch, block.dtype)
        g = rows.g * (tf.cast(scale, block.dtype) * batch)
        # The examples of a further call are the same examples.
        previous = statistics.get("G")
        total = block.output_statistic(g, sharing)
        if previous is not None:
            total += previous.total
        statistics["G"] = Statistic(total, batch)
        if rows.a is not None:
            weights = _row_weights(block, rows, carries)
            new = block.input_statistic(rows.a, weights, sharing)
            old = statistics.get("A")
            if old is not None:
                new = Statistic(old.total + new.total, old.count + new.count)
            statistics["A"] = new
    return statistics


def _row_weights(
    block: Block, rows: Rows, carries: tf.Tensor | None
) -> tf.Tensor | None:
    """1 for rows that carry loss, else 0; None when all do.

    A padded position may still carry loss when a later layer ignores the
    mask, so only those without a gradient are left out.
    """
    if rows.mask is None and carries is None:
        return None
    shape = tf.shape(rows.g)[:2]
    keep = tf.ones(shape, tf.bool)
    if rows.mask is not None:
        flat = tf.reshape(rows.g, [shape[0], shape[1], -1])
        keep = tf.logical_or(rows.mask, tf.reduce_any(flat != 0, -1))
    if carries is not None:
        # A layer may see the batch folded with other dimensions.
        owner = tf.range(shape[0]) * tf.shape(carries)[0]
        owner //= tf.maximum(shape[0], 1)
        keep = tf.logical_and(keep, tf.gather(carries, owner)[:, None])
    return tf.cast(keep, block.dtype)
