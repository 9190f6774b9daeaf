"""What K-FAC sends between workers in each kind of step."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.distributed.assignment import Plan
from tfkfac.distributed.collectives import Communicator
from tfkfac.distributed.traffic import (
    Item,
    all_reduce_bytes,
    broadcast_items,
    received_bytes,
)
from tfkfac.linalg.packing import pack, packed_size, unpack
from tfkfac.solvers import Solver
from tfkfac.solvers.base import gradient_shape

Kinds = dict[str, dict[str, int]]
Statistics = Mapping[str, Statistic]
Parts = dict[str, tf.Tensor]


class Exchange:
    """Packs, sends and unpacks what the plan says.

    Args:
        plan: Placement of the blocks on the workers.
        blocks: The blocks, in the plan's order.
        solver: The solver.
        symmetric: Whether symmetric matrices travel as triangles.
        factor_dtype: Dtype of statistics on the wire; None is their own.
        inverse_dtype: Dtype of decompositions on the wire; None is their own.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[Block],
        solver: Solver,
        symmetric: bool = False,
        factor_dtype: tf.DType | None = None,
        inverse_dtype: tf.DType | None = None,
    ) -> None:
        self.plan = plan
        self._blocks = blocks
        self._solver = solver
        self._symmetric = symmetric
        self._factor_dtype = factor_dtype
        self._inverse_dtype = inverse_dtype

    # ------------------------------------------------------------- factors
    def reduce_statistics(
        self,
        communicator: Communicator,
        statistics: Mapping[int, Statistics],
    ) -> dict[int, dict[str, Statistic]]:
        """Adds up totals and counts over the workers, if the mode does.

        Half-precision totals would overflow, so they travel as shares of the
        sum of all counts.
        """
        if not self.plan.reduces_factors:
            return {i: dict(named) for i, named in statistics.items()}
        keys = [(i, name) for i, s in statistics.items() for name in s]
        counts = communicator.all_reduce(
            [statistics[i][name].count for i, name in keys]
        )
        shares = [
            tf.math.divide_no_nan(statistics[i][name].total, count)
            for (i, name), count in zip(keys, counts, strict=True)
        ]
        sums = communicator.all_reduce(
            [self._to_wire(share) for share in shares], self._factor_dtype
        )
        reduced: dict[int, dict[str, Statistic]] = {}
        for (i, name), count, value in zip(keys, counts, sums, strict=True):
            shape = self._blocks[i].factor_shapes[name]
            mean = self._from_wire(value, shape)
            reduced.setdefault(i, {})[name] = Statistic(mean * count, count)
        return reduced

    def factor_traffic(self) -> int:
        """Bytes that each worker receives in a factor step."""
        if not self.plan.reduces_factors:
            return 0
        shapes = [
            (shape, self._factor_dtype or block.dtype)
            for block in self._blocks
            for shape in block.factor_shapes.values()
        ]
        totals = sum(self._wire_size(s) * dtype.size for s, dtype in shapes)
        counts = sum(
            block.dtype.size * len(block.factor_shapes)
            for block in self._blocks
        )
        return all_reduce_bytes(totals + counts, self.plan.workers)

    # ------------------------------------------------------ decompositions
    def share_decompositions(
        self,
        communicator: Communicator,
        parts: Mapping[int, Parts],
        layers: Sequence[int],
    ) -> dict[int, Parts]:
        """Sends the parts made by owners to the gradient workers.

        Args:
            communicator: This worker's collectives.
            parts: The parts that this worker has made, by layer.
            layers: All layers that take part in the step.

        Returns:
            The parts this worker needs, by layer.
        """
        items = [i for i in self._part_items() if i.layer in set(layers)]

        def value_of(item: Item) -> tf.Tensor:
            value = parts[item.layer][item.name]
            packs = self._packs_part(item.layer, item.name)
            value = pack(value) if packs else value
            return tf.cast(value, item.spec.dtype)

        received: dict[int, Parts] = {}
        for (layer, name), value in broadcast_items(
            communicator, items, value_of
        ).items():
            block = self._blocks[layer]
            if self._packs_part(layer, name):
                value = unpack(value, block.factor_shapes[name])
            received.setdefault(layer, {})[name] = block.cast(value)
        return received

    def decomposition_traffic(self, rank: int) -> int:
        """Bytes that a worker receives when all blocks are decomposed."""
        return received_bytes(self._part_items(), rank)

    def _part_items(self) -> list[Item]:
        items = []
        for i, block in enumerate(self._blocks):
            for factor, owner in self.plan.layers[i].owners.items():
                members = self.plan.decomposition_group(i, factor)
                dtype = self._inverse_dtype or block.dtype
                for name, shape in self._solver.parts(block, factor).items():
                    if self._packs_part(i, name):
                        shape = (packed_size(shape),)
                    spec = tf.TensorSpec(shape, dtype)
                    items.append(Item(i, name, spec, owner, members))
        return items

    # ------------------------------------------- preconditioned gradients
    def share_gradients(
        self,
        communicator: Communicator,
        matrices: Mapping[int, tf.Tensor],
        layers: Sequence[int],
    ) -> dict[int, tf.Tensor]:
        """Sends preconditioned gradients from gradient workers to receivers.

        Args:
            communicator: This worker's collectives.
            matrices: Those that this worker has computed, by layer.
            layers: All layers that take part in the step.

        Returns:
            All of them, by layer.
        """
        items = [i for i in self._gradient_items() if i.layer in set(layers)]
        received = broadcast_items(
            communicator, items, lambda item: matrices[item.layer]
        )
        shared = dict(matrices)
        for (layer, _), value in received.items():
            shared[layer] = value
        return shared

    def gradient_traffic(self, rank: int) -> int:
        """Bytes of preconditioned gradients that a worker receives a step."""
        return received_bytes(self._gradient_items(), rank)

    def _gradient_items(self) -> list[Item]:
        return [
            Item(
                i,
                str(root),
                tf.TensorSpec(gradient_shape(block), block.dtype),
                root,
                members,
            )
            for i, block in enumerate(self._blocks)
            for root, members in self.plan.gradient_groups(i)
        ]

    # ------------------------------------------------------------- packing
    def _packs_part(self, layer: int, name: str) -> bool:
        shape = self._blocks[layer].factor_shapes.get(name, ())
        return (
            self._symmetric and self._solver.symmetric_parts and len(shape) > 1
        )

    def _wire_size(self, shape: tuple[int, ...]) -> int:
        if self._symmetric and len(shape) > 1:
            return packed_size(shape)
        return tf.TensorShape(shape).num_elements()

    def _to_wire(self, matrix: tf.Tensor) -> tf.Tensor:
        packs = self._symmetric and matrix.shape.rank > 1
        return pack(matrix) if packs else matrix

    def _from_wire(self, value: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
        packs = self._symmetric and len(shape) > 1
        return unpack(value, shape) if packs else value


def step_bytes(
    gradients: int, factors: int, decompositions: int, preconditioned: int
) -> Kinds:
    """Traffic of each kind of step, by what is sent."""

    def kind(with_factors: bool, with_decompositions: bool) -> dict[str, int]:
        return {
            "gradients": gradients,
            "factors": factors * with_factors,
            "decompositions": decompositions * with_decompositions,
            "preconditioned_gradients": preconditioned,
        }

    return {
        "plain": kind(False, False),
        "factor": kind(True, False),
        "inverse": kind(False, True),
    }
