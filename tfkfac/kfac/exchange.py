"""Messages between workers: statistics, decompositions, gradients."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.distributed.collectives import (
    Communicator,
    Item,
    broadcast_items,
    flatten,
    rounds,
    scope,
    split_buckets,
    unflatten,
)
from tfkfac.distributed.plan import Plan
from tfkfac.factors import Part, Tensors
from tfkfac.factors.base import Wire
from tfkfac.fisher.types import Statistics
from tfkfac.solvers import Solver

# Scaled sums stay below this bound, within float16 (largest number 65504).
_MAX_SUM = 2.0**15


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Pack, send and unpack tensors between workers, according to a plan.

    `num_scalars` scalars are sent with each preconditioned gradient.
    """

    plan: Plan
    blocks: Sequence[Block]
    solver: Solver
    wire: Wire
    num_scalars: int = 0

    # ------------------------------------------------------------- factors
    def reduce_statistics(
        self, communicator: Communicator, statistics: Statistics
    ) -> dict[int, dict[str, Statistic]]:
        """All-reduce statistics over the workers, if the plan requires it.

        Each bucket of statistics is sent as soon as the bucket is complete:
        last layers first, in the order of the backward pass.
        """
        if not self.plan.reduces_factors:
            return {i: dict(by_name) for i, by_name in statistics.items()}
        rows = [
            (i, name, self.blocks[i].factors[name].storage, statistic)
            for i in sorted(statistics, reverse=True)
            for name, statistic in statistics[i].items()
        ]
        message_specs = [
            tf.TensorSpec(
                [math.prod(self.wire.shape(spec)) + 1],
                self.wire.factor_dtype or statistic.total.dtype,
            )
            for _, _, spec, statistic in rows
        ]
        is_half = self.wire.factor_dtype is not None
        reduce = self._reduce_half if is_half else self._reduce
        reduced: dict[int, dict[str, Statistic]] = {}
        remaining = iter(rows)
        for bucket in split_buckets(message_specs):
            bucket_rows = itertools.islice(remaining, len(bucket))
            layers, names, specs, local = zip(*bucket_rows, strict=True)
            with tf.name_scope("statistics/" + scope(layers)):
                sums = reduce(communicator, specs, local)
            for i, name, total in zip(layers, names, sums, strict=True):
                reduced.setdefault(i, {})[name] = total
        return reduced

    def _reduce(
        self,
        communicator: Communicator,
        specs: Sequence[Part],
        local: Sequence[Statistic],
    ) -> list[Statistic]:
        """All-reduce the totals and counts of a bucket of statistics."""
        sent = [
            flatten([self.wire.pack(spec, s.total), s.count])
            for spec, s in zip(specs, local, strict=True)
        ]
        sums = []
        received = communicator.all_reduce(sent)
        for spec, s, flat in zip(specs, local, received, strict=True):
            packed = tf.TensorSpec(self.wire.shape(spec), s.total.dtype)
            total, count = unflatten(flat, [packed, s.count])
            sums.append(Statistic(self.wire.unpack(spec, total), count))
        return sums

    def _reduce_half(
        self,
        communicator: Communicator,
        specs: Sequence[Part],
        local: Sequence[Statistic],
    ) -> list[Statistic]:
        """All-reduce totals in half precision, and counts in full precision.

        To avoid overflow and underflow, each total is divided by the scale
        `sum over workers of max |total| / _MAX_SUM`.
        """
        counts_and_maxima = communicator.all_reduce(
            [s.count for s in local]
            + [p.largest(s.total) for p, s in zip(specs, local, strict=True)]
        )
        counts = counts_and_maxima[: len(local)]
        scales = [x / _MAX_SUM for x in counts_and_maxima[len(local) :]]
        sums = communicator.all_reduce(
            [
                self.wire.pack(spec, tf.math.divide_no_nan(s.total, scale))
                for spec, s, scale in zip(specs, local, scales, strict=True)
            ],
            self.wire.factor_dtype,
        )
        return [
            Statistic(self.wire.unpack(spec, sum_) * scale, count)
            for spec, sum_, scale, count in zip(
                specs, sums, scales, counts, strict=True
            )
        ]

    # ------------------------------------------------------ decompositions
    def share_decompositions(
        self,
        communicator: Communicator,
        parts: Mapping[int, Tensors],
        layers: Sequence[int],
    ) -> dict[int, dict[str, tf.Tensor]]:
        """Broadcast decompositions from owners to gradient workers.

        `parts` are this worker's decompositions, `layers` all layers to send in
        this step. Returns the decompositions that this worker needs.
        """
        items = self._decomposition_items(layers)
        specs = {
            i: self.solver.all_parts(self.blocks[i].factors) for i in layers
        }

        def value_of(item: Item) -> tf.Tensor:
            value = parts[item.layer][item.name]
            value = tf.cast(value, self._decomposition_dtype(item.layer))
            return self.wire.pack(specs[item.layer][item.name], value)

        with tf.name_scope("decompositions"):
            values = broadcast_items(communicator, items, value_of)
        received: dict[int, dict[str, tf.Tensor]] = {}
        for (layer, name), value in values.items():
            value = self.wire.unpack(specs[layer][name], value)
            value = tf.cast(value, self.blocks[layer].dtype)
            received.setdefault(layer, {})[name] = value
        return received

    def _decomposition_items(self, layers: Sequence[int]) -> list[Item]:
        """Return decompositions to broadcast, in equal order on all workers."""
        items = []
        for i in sorted(layers):
            for factor, owner in self.plan.layers[i].owners.items():
                members = self.plan.decomposition_group(i, factor)
                specs = self.solver.parts(self.blocks[i].factors, factor)
                for name, spec in specs.items():
                    packed = tf.TensorSpec(
                        self.wire.shape(spec), self._decomposition_dtype(i)
                    )
                    items.append(Item(i, name, packed, owner, members))
        return items

    def _decomposition_dtype(self, layer: int) -> tf.DType:
        return self.wire.inverse_dtype or self.blocks[layer].dtype

    # ------------------------------------------- preconditioned gradients
    def stages(self, layers: Sequence[int]) -> list[list[int]]:
        """Group layers into stages that overlap communication and computation.

        If no worker needs another's decompositions, the gradients of a stage
        are sent while the next stage is decomposed (DP-KFAC, section 5).
        Otherwise there is a single stage.
        """
        if self.plan.sends_decompositions:
            return [list(layers)]
        stages = [
            sorted({item.layer for item in items})
            for items in rounds(self._gradient_items(layers))
        ]
        return stages or [list(layers)]

    def share_gradients(
        self,
        communicator: Communicator,
        local: Mapping[int, Sequence[tf.Tensor]],
        layers: Sequence[int],
    ) -> dict[int, list[tf.Tensor]]:
        """Broadcast preconditioned gradients from gradient workers.

        `local` maps a layer to the tensors of this worker: gradients, then a
        vector of `num_scalars`. The result has all layers.
        """
        items = self._gradient_items(layers)
        with tf.name_scope("preconditioned"):
            received = broadcast_items(
                communicator, items, lambda item: flatten(local[item.layer])
            )
        shared = {i: list(tensors) for i, tensors in local.items()}
        for (layer, _), flat in received.items():
            shared[layer] = unflatten(flat, self._gradient_specs(layer))
        return shared

    def _gradient_specs(self, layer: int) -> list[tf.TensorSpec]:
        """Return the specs of a preconditioned gradient and of the scalars."""
        block, count = self.blocks[layer], self.num_scalars
        shapes = [block.gradient_shape, *([(count,)] if count else [])]
        return [tf.TensorSpec(shape, block.dtype) for shape in shapes]

    def _gradient_items(self, layers: Sequence[int]) -> list[Item]:
        """Return gradients to broadcast, in the same order on every worker."""
        items = []
        for i in sorted(layers):
            size = math.prod(self.blocks[i].gradient_shape)
            flat = tf.TensorSpec(
                [size + self.num_scalars], self.blocks[i].dtype
            )
            for root, members in self.plan.gradient_groups(i):
                items.append(Item(i, str(root), flat, root, members))
        return items
