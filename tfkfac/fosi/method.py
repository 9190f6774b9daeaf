"""The methods FOSI and DHO2: training step, state and reports."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardCall, ForwardTap
from tfkfac.compat.graphs import Tracked, in_graph
from tfkfac.compat.optimizers import variable_key
from tfkfac.curvature.hessian import flat_space, hessian_operator
from tfkfac.distributed.collectives import all_reduce_bytes, gradient_bytes
from tfkfac.fosi.estimation import Estimation, estimation_bytes
from tfkfac.fosi.layouts import Geometry, Layout
from tfkfac.fosi.subspace import (
    WARMUP_SHARE,
    InnerTraits,
    NewtonRate,
    State,
    Subspace,
    Timing,
)
from tfkfac.fosi.update import SplitUpdate, adopt, has_momentum, is_plain_sgd
from tfkfac.loss.batch import find_call
from tfkfac.saving.entries import Contents
from tfkfac.saving.slots import planned
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.shell.method import Method
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of `FOSI` that the method uses."""

    num_largest: int
    num_smallest: int
    alpha: Hyperparameter
    update_interval: Hyperparameter
    warmup_steps: int | None
    lanczos_steps: int | None
    momentum: float
    learning_rate_clip: float
    layout: str
    accelerator_fraction: float
    final_update: str
    seed: int


class FOSIMethod(Method):
    """Newton steps along V, inner optimizer steps on the remaining gradient.

    All replicas train, and estimate the directions together before a step
    (DHO2).
    """

    settings: Settings
    states: Sequence[State] = ()  # states of the local replicas

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.timing = Timing(settings.warmup_steps, settings.update_interval)
        self.rate = NewtonRate(settings.alpha)
        self._geometry: Geometry | None = None
        # Keys of the weights that the directions belong to.
        self._keys: list[Hashable] = []
        self._warmup_updates = -1  # length of the default warm-up; -1: unknown

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """Run a step (FOSI, algorithm 3; DHO2, algorithm 3)."""
        model, state = self.job.model, self.job.local_state(self.states)
        self.rate.record_largest(self.job, state)
        call = find_call(model, step.batch, ForwardTap.open(model).pop_items())
        self.train(step, state, lambda: self.estimate(step, state, call))

    def train(
        self, step: Step, state: State, estimate: Callable[[], None]
    ) -> None:
        """Run a worker's step; `estimate` updates the directions if due."""
        settings = self.settings
        if state.layout.reduces_gradients:
            step.weigh()
        else:
            step.reduce()

        def direction() -> Update:
            estimate()
            momentum, clip = settings.momentum, settings.learning_rate_clip
            return SplitUpdate(step, state, self.rate, momentum, clip).make()

        step.check_finite()
        step.apply(direction)

    def estimate(self, step: Step, state: State, call: ForwardCall) -> None:
        """Run a Lanczos estimation at the current weights, if it is due."""
        job, group, clock = self.job, step.group, self.job.clock
        layout = state.layout

        def update() -> tf.Tensor:
            estimation = Estimation(layout.geometry, group, self.settings.seed)
            # Weigh the losses before differentiation: in the Hessian,
            # synchronised layers mix the losses of the replicas.
            local = hessian_operator(
                job.model,
                call,
                dict(step.batch.arguments),
                [tf.identity(v.value) for v in job.model.trainable_variables],
                group.differentiable_sum,
                step.loss.shares,
            )
            spectrum = estimation.run(local)
            directions = layout.arrange(spectrum.rows, group)
            adopt(state, spectrum.values, directions, group, job)
            return state.last.assign(clock)

        # Use `tf.cond`: TensorFlow optimises the graph of `when` differently,
        # which changes rounding errors.
        is_due, last = self.timing.begins(clock, state), state.last
        tf.cond(is_due, in_graph(update), lambda: tf.convert_to_tensor(last))

    # --------------------------------------------------- binding and state
    @override
    def set_run_length(self, steps: int | None) -> None:
        """Set the default warm-up, unless it is set or over, or steps is 0."""
        if self.settings.warmup_steps is not None or steps == 0:
            return
        for state in self.states[:1]:
            if max(int(state.warmup.numpy()), int(state.last.numpy())) >= 0:
                return
        job, warmup = self.job, -1
        if steps is not None:
            accumulated = job.inner_optimizer.gradient_accumulation_steps or 1
            warmup = math.ceil(WARMUP_SHARE * (steps // accumulated))
        if job.topology.replicas > len(job.topology.local):
            # Use the first process' value: with different warm-ups, workers
            # would hang. Without states, there are no collectives yet.
            if self.states:
                with tf.device("CPU:0"):
                    group = job.among_processes("run length")
                    gathered = group.all_gather(tf.constant([warmup], tf.int64))
                warmup = int(gathered[0, 0])
            else:
                warmup = -1
        self._warmup_updates = warmup
        self._assign_warmup()

    def _assign_warmup(self) -> None:
        """Assign the default warm-up to the states that exist."""
        with tf.init_scope():
            for state in self.states:
                state.warmup.assign(self._warmup_updates)

    @override
    def attach(self, job: Job) -> None:
        self.job = job
        ForwardTap.open(job.model)

    @property
    def geometry(self) -> Geometry:
        """Sizes of the subspace, limited by the number of weights."""
        space = flat_space(self.job.model.trainable_variables)
        largest = min(self.settings.num_largest, space.size)
        smallest = min(self.settings.num_smallest, space.size - largest)
        steps = self.settings.lanczos_steps
        if steps is None:
            # `max(4 r, 2 ln n)` for r Ritz pairs of size n (FOSI).
            logarithm = math.ceil(2 * math.log(max(space.size, 2)))
            steps = max(4 * (largest + smallest), logarithm)
        steps = min(steps, space.size)
        return Geometry(space.size, largest, smallest, steps, space.dtype)

    def make_layout(self) -> Layout:
        """Create the layout of the directions among the workers."""
        # Replica 0 is a worker, so its peers are all workers.
        return Layout(self.settings.layout, self.geometry, len(self.peers(0)))

    @override
    def create(self) -> Sequence[Tracked]:
        geometry = self.geometry
        requested = self.settings.num_largest + self.settings.num_smallest
        keys = [
            variable_key(self.job.inner_optimizer, v)
            for v in self.job.model.trainable_variables
        ]
        if (geometry, keys) != (self._geometry, self._keys):
            if geometry.directions < requested:
                warnings.warn(
                    f"Model '{self.job.model.name}' has {geometry.size} "
                    f"weights: optimizer '{self.job.name}' uses "
                    f"{geometry.directions} directions, not {requested}.",
                    stacklevel=2,
                )
            self._geometry, self._keys = geometry, keys
            layout = self.make_layout()
            self.states = self.job.for_each(lambda rank: self.new(rank, layout))
            self._assign_warmup()
        return self.states

    def new(self, rank: int, layout: Layout) -> State:
        """Create the state of a replica."""
        return State(layout, Subspace(layout, self.inner(), rank))

    def inner(self) -> InnerTraits:
        """Properties of the inner optimizer that decide which state exists."""
        accumulation = self.job.inner_optimizer.gradient_accumulation_steps
        return InnerTraits(bool(accumulation), has_momentum(self.job))

    @override
    def contents(self, rank: int) -> Contents:
        return self.job.at(self.states, rank).contents()

    @override
    def events(self) -> list[tuple[str, tf.Variable]]:
        state = self.states[0]
        return [
            ("estimations of curvature that were not finite", state.failures),
            ("times that invalid directions were dropped", state.forgotten),
        ]

    # ----------------------------------------------------------- reporting
    def spectrum(self) -> np.ndarray:
        """The Ritz values in use, ascending; empty if there are none."""
        estimated = self.states and int(self.states[0].estimations.numpy()) > 0
        subspace = self.states[0].subspace if estimated else None
        if subspace is None:
            return np.zeros([0], np.float32)
        return np.asarray(subspace.ritz_values.numpy())

    @override
    def summary(self) -> list[str]:
        job, geometry, state = self.job, self.geometry, self.state_bytes()
        count = int(self.states[0].estimations.numpy()) if self.states else 0
        estimations, warmup = str(count), self.timing.warmup(self.states)
        if int(job.clock) <= warmup:
            estimations += f", the first begins before update {warmup + 1:,}"
        roles = []
        if (replicas := job.topology.replicas) > 1:
            workers = self.peers(0)
            accelerators = range(len(workers), replicas)
            roles = [
                ("Workers", ", ".join(map(str, workers))),
                ("Accelerators", ", ".join(map(str, accelerators)) or "-"),
                ("Layout", self.settings.layout),
            ]
        rows = [
            ("Weights", f"{geometry.size:,}"),
            (
                "Directions",
                f"{geometry.largest} of largest and {geometry.smallest} of "
                "smallest curvature",
            ),
            ("Lanczos steps", str(geometry.steps)),
            ("Estimations", estimations),
            ("State: directions", bytes_text(state["directions"])),
            ("State: Lanczos basis", bytes_text(state["basis"])),
            ("State: copies", bytes_text(state["copies"])),
            *roles,
        ]
        if len(values := self.spectrum()):
            formatted = ", ".join(f"{value:.4g}" for value in values)
            rows.append(("Ritz values", formatted))
        title = (
            f"FOSI '{job.name}' of model '{job.model.name}': Newton steps in "
            f"the directions, {type(job.inner_optimizer).__name__} on the rest"
        )
        return [title, "", *table(("", "Value"), rows)]

    @override
    def state_bytes(self) -> dict[str, int]:
        with planned():
            state = self.new(self.job.topology.local[0], self.make_layout())
        sizes = {
            "directions": state.subspace.bytes if state.subspace else 0,
            **self.estimation_state_bytes(state),
            "counters": state.bytes,
        }
        return sizes | {"total": sum(sizes.values())}

    def estimation_state_bytes(self, state: Any) -> dict[str, int]:
        """Return "basis" and "copies" as in `FOSI`."""
        layout = state.layout
        basis = layout.geometry.steps * layout.slices.length * layout.item
        return {"basis": basis, "copies": 0}

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        plain, estimation = self.received_bytes(self.make_layout())
        return {
            "warmup": plain | {"projections": 0},
            "plain": plain,
            "estimation": plain | estimation,
        }

    def received_bytes(
        self, layout: Layout
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes received in a plain step; other entries with an estimation."""
        job = self.job
        weights = job.model.trainable_variables
        gradients = gradient_bytes(weights, job.topology.hint)
        plain = {
            "gradients": all_reduce_bytes(gradients, layout.workers),
            "projections": layout.projection_bytes(is_plain_sgd(job)),
            "lanczos": 0,
            "directions": 0,
            "weights": 0,
        }
        replacement = Subspace.replace_bytes(layout, self.inner())
        return plain, {
            "lanczos": estimation_bytes(layout.geometry, layout.workers),
            "directions": layout.arrangement_bytes + replacement,
        }
