"""Placement of blocks on workers: messages, costs and update schedule."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self, TypeVar

import numpy as np
import tensorflow as tf

from tfkfac.blocks import Block, Statistic
from tfkfac.blocks.registry import Registry
from tfkfac.distributed.collectives import (
    Communicator,
    Item,
    all_reduce_bytes,
    broadcast_items,
    bundles,
    flatten,
    scope,
    split_buckets,
    sum_dtype,
    unflatten,
)
from tfkfac.distributed.plan import (
    MODES,
    LayerPlan,
    Plan,
    Shapes,
    cost,
    plan_layers,
)
from tfkfac.distributed.topology import Topology
from tfkfac.factors import Part, Tensors
from tfkfac.factors.base import Wire
from tfkfac.fisher.types import Statistics
from tfkfac.kfac.settings import Distribution
from tfkfac.linalg.tensors import unstacked
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.solvers import Solver

T = TypeVar("T")
Bucket = Sequence[tuple[Part, Statistic]]  # factor types, sums of a batch
Numbers = np.ndarray  # one number per worker
# Scaled sums stay below this bound, within float16 (largest number 65504).
_MAX_SUM = 2.0**15


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """Bytes of one block, independent of its placement.

    Attributes:
        factors: Bytes of each factor's average on its owner, by name.
        decomposition: Bytes of the decomposition on each gradient worker.
        statistics: Bytes of a batch's statistics in the all-reduce.
        parts: Bytes that each factor's owner sends after a decomposition.
        gradient: Bytes of the message with the preconditioned gradient.
    """

    factors: Mapping[str, int]
    decomposition: int
    statistics: int
    parts: Mapping[str, int]
    gradient: int

    @classmethod
    def of(
        cls, block: Block, solver: Solver, wire: Wire, num_scalars: int = 0
    ) -> Self:
        """Return the bytes of a block for a solver and a message format."""
        factors, item = block.factors, block.dtype.size
        dtype = wire.inverse_dtype or block.dtype
        statistics_bytes = 0
        for factor in factors.values():
            total = math.prod(wire.shape(factor.storage))
            statistics_bytes += total * (wire.factor_dtype or block.dtype).size
            # Add the row count and, in half precision, the scales, which are
            # sent in the dtype of the block.
            scales = 0
            if wire.factor_dtype is not None:
                spec = factor.storage
                sizes = enumerate(spec.shape)
                scales = math.prod(n for i, n in sizes if i not in spec.axes)
            statistics_bytes += item * (1 + scales)
        sent_bytes = {}
        for name in factors:
            sent = solver.parts(factors, name).values()
            elements = sum(math.prod(wire.shape(spec)) for spec in sent)
            sent_bytes[name] = elements * dtype.size
        stored = solver.kept(factors).values()
        return cls(
            factors={n: f.elements * item for n, f in factors.items()},
            decomposition=sum(spec.elements for spec in stored) * dtype.size,
            statistics=statistics_bytes,
            parts=sent_bytes,
            gradient=(math.prod(block.gradient_shape) + num_scalars) * item,
        )


class Loads:
    """Cost of each worker: sum over the layers that a plan assigns to it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        columns = [layer.gradient_workers[0] for layer in plan.layers]
        self._columns = np.array(columns, np.int64)

    def owned(self, values: Sequence[Mapping[str, float]]) -> Numbers:
        """Sum per-factor values over the factors that each worker owns."""
        sums = np.zeros(self.plan.workers)
        for layer, by_name in zip(self.plan.layers, values, strict=True):
            for name, value in by_name.items():
                sums[layer.owners[name]] += value
        return sums

    def preconditioned(self, values: Sequence[float]) -> Numbers:
        """Sum per-layer values over the layers that a worker preconditions."""
        sums = np.zeros(self.plan.columns)
        np.add.at(sums, self._columns, values)
        return np.resize(sums, self.plan.workers)

    def state(self, costs: Sequence[BlockCost]) -> dict[str, Numbers]:
        """Bytes of factors and decompositions on each worker."""
        return {
            "factors": self.owned([c.factors for c in costs]),
            "decompositions": self.preconditioned(
                [c.decomposition for c in costs]
            ),
        }

    def received(
        self, costs: Sequence[BlockCost], gradients: int
    ) -> dict[str, Numbers]:
        """Bytes that each worker receives, by message.

        `gradients` are the bytes of all gradients of the model.
        """
        plan = self.plan
        statistics = plan.reduces_factors * sum(c.statistics for c in costs)
        reduced_statistics, reduced_gradients = (
            np.full(plan.workers, all_reduce_bytes(size, plan.workers))
            for size in (statistics, gradients)
        )
        total = self.preconditioned([sum(c.parts.values()) for c in costs])
        local = self.preconditioned([c.gradient for c in costs])
        return {
            "gradients": reduced_gradients,
            "factors": reduced_statistics,
            "decompositions": total - self.owned([c.parts for c in costs]),
            "preconditioned_gradients": sum(c.gradient for c in costs) - local,
        }


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
        # The layer, the name and the type of each factor, and its statistics.
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
        for message in split_buckets(message_specs):
            bucket = list(itertools.islice(remaining, len(message)))
            with tf.name_scope("statistics/" + scope([i for i, *_ in bucket])):
                sums = reduce(
                    communicator, [(spec, x) for _, _, spec, x in bucket]
                )
            for (i, name, *_), total in zip(bucket, sums, strict=True):
                reduced.setdefault(i, {})[name] = total
        return reduced

    def _reduce(
        self, communicator: Communicator, bucket: Bucket
    ) -> list[Statistic]:
        """All-reduce the totals and counts of a bucket of statistics."""
        received = communicator.all_reduce(
            [
                flatten([self.wire.pack(spec, s.total), s.count])
                for spec, s in bucket
            ]
        )
        sums = []
        for (spec, s), flat in zip(bucket, received, strict=True):
            packed = tf.TensorSpec(self.wire.shape(spec), s.total.dtype)
            total, count = unflatten(flat, [packed, s.count])
            sums.append(Statistic(self.wire.unpack(spec, total), count))
        return sums

    def _reduce_half(
        self, communicator: Communicator, bucket: Bucket
    ) -> list[Statistic]:
        """All-reduce totals in half precision, and counts in full precision.

        To avoid overflow and underflow, each total is divided by the scale
        `sum over workers of max |total| / _MAX_SUM`.
        """
        counts_and_maxima = communicator.all_reduce(
            [s.count for _, s in bucket]
            + [spec.largest(s.total) for spec, s in bucket]
        )
        counts = counts_and_maxima[: len(bucket)]
        scales = [x / _MAX_SUM for x in counts_and_maxima[len(bucket) :]]
        sums = communicator.all_reduce(
            [
                self.wire.pack(spec, tf.math.divide_no_nan(s.total, scale))
                for (spec, s), scale in zip(bucket, scales, strict=True)
            ],
            self.wire.factor_dtype,
        )
        return [
            Statistic(self.wire.unpack(spec, sum_) * scale, count)
            for (spec, _), sum_, scale, count in zip(
                bucket, sums, scales, counts, strict=True
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
        # All workers must list the items in the same order.
        items: list[Item] = []
        specs: dict[tuple[int, str], Part] = {}
        for i in sorted(layers):
            dtype = self.wire.inverse_dtype or self.blocks[i].dtype
            layer_plan = self.plan.layers[i]
            for factor, owner in layer_plan.owners.items():
                # The owner, and the workers that need its decomposition.
                members = tuple(sorted({owner, *layer_plan.gradient_workers}))
                by_name = self.solver.parts(self.blocks[i].factors, factor)
                for name, spec in by_name.items():
                    packed = tf.TensorSpec(self.wire.shape(spec), dtype)
                    items.append(Item(i, name, packed, owner, members))
                    specs[i, name] = spec

        def value_of(item: Item) -> tf.Tensor:
            value = tf.cast(parts[item.layer][item.name], item.spec.dtype)
            return self.wire.pack(specs[item.layer, item.name], value)

        with tf.name_scope("decompositions"):
            values = broadcast_items(communicator, items, value_of)
        received: dict[int, dict[str, tf.Tensor]] = {}
        for (layer, name), value in values.items():
            value = self.wire.unpack(specs[layer, name], value)
            value = tf.cast(value, self.blocks[layer].dtype)
            received.setdefault(layer, {})[name] = value
        return received

    # ------------------------------------------- preconditioned gradients
    def stages(self, layers: Mapping[int, T]) -> list[list[T]]:
        """Group layers into stages that overlap communication and computation.

        If workers exchange no decompositions, the gradients of a stage are
        sent while the next stage is decomposed (DP-KFAC, section 5).
        Otherwise there is a single stage.
        """
        stages: list[set[int]] = []
        sends_decompositions = any(
            set(layer.gradient_workers) != {owner}
            for layer in self.plan.layers
            for owner in layer.owners.values()
        )
        if not sends_decompositions:
            for items in bundles(self._gradient_items(list(layers))).values():
                sent = iter(items)
                messages = split_buckets([item.spec for item in items])
                # Stage i has the layers of the i-th message of each sender.
                for index, message in enumerate(messages):
                    if index == len(stages):
                        stages.append(set())
                    message_items = itertools.islice(sent, len(message))
                    stages[index] |= {item.layer for item in message_items}
        if not stages:
            return [list(layers.values())]
        return [[layers[i] for i in sorted(stage)] for stage in stages]

    def share_gradients(
        self,
        communicator: Communicator,
        groups: Sequence[Sequence[int]],
        local: Sequence[Sequence[tf.Tensor] | None],
    ) -> list[Sequence[tf.Tensor]]:
        """Broadcast preconditioned gradients from gradient workers.

        `groups` are the layers of each group. `local` are the stacks of each
        group on this worker, or None: gradients, and `num_scalars` per layer.
        The result has the stacks of all groups.
        """
        items = self._gradient_items([i for layers in groups for i in layers])
        if not items:
            return [stacks for stacks in local if stacks is not None]
        tensors: dict[int, Sequence[tf.Tensor]] = {}
        for layers, stacks in zip(groups, local, strict=True):
            by_layer = zip(*map(unstacked, stacks or ()), strict=True)
            tensors |= zip(layers, by_layer, strict=False)
        with tf.name_scope("preconditioned"):
            received = broadcast_items(
                communicator, items, lambda item: flatten(tensors[item.layer])
            )
        for (layer, _), flat in received.items():
            block, count = self.blocks[layer], self.num_scalars
            shapes = [block.gradient_shape, *([(count,)] if count else [])]
            specs = [tf.TensorSpec(shape, block.dtype) for shape in shapes]
            tensors[layer] = unflatten(flat, specs)
        return [
            [
                tf.stack(rows)
                for rows in zip(*(tensors[i] for i in layers), strict=True)
            ]
            for layers in groups
        ]

    def _gradient_items(self, layers: Sequence[int]) -> list[Item]:
        """Return gradients to broadcast, in the same order on every worker."""
        items = []
        for i in sorted(layers):
            size = math.prod(self.blocks[i].gradient_shape)
            flat = tf.TensorSpec(
                [size + self.num_scalars], self.blocks[i].dtype
            )
            for root, receivers in self.plan.layers[i].receivers.items():
                if receivers:
                    members = tuple(sorted((root, *receivers)))
                    items.append(Item(i, str(root), flat, root, members))
        return items


class Placement:
    """Assignment of the blocks of a model to the workers of a job.

    `num_scalars` scalars are sent with each preconditioned gradient.
    """

    def __init__(
        self,
        registry: Registry,
        topology: Topology,
        solver: Solver,
        distribution: Distribution,
        num_scalars: int = 0,
    ) -> None:
        self.registry = registry
        self.blocks = registry.blocks  # in the order of the layers
        self.topology = topology
        self.solver = solver
        self.distribution = distribution
        factors = [block.factors for block in registry.blocks]
        self.plan = Plan(
            MODES[distribution.mode],
            topology.replicas,
            plan_layers(
                factors,
                topology.replicas,
                distribution.mode,
                distribution.gradient_worker_fraction,
                distribution.assignment,
                solver.whole_layers,
            ),
        )
        self.schedule_groups = assign_groups(self.plan.layers, factors)
        dtype = distribution.factor_dtype
        self.wire = Wire(
            distribution.symmetric,
            dtype and sum_dtype(tf.as_dtype(dtype), topology.hint),
            distribution.storage_dtype,
        )
        self.exchange = Exchange(
            self.plan, registry.blocks, solver, self.wire, num_scalars
        )
        self.costs = [
            BlockCost.of(block, solver, self.wire, num_scalars)
            for block in registry.blocks
        ]

    @property
    def takes_rows(self) -> bool:
        """True if gradients may be preconditioned as rows (a, g).

        All workers must be gradient workers: each preconditions local rows.
        """
        all_precondition = all(
            len(layer.gradient_workers) == self.topology.replicas
            for layer in self.plan.layers
        )
        return self.solver.takes_rows and all_precondition

    def state_bytes(self, rank: int) -> dict[str, int]:
        """Bytes of factors and decompositions of a worker."""
        state = Loads(self.plan).state(self.costs)
        return {name: int(sums[rank]) for name, sums in state.items()}

    def communication_bytes(
        self, rank: int, gradient_bytes: int
    ) -> dict[str, dict[str, int]]:
        """Bytes that a worker receives in each type of step, by message."""
        received = Loads(self.plan).received(self.costs, gradient_bytes)
        by_message = {name: int(sums[rank]) for name, sums in received.items()}
        return {
            "plain": by_message | {"factors": 0, "decompositions": 0},
            "factor": by_message | {"decompositions": 0},
            "inverse": by_message | {"factors": 0},
        }


# Default schedule (measured): the second and third interval begin at these
# steps. The intervals are short while the curvature changes fast.
_BOUNDARIES = (20, 100)
FACTORS = (1, 5, 20)
INVERSES = (5, 20, 100)

# Maximum number of groups of inverse updates, which run in different steps.
# Each group is a branch of the graph.
_MAX_GROUPS = 4
# Multiplications that one group may always have: about 10 ms on one core.
_MIN_OPERATIONS = 2 * 10**8
# Limit on the operations of a group, relative to the largest block.
_SLACK = 1.5
# Fraction of a block's operations by which it may lengthen a group for free:
# blocks of nearly equal size, such as 4,096 and 4,097 rows, share a group.
_TOLERANCE = 0.1


def steps_between(
    interval: Hyperparameter, default: tuple[int, int, int], clock: tf.Tensor
) -> tf.Tensor:
    """Return the interval; for None, the interval of the default schedule."""
    if interval.get() is not None:
        return interval.at(clock)
    first, second = _BOUNDARIES
    early, middle, late = (tf.constant(i, tf.int64) for i in default)
    late = tf.where(clock < second, middle, late)
    return tf.where(clock < first, early, late)


def assign_groups(
    layers: Sequence[LayerPlan], shapes: Sequence[Shapes]
) -> tuple[int, ...]:
    """Divide blocks into groups, to spread inverse updates over steps.

    The workers wait for each other in each step, so a group takes as long as
    its busiest worker. Use the fewest groups whose busiest workers stay within
    1.5 times the largest block; a small model has one group.
    """
    work: list[Counter[int]] = [Counter() for _ in layers]
    for by_worker, layer, factors in zip(work, layers, shapes, strict=True):
        for name, factor in factors.items():
            by_worker[layer.owners[name]] += cost(factor, "compute")
    sizes = [max(by_worker.values()) for by_worker in work]
    limit = _SLACK * max([_MIN_OPERATIONS, *sizes])
    for count in range(1, _MAX_GROUPS + 1):
        sums: list[Counter[int]] = [Counter() for _ in range(count)]
        # The length of a group: the operations of its busiest worker.
        lengths, groups = [0] * count, [0] * len(work)
        # From the largest block on, choose a group that the block does not
        # lengthen, else the group that is the shortest with the block. With
        # one worker this is longest processing time first.
        for block in sorted(range(len(work)), key=lambda b: (-sizes[b], b)):
            lengthened = [
                max(length, *(loads[w] + n for w, n in work[block].items()))
                for length, loads in zip(lengths, sums, strict=True)
            ]
            limits = [length + _TOLERANCE * sizes[block] for length in lengths]
            group = min(
                range(count),
                key=lambda g: (lengthened[g] > limits[g], lengthened[g]),
            )
            groups[block] = group
            sums[group].update(work[block])
            lengths[group] = lengthened[group]
        if max(lengths) <= limit:
            break
    return tuple(groups)


def find_due_groups(
    count: int,
    interval: tf.Tensor,
    factor_interval: tf.Tensor,
    clock: tf.Tensor,
) -> tf.Tensor:
    """Return a bool per schedule group, True if its inverse update is due.

    Each group is due once per interval. With several groups, a group that
    coincides with a factor update is delayed by a step.
    """
    offsets = tf.constant([*range(count)], tf.int64) * interval // count
    if count > 1:
        coincides = tf.equal(offsets % factor_interval, 0)
        offsets += tf.cast(coincides & (factor_interval > 1), tf.int64)
    return tf.equal((clock - offsets) % interval, 0)
