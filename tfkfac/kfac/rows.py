"""Which blocks are preconditioned by the rows of their gradients.

A layer's gradient `W = a^T g` has as many rows as the batch has examples. If
they are few, `(a A^-1)^T (g G^-1)` takes fewer multiplications than
`A^-1 W G^-1`, and W itself is not needed: the tape's product of it is then no
part of the graph. That must be sound: the gradient that is applied has to be
that product and nothing more, see `is_product`; any other is taken as it is.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfkfac.blocks import RowGradient
from tfkfac.capture.products import is_product
from tfkfac.kfac.active import ActiveBlock
from tfkfac.solvers import most_rows
from tfkfac.training.step import Gradients, Step

# A layer for which fewer rows than this would be too many is always taken by
# its matrix: there is little to gain.
_LEAST = 16


def with_rows(layers: Sequence[ActiveBlock], step: Step) -> list[ActiveBlock]:
    """Finds the blocks for which rows may be cheaper, and their rows.

    Their gradients are withheld from the step. The choice is the same on
    workers whose batches differ in size.

    Args:
        layers: The blocks of the step.
        step: The step, its gradients still as the tape returned them.
    """
    found = []
    for one in layers:
        rows = _rows_of(one, step.gradients, step.group.size)
        if rows is not None:
            step.withhold(one.indices, bound(rows))
        found.append(dataclasses.replace(one, rows=rows))
    return found


def _rows_of(
    one: ActiveBlock, gradients: Gradients, workers: int
) -> RowGradient | None:
    factors = one.block.factors
    if "A" not in factors or factors["G"].stack_shape or len(one.records) != 1:
        return None
    most, (record,) = most_rows(factors, workers), one.records
    own = [gradients[i] for i in one.indices]
    if most < _LEAST or not is_product(own, record.inputs, record.gradient):
        return None
    elements = record.gradient.shape.num_elements()
    if workers == 1 and elements and elements > most * factors["G"].size:
        return None
    rows = one.block.rows(record)
    return RowGradient(
        tf.reshape(rows.a, [-1, factors["A"].size]),
        tf.reshape(rows.g, [-1, factors["G"].size]),
    )


def bound(rows: RowGradient) -> tf.Tensor:
    """A number that is finite only if `a^T g` is.

    No element of it is larger than the product of the sums. (Norms would need
    squares, which overflow where a gradient does not.)
    """
    sums = [tf.reduce_sum(tf.abs(tensor)) for tensor in (rows.a, rows.g)]
    return sums[0] * sums[1]
