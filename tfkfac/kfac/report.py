"""Warnings, and the summary."""

import warnings
from collections.abc import Mapping, Sequence

from tfkfac.blocks import Block
from tfkfac.blocks.registry import (
    EXCLUDED,
    Leftover,
    Registry,
    count_weights,
)
from tfkfac.capture.walk import SKIPPED
from tfkfac.compat.models import last_layers
from tfkfac.factors import LowRank
from tfkfac.fisher.types import Choice
from tfkfac.kfac.bank import State
from tfkfac.kfac.natural import Natural
from tfkfac.kfac.placement import Placement
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.job import Job

# Below this share of the weights most of a model is not trained by K-FAC.
_LOW_COVERAGE = 0.5
# A weight that is a larger share of the model is missed if it has no block.
_LARGE = 0.05
# Layers named by the warning of it, and besides all those of large weights.
_MOST_NAMED = 3


class Advice:
    """Issue each warning once, on the worker of replica 0."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def give(self, job: Job, text: str | None) -> None:
        """Warn if there is a text and it is new."""
        if text is None or text in self._given:
            return
        self._given.add(text)
        if 0 in job.topology.local:
            warnings.warn(text, stacklevel=3)


def coverage_warning(registry: Registry, job: Job) -> str | None:
    """Returns what to say of weights that K-FAC leaves alone, or None.

    That is if they are most of the model, or if one is a large part of it or
    its last layer's, which is named then. Layers of `skip_layers`, and those
    that a kind of steps leaves out on purpose, do not count.
    """
    known = SKIPPED, EXCLUDED
    left = [one for one in registry.left if one.reason not in known]
    covered = registry.covered
    total = covered + sum(one.weights for one in left)
    last = {id(w) for layer in last_layers(job.model) for w in layer.weights}

    def is_missed(one: Leftover) -> bool:
        return any(
            count_weights([v]) > _LARGE * total or id(v) in last
            for v in one.variables
        )

    if covered >= _LOW_COVERAGE * total and not any(map(is_missed, left)):
        return None
    what = (
        f"K-FAC preconditions {covered / total:.1%} of the weights of model "
        f"'{job.model.name}' ({covered:,} of {total:,})"
    )
    if not registry.blocks:
        what = f"Model '{job.model.name}' has no layer that K-FAC supports"
    left.sort(key=lambda one: one.weights, reverse=True)
    named = [
        f"{one.path or '(model)'} ({one.weights:,} weights: {one.reason})"
        for place, one in enumerate(left)
        if place < _MOST_NAMED or is_missed(one)
    ]
    named += ["..."] if len(left) > len(named) else []
    return (
        f"{what}. Its {', '.join(who_trains_the_rest(job))}, trains the others "
        "alone: "
        f"{', '.join(named)}. See `optimizer.summary()`; for layers of your "
        "own there is `tfkfac.register_block`."
    )


def unseen_loss_warning(job: Job) -> str:
    """Returns what to say of a loss that is taken for a mean."""
    return (
        f"Optimizer '{job.name}' has not seen the loss of model "
        f"'{job.model.name}' being computed and takes it for the mean over the "
        "examples, the leading dimension of each layer's input. If it is a sum "
        "or a mean over tokens or pixels, its steps are far too short or too "
        "long: compute it with `model.compute_loss`, or say what it is the "
        "mean over by `optimizer.attach(model, loss_terms=...)`, 1 for a sum."
    )


def who_trains_the_rest(job: Job) -> tuple[str, str]:
    """Role and class of the optimizer of the weights without a block."""
    inner, rest = job.inner_optimizer, job.rest_optimizer
    role = "inner optimizer" if rest is None else "rest optimizer"
    return role, type(inner if rest is None else rest).__name__


def describe(
    job: Job,
    placement: Placement,
    states: Sequence[State],
    notes: Sequence[str],
    kind: Natural,
    sizes: Mapping[str, int],
) -> list[str]:
    """Returns the lines of the summary, with notes after the first.

    Before training there are no states; the sizes of their parts are known.
    """
    inner = type(job.inner_optimizer).__name__
    title = (
        f"K-FAC '{job.name}' of model '{job.model.name}': solver "
        f"{placement.solver.name}, inner optimizer {inner}"
    )
    lines = [title + kind.title, *notes, ""]
    rows = [
        block_row(placement, states, i)
        for i, block in enumerate(placement.blocks)
        if block.left_out is None
    ]
    if rows:
        header = ["Layer", "Block", "A", "G", "Weights", "State"]
        if placement.topology.replicas > 1:
            header += ["Owner", "Gradient workers"]
        lines += table(tuple(header), rows)
    else:
        lines.append("No layer is preconditioned.")
    if placement.registry.left:
        who, _ = who_trains_the_rest(job)
        lines += ["", f"Left to the {who} as they are:"]
        rows = [
            (
                left.path or "(model)",
                variable.name,
                f"{count_weights([variable]):,}",
                left.reason,
            )
            for left in placement.registry.left
            for variable in left.variables
        ]
        lines += table(("Layer", "Variable", "Weights", "Reason"), rows)
    lines += ["", totals(placement, sizes)]
    return lines


def fisher_text(wanted: str | None, choice: Choice | None) -> str:
    """Line on the type of the Fisher matrix, wanted and chosen in a step."""
    if choice is None:
        return f"Fisher matrix: {wanted or 'chosen by the loss when training'}"
    why = f" ({choice.reason})" if choice.reason else ""
    return f"Fisher matrix: {choice.type}{why}"


def block_row(
    placement: Placement, states: Sequence[State], layer: int
) -> tuple[str, ...]:
    """One line of the table of blocks; the bytes are this worker's."""
    block, rank = placement.blocks[layer], placement.topology.local[0]
    row = [
        block.path,
        block.kind,
        *(factor_text(block, name, states) for name in ("A", "G")),
        f"{count_weights(block.variables):,}",
        bytes_text(placement.kept_bytes(rank, layer)),
    ]
    if placement.topology.replicas > 1:
        plan = placement.plan.layers[layer]
        owners = dict.fromkeys(map(str, plan.owners.values()))
        if len(owners) > 1:
            owners = {f"{k}: {owner}": None for k, owner in plan.owners.items()}
        row += [", ".join(owners), ", ".join(map(str, plan.gradient_workers))]
    return tuple(row)


def factor_text(block: Block, name: str, states: Sequence[State]) -> str:
    """Kind of one factor, and the share of it that a sketch explains."""
    kind = block.factors.get(name)
    if kind is None:
        return "-"
    if isinstance(kind, LowRank):
        for one in (p for state in states for p in state.preconditioners):
            kept = one.factors if one.block is block else None
            if kept is not None and name in kept.names and kept.weight > 0:
                share = float(kind.explained(kept.values()[name]))
                return f"{kind.text} ({share:.0%} of trace)"
    return kind.text


def totals(placement: Placement, sizes: Mapping[str, int]) -> str:
    """The line under the tables."""
    covered = placement.registry.covered
    rest = sum(left.weights for left in placement.registry.left)
    topology = placement.topology
    where = f" of worker {topology.local[0]}" if topology.replicas > 1 else ""
    parts = [
        f"{name.replace('_', ' ')} {bytes_text(size)}"
        for name, size in sizes.items()
        if name != "total"
    ]
    return (
        f"Preconditioned weights: {covered:,} of {covered + rest:,}. "
        f"State{where}: {', '.join(parts)}."
    )
