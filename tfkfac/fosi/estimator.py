"""Who estimates the directions, and when: between steps, or beside them."""

import abc
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfkfac.capture.model_taps import ForwardCall, ForwardTap
from tfkfac.compat.graphs import in_graph
from tfkfac.distributed.wire import gradient_bytes
from tfkfac.fosi.directions import Search, adopt
from tfkfac.fosi.estimation import (
    Estimation,
    basis_bytes,
    estimation_bytes,
    local_hessian,
)
from tfkfac.fosi.layouts import Layout
from tfkfac.fosi.plain_sgd import has_momentum
from tfkfac.fosi.state import State
from tfkfac.fosi.subspace import Inner, Subspace
from tfkfac.fosi.update import projection_bytes
from tfkfac.loss.replay import find_call
from tfkfac.training.job import Job
from tfkfac.training.step import Step

# Does the step of a replica that trains: with its state, and what renews the
# directions if that is due.
Train = Callable[[Step, State, Callable[[], None]], None]


class Estimator(abc.ABC):
    """Who estimates the directions, and when.

    Args:
        search: Which directions are sought, and when.

    Attributes:
        job: What it is attached to.
        states: What each replica of this process keeps.
    """

    job: Job
    states: Sequence[State] = ()

    def __init__(self, search: Search) -> None:
        self.search = search

    @abc.abstractmethod
    def attach(self, job: Job) -> None:
        """Binds it to a job, whose model may not be built yet."""

    @abc.abstractmethod
    def count_trainers(self, replicas: int) -> int:
        """Number of replicas, of all, that train and share the directions."""

    def peers(self, rank: int) -> tuple[int, ...]:
        """The replicas that a replica shares a mean loss with."""
        return tuple(range(self.job.topology.replicas))

    @abc.abstractmethod
    def create(self, layout: Layout) -> None:
        """Creates the states."""

    @abc.abstractmethod
    def run(self, step: Step, train: Train) -> None:
        """Does a step, in which those that train call `train`."""

    @abc.abstractmethod
    def first(self, updates: int) -> str:
        """When the first estimation comes; empty after that.

        Args:
            updates: Number of updates of the weights so far.
        """

    @abc.abstractmethod
    def rows(self) -> list[tuple[str, str]]:
        """Rows of the summary that say who does what."""

    @abc.abstractmethod
    def state_bytes(self, layout: Layout) -> dict[str, int]:
        """Bytes that this replica keeps, by kind."""

    @abc.abstractmethod
    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        """Bytes that this replica receives, by kind of step."""

    def idle_share(self) -> np.ndarray:
        """Share of the time that each replica has waited for the others."""
        return np.zeros(self.job.topology.replicas)

    def new_subspace(self, layout: Layout) -> Subspace:
        """The directions of a replica that trains."""
        return Subspace(layout, self.inner())

    def inner(self) -> Inner:
        """What the inner optimizer is like."""
        accumulation = self.job.inner_optimizer.gradient_accumulation_steps
        return Inner(bool(accumulation), has_momentum(self.job))


class BetweenSteps(Estimator):
    """All replicas train, and estimate together before a step (DHO2)."""

    @override
    def attach(self, job: Job) -> None:
        self.job = job

    @override
    def count_trainers(self, replicas: int) -> int:
        return replicas

    @override
    def create(self, layout: Layout) -> None:
        self.states = self.job.for_each(
            lambda rank: State(layout, self.new_subspace(layout))
        )

    @override
    def run(self, step: Step, train: Train) -> None:
        model, state = self.job.model, self.job.own(self.states)
        call = find_call(model, step.batch, ForwardTap.open(model).take())
        train(step, state, lambda: self.estimate(step, state, call))

    def estimate(self, step: Step, state: State, call: ForwardCall) -> None:
        """A Lanczos estimation at the current weights, if it is due."""
        clock = self.job.clock

        def update() -> tf.Tensor:
            geometry, group = state.layout.geometry, step.group
            estimation = Estimation(geometry, group, self.search.seed)
            local = local_hessian(
                self.job.model, step.batch, call, estimation, step.loss.shares
            )
            found = estimation.run(local)
            part = state.layout.arrange(found.rows, group)
            adopt(state, found.values, part, group, self.job)
            return state.last.assign(clock)

        due = self.search.timing.begins(clock, state)
        last = state.last
        tf.cond(due, in_graph(update), lambda: tf.convert_to_tensor(last))

    @override
    def first(self, updates: int) -> str:
        warmup = self.search.timing.first(self.states)
        if updates > warmup:
            return ""
        return f"the first before update {warmup + 1:,}"

    @override
    def rows(self) -> list[tuple[str, str]]:
        replicas = self.job.topology.replicas
        if replicas == 1:
            return []
        workers = ", ".join(map(str, range(replicas)))
        return [("Workers", workers), ("Accelerators", "-")]

    @override
    def state_bytes(self, layout: Layout) -> dict[str, int]:
        return with_total(
            {
                "directions": Subspace.bytes(layout, self.inner()),
                "basis": basis_bytes(layout.geometry, layout.workers),
                "copies": 0,
                "counters": State.bytes(),
            }
        )

    @override
    def communication_bytes(self, layout: Layout) -> dict[str, dict[str, int]]:
        gradients = gradient_bytes(
            self.job.model.trainable_variables, self.job.topology.hint
        )
        plain = layout.step_bytes(gradients, projection_bytes(self.job, layout))
        return {
            "warmup": {**plain, "projections": 0},
            "plain": plain,
            "estimation": {
                **plain,
                "lanczos": estimation_bytes(layout.geometry, layout.workers),
                "directions": layout.arrangement_bytes()
                + Subspace.carrying_bytes(layout, self.inner()),
            },
        }


def with_total(kinds: dict[str, int]) -> dict[str, int]:
    """Adds the sum of some kinds of bytes."""
    return {**kinds, "total": sum(kinds.values())}
