"""Which worker keeps and does what of a model's blocks, and what it costs."""

from tfkfac.blocks import Block
from tfkfac.blocks.registry import Registry
from tfkfac.distributed.collectives import sum_dtype
from tfkfac.distributed.plan import Plan, plan_layers
from tfkfac.distributed.topology import Topology
from tfkfac.distributed.wire import Wire, all_reduce_bytes
from tfkfac.kfac.exchange import Exchange, Kinds, step_bytes
from tfkfac.kfac.schedule import take_turns
from tfkfac.kfac.settings import Settings
from tfkfac.solvers import Solver


class Placement:
    """The blocks of a model on the workers of a job.

    Args:
        registry: Blocks and leftovers of the model.
        topology: The workers.
        solver: The solver.
        settings: How the work is distributed.

    Attributes:
        turns: The turn in which each block is decomposed.
    """

    def __init__(
        self,
        registry: Registry,
        topology: Topology,
        solver: Solver,
        settings: Settings,
    ) -> None:
        self.registry = registry
        self.topology = topology
        self.solver = solver
        self.settings = settings
        factors = [block.factors for block in registry.blocks]
        self.turns = take_turns(
            [sum(f.operations for f in kinds.values()) for kinds in factors]
        )
        self.plan = Plan(
            settings.mode,
            topology.replicas,
            plan_layers(
                factors,
                topology.replicas,
                settings.distribution,
                settings.fraction,
                settings.assignment,
                solver.whole_layers,
                self.turns,
            ),
        )
        wire = settings.factor_dtype
        self.exchange = Exchange(
            self.plan,
            registry.blocks,
            solver,
            Wire(
                settings.symmetric,
                wire and sum_dtype(wire, topology.hint),
                settings.inverse_dtype,
            ),
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, in the order of the layers."""
        return self.registry.blocks

    @property
    def takes_rows(self) -> bool:
        """Whether gradients may be preconditioned by their rows.

        Every worker has to do it with its own ones.
        """
        everywhere = all(
            len(layer.gradient_workers) == self.topology.replicas
            for layer in self.plan.layers
        )
        return self.solver.takes_rows and everywhere

    def factor_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the factors of a block that a worker keeps."""
        sizes = self.exchange.sizes[layer].factors
        return sum(sizes[name] for name in self.plan.owns(rank, layer))

    def decomposition_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the decomposition of a block that a worker keeps."""
        if not self.plan.preconditions(rank, layer):
            return 0
        return self.exchange.sizes[layer].decomposition

    def statistic_bytes(self, rank: int, layer: int) -> int:
        """Bytes of the sums of a block's statistics over micro-batches."""
        if not self.plan.observes(rank, layer):
            return 0
        block = self.blocks[layer]
        kinds = block.factors.values()
        return sum(kind.elements + 1 for kind in kinds) * block.dtype.size

    def state_bytes(
        self,
        rank: int,
        accumulated: int | None = None,
        previous: int | None = None,
    ) -> dict[str, int]:
        """Bytes of the curvature state of a worker.

        Args:
            rank: The worker.
            accumulated: Bytes of the gradients that it adds up over
                micro-batches; None if it does not.
            previous: Bytes of the update before; None if it is not kept.
        """
        layers = range(len(self.blocks))
        sizes = {
            "factors": sum(self.factor_bytes(rank, i) for i in layers),
            "decompositions": sum(
                self.decomposition_bytes(rank, i) for i in layers
            ),
        }
        if accumulated is not None:
            statistics = sum(self.statistic_bytes(rank, i) for i in layers)
            sizes["accumulation"] = accumulated + statistics
        if previous is not None:
            sizes["previous_update"] = previous
        return {**sizes, "total": sum(sizes.values())}

    def communication_bytes(self, rank: int, gradient_bytes: int) -> Kinds:
        """Bytes that a worker receives in each kind of step."""
        workers = self.topology.replicas
        return step_bytes(
            all_reduce_bytes(gradient_bytes, workers),
            self.exchange.factor_traffic(),
            self.exchange.decomposition_traffic(rank),
            self.exchange.gradient_traffic(rank),
        )
