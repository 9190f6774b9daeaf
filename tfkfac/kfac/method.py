"""K-FAC, step by step."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.blocks import LayerGradient, block_types
from tfkfac.blocks.registry import build_registry, tappable
from tfkfac.blocks.statistics import batch_statistics
from tfkfac.capture.taps import Tap, before_first_call
from tfkfac.capture.walk import SkipRule, unbuilt
from tfkfac.compat.optimizers import variable_key
from tfkfac.compat.tracking import Tracked
from tfkfac.distributed.traffic import gradient_bytes
from tfkfac.kfac.active import (
    ActiveBlock,
    active_blocks,
    decompose_owned,
    replace_decompositions,
    update_averages,
)
from tfkfac.kfac.advice import coverage_warning, solver_warning
from tfkfac.kfac.clip import clip_factor
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.schedule import FACTOR_INTERVALS, INVERSE_INTERVALS, is_due
from tfkfac.kfac.settings import Settings
from tfkfac.kfac.state import State
from tfkfac.kfac.summary import describe
from tfkfac.saving.store import Entry
from tfkfac.solvers import SOLVERS
from tfkfac.wrapper.hyperparameters import Tunable, Value
from tfkfac.wrapper.method import Method
from tfkfac.wrapper.step import Gradients, Job, Step, Update

Pairs = list[tuple[tf.Tensor, tf.Tensor]]


class KFACMethod(Method):
    """Preconditions the gradient of each layer by its Kronecker factors.

    The arguments are those of `KFAC`, checked.

    Args:
        damping: Tikhonov damping.
        kl_clip: Largest squared length of a step, or None.
        factor_update_interval: Steps between updates of the factors.
        inverse_update_interval: Steps between decompositions.
        solver: Name of the solver.
        factor_decay: Weight of the old factors in the running average.
        weight_sharing: "expand", "reduce" or "average".
        settings: How the work is distributed.
        max_factor_dim: Most rows of a factor kept as a whole matrix, or None.
        skip_layers: Layers to leave to the inner optimizer.
    """

    damping = Tunable()
    kl_clip = Tunable(positive=True, optional=True)
    factor_update_interval = Tunable(integer=True, optional=True)
    inverse_update_interval = Tunable(integer=True, optional=True)
    arguments = (
        "solver",
        "factor_decay",
        "weight_sharing",
        "max_factor_dim",
    )

    def __init__(
        self,
        *,
        damping: Value,
        kl_clip: Value,
        factor_update_interval: Value,
        inverse_update_interval: Value,
        solver: str,
        factor_decay: float,
        weight_sharing: str,
        settings: Settings,
        max_factor_dim: int | None,
        skip_layers: tuple[SkipRule, ...],
    ) -> None:
        self.damping = damping
        self.kl_clip = kl_clip
        self.factor_update_interval = factor_update_interval
        self.inverse_update_interval = inverse_update_interval
        self.solver = solver
        self.factor_decay = factor_decay
        self.weight_sharing = weight_sharing
        self.settings = settings
        self.max_factor_dim = max_factor_dim
        self.skip_layers = skip_layers
        self.states: tuple[State, ...] = ()
        self._placement: Placement | None = None
        self._warned: str | None = None

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """One step (Distributed K-FAC, algorithm 1; KAISA, section 3)."""
        step.reduce()
        layers = self.observe(step)

        def direction() -> Update:
            self.update_factors(layers, step)
            self.update_inverses(layers, step)
            pairs = self.precondition(layers, step)
            return self.replace(layers, self.clip(pairs), step)

        step.apply_if_finite(direction)

    def observe(self, step: Step) -> list[ActiveBlock]:
        """The blocks of this step, with what their layers left behind."""
        inner = self.job.inner_optimizer
        return active_blocks(
            self.job.own(self.states).preconditioners,
            step.gradients,
            [variable_key(inner, v) for v in step.variables],
            lambda variable: variable_key(inner, variable),
        )

    def update_factors(self, layers: Sequence[ActiveBlock], step: Step) -> None:
        """Local statistics -> [all-reduce] -> averages, if they are due."""
        state, placement = self.job.own(self.states), self.placement
        scale = step.row_scale()

        def update() -> tf.Tensor:
            statistics = {
                one.position: batch_statistics(
                    one.block,
                    one.records,
                    self.weight_sharing,
                    scale,
                    step.batch.weightless,
                    step.loss.terms,
                )
                for one in layers
                if placement.plan.observes(step.group.rank, one.position)
            }
            reduced = placement.exchange.reduce_statistics(
                step.group, statistics
            )
            taken = update_averages(layers, reduced, self.factor_decay)
            return state.factor_updates.assign_add(taken)

        interval, done = self.factor_update_interval, state.factor_updates
        due = is_due(interval, FACTOR_INTERVALS, self.job.clock, done)
        tf.cond(due, update, lambda: tf.convert_to_tensor(done))

    def update_inverses(
        self, layers: Sequence[ActiveBlock], step: Step
    ) -> None:
        """Owners decompose -> gradient workers receive, if that is due."""
        state, placement = self.job.own(self.states), self.placement

        def update() -> tf.Tensor:
            damping = self.damping.at(self.job.clock)
            made = decompose_owned(layers, placement.solver, damping)
            parts = placement.exchange.share_decompositions(
                step.group, made, [one.position for one in layers]
            )
            replace_decompositions(layers, parts, damping)
            return state.inverse_updates.assign_add(1)

        interval, done = self.inverse_update_interval, state.inverse_updates
        due = is_due(interval, INVERSE_INTERVALS, self.job.clock, done)
        # Before the first statistics (an empty batch) there is nothing.
        due = tf.logical_and(due, state.factor_updates > 0)
        tf.cond(due, update, lambda: tf.convert_to_tensor(done))

    def precondition(self, layers: Sequence[ActiveBlock], step: Step) -> Pairs:
        """Gradient workers apply -> receivers receive.

        Returns:
            Gradient matrices `W` of the negative log-likelihood and `P`, the
            preconditioned ones.
        """
        unit = tf.math.divide_no_nan(
            tf.ones_like(step.loss.unit), step.loss.unit
        )
        plain = {
            one.position: one.block.to_matrix(
                [step.gradients[i] for i in one.indices]
            )
            * one.block.cast(unit)
            for one in layers
        }
        own = {
            one.position: one.state.decomposition.apply(
                LayerGradient(plain[one.position])
            )
            for one in layers
            if one.state.decomposition is not None
        }
        shared = self.placement.exchange.share_gradients(
            step.group, own, list(plain)
        )
        return [(plain[i], shared[i]) for i in plain]

    def clip(self, pairs: Pairs) -> list[tf.Tensor]:
        """Scales the preconditioned gradients to the longest step allowed."""
        if self.kl_clip.get() is None or not pairs:
            factor = tf.constant(1.0)
        else:
            factor = clip_factor(
                pairs,
                self.kl_clip.at(self.job.clock),
                self.job.inner_optimizer.learning_rate,
            )
        return [p * tf.cast(factor, p.dtype) for _, p in pairs]

    def replace(
        self,
        layers: Sequence[ActiveBlock],
        matrices: Sequence[tf.Tensor],
        step: Step,
    ) -> Update:
        """Puts preconditioned gradients in the places of the gradients."""
        replaced: Gradients = list(step.gradients)
        for one, matrix in zip(layers, matrices, strict=True):
            new = one.block.from_matrix(matrix)
            for i, gradient in zip(one.indices, new, strict=True):
                replaced[i] = gradient
        return Update(replaced)

    # --------------------------------------------------- binding and state
    @override
    def attach(self, job: Job) -> None:
        self.job = job
        self._placement = None
        self._tap_layers()
        text = solver_warning(job.model, SOLVERS[self.solver])
        if text is not None:
            warnings.warn(text, stacklevel=3)

    def _tap_layers(self) -> None:
        """Taps the layers there are, and again when more have been built."""
        for layer in tappable(self.job.model, self.skip_layers):
            Tap.open(layer, self)
        for layer in unbuilt(self.job.model):
            if not block_types(layer):
                before_first_call(layer, self._tap_layers)

    @property
    def placement(self) -> Placement:
        """Blocks of the model, and which worker does what of them."""
        if self._placement is None:
            self._placement = Placement(
                build_registry(
                    self.job.model, self.skip_layers, self.max_factor_dim
                ),
                self.job.topology,
                SOLVERS[self.solver](),
                self.settings,
            )
        return self._placement

    @override
    def create(self) -> Sequence[Tracked]:
        self._placement = None  # what was seen before the model was built
        placement = self.placement
        self._warn_of_coverage()
        known = dict(zip(self.job.topology.local, self.states, strict=False))

        def make(rank: int) -> State:
            state = known.get(rank) or State()
            state.fill(placement, rank)
            return state

        self.states = self.job.for_each(make)
        return self.states

    def _warn_of_coverage(self) -> None:
        """Warns of a model that is mostly left alone: once, one worker."""
        inner = type(self.job.inner_optimizer).__name__
        text = coverage_warning(
            self.placement.registry, self.job.model.name, inner
        )
        if text not in (None, self._warned) and 0 in self.job.topology.local:
            warnings.warn(text, stacklevel=3)
        self._warned = text

    @override
    def agreement(self) -> dict[str, Any]:
        registry = self.placement.registry
        layers = [
            [block.path, block.kind, [f.text for f in block.factors.values()]]
            for block in registry.blocks
        ]
        rest = [[left.path, left.reason] for left in registry.leftovers]
        return {"layers": layers, "layers left to the inner optimizer": rest}

    @override
    def entries(self) -> list[Entry]:
        return self.states[0].entries()

    @override
    def events(self) -> list[tuple[str, tf.Variable]]:
        return self.states[0].events()

    # ----------------------------------------------------------- reporting
    @override
    def summary(self) -> list[str]:
        title = (
            f"K-FAC '{self.job.name}' of model '{self.job.model.name}': solver "
            f"{self.solver}, inner optimizer "
            f"{type(self.job.inner_optimizer).__name__}"
        )
        return describe(self.placement, title)

    def factors(self) -> dict[str, dict[str, np.ndarray]]:
        """Bias-corrected averages that this process keeps, by layer path."""
        kept = {}
        replicas = [state.preconditioners for state in self.states]
        for copies in zip(*replicas, strict=True):
            found = {
                name: value.numpy()
                for p in copies
                if p.factors is not None
                for name, value in p.factors.values().items()
            }
            if found:
                kept[copies[0].block.path] = dict(sorted(found.items()))
        return kept

    @override
    def state_bytes(self) -> dict[str, int]:
        return self.placement.state_bytes(self.job.topology.local[0])

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        size = gradient_bytes(
            self.job.model.trainable_variables, self.job.topology.hint
        )
        return self.placement.communication_bytes(
            self.job.topology.local[0], size
        )
