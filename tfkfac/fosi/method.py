"""The methods FOSI and DHO2: training step, state and reports."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardTap
from tfkfac.compat.graphs import Tracked
from tfkfac.curvature.hessian import flat_space
from tfkfac.fosi.estimation import Estimator
from tfkfac.fosi.layouts import LAYOUTS, Geometry, Layout
from tfkfac.fosi.multirole import AcceleratedEstimator
from tfkfac.fosi.subspace import NewtonRate, State, Timing, default_warmup
from tfkfac.fosi.update import SplitUpdate
from tfkfac.linalg.lanczos import default_steps
from tfkfac.saving.entries import Contents
from tfkfac.shell.arguments import Hyperparameter
from tfkfac.shell.method import Method
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.job import Job
from tfkfac.training.step import Step, Update

# Default interval between estimations by accelerators, in steps.
_ACCELERATED_INTERVAL = 800


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

    The arguments are those of `FOSI`.
    """

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        seed, fraction = settings.seed, settings.accelerator_fraction
        if fraction > 0 and settings.update_interval.get() is None:
            settings.update_interval.set(_ACCELERATED_INTERVAL)
        timing = Timing(settings.warmup_steps, settings.update_interval)
        self.rate = NewtonRate(settings.alpha)
        self.estimator = Estimator(timing, seed)
        if fraction > 0:
            self.estimator = AcceleratedEstimator(
                timing, seed, fraction, settings.final_update, self.rate
            )
        self._geometry: Geometry | None = None
        self._reported_warmup = -1  # updates; -1: unknown

    @property
    def states(self) -> Sequence[State]:
        """The states of the replicas of this process."""
        return self.estimator.states

    # ------------------------------------------------------------ the step
    @override
    def run(self, step: Step) -> None:
        """Run a step (FOSI, algorithm 3; DHO2, algorithm 3 and section IV)."""
        self.rate.record_largest(self.job, self.job.local_state(self.states))
        self.estimator.run(step, self.train)

    def train(
        self, step: Step, state: State, estimate: Callable[[], None]
    ) -> None:
        """The step of a replica that trains.

        `estimate` replaces the directions if an estimation is due.
        """
        if state.layout.reduces_gradients:
            step.weigh()
        else:
            step.reduce()

        def direction() -> Update:
            estimate()
            return SplitUpdate(
                step,
                state,
                self.rate,
                self.settings.momentum,
                self.settings.learning_rate_clip,
            ).make()

        step.check_finite()
        step.apply(direction)

    # --------------------------------------------------- binding and state
    @override
    def set_run_length(
        self, steps: int | None, remaining: int | None = None
    ) -> None:
        """Set the default warm-up, unless it is already set or over."""
        is_set = [
            max(int(state.warmup.numpy()), int(state.last.numpy())) >= 0
            for state in self.states[:1]
        ]
        if self.settings.warmup_steps is None and not any(is_set):
            self._reported_warmup = default_warmup(self.job, self.states, steps)
            self._assign_warmup()

    def _assign_warmup(self) -> None:
        """Assign the default warm-up to the states that exist."""
        with tf.init_scope():
            for state in self.states:
                state.warmup.assign(self._reported_warmup)

    @override
    def attach(self, job: Job) -> None:
        self.job = job
        ForwardTap.open(job.model)
        self.estimator.attach(job)

    @property
    def geometry(self) -> Geometry:
        """Sizes of the subspace, limited by the number of weights."""
        space = flat_space(self.job.model.trainable_variables)
        largest = min(self.settings.num_largest, space.size)
        smallest = min(self.settings.num_smallest, space.size - largest)
        steps = self.settings.lanczos_steps
        if steps is None:
            steps = default_steps(space.size, largest + smallest)
        steps = min(steps, space.size)
        return Geometry(space.size, largest, smallest, steps, space.dtype)

    def make_layout(self) -> Layout:
        """The layout of the directions among the training replicas."""
        # Replica 0 always trains.
        return LAYOUTS[self.settings.layout](self.geometry, len(self.peers(0)))

    @override
    def create(self) -> Sequence[Tracked]:
        geometry = self.geometry
        requested = self.settings.num_largest + self.settings.num_smallest
        if geometry != self._geometry:
            if geometry.directions < requested:
                warnings.warn(
                    f"Model '{self.job.model.name}' has {geometry.size} "
                    f"weights: optimizer '{self.job.name}' uses "
                    f"{geometry.directions} directions, not {requested}.",
                    stacklevel=2,
                )
            self._geometry = geometry
            self.estimator.create(self.make_layout())
            self._assign_warmup()
        return self.states

    @override
    def peers(self, rank: int) -> tuple[int, ...]:
        return self.estimator.peers(rank)

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
        first = self.estimator.first(int(job.clock))
        roles = self.estimator.rows()
        if job.topology.replicas > 1:
            roles.insert(2, ("Layout", self.settings.layout))
        rows = [
            ("Weights", f"{geometry.size:,}"),
            (
                "Directions",
                f"{geometry.largest} of largest and {geometry.smallest} of "
                "smallest curvature",
            ),
            ("Lanczos steps", str(geometry.steps)),
            ("Estimations", f"{count}, {first}" if first else str(count)),
            ("State: directions", bytes_text(state["directions"])),
            ("State: Lanczos basis", bytes_text(state["basis"])),
            ("State: copies", bytes_text(state["copies"])),
            *roles,
        ]
        if len(values := self.spectrum()):
            text = ", ".join(f"{value:.4g}" for value in values)
            rows.append(("Ritz values", text))
        title = (
            f"FOSI '{job.name}' of model '{job.model.name}': Newton steps in "
            f"the directions, {type(job.inner_optimizer).__name__} on the rest"
        )
        return [title, "", *table(("", "Value"), rows)]

    @override
    def state_bytes(self) -> dict[str, int]:
        return self.estimator.state_bytes(self.make_layout())

    @override
    def communication_bytes(self) -> dict[str, dict[str, int]]:
        return self.estimator.communication_bytes(self.make_layout())
