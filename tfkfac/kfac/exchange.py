"""Messages of K-FAC between workers in each kind of step."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

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
from tfkfac.solvers import Solver

# Within the range of all dtypes on the wire: float16 ends at 65504.
_REACH = 2.0**15

Statistics = Mapping[str, Statistic]
Parts = dict[str, tf.Tensor]


class Exchange:
    """Packs, sends and unpacks tensors by a plan.

    Some numbers travel `beside` each preconditioned gradient.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[Block],
        solver: Solver,
        wire: Wire,
        beside: int = 0,
    ) -> None:
        self.plan = plan
        self._blocks = blocks
        self._solver = solver
        self.wire = wire
        self._beside = beside
        self._storage = [
            {name: kind.storage for name, kind in block.factors.items()}
            for block in blocks
        ]

    # ------------------------------------------------------------- factors
    def reduce_statistics(
        self, communicator: Communicator, statistics: Mapping[int, Statistics]
    ) -> dict[int, dict[str, Statistic]]:
        """Adds up totals and counts over the workers, if the mode does.

        They travel in buckets, each as soon as what is in it has been made:
        the last layers first, where gradients come from.
        """
        if not self.plan.reduces_factors:
            return {i: dict(named) for i, named in statistics.items()}
        rows = [
            (i, name, self._storage[i][name], one)
            for i in sorted(statistics, reverse=True)
            for name, one in statistics[i].items()
        ]
        specs = [
            tf.TensorSpec(
                [math.prod(self.wire.shape(part)) + 1],
                self.wire.factor_dtype or one.total.dtype,
            )
            for _, _, part, one in rows
        ]
        whole = self.wire.factor_dtype is None
        add_up = self._add_up if whole else self._add_up_in_half
        reduced: dict[int, dict[str, Statistic]] = {}
        rest = iter(rows)
        for bucket in split_buckets(specs):
            some = itertools.islice(rest, len(bucket))
            layers, names, parts, own = zip(*some, strict=True)
            with tf.name_scope("statistics/" + scope(layers)):
                sums = add_up(communicator, parts, own)
            for i, name, total in zip(layers, names, sums, strict=True):
                reduced.setdefault(i, {})[name] = total
        return reduced

    def _add_up(
        self,
        communicator: Communicator,
        parts: Sequence[Part],
        own: Sequence[Statistic],
    ) -> list[Statistic]:
        """Adds up a bucket: each total with its count behind it."""
        sent = [
            flatten([self.wire.pack(part, one.total), one.count])
            for part, one in zip(parts, own, strict=True)
        ]
        sums = []
        received = communicator.all_reduce(sent)
        for part, one, flat in zip(parts, own, received, strict=True):
            like = tf.TensorSpec(self.wire.shape(part), one.total.dtype)
            total, count = unflatten(flat, [like, one.count])
            sums.append(Statistic(self.wire.unpack(part, total), count))
        return sums

    def _add_up_in_half(
        self,
        communicator: Communicator,
        parts: Sequence[Part],
        own: Sequence[Statistic],
    ) -> list[Statistic]:
        """The same in half precision, where a count has no place.

        Totals may overflow or vanish, so they travel in units of the sum of
        all workers' largest entries.
        """
        counts_and_units = communicator.all_reduce(
            [s.count for s in own]
            + [p.largest(s.total) for p, s in zip(parts, own, strict=True)]
        )
        counts = counts_and_units[: len(own)]
        units = [unit / _REACH for unit in counts_and_units[len(own) :]]
        sums = communicator.all_reduce(
            [
                self.wire.pack(part, tf.math.divide_no_nan(one.total, unit))
                for part, one, unit in zip(parts, own, units, strict=True)
            ],
            self.wire.factor_dtype,
        )
        return [
            Statistic(self.wire.unpack(part, sum_) * unit, count)
            for part, sum_, unit, count in zip(
                parts, sums, units, counts, strict=True
            )
        ]

    # ------------------------------------------------------ decompositions
    def share_decompositions(
        self,
        communicator: Communicator,
        parts: Mapping[int, Tensors],
        layers: Sequence[int],
    ) -> dict[int, Parts]:
        """Sends the parts made by owners to the gradient workers.

        Given those that this worker has made, by layer, and all layers that
        take part in the step, returns those that it needs.
        """
        items = self._part_items(layers)
        part_of = {
            i: self._solver.all_parts(self._blocks[i].factors) for i in layers
        }

        def value_of(item: Item) -> tf.Tensor:
            made = parts[item.layer][item.name]
            made = tf.cast(made, self._part_dtype(item.layer))
            return self.wire.pack(part_of[item.layer][item.name], made)

        with tf.name_scope("decompositions"):
            values = broadcast_items(communicator, items, value_of)
        received: dict[int, Parts] = {}
        for (layer, name), value in values.items():
            value = self.wire.unpack(part_of[layer][name], value)
            value = tf.cast(value, self._blocks[layer].dtype)
            received.setdefault(layer, {})[name] = value
        return received

    def _part_items(self, layers: Sequence[int]) -> list[Item]:
        items = []
        for i, block in self._of(layers):
            for factor, owner in self.plan.layers[i].owners.items():
                members = self.plan.decomposition_group(i, factor)
                dtype = self._part_dtype(i)
                parts = self._solver.parts(block.factors, factor)
                for name, part in parts.items():
                    spec = tf.TensorSpec(self.wire.shape(part), dtype)
                    items.append(Item(i, name, spec, owner, members))
        return items

    def _part_dtype(self, layer: int) -> tf.DType:
        return self.wire.inverse_dtype or self._blocks[layer].dtype

    # ------------------------------------------- preconditioned gradients
    def stages(self, layers: Sequence[int]) -> list[list[int]]:
        """Layers of a step whose results travel while the next ones are made.

        A worker that needs nobody else's decompositions can have a stage
        decomposed and on its way before it begins with the next (DP-KFAC,
        section 5). Otherwise there is a single stage.
        """
        if self.plan.sends_decompositions:
            return [list(layers)]
        items = self._gradient_items(layers)
        found = [sorted({item.layer for item in one}) for one in rounds(items)]
        return found or [list(layers)]

    def share_gradients(
        self,
        communicator: Communicator,
        made: Mapping[int, Sequence[tf.Tensor]],
        layers: Sequence[int],
    ) -> dict[int, list[tf.Tensor]]:
        """Sends preconditioned gradients from gradient workers to receivers.

        Those that this worker has made, by layer, with the numbers beside
        them; all of them come back.
        """
        items = self._gradient_items(layers)
        with tf.name_scope("preconditioned"):
            received = broadcast_items(
                communicator, items, lambda item: flatten(made[item.layer])
            )
        shared = {i: list(own) for i, own in made.items()}
        for (layer, _), flat in received.items():
            shared[layer] = unflatten(flat, self._gradient_specs(layer))
        return shared

    def _gradient_specs(self, layer: int) -> list[tf.TensorSpec]:
        """A preconditioned gradient and the numbers beside it."""
        block = self._blocks[layer]
        shapes = [block.gradient_shape, (self._beside,)]
        return [
            tf.TensorSpec(shape, block.dtype)
            for shape in shapes[: 1 + (self._beside > 0)]
        ]

    def _gradient_items(self, layers: Sequence[int]) -> list[Item]:
        return [
            Item(
                i,
                str(root),
                tf.TensorSpec(
                    [math.prod(block.gradient_shape) + self._beside],
                    block.dtype,
                ),
                root,
                members,
            )
            for i, block in self._of(layers)
            for root, members in self.plan.gradient_groups(i)
        ]

    def _of(self, layers: Sequence[int]) -> Iterator[tuple[int, Block]]:
        """Some layers, in the plan's order on every worker."""
        return ((i, self._blocks[i]) for i in sorted(layers))
