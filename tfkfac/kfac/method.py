"""K-FAC method: stages of one training step, state and reporting."""

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import Statistic
from tfkfac.blocks.registry import build_registry, tap_layers
from tfkfac.capture.model_taps import ForwardTap, PullbackTap
from tfkfac.compat.functions import when
from tfkfac.compat.graphs import Tracked, in_xla
from tfkfac.compat.optimizers import rate_of
from tfkfac.compat.overrides import Below
from tfkfac.distributed.collectives import Communicator, gradient_bytes
from tfkfac.factors import Limit
from tfkfac.fisher.types import EMPIRICAL, Choice, Statistics, choose_type
from tfkfac.kfac import report
from tfkfac.kfac.active import (
    ActiveBlock,
    active_blocks,
    active_groups,
    local_statistics,
    observed,
    with_rows,
)
from tfkfac.kfac.averages import CACHED_ELEMENTS, MAX_ELEMENTS
from tfkfac.kfac.natural import MOST_ROWS, Natural
from tfkfac.kfac.placement import (
    FACTORS,
    INVERSES,
    Placement,
    find_due_groups,
    steps_between,
)
from tfkfac.kfac.scales import Batch
from tfkfac.kfac.settings import AUTO, Distribution, KFACSettings
from tfkfac.kfac.spectral import Spectral
from tfkfac.kfac.state import State
from tfkfac.loss.batch import trace_nested_calls
from tfkfac.loss.terms import recognized
from tfkfac.saving.entries import Contents
from tfkfac.shell.method import Method
from tfkfac.shell.rest import LengthRate
from tfkfac.solvers.registry import make_solver
from tfkfac.training.guards import count_each
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update

_RULES = {"natural": Natural, "spectral": Spectral}
# Rank of the approximation of a factor with more than `max_factor_dim` rows. It
# saves 90 % of the elements of a factor of 640 rows.
FACTOR_RANK = 64


class KFACMethod(Method):
    """Precondition the gradient of each layer by its Kronecker factors."""

    settings: KFACSettings

    def __init__(self, settings: KFACSettings) -> None:
        super().__init__(settings)
        self.takes_float8 = settings.gradient_accumulation_steps is None
        distribution = settings.distribution
        if isinstance(distribution, str):
            distribution = Distribution(distribution)
        self._rule = _RULES[settings.step](settings)
        self._distribution = distribution
        self.states: tuple[State, ...] = ()
        self._placement: Placement | None = None
        self._advised: set[str] = set()
        # True while Keras traces or calls a step that XLA compiles.
        self._defers_inverses = False
        self._deferred: set[int] = set()  # blocks with inverses after the step
        self._choice: Choice | None = None
        self._loss_lines: list[str] = []

    def _advise(self, text: str, key: str | None = None) -> None:
        """Warn on the worker of replica 0, once per key (default: text)."""
        key = key or text
        if key not in self._advised:
            self._advised.add(key)
            if 0 in self.job.topology.local:
                warnings.warn(text, stacklevel=3)

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """Run one step (Distributed K-FAC, algorithm 1; KAISA, section 3)."""
        state = self.job.local_state(self.states)
        layers = active_blocks(step, state)
        # Use matrices with XLA: a choice at run time would compile both forms.
        by_rows = self.placement.takes_rows and state.pending is None
        by_rows = by_rows and not in_xla()
        if by_rows and self._rule.takes_rows(step.group.size):
            layers = with_rows(layers, state, step, self._rule.has_product)
        self._describe_losses(step)
        statistics = self.statistics(state, layers, step)
        micro_batches = self.settings.gradient_accumulation_steps or 1
        batch = self._rule.read(
            step, layers, state, self._advise, micro_batches
        )
        if state.pending is None:
            self.update(state, layers, step, statistics, batch)
        else:
            self.accumulate(state, layers, step, statistics, batch)

    def _describe_losses(self, step: Step) -> None:
        """Record the likelihoods for the summary; warn of unknown losses."""
        job, likelihoods = self.job, recognized(step.loss.losses)
        model = job.model.name
        self._loss_lines = [
            f"Loss '{loss}' is taken for: {name or 'no likelihood'}"
            for loss, name in likelihoods
        ]
        for loss, name in likelihoods:
            if name is None:
                self._advise(
                    f"Loss '{loss}' of model '{model}' is a multiple of no "
                    f"known likelihood. Optimizer '{job.name}' uses its value "
                    "as the negative log-likelihood of a term, and the "
                    "empirical Fisher matrix. Declare its distribution and "
                    "unit with `tfkfac.register_distribution`. Scale targets "
                    "of a regression to about 1: their unit is not known."
                )
        if not job.terms_of(step.batch):
            rule = self._rule if step.batch.value is None else Natural
            self._advise(
                f"Optimizer '{job.name}' did not observe the loss of model "
                f"'{model}' and assumes a mean over the examples, the leading "
                f"dimension of each layer's input. {rule.without_loss} Compute "
                "the loss with `model.compute_loss`, or pass the number of "
                "terms of the mean, 1 for a sum, to "
                "`optimizer.attach(model, loss_terms=...)`."
            )

    def update(
        self,
        state: State,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
        batch: Batch | None,
    ) -> None:
        """Update the weights from local gradients, which are reduced here."""
        rule, settings, clock = self._rule, self.settings, self.job.clock
        damping = settings.damping.at(clock)
        # Reduce: all-reduce the gradients and the requests for new inverses.
        requested, sums = self.reduce(state, step, batch)
        layers = rule.rescale(layers, step, state, batch, sums)
        step.check_finite()
        # Factors: all-reduce the statistics, update the running averages.
        self.update_factors(state, layers, step, statistics)
        # Inverses: owners decompose, gradient workers receive.
        groups_due = find_due_groups(
            max(self.placement.schedule_groups, default=0) + 1,
            steps_between(settings.inverse_update_interval, INVERSES, clock),
            steps_between(settings.factor_update_interval, FACTORS, clock),
            clock,
        )
        exchange = self.placement.exchange
        first, *later_stages = exchange.stages(
            {layer.position: layer for layer in layers}
        )
        update_inverses = functools.partial(
            self.update_inverses, state, step, groups_due, requested, damping
        )
        updated = [update_inverses(first)]

        def direction() -> Update:
            # Precondition: gradient workers apply the inverses, receivers get
            # the results. Each stage computes while the results of the previous
            # stages are sent. The stages are not nested in one another: a
            # branch would capture all tensors of the branches inside of it.
            preconditioned = rule.directions(
                active_groups(first, state), step, exchange, damping
            )
            for stage in later_stages:
                updated.append(update_inverses(stage))
                preconditioned += rule.directions(
                    active_groups(stage, state), step, exchange, damping
                )
            any_updated = tf.cast(tf.reduce_any(updated), tf.int64)
            state.inverse_updates.assign_add(any_updated)
            # Count invalid directions; request the inverses of their blocks.
            counters = state.counters
            valid = [(x.group.positions, x.valid) for x in preconditioned]
            invalid = ~counters.flags(valid)
            count_each(
                invalid,
                counters.plain,
                counters.paths,
                "the preconditioned gradient is not finite or far too long, "
                "the plain one takes its place; the next step decomposes the "
                "factors anew.",
            )
            counters.request_decomposition(invalid)
            # Clip the preconditioned gradients.
            gradients = rule.gradients(
                preconditioned, step, state, damping, batch, sums
            )
            return Update(gradients)

        # Apply: the inner optimizer updates the weights.
        step.apply(direction)

    def statistics(
        self, state: State, layers: Sequence[ActiveBlock], step: Step
    ) -> Callable[[], Statistics]:
        """Return a function that computes the statistics of this batch."""
        choice = Choice(EMPIRICAL)
        if self.settings.fisher != EMPIRICAL:
            calls = PullbackTap.open(self.job.model).pop_items()
            choice = choose_type(self.settings.fisher, step.loss.losses, calls)
        # Keep no tensors after the trace.
        self._choice = Choice(choice.type, reason=choice.reason)
        return lambda: local_statistics(
            layers, step, choice, state, self.placement.plan, self.settings
        )

    def reduce(
        self, state: State, step: Step, batch: Batch | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """All-reduce gradients and requests for inverse updates together.

        A gradient worker cannot compute the inverse of another worker's block.
        So a block that one worker requests is recomputed by its owner.

        Returns:
            A bool for each block, True if its inverse is requested, and the
            sums of the scalars of the step rule and of the moments.
        """
        requested = tf.equal(state.counters.decomposed, 0)
        gradient = next((g for g in step.gradients if g is not None), None)
        dtype = tf.float32 if gradient is None else gradient.dtype
        scalars = self._rule.scalars(step, batch)
        extra = [tf.cast(value, dtype) for value in (requested, *scalars)]
        if batch is not None and batch.moments is not None:
            extra.append(batch.moments.values)
        request_counts, *sums = step.reduce(*extra)
        if self.placement.plan.shares_clocks:
            requested = request_counts > 0
        return requested, sums

    def accumulate(
        self,
        state: State,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
        batch: Batch | None,
    ) -> None:
        """Add a micro-batch; update the weights after the last one."""
        pending = state.pending
        assert pending is not None
        step.keep_finite(tf.convert_to_tensor(pending.loss))
        step.weigh()
        pending.add(step)
        if batch is not None:
            batch = batch.accumulated(pending.moments)
        scheduled, initial = self.factors_due(state, layers, step)
        when(scheduled | initial, lambda: pending.add_statistics(statistics()))

        def complete() -> None:
            merged = pending.merged(step)
            self.update(state, layers, merged, pending.statistics, batch)
            pending.reset()

        num_micro_batches = self.settings.gradient_accumulation_steps
        when(tf.equal(pending.count, num_micro_batches), complete)

    def factors_due(
        self, state: State, layers: Sequence[ActiveBlock], step: Step
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return two bools: due by schedule; due for blocks without factors."""
        clock = self.job.clock
        interval = steps_between(
            self.settings.factor_update_interval, FACTORS, clock
        )
        local = observed(layers, step, self.placement.plan)
        positions = tf.constant([layer.position for layer in local], tf.int32)
        missing = tf.gather(state.counters.without_statistics(), positions)
        return tf.equal(clock % interval, 0), tf.reduce_any(missing)

    def update_factors(
        self,
        state: State,
        layers: Sequence[ActiveBlock],
        step: Step,
        statistics: Callable[[], Statistics],
    ) -> None:
        """All-reduce statistics and update the averages if they are due."""
        placement = self.placement
        scheduled, initial = self.factors_due(state, layers, step)
        assert self._choice is not None
        is_empirical = self._choice.type == EMPIRICAL
        # Skip gradients at outputs that are still far from the labels.
        fits = [is_due for is_due, *_ in step.output_changes.values()]
        is_usable = ~tf.reduce_any(fits) if fits else tf.constant(True)
        swapped = {x.position for x in layers if x.used.swapped}

        def move_averages() -> None:
            local, unit = dict(statistics()), step.unit_factor
            if unit is not None:
                # Divide the statistics of the output gradients by the unit of
                # the loss; divide empirical statistics by the square of it.
                for i, by_name in local.items():
                    name = "A" if i in swapped else "G"
                    total, count = by_name[name]
                    # The average is `total / count`. Scale the count, a scalar,
                    # not the matrix; the square of a unit could overflow.
                    count *= tf.cast(unit, count.dtype)
                    if is_empirical:
                        total /= tf.cast(unit, total.dtype)
                    local[i] = {**by_name, name: Statistic(total, count)}
            reduced = placement.exchange.reduce_statistics(step.group, local)
            decay = self.settings.factor_decay
            when(
                is_usable,
                lambda: state.update_averages(reduced, decay, scheduled),
            )

        when((scheduled | initial) & step.finite, move_averages)

    def update_inverses(
        self,
        state: State,
        step: Step,
        groups_due: tf.Tensor,
        requested: tf.Tensor,
        damping: tf.Tensor,
        layers: Sequence[ActiveBlock],
    ) -> tf.Tensor:
        """Recompute inverses that are due by group or requested by block.

        Owners decompose and gradient workers receive, one schedule group of
        blocks after the other. For a step that XLA compiles, the update runs
        after the step: XLA's own decompositions are many times slower.
        """
        if not layers:
            return tf.constant(False)
        counters = state.counters
        positions = [layer.position for layer in layers]
        places = range(len(self.placement.blocks))
        due = tf.gather(groups_due, self.placement.schedule_groups)
        due |= requested
        due &= (counters.observed > 0) & step.finite
        due &= tf.constant([i in positions for i in places])
        dampings = tf.fill([len(places)], damping)
        for layer in layers:
            if layer.output_scale is not None:
                # The damping in the unit of the block's factors.
                is_layer = tf.constant([i == layer.position for i in places])
                square = tf.square(layer.output_scale)
                scaled = damping / tf.cast(square, damping.dtype)
                dampings = tf.where(is_layer, scaled, dampings)
        if self._defers_inverses and in_xla():
            self._deferred.update(positions)
            counters.deferred.assign_add(tf.cast(due, tf.int64))
            counters.dampings.assign(tf.where(due, dampings, counters.dampings))
        else:
            self.decompose(state, due, positions, dampings, step.group)
        return tf.reduce_any(due)

    def decompose(
        self,
        state: State,
        due: tf.Tensor,
        positions: Sequence[int],
        dampings: tf.Tensor,
        group: Communicator,
    ) -> None:
        """Recompute the inverses that are due, one schedule group at a time."""
        placement = self.placement
        schedule_groups = defaultdict(list)
        for i in positions:
            schedule_groups[placement.schedule_groups[i]].append(i)
        for _, members in sorted(schedule_groups.items()):
            group_due = due & tf.constant(
                [i in members for i in range(len(placement.blocks))]
            )

            def decompose_group(
                members: Sequence[int] = members, due: tf.Tensor = group_due
            ) -> None:
                decompositions = placement.exchange.share_decompositions(
                    group,
                    state.decompose(members, placement.solver, dampings),
                    members,
                )
                state.replace_decompositions(decompositions, dampings, due)

            when(tf.reduce_any(group_due), decompose_group)

    @override
    def run_compiled(self, below: Below, data: Any) -> Any:
        self._defers_inverses = True
        try:
            results = below(data)
        finally:
            self._defers_inverses = False
        if self._deferred:
            self.job.model.distribute_strategy.run(self._decompose_deferred)
        return results

    def _decompose_deferred(self) -> None:
        """Recompute the inverses that became due in a compiled step."""
        state = self.job.local_state(self.states)
        counters, group = state.counters, self.job.group("inverses")
        due, dampings = counters.deferred > 0, counters.dampings.value()
        positions = sorted(self._deferred)

        def decompose_deferred() -> None:
            self.decompose(state, due, positions, dampings, group)
            counters.deferred.assign(tf.zeros_like(counters.deferred))

        when(tf.reduce_any(due), decompose_deferred)

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        self.job = job
        self._placement = None
        tap_layers(
            job.model,
            self.settings.skip_layers,
            self.settings.only_layers,
            self,
            self._rule.excluded_blocks,
        )
        if self.settings.fisher != EMPIRICAL:
            PullbackTap.open(job.model)
        if self._rule.summed_scalars:
            ForwardTap.open(job.model)

    @property
    def placement(self) -> Placement:
        """Blocks of the model, and the assignment of blocks to workers."""
        if self._placement is None:
            trace_nested_calls(self.job.model)
            rows: Any = self.settings.max_factor_dim
            dense_rows = rows
            if rows == AUTO:
                rows, dense_rows = MOST_ROWS, self._rule.dense_layer_rows
            registry = build_registry(
                self.job.model,
                self.settings.skip_layers,
                self.settings.only_layers,
                Limit(rows, FACTOR_RANK),
                self._rule.excluded_blocks,
                Limit(dense_rows, FACTOR_RANK),
            )
            self._placement = Placement(
                registry,
                self.job.topology,
                make_solver(self.settings.solver, self._rule.has_momenta),
                self._distribution,
                self._rule.extra_scalars,
            )
        return self._placement

    @override
    def create(self) -> Sequence[Tracked]:
        # Discard the placement: it was created before the model was built.
        self._placement = None
        placement = self.placement
        warning = report.coverage_warning(
            placement.registry, self.job, self._rule
        )
        if warning is not None:
            self._advise(warning)
        existing = dict(zip(self.job.topology.local, self.states, strict=False))
        has_momenta, limit = self._rule.has_momenta, MAX_ELEMENTS
        # XLA runs on GPUs only.
        if not has_momenta and not tf.config.list_physical_devices("GPU"):
            limit = CACHED_ELEMENTS

        def make_state(rank: int) -> State:
            state = existing.get(rank) or State()
            state.fill(placement, rank, has_momenta, limit)
            if self.settings.gradient_accumulation_steps is not None:
                state.accumulate(placement, rank, self.job)
            return state

        self.states = self.job.for_each(make_state)
        rest = self.job.rest_optimizer
        rate = rest and rate_of(rest)
        if isinstance(rate, LengthRate):
            # Replicas that share a variable would wait for each other.
            lengths = [x.length.factor for x in self.states if x.length]
            rate.lengths = tuple(lengths)
        return self.states

    @override
    def covered(self) -> list[keras.Variable]:
        registry = self.placement.registry
        covered = [v for block in registry.blocks for v in block.variables]
        return covered + [v for _, v in self._rule.plain_matrices(registry)]

    @override
    def accumulation(self) -> tuple[int, int]:
        pending = self.states[0].pending if self.states else None
        count = 0 if pending is None else int(pending.count.numpy())
        return self.settings.gradient_accumulation_steps or 1, count

    @override
    def agreement(self) -> dict[str, Any]:
        return self.placement.registry.agreement()

    @override
    def contents(self, rank: int) -> Contents:
        return self.job.at(self.states, rank).contents(self.placement, rank)

    @override
    def events(self) -> list[tuple[str, tf.Variable]]:
        return [event for state in self.states for event in state.events()]

    # ----------------------------------------------------------- reporting
    @override
    def summary(self) -> list[str]:
        choice = self._choice  # None before training
        text = self.settings.fisher or "chosen by the loss when training"
        if choice is not None:
            reason = f" ({choice.reason})" if choice.reason else ""
            text = f"{choice.type}{reason}"
        return report.describe(
            self.job,
            self.placement,
            self.states,
            [f"Fisher matrix: {text}", *self._loss_lines],
            self._rule,
            self.state_bytes(),
        )

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Bias-corrected averages that this process keeps, by layer path."""
        result: dict[str, dict[str, np.ndarray]] = {}
        groups = [group for state in self.states for group in state.averages]
        for group in groups:
            for name, values in group.values().items():
                for block, value in zip(group.blocks, values, strict=True):
                    shown = group.factor_types[name].shown(value).numpy()
                    result.setdefault(block.path, {})[name] = shown
        return {
            block.path: dict(sorted(result[block.path].items()))
            for block in self.states[0].blocks
            if block.path in result
        }

    @override
    def state_bytes(self) -> dict[str, int]:
        placement, rank = self.placement, self.job.topology.local[0]
        sizes = placement.state_bytes(rank)
        if self.settings.gradient_accumulation_steps is not None:
            gradients = gradient_bytes(self.job.model.trainable_variables)
            statistics = sum(
                (factor.elements + 1) * block.dtype.size
                for i, block in enumerate(placement.blocks)
                if placement.plan.observes(rank, i)
                for factor in block.factors.values()
            )
            sizes["accumulation"] = gradients + statistics
        sizes |= self._rule.bytes(placement, rank)
        return {**sizes, "total": sum(sizes.values())}

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        weights = self.job.model.trainable_variables
        topology = self.job.topology
        size = gradient_bytes(weights, topology.hint)
        # Add the request of each block for an inverse, and the rule's scalars.
        flags = len(self.placement.blocks) + self._rule.summed_scalars
        size += flags * sum(tf.as_dtype(v.dtype).size for v in weights[:1])
        return self.placement.communication_bytes(topology.local[0], size)
