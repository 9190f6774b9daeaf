"""K-FAC, step by step."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks.registry import build_registry, tap_layers
from tfkfac.capture.model_taps import PullbackTap
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import Tracked
from tfkfac.distributed.collectives import gradient_bytes
from tfkfac.factors import Limit
from tfkfac.fisher.types import EMPIRICAL, Choice, choose_type
from tfkfac.kfac import report
from tfkfac.kfac.active import (
    ActiveBlock,
    Statistics,
    batch_statistics,
    in_stages,
    observe,
    observed,
)
from tfkfac.kfac.averages import Pending
from tfkfac.kfac.bank import State, local_factors
from tfkfac.kfac.natural import Natural, count_invalid
from tfkfac.kfac.placement import (
    FACTORS,
    INVERSES,
    Placement,
    steps_between,
    turns_due,
)
from tfkfac.kfac.settings import (
    Distribution,
    KFACSettings,
)
from tfkfac.kfac.spectral import Spectral
from tfkfac.saving.entries import Contents
from tfkfac.shell.method import Method
from tfkfac.solvers.registry import make_solver
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update

STEPS = {"natural": Natural, "spectral": Spectral}
# Rank of the approximation of a factor wider than `max_factor_dim`. At a limit
# of 640 it takes at most a tenth of the matrix.
FACTOR_RANK = 64


class KFACMethod(Method):
    """Preconditions the gradient of each layer by its Kronecker factors.

    The arguments are those of `KFAC`.
    """

    settings: KFACSettings

    def __init__(self, settings: KFACSettings) -> None:
        super().__init__(settings)
        distribution = settings.distribution
        if isinstance(distribution, str):
            distribution = Distribution(distribution)
        self._kind = STEPS[settings.step](
            settings.damping, settings.kl_clip, settings.momentum
        )
        self._distribution = distribution
        self.states: tuple[State, ...] = ()
        self._placement: Placement | None = None
        self._advice = report.Advice()
        self._choice: Choice | None = None

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """One step (Distributed K-FAC, algorithm 1; KAISA, section 3)."""
        self._kind.find_rates(self.job, self.states)
        own = self.job.own(self.states)
        by_rows = self.placement.takes_rows and own.pending is None
        by_rows &= self._kind.takes_rows(step.group.size)
        layers = observe(step, own, by_rows)
        step.note_losses("its unit is 1, its Fisher matrix the empirical one")
        if not self.job.terms_of(step.batch):
            self._advice.give(self.job, report.unseen_loss_warning(self.job))
        statistics = self.statistics(layers, step)
        if own.pending is None:
            self.update(layers, step, statistics)
        else:
            self.accumulate(layers, step, own.pending, statistics)

    def update(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
    ) -> None:
        """An update of the weights, by gradients still this replica's own."""
        own, kind = self.job.own(self.states), self._kind
        damping = kind.damping.at(self.job.clock)
        asked, loss = self.reduce(step)
        # One after the other, and not one within the other: what each of them
        # uses would be passed from branch to branch.
        step.check_finite()
        self.update_factors(layers, step, statistics)
        turns = self.turns_due()
        first, *others = in_stages(layers, self.placement)
        renewed = [self.renew(first, step, turns, asked, damping)]

        def direction() -> Update:
            # Gradient workers apply -> receivers receive, stage by stage.
            exchange = self.placement.exchange
            made = kind.directions(first, step, exchange, damping)
            for stage in others:  # while what those before made is sent
                renewed.append(self.renew(stage, step, turns, asked, damping))
                made += kind.directions(stage, step, exchange, damping)
            any_renewed = tf.cast(tf.reduce_any(renewed), tf.int64)
            own.inverse_updates.assign_add(any_renewed)
            count_invalid(own.counters, made)
            return Update(kind.gradients(made, step, own, damping, loss))

        step.apply(direction)

    def statistics(
        self, layers: Sequence[ActiveBlock], step: Step
    ) -> Callable[[], Statistics]:
        """Function that takes this replica's statistics of the batch."""
        choice = Choice(EMPIRICAL)
        if self.settings.fisher != EMPIRICAL:
            calls = PullbackTap.open(self.job.model).take()
            choice = choose_type(self.settings.fisher, step.loss.losses, calls)
        self._choice = choice.without_tensors()
        return lambda: batch_statistics(
            layers,
            step,
            choice,
            self.job.own(self.states),
            self.placement.plan,
            self.settings.weight_sharing,
            self.settings.factor_batch_fraction,
        )

    def reduce(self, step: Step) -> tuple[tf.Tensor, tf.Tensor]:
        """Reduces the gradients, and with them what has to be decomposed.

        A worker that keeps decompositions of others' factors cannot make them
        by itself: what one has asked for, all do. It costs no message.

        Returns:
            A bool for each block, true if it is to be decomposed at once, and
            the mean loss of the group, zero if nobody asks for it.
        """
        counters = self.job.own(self.states).counters
        asked = tf.equal(counters.decomposed, 0)
        first = next((g for g in step.gradients if g is not None), None)
        dtype = tf.float32 if first is None else first.dtype
        losses = [step.own_loss()] if self._kind.needs_loss else []
        scalars = [asked, *losses]
        sums = step.reduce(*(tf.cast(x, dtype) for x in scalars))
        loss = sums[-1] if losses else tf.zeros([])
        wanted = sums[0] > 0 if self.placement.plan.shares_clocks else asked
        return wanted, tf.cast(loss, tf.float64)

    def accumulate(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        pending: Pending,
        statistics: Callable[[], Statistics],
    ) -> None:
        """Adds a micro-batch to those before; with the last one, updates."""
        step.keep_finite(tf.convert_to_tensor(pending.loss))
        step.weigh()
        pending.add(step)
        due, late = self.factors_due(layers, step)
        tf.cond(
            due | late,
            lambda: pending.add_statistics(statistics()),
            lambda: tf.constant(0),
        )

        def complete() -> tf.Tensor:
            merged = pending.merged(step)
            self.update(layers, merged, pending.statistics)
            pending.reset()
            return tf.constant(0)

        tf.cond(pending.is_complete(), complete, lambda: tf.constant(0))

    def factors_due(
        self, layers: Sequence[ActiveBlock], step: Step
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Two bools: due by schedule, due for a block without statistics."""
        counters, clock = self.job.own(self.states).counters, self.job.clock
        steps = steps_between(
            self.settings.factor_update_interval, FACTORS, clock
        )
        seen = observed(layers, step, self.placement.plan)
        own = tf.constant([one.position for one in seen], tf.int32)
        new = tf.gather(counters.without_statistics(), own)
        return tf.equal(clock % steps, 0), tf.reduce_any(new)

    def update_factors(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
    ) -> None:
        """Local statistics -> [all-reduce] -> averages, if they are due."""
        state, placement = self.job.own(self.states), self.placement
        due, late = self.factors_due(layers, step)

        def move_averages() -> None:
            reduced = placement.exchange.reduce_statistics(
                step.group, statistics()
            )
            taken = state.update_averages(
                reduced, self.settings.factor_decay, due
            )
            state.factor_updates.assign_add(taken)

        when((due | late) & step.finite, move_averages)

    def turns_due(self) -> list[tf.Tensor]:
        """A bool for each turn of decompositions, true if it has come."""
        clock = self.job.clock
        return turns_due(
            max(self.placement.turns, default=0) + 1,
            steps_between(
                self.settings.inverse_update_interval, INVERSES, clock
            ),
            steps_between(self.settings.factor_update_interval, FACTORS, clock),
            clock,
        )

    def renew(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        due: Sequence[tf.Tensor],
        asked: tf.Tensor,
        damping: tf.Tensor,
    ) -> tf.Tensor:
        """Owners decompose -> gradient workers receive, turn by turn.

        Blocks of one stage, whose turns are due or who asked not to wait.

        Returns:
            Scalar bool, true if any block was decomposed.
        """
        turns: dict[int, list[int]] = {}
        for one in layers:
            turn = self.placement.turns[one.position]
            turns.setdefault(turn, []).append(one.position)
        renewed = [
            self.renew_turn(places, step, due[turn], asked, damping)
            for turn, places in sorted(turns.items())
        ]
        return tf.reduce_any(tf.stack([tf.constant(False), *renewed]))

    def renew_turn(
        self,
        places: Sequence[int],
        step: Step,
        due: tf.Tensor,
        asked: tf.Tensor,
        damping: tf.Tensor,
    ) -> tf.Tensor:
        """The same of the blocks of one turn, by their positions."""
        state, placement = self.job.own(self.states), self.placement
        counters, every = state.counters, range(len(placement.blocks))
        wanted = (counters.observed > 0) & (due | asked) & step.finite
        wanted &= tf.constant([i in places for i in every])

        def renew() -> None:
            made = state.decompose(places, placement.solver, damping)
            parts = placement.exchange.share_decompositions(
                step.group, made, places
            )
            state.replace_decompositions(parts, damping, wanted)

        any_wanted = tf.reduce_any(wanted)
        when(any_wanted, renew)
        return any_wanted

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        self.job = job
        self._placement = None
        excluded = self._kind.excluded_blocks
        tap_layers(job.model, self.settings.skip_layers, self, excluded)
        if self.settings.fisher != EMPIRICAL:
            PullbackTap.open(job.model)

    @override
    def set_run_length(
        self, steps: int | None, remaining: int | None = None
    ) -> None:
        """Compute the largest rates of schedules within the run."""
        if remaining is not None:
            updates = remaining // (
                self.settings.gradient_accumulation_steps or 1
            )
            end = int(self.job.clock) + updates
            self._kind.set_end_step(end, self.job, self.states)

    @property
    def placement(self) -> Placement:
        """Blocks of the model, and which worker does what of them."""
        if self._placement is None:
            registry = build_registry(
                self.job.model,
                self.settings.skip_layers,
                Limit(self.settings.max_factor_dim, FACTOR_RANK),
                self._kind.excluded_blocks,
            )
            self._placement = Placement(
                registry,
                self.job.topology,
                make_solver(self.settings.solver),
                self._distribution,
                self._kind.extra_scalars,
            )
        return self._placement

    @override
    def create(self) -> Sequence[Tracked]:
        self._placement = None  # what was seen before the model was built
        placement = self.placement
        warning = report.coverage_warning(placement.registry, self.job)
        self._advice.give(self.job, warning)
        known = dict(zip(self.job.topology.local, self.states, strict=False))

        def make(rank: int) -> State:
            state = known.get(rank) or State()
            state.fill(placement, rank, self._kind.has_momenta)
            state.sections = state.sections or tuple(
                self._kind.sections(self.job)
            )
            if self.settings.gradient_accumulation_steps is not None:
                state.accumulate(
                    self.settings.gradient_accumulation_steps,
                    placement,
                    rank,
                    self.job,
                )
            return state

        self.states = self.job.for_each(make)
        return self.states

    @override
    def covered(self) -> list[keras.Variable]:
        return [v for one in self.placement.blocks for v in one.variables]

    @override
    def agreement(self) -> dict[str, Any]:
        return self.placement.registry.agreement()

    @override
    def contents(self, rank: int) -> Contents:
        return self.job.at(self.states, rank).contents(self.placement, rank)

    @override
    def events(self) -> list[tuple[str, tf.Variable]]:
        return [
            *(event for state in self.states for event in state.events()),
            *self.job.losses.events(),
        ]

    # ----------------------------------------------------------- reporting
    @override
    def summary(self) -> list[str]:
        notes = [
            report.fisher_text(self.settings.fisher, self._choice),
            *self.job.losses.lines(),
        ]
        return report.describe(
            self.job,
            self.placement,
            self.states,
            notes,
            self._kind,
            self.state_bytes(),
        )

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Bias-corrected averages that this process keeps, by layer path."""
        return local_factors(self.states)

    @override
    def state_bytes(self) -> dict[str, int]:
        placement, rank = self.placement, self.job.topology.local[0]
        sizes = placement.state_bytes(rank)
        if self.settings.gradient_accumulation_steps is not None:
            gradients = gradient_bytes(self.job.model.trainable_variables)
            statistics = placement.accumulated_bytes(rank)
            sizes["accumulation"] = gradients + statistics
        sizes |= self._kind.bytes(placement, rank)
        return {**sizes, "total": sum(sizes.values())}

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        weights = self.job.model.trainable_variables
        topology = self.job.topology
        size = gradient_bytes(weights, topology.hint)
        # Each block's request for a decomposition, and the loss.
        flags = len(self.placement.blocks) + self._kind.needs_loss
        size += flags * int(tf.as_dtype(weights[0].dtype).size)
        return self.placement.communication_bytes(topology.local[0], size)
