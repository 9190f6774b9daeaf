"""Rows of the residuals' Jacobian, one for each output of each example.

With a root B of the loss' Hessian at the outputs y that it reads, and `J =
dy/dw`, these are `K = B^T J`. The residuals r themselves, `B r = dL/dy`, are
those of least length. The backward pass of one example is traced once and
vectorised over examples and outputs, in blocks, so that no more than a block of
rows is in memory.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfkfac.capture.walk import needs_loop
from tfkfac.compat.graphs import count_scalars
from tfkfac.compat.losses import logits_of
from tfkfac.curvature.hessian import dense, tape
from tfkfac.fisher.roots import Root
from tfkfac.linalg.symmetric import band_shapes, bands, from_bands
from tfkfac.linalg.vectors import FlatSpace
from tfkfac.loss.batch import stateless

# Fewest rows of a block.
_LEAST = 256
# Part of a step that outputs are computed at, on both sides: their second
# derivatives lose 16 digits over its square, and gain by its square.
_PART = 0.1


class Read(NamedTuple):
    """The output of the model that one loss reads."""

    position: int  # among the model's outputs
    is_logits: bool  # whether it is the logits behind that output
    output: tf.Tensor  # its value
    slopes: tf.Tensor  # gradient of the loss there, `(examples, outputs)`
    root: Root  # of the Hessian there
    size: int  # number of outputs of an example


class Rows(NamedTuple):
    """Examples of which a function makes outputs, each by itself.

    In `fit` they are those of a call of the model, in `minimize` the points of
    a condition.
    """

    # Of some examples, by position among the model's outputs.
    outputs: Callable[[Sequence[tf.Tensor]], Mapping[int, tf.Tensor]]
    points: Sequence[tf.Tensor]  # with one batch axis
    places: Sequence[int]  # positions of its outputs
    size: int  # number of residuals of an example
    reads: Sequence[Read] = ()  # of the outputs, by the losses

    @property
    def examples(self) -> int | tf.Tensor:
        """Number of examples; a tensor if it is not known before."""
        size: int | None = self.points[0].shape[0]
        return tf.shape(self.points[0])[0] if size is None else size

    def joined(self, outputs: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Outputs that the losses read, `(examples, size)`."""
        parts = []
        for read in self.reads:
            output = outputs[read.position]
            found = logits_of(output) if read.is_logits else output
            parts.append(flat_output(found, read))
        return tf.concat(parts, 1)

    def weigh(
        self, rows: tf.Tensor, first: Any = 0, end: tf.Tensor | None = None
    ) -> tf.Tensor:
        """`B^T` times rows `(examples, size, n)` of some examples, or all."""
        end = tf.shape(rows)[0] if end is None else end
        parts = tf.split(rows, [read.size for read in self.reads], 1)
        pairs = zip(self.reads, parts, strict=True)
        return tf.concat([r.root.times(p, first, end) for r, p in pairs], 1)


@dataclasses.dataclass(frozen=True)
class Jacobian:
    """The Jacobian of the residuals of a batch, examples by examples."""

    model: keras.Model
    rows: Sequence[Rows]
    weights: Sequence[keras.Variable]  # that it is with respect to
    values: Sequence[tf.Tensor]  # of these
    space: FlatSpace  # of the flat vectors of these
    block: int  # number of rows that are made at once
    most_examples: int  # of one backward pass

    def whole(self) -> tf.Tensor:
        """K, `(m, n)`."""
        made = [rows.weigh(self._plain(rows)(0, None)) for rows in self.rows]
        return tf.concat([flat(own) for own in made], 0)

    def residuals(self) -> tf.Tensor:
        """r, `(m,)`."""
        found = [
            tf.concat([r.root.residuals(r.slopes) for r in rows.reads], 1)
            for rows in self.rows
        ]
        return tf.concat([tf.reshape(own, [-1]) for own in found], 0)

    def squares(self) -> tuple[tf.Tensor, tf.Tensor]:
        """`K^T K`, `(n, n)`, and the gradient of the loss, `(n,)`."""
        size, dtype = self.space.size, self.space.dtype
        shapes = [size], *band_shapes(size)
        sums: Sequence[tf.Tensor] = [tf.zeros(s, dtype) for s in shapes]
        for rows in self.rows:
            sums = self._add_squares(rows, sums)
        return from_bands(sums[1:]), sums[0]

    def _add_squares(
        self, rows: Rows, sums: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """Adds to a gradient and the bands of a matrix, block by block."""
        plain, examples = self._plain(rows), rows.examples
        slopes = tf.concat([read.slopes for read in rows.reads], 1)
        block = max(self.block // rows.size, 1)

        def add(first: tf.Tensor, gradient: tf.Tensor, *sums: Any) -> Any:
            end = tf.minimum(first + block, examples)
            made = plain(first, end)
            own = tf.reshape(slopes[first:end], [-1, 1])
            gradient += tf.matmul(flat(made), own, transpose_a=True)[:, 0]
            new = bands(flat(rows.weigh(made, first, end)))
            return end, gradient, *map(tf.add, sums, new)

        _, *sums = tf.while_loop(
            lambda first, *_: first < examples,
            add,
            (tf.constant(0), *sums),
            parallel_iterations=1,
        )
        return sums

    def turn(self, change: tf.Tensor) -> tf.Tensor:
        """`B^T y''`, `(m,)`: the outputs' second derivatives along a change."""
        outputs = tf.function(self._all_outputs, autograph=False)
        parts = self.space.split(_PART * change)
        pairs = list(zip(self.values, parts, strict=True))
        there = outputs([v + part for v, part in pairs])
        back = outputs([v - part for v, part in pairs])
        here = [
            tf.concat([flat_output(r.output, r) for r in rows.reads], 1)
            for rows in self.rows
        ]
        ways = zip(there, here, back, strict=True)
        return self._weigh_all([(p - 2 * y + q) / _PART**2 for p, y, q in ways])

    def pull(self, vector: tf.Tensor) -> tf.Tensor:
        """`K^T` times a vector `(m,)`, by one backward pass in blocks."""
        sizes = [rows.size * rows.examples for rows in self.rows]
        parts = zip(self.rows, tf.split(vector, sizes), strict=True)
        return tf.add_n([self._pull(rows, part) for rows, part in parts])

    def _pull(self, rows: Rows, vector: tf.Tensor) -> tf.Tensor:
        """That of some rows alone."""
        vector = tf.reshape(vector, [-1, rows.size])

        def add(first: tf.Tensor, total: tf.Tensor) -> Any:
            end = tf.minimum(first + self.most_examples, rows.examples)
            own = [part[first:end] for part in rows.points]
            with tape() as back:
                back.watch(self.values)
                outputs = self._outputs(rows, own, self.values)
                weighed = rows.weigh(outputs[..., None], first, end)[..., 0]
            slopes = back.gradient(
                weighed, self.values, output_gradients=vector[first:end]
            )
            return end, total + self.space.join(dense(slopes))

        _, total = tf.while_loop(
            lambda first, _: first < rows.examples,
            add,
            (tf.constant(0), tf.zeros([self.space.size], self.space.dtype)),
            parallel_iterations=1,
        )
        return total

    def _weigh_all(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """`B^T y`, `(m,)`, of `_all_outputs`."""
        pairs = zip(self.rows, outputs, strict=True)
        made = [rows.weigh(y[..., None]) for rows, y in pairs]
        return tf.concat([tf.reshape(own, [-1]) for own in made], 0)

    def _all_outputs(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The outputs y of each of the rows, `(examples, size)`."""
        return [self._outputs(r, r.points, values) for r in self.rows]

    def _plain(self, rows: Rows) -> Callable[..., tf.Tensor]:
        """A function of a range of examples: J, `(examples, size, n)`.

        It is traced when first called.
        """
        seeds = tf.eye(rows.size, dtype=self.space.dtype)
        loop, dtype = needs_loop(self.model), self.space.dtype

        def trace(points: Any, values: Any) -> tf.Tensor:
            count = tf.shape(points[0])[0]
            if rows.size > 1:
                points = [tf.repeat(part, rows.size, 0) for part in points]
            pairs = (points, tf.tile(seeds, [count, 1]))

            def row(pair: Any) -> tf.Tensor:
                points, seed = pair
                return self._row(rows, points, seed, values)

            if loop:
                return tf.map_fn(row, pairs, fn_output_signature=dtype)
            return tf.vectorized_map(row, pairs)

        traced = tf.function(trace, autograph=False, reduce_retracing=True)

        def plain(first: Any, end: tf.Tensor | None) -> tf.Tensor:
            own = [part[first:end] for part in rows.points]
            found = traced(own, list(self.values))
            return tf.reshape(found, [-1, rows.size, self.space.size])

        return plain

    def _row(self, rows: Rows, points: Any, seed: Any, values: Any) -> Any:
        """The gradient of the outputs of one example, times a seed."""
        with tape() as back:
            back.watch(values)
            outputs = self._outputs(rows, [p[None] for p in points], values)
        slopes = back.gradient(outputs, values, output_gradients=seed[None])
        return self.space.join(dense(slopes))

    def _outputs(
        self,
        rows: Rows,
        points: Sequence[tf.Tensor],
        values: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """The outputs of some examples, at values of the weights."""
        mapping = list(zip(self.weights, values, strict=True))
        with stateless(self.model, mapping):
            return rows.joined(rows.outputs(points))


def flat_output(output: tf.Tensor, read: Read) -> tf.Tensor:
    """An output as `(examples, outputs)`, in the dtype of the slopes."""
    return tf.cast(tf.reshape(output, [-1, read.size]), read.slopes.dtype)


def activations(model: keras.Model, rows: Rows) -> int:
    """Numbers that are made of an example in a forward pass.

    What a loop keeps counts nothing: it is that of a few examples.
    """
    if needs_loop(model):
        return 0

    def forward(*own: tf.Tensor) -> Any:
        # Tensors: a tape of the model's own would watch variables.
        mapping = [(v, tf.identity(v.value)) for v in model.trainable_variables]
        with stateless(model, mapping):
            return rows.outputs(own)

    one = [tf.TensorSpec((1, *x.shape[1:]), x.dtype) for x in rows.points]
    return count_scalars(forward, one)


def block_examples(weights: int, outputs: int, activations: int) -> int:
    """Number of examples whose rows are made at once.

    Few rows stay in the processor's cache. With less than there are weights,
    adding up the squares of blocks would take as long as making them; with
    many activations it is these that take the memory, and the time.
    """
    part = 2 * weights / (2 * weights + activations)
    return max(int(max(weights, _LEAST) * part) // outputs, 1)


def flat(rows: tf.Tensor) -> tf.Tensor:
    """Rows `(examples, outputs, n)` as a matrix."""
    return tf.reshape(rows, [-1, rows.shape[-1]])
