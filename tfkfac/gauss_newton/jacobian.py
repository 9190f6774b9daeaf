"""Rows of a model's Jacobian, one for each output of each example.

The backward pass of one example is traced once and vectorised over examples
and outputs, in blocks, so that no more than a block of rows is in memory.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfkfac.capture.model_taps import ForwardCall, paused
from tfkfac.capture.walk import walk
from tfkfac.compat.losses import logits_of
from tfkfac.compat.models import kept_losses
from tfkfac.curvature.hessian import dense, tape
from tfkfac.gauss_newton.residuals import Read
from tfkfac.linalg.symmetric import band_shapes, bands, from_bands
from tfkfac.linalg.vectors import FlatSpace

# Fewest rows of a block.
_LEAST = 256
# Part of a step that outputs are computed at, on both sides: their second
# derivatives lose 16 digits over its square, and gain by its square.
_PART = 0.1
# Operations that make nothing new.
_VIEWS = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient")
_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


@dataclasses.dataclass(frozen=True)
class Jacobian:
    """The Jacobian of the residuals of a batch, examples by examples."""

    model: keras.Model
    call: ForwardCall
    weights: Sequence[keras.Variable]  # that it is with respect to
    values: Sequence[tf.Tensor]  # of these
    space: FlatSpace  # of the flat vectors of these
    reads: Sequence[Read]  # of the outputs, by the losses
    block: int  # number of examples whose rows are made at once

    @property
    def size(self) -> int:
        """Number of outputs of an example."""
        return sum(read.size for read in self.reads)

    @property
    def examples(self) -> tf.Tensor:
        """Number of examples."""
        return tf.shape(self.reads[0].output)[0]

    def rows(self) -> tf.Tensor:
        """K, `(m, n)`."""
        all_ = (tf.constant(0), self.examples)
        return flat(self._weighed(self._plain(self._tracing(), *all_), *all_))

    def squares(self) -> tuple[tf.Tensor, tf.Tensor]:
        """`K^T K`, `(n, n)`, and the gradient of the loss, `(n,)`."""
        trace, examples = self._tracing(), self.examples
        size, dtype = self.space.size, self.space.dtype
        slopes = tf.concat([read.slopes for read in self.reads], 1)

        def add(first: tf.Tensor, gradient: tf.Tensor, *sums: Any) -> Any:
            end = tf.minimum(first + self.block, examples)
            plain = self._plain(trace, first, end)
            rows = self._weighed(plain, first, end)
            own = tf.reshape(slopes[first:end], [-1, 1])
            gradient += tf.matmul(flat(plain), own, transpose_a=True)[:, 0]
            new = bands(flat(rows))
            return end, gradient, *map(tf.add, sums, new)

        nothing = [tf.zeros(shape, dtype) for shape in band_shapes(size)]
        _, gradient, *sums = tf.while_loop(
            lambda first, *_: first < examples,
            add,
            (tf.constant(0), tf.zeros([size], dtype), *nothing),
            parallel_iterations=1,
        )
        return from_bands(sums), gradient

    def turn(self, change: tf.Tensor) -> tf.Tensor:
        """`B^T y''`, `(m,)`: the outputs' second derivatives along a change."""
        outputs = tf.function(self._all_outputs, autograph=False)
        parts = self.space.split(_PART * change)
        pairs = list(zip(self.values, parts, strict=True))
        there = outputs([v + part for v, part in pairs])
        back = outputs([v - part for v, part in pairs])
        here = self._joined([read.output for read in self.reads])
        return self._weighed_all((there - 2 * here + back) / _PART**2)

    def pull(self, vector: tf.Tensor) -> tf.Tensor:
        """`K^T` times a vector `(m,)`, by one backward pass."""
        with tape() as back:
            back.watch(self.values)
            outputs = self._weighed_all(self._all_outputs(self.values))
        slopes = back.gradient(outputs, self.values, output_gradients=vector)
        return self.space.join(dense(slopes))

    def _all_outputs(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """y, `(examples, outputs)`."""
        leaves, examples = leaves_of(self.call)
        return self._outputs([leaves[i] for i in examples], values)

    def _weighed_all(self, outputs: tf.Tensor) -> tf.Tensor:
        """`B^T y`, `(m,)`."""
        all_ = (tf.constant(0), self.examples)
        return tf.reshape(self._weighed(outputs[..., None], *all_), [-1])

    def _plain(
        self, trace: Callable[..., tf.Tensor], first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """J of some examples, `(examples, outputs, n)`."""
        leaves, examples = leaves_of(self.call)
        own = [leaves[i][first:end] for i in examples]
        found = trace(own, list(self.values))
        return tf.reshape(found, [-1, self.size, self.space.size])

    def _weighed(
        self, plain: tf.Tensor, first: tf.Tensor, end: tf.Tensor
    ) -> tf.Tensor:
        """The rows `B^T J` of these examples."""
        sizes = [read.size for read in self.reads]
        parts = tf.split(plain, sizes, 1) if len(sizes) > 1 else [plain]
        made = [
            read.root.times(part, first, end)
            for read, part in zip(self.reads, parts, strict=True)
        ]
        return tf.concat(made, 1) if len(made) > 1 else made[0]

    def _tracing(self) -> Callable[..., tf.Tensor]:
        """The function of examples and weights, traced when first called."""
        seeds = tf.eye(self.size, dtype=self.space.dtype)
        loop, dtype = needs_loop(self.model), self.space.dtype

        def rows(leaves: Any, values: Any) -> tf.Tensor:
            count = tf.shape(leaves[0])[0]
            if self.size > 1:
                leaves = [tf.repeat(leaf, self.size, 0) for leaf in leaves]
            pairs = (leaves, tf.tile(seeds, [count, 1]))

            def row(pair: Any) -> tf.Tensor:
                leaves, seed = pair
                return self._row(leaves, seed, values)

            if loop:
                return tf.map_fn(row, pairs, fn_output_signature=dtype)
            return tf.vectorized_map(row, pairs)

        return tf.function(rows, autograph=False, reduce_retracing=True)

    def _row(
        self, leaves: Any, seed: tf.Tensor, values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """The gradient of the outputs of one example, times a seed."""
        with tape() as back:
            back.watch(values)
            outputs = self._outputs([leaf[None] for leaf in leaves], values)
        slopes = back.gradient(outputs, values, output_gradients=seed[None])
        return self.space.join(dense(slopes))

    def _outputs(
        self, own: Sequence[tf.Tensor], values: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """The outputs that the losses read, `(examples, outputs)`."""
        mapping = list(zip(self.weights, values, strict=True))
        outputs = keras.tree.flatten(
            outputs_at(self.model, self.call, own, mapping)
        )
        places = [(outputs[read.position], read) for read in self.reads]
        return self._joined(
            [logits_of(x) if read.is_logits else x for x, read in places]
        )

    def _joined(self, outputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Outputs that the losses read, `(examples, outputs)`."""
        parts = [
            tf.cast(tf.reshape(x, [-1, read.size]), self.space.dtype)
            for x, read in zip(outputs, self.reads, strict=True)
        ]
        return tf.concat(parts, 1)


def leaves_of(call: ForwardCall) -> tuple[list[Any], list[int]]:
    """The arguments of a call, and which of them have examples."""
    leaves = keras.tree.flatten((call.args, call.kwargs))
    shapes: list[Any] = [getattr(leaf, "shape", ()) for leaf in leaves]
    batches = [i for i, shape in enumerate(shapes) if len(shape) > 0]
    return leaves, [i for i in batches if shapes[i][0] == shapes[batches[0]][0]]


def outputs_at(
    model: keras.Model,
    call: ForwardCall,
    own: Sequence[tf.Tensor],
    mapping: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> Any:
    """The outputs of a call with other examples, at values of some weights."""
    leaves, examples = leaves_of(call)
    for place, leaf in zip(examples, own, strict=True):
        leaves[place] = leaf
    args, kwargs = keras.tree.pack_sequence_as((call.args, call.kwargs), leaves)
    with (
        paused(),
        kept_losses(model),
        keras.StatelessScope(mapping, collect_losses=True),
    ):
        return model(*args, **kwargs)


def activations(model: keras.Model, call: ForwardCall) -> int:
    """Numbers that a model makes of an example in its forward pass.

    Sizes that only a run knows, and what a loop keeps, count nothing.
    """
    if needs_loop(model):
        return 0  # those of a few examples, not of all in a block

    def forward(*own: tf.Tensor) -> Any:
        # Tensors: a tape of the model's own would watch variables.
        mapping = [(v, tf.identity(v.value)) for v in model.trainable_variables]
        return outputs_at(model, call, own, mapping)

    leaves, examples = leaves_of(call)
    one = [
        tf.TensorSpec((1, *leaves[i].shape[1:]), leaves[i].dtype)
        for i in examples
    ]
    traced = tf.function(forward, autograph=False).get_concrete_function(*one)
    known = {given.ref() for given in traced.inputs[: len(one)]}
    count = 0
    for operation in traced.graph.get_operations():
        if any(given.ref() in known for given in operation.inputs):
            known.update(made.ref() for made in operation.outputs)
            if operation.type not in _VIEWS:
                sizes = [x.shape.num_elements() for x in operation.outputs]
                count += sum(size or 0 for size in sizes)
    return count


def block_examples(weights: int, outputs: int, activations: int) -> int:
    """Number of examples whose rows are made at once.

    Few rows stay in the processor's cache. With less than there are weights,
    adding up the squares of blocks would take as long as making them; with
    many activations it is these that take the memory, and the time.
    """
    part = 2 * weights / (2 * weights + activations)
    return max(int(max(weights, _LEAST) * part) // outputs, 1)


def needs_loop(model: keras.Model) -> bool:
    """True if examples are taken one after the other, which is slow.

    TensorFlow vectorises neither the gradient of grouped convolutions nor
    recurrent layers with a mask, or with weights before them.
    """
    layers = [node.layer for node in walk(model)]
    convolutions = [x for x in layers if isinstance(x, _CONVOLUTIONS)]
    if any(layer.groups > 1 for layer in convolutions):
        return True
    recurrent = [x for x in layers if isinstance(x, keras.layers.RNN)]
    if not recurrent:
        return False
    masks = any(
        getattr(layer, "mask_zero", False)
        or isinstance(layer, keras.layers.Masking)
        for layer in layers
    )
    own = {id(v) for v in recurrent[0].trainable_variables}
    before = layers[: layers.index(recurrent[-1])]
    others = [v for x in before for v in x.trainable_variables]
    return masks or any(id(v) not in own for v in others)


def flat(rows: tf.Tensor) -> tf.Tensor:
    """Rows `(examples, outputs, n)` as a matrix."""
    return tf.reshape(rows, [-1, rows.shape[-1]])
