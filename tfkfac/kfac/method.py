"""K-FAC, step by step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule
from typing_extensions import override

from tfkfac.blocks.embedding import EmbeddingBlock, PositionEmbeddingBlock
from tfkfac.blocks.registry import tap_layers
from tfkfac.capture.model_taps import ForwardTap, PullbackTap
from tfkfac.checks import check_choice, check_count, check_range
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import Tracked
from tfkfac.compat.optimizers import rate_of
from tfkfac.distributed.collectives import gradient_bytes
from tfkfac.factors import Limit
from tfkfac.fisher.types import EMPIRICAL, TYPES, Choice, choose_type
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
from tfkfac.kfac.bank import FAULTS, State, kept_factors
from tfkfac.kfac.length import (
    RATE,
    SMALL,
    clip_step,
    rms_factor,
    spectral_length,
)
from tfkfac.kfac.placement import (
    FACTORS,
    INVERSES,
    Placement,
    Placer,
    steps_between,
    turns_due,
)
from tfkfac.kfac.precondition import (
    BESIDE,
    Preconditioned,
    precondition,
    put_back,
    renew_unsound,
)
from tfkfac.kfac.quadratic import Sample, quadratic_step
from tfkfac.kfac.settings import (
    Distribution,
    LevenbergMarquardt,
    QuadraticStep,
    SpectralStep,
    check_batch_fraction,
    check_distribution,
    check_skip_layers,
    check_step,
    rule_of,
)
from tfkfac.saving.entries import Contents
from tfkfac.shell.arguments import Argument, Tunable
from tfkfac.shell.method import Method
from tfkfac.shell.rest import largest_rate
from tfkfac.solvers import SOLVERS
from tfkfac.training.job import Job
from tfkfac.training.step import Gradients, Step, Update

# Blocks that spectral steps leave out: of a table each row sees little of the
# data, and orthogonalised it would move as much as one that sees all.
TABLES = (EmbeddingBlock, PositionEmbeddingBlock)


def may_be_small(job: Job) -> bool:
    """True if the learning rate could be too small for the inner SGD."""
    inner = job.inner_optimizer
    is_sgd = isinstance(inner, keras.optimizers.SGD)
    # A number may be another one by then.
    has_schedule = isinstance(rate_of(inner), LearningRateSchedule)
    return is_sgd and not (has_schedule and largest_rate(inner) >= SMALL * RATE)


class KFACMethod(Method):
    """Preconditions the gradient of each layer by its Kronecker factors.

    The arguments are those of `KFAC`.
    """

    damping = Tunable(also=LevenbergMarquardt)
    kl_clip = Tunable(positive=True, optional=True)
    step = Argument(check_step)
    fisher = Argument(check_choice, TYPES, optional=True)
    solver = Argument(check_choice, tuple(SOLVERS))
    distribution = Argument(check_distribution)
    factor_update_interval = Tunable(integer=True, optional=True)
    inverse_update_interval = Tunable(integer=True, optional=True)
    factor_decay = Argument(check_range, 0, 1)
    factor_batch_fraction = Argument(check_batch_fraction)
    weight_sharing = Argument(check_choice, ("expand", "reduce", "average"))
    max_factor_dim = Argument(check_count, 1, optional=True)
    factor_rank = Argument(check_count, 1)
    skip_layers = Argument(check_skip_layers)
    gradient_accumulation_steps = Argument(check_count, 2, optional=True)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        distribution = self.distribution
        if isinstance(distribution, str):
            distribution = Distribution(distribution)
        self._rule = rule = rule_of(self.step)
        self._quadratic = rule if isinstance(rule, QuadraticStep) else None
        self._spectral = rule if isinstance(rule, SpectralStep) else None
        self._without = () if self._spectral is None else TABLES
        self._placer = Placer(
            distribution,
            self.solver,
            self.skip_layers,
            Limit(self.max_factor_dim, self.factor_rank),
            self._without,
            0 if self._spectral is None else BESIDE,
        )
        self.states: tuple[State, ...] = ()
        self._placement: Placement | None = None
        self._advice = report.Advice()
        self._choice: Choice | None = None

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """One step (Distributed K-FAC, algorithm 1; KAISA, section 3)."""
        own = self.job.own(self.states)
        # Rows alone would not do: a rule needs the whole gradients.
        whole = own.pending is not None or self._rule is not None
        layers = observe(step, own, not whole and self.placement.takes_rows)
        step.note_losses("its unit is 1, its Fisher matrix the empirical one")
        if not self.job.terms_of(step.batch):
            self._advice.give(self.job, report.unseen_loss_warning(self.job))
        statistics = self.statistics(layers, step)
        sample = Sample.of(step) if self._quadratic is not None else None
        if own.pending is None:
            self.update(layers, step, statistics, sample)
        else:
            self.accumulate(layers, step, own.pending, statistics, sample)

    def update(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
        sample: Sample | None = None,
    ) -> None:
        """An update of the weights, by gradients still this replica's own."""
        own, clock = self.job.own(self.states), self.job.clock
        damping = own.current_damping(self.damping, clock)
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
            rule = self._spectral
            made = precondition(first, step, exchange, damping, rule)
            for stage in others:  # while what those before made is sent
                renewed.append(self.renew(stage, step, turns, asked, damping))
                made += precondition(stage, step, exchange, damping, rule)
            any_renewed = tf.cast(tf.reduce_any(renewed), tf.int64)
            own.inverse_updates.assign_add(any_renewed)
            renew_unsound(own.counters, made)
            return Update(self.choose_length(made, step, sample, damping, loss))

        step.apply(direction)

    def statistics(
        self, layers: Sequence[ActiveBlock], step: Step
    ) -> Callable[[], Statistics]:
        """Function that takes this replica's statistics of the batch."""
        choice = Choice(EMPIRICAL)
        if self.fisher != EMPIRICAL:
            calls = PullbackTap.open(self.job.model).take()
            choice = choose_type(self.fisher, step.loss.losses, calls)
        self._choice = choice.without_tensors()
        return lambda: batch_statistics(
            layers,
            step,
            choice,
            self.job.own(self.states),
            self.placement.plan,
            self.weight_sharing,
            self.factor_batch_fraction,
        )

    def reduce(self, step: Step) -> tuple[tf.Tensor, tf.Tensor]:
        """Reduces the gradients, and with them what has to be decomposed.

        A worker that keeps decompositions of others' factors cannot make them
        by itself: what one has asked for, all do. It costs no message, nor
        does that all learn of the faults of the step before.

        Returns:
            A bool for each block, true if it is to be decomposed at once, and
            the mean loss of the group, zero if nobody asks for it.
        """
        counters = self.job.own(self.states).counters
        asked = tf.equal(counters.decomposed, 0)
        news = [counters.news()] if step.group.size > 1 else []
        first = next((g for g in step.gradients if g is not None), None)
        dtype = tf.float32 if first is None else first.dtype
        losses = [] if self._spectral is None else [step.own_loss()]
        beside = [asked, *news, *losses]
        sums = step.reduce(*(tf.cast(one, dtype) for one in beside))
        for told in news:
            counters.hear(told, anywhere=sums[1] > 0)
        loss = sums[-1] if losses else tf.zeros([])
        wanted = sums[0] > 0 if self.placement.plan.shares_clocks else asked
        return wanted, tf.cast(loss, tf.float64)

    def accumulate(
        self,
        layers: Sequence[ActiveBlock],
        step: Step,
        pending: Pending,
        statistics: Callable[[], Statistics],
        sample: Sample | None,
    ) -> None:
        """Adds a micro-batch to those before; with the last one, updates."""
        step.keep_finite()
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
            self.update(layers, merged, pending.statistics, sample)
            pending.reset()
            return tf.constant(0)

        tf.cond(pending.is_complete(), complete, lambda: tf.constant(0))

    def factors_due(
        self, layers: Sequence[ActiveBlock], step: Step
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Two bools: due by schedule, due for a block without statistics."""
        counters, clock = self.job.own(self.states).counters, self.job.clock
        steps = steps_between(self.factor_update_interval, FACTORS, clock)
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
            taken = state.update_averages(reduced, self.factor_decay, due)
            state.factor_updates.assign_add(taken)

        when((due | late) & step.finite, move_averages)

    def turns_due(self) -> list[tf.Tensor]:
        """A bool for each turn of decompositions, true if it has come."""
        clock = self.job.clock
        due = turns_due(
            max(self.placement.turns, default=0) + 1,
            steps_between(self.inverse_update_interval, INVERSES, clock),
            steps_between(self.factor_update_interval, FACTORS, clock),
            clock,
        )
        adaptive = self.job.own(self.states).damping
        if adaptive is not None:  # which has just grown
            due = [now | (adaptive.again > 0) for now in due]
        return due

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

    def choose_length(
        self,
        made: Sequence[Preconditioned],
        step: Step,
        sample: Sample | None,
        damping: tf.Tensor,
        loss: tf.Tensor,
    ) -> Gradients:
        """Gradients for the inner optimizer, of a length that a rule says."""
        state, clock = self.job.own(self.states), self.job.clock
        if sample is not None:
            assert self._quadratic is not None
            fraction = self._quadratic.batch_fraction
            return quadratic_step(step, made, sample, fraction, state, damping)
        if not made:
            return step.gradients
        if self._spectral is not None:
            return self.spectral_gradients(made, step, damping, loss)
        products = [one.product for one in made]
        rate = self.job.inner_optimizer.learning_rate
        limit = None if self.kl_clip.get() is None else self.kl_clip.at(clock)
        clip = clip_step(products, limit, rate)
        small = limit is not None and may_be_small(self.job)
        shown = rate if small else None
        state.report.note(clip, damping, self.job.name, shown)
        return put_back(made, clip.factor, step.gradients)

    def spectral_gradients(
        self,
        made: Sequence[Preconditioned],
        step: Step,
        damping: tf.Tensor,
        loss: tf.Tensor,
    ) -> Gradients:
        """Gradients of a spectral step, of the length that it has."""
        assert self._spectral is not None
        state = self.job.own(self.states)
        squares = [2 * one.gradient.bound() for one in made]
        if self._spectral.length == "rms":
            sized = [
                one._replace(
                    gradient=one.gradient.scaled(
                        rms_factor(square, one.layer.block.gradient_shape)
                    )
                )
                for one, square in zip(made, squares, strict=True)
            ]
            state.report.assign(damping=damping)
            return put_back(sized, tf.ones([]), step.gradients)
        assert state.largest_rate is not None
        clip = spectral_length(
            [one.product for one in made],
            squares,
            tf.math.divide_no_nan(loss, step.loss.unit),
            damping,
            state.largest_rate,
            self.job.inner_optimizer.learning_rate,
        )
        state.report.assign(length=clip.length, damping=damping)
        return put_back(made, clip.factor, step.gradients)

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        self.job = job
        self._placement = None
        tap_layers(job.model, self.skip_layers, self, self._without)
        if self.fisher != EMPIRICAL:
            PullbackTap.open(job.model)
        if self._quadratic is not None:
            ForwardTap.open(job.model)
        self._advice.give(job, report.adaptive_warning(job.inner_optimizer))
        self._advice.give(
            job, report.solver_warning(job.model, SOLVERS[self.solver])
        )

    @property
    def placement(self) -> Placement:
        """Blocks of the model, and which worker does what of them."""
        if self._placement is None:
            self._placement = self._placer.place(
                self.job,
                self.factor_update_interval,
                self.inverse_update_interval,
            )
        return self._placement

    @override
    def create(self) -> Sequence[Tracked]:
        self._placer.measure(self.job)
        self._placement = None  # what was seen before the model was built
        placement = self.placement
        warning = report.coverage_warning(placement.registry, self.job)
        self._advice.give(self.job, warning)
        self._advice.announce(self.job, placement.registry)
        known = dict(zip(self.job.topology.local, self.states, strict=False))

        def make(rank: int) -> State:
            state = known.get(rank) or State()
            if self._spectral is not None:
                state.take_spectral_steps(
                    largest_rate(self.job.inner_optimizer)
                )
            state.fill(placement, rank)
            if self._quadratic is not None:
                state.take_quadratic_steps(self.job.model, self.damping.get())
            if self.gradient_accumulation_steps is not None:
                state.accumulate(
                    self.gradient_accumulation_steps, placement, rank, self.job
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
        return [*self.states[0].events(), *self.job.losses.events()]

    # ----------------------------------------------------------- reporting
    @override
    def summary(self) -> list[str]:
        placement = self.placement  # which fills the placer's lines
        notes = [
            report.fisher_text(self.fisher, self._choice),
            *self.job.losses.lines(),
            *self._placer.lines,
        ]
        return report.describe(
            self.job,
            placement,
            self.states,
            notes,
            self._rule,
            self.state_bytes(),
        )

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Bias-corrected averages that this process keeps, by layer path."""
        return kept_factors(self.states)

    @override
    def state_bytes(self) -> dict[str, int]:
        size = gradient_bytes(self.job.model.trainable_variables)
        return self.placement.state_bytes(
            self.job.topology.local[0],
            None if self.gradient_accumulation_steps is None else size,
            size if self._quadratic is not None else None,
            self._spectral is not None,
        )

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        weights = self.job.model.trainable_variables
        topology = self.job.topology
        size = gradient_bytes(weights, topology.hint)
        # And a flag of each block, asked or faulty, and the loss.
        flags = len(self.placement.blocks) * (1 + len(FAULTS))
        flags += self._spectral is not None
        size += flags * int(tf.as_dtype(weights[0].dtype).size)
        return self.placement.communication_bytes(topology.local[0], size)
