"""Warnings and the summary of K-FAC."""

import dataclasses
from collections.abc import Mapping, Sequence

from tfkfac.blocks.registry import EXCLUDED, Leftover, Registry, count_weights
from tfkfac.capture.walk import SKIPPED
from tfkfac.factors import LowRank
from tfkfac.kfac.natural import Natural
from tfkfac.kfac.placement import Placement
from tfkfac.kfac.state import State
from tfkfac.shell.tables import bytes_text, table
from tfkfac.training.job import Job

# Warn if the preconditioned weights are below this fraction of all weights.
_LOW_COVERAGE = 0.5
# Warn of an uncovered weight above this fraction of all weights.
_LARGE = 0.05
# Number of uncovered layers named in the warning, not counting large layers.
_NUM_NAMED = 3


def coverage_warning(registry: Registry, job: Job, rule: Natural) -> str | None:
    """Warning about uncovered weights, or None.

    Warn if most weights, or a single large weight, are uncovered.
    Layers that arguments or the step rule exclude, and matrices that the step
    rule trains itself, do not count.
    """
    matrices = [variable for _, variable in rule.plain_matrices(registry)]
    plain = {id(variable) for variable in matrices}
    uncovered = [
        dataclasses.replace(
            item,
            variables=tuple(v for v in item.variables if id(v) not in plain),
        )
        for item in registry.uncovered
        if item.reason not in (SKIPPED, EXCLUDED)
    ]
    uncovered = [item for item in uncovered if item.variables]
    covered = registry.covered
    trained = covered + count_weights(matrices)
    total = trained + sum(item.weights for item in uncovered)

    def is_large(item: Leftover) -> bool:
        return any(count_weights([v]) > _LARGE * total for v in item.variables)

    if trained >= _LOW_COVERAGE * total and not any(map(is_large, uncovered)):
        return None
    coverage = (
        f"K-FAC preconditions {covered / total:.1%} of the weights of model "
        f"'{job.model.name}' ({covered:,} of {total:,})"
    )
    if not registry.blocks:
        coverage = f"Model '{job.model.name}' has no layer that K-FAC supports"
    uncovered.sort(key=lambda item: item.weights, reverse=True)
    named = [
        f"{item.path or '(model)'} ({item.weights:,} weights: {item.reason})"
        for rank, item in enumerate(uncovered)
        if rank < _NUM_NAMED or is_large(item)
    ]
    named += ["..."] if len(uncovered) > len(named) else []
    return (
        f"{coverage}. Its {', '.join(rest_role_and_class(job))}, trains the "
        "others alone: "
        f"{', '.join(named)}. See `optimizer.summary()`; support custom layers "
        "with `tfkfac.register_block`."
    )


def rest_role_and_class(job: Job) -> tuple[str, str]:
    """Role and class name of the optimizer of uncovered weights."""
    inner, rest = job.inner_optimizer, job.rest_optimizer
    role = "inner optimizer" if rest is None else "rest optimizer"
    return role, type(inner if rest is None else rest).__name__


def describe(
    job: Job,
    placement: Placement,
    states: Sequence[State],
    notes: Sequence[str],
    rule: Natural,
    sizes: Mapping[str, int],
) -> list[str]:
    """Return the lines of the summary; `states` are empty before training."""
    inner = type(job.inner_optimizer).__name__
    title = (
        f"K-FAC '{job.name}' of model '{job.model.name}': solver "
        f"{placement.solver.name}, inner optimizer {inner}"
    )
    lines = [title + rule.title, *notes, ""]
    rows = [
        block_row(placement, states, i)
        for i, block in enumerate(placement.blocks)
        if block.skip_reason is None
    ]
    if rows:
        header = ["Layer", "Block", "A", "G", "Weights", "State"]
        if placement.topology.replicas > 1:
            header += ["Owner", "Gradient workers"]
        lines += table(tuple(header), rows)
    else:
        lines.append("No layer is preconditioned.")
    plain = rule.plain_matrices(placement.registry)
    plain_ids = {id(variable) for _, variable in plain}
    leftovers = [
        (leftover.path, variable, leftover.reason)
        for leftover in placement.registry.uncovered
        for variable in leftover.variables
    ]
    role, _ = rest_role_and_class(job)
    for title, is_plain in (
        ("No curvature, orthogonalised momentum:", True),
        (f"Trained by the {role}, without curvature:", False),
    ):
        rows = [
            (
                path or "(model)",
                variable.name,
                f"{count_weights([variable]):,}",
                reason,
            )
            for path, variable, reason in leftovers
            if (id(variable) in plain_ids) == is_plain
        ]
        if rows:
            lines += ["", title]
            lines += table(("Layer", "Variable", "Weights", "Reason"), rows)
    covered = placement.registry.covered
    total = covered + sum(x.weights for x in placement.registry.uncovered)
    topology = placement.topology
    worker = f" of worker {topology.local[0]}" if topology.replicas > 1 else ""
    state_sizes = [
        f"{name.replace('_', ' ')} {bytes_text(size)}"
        for name, size in sizes.items()
        if name != "total"
    ]
    return [
        *lines,
        "",
        f"Preconditioned weights: {covered:,} of {total:,}. "
        f"State{worker}: {', '.join(state_sizes)}.",
    ]


def block_row(
    placement: Placement, states: Sequence[State], layer: int
) -> tuple[str, ...]:
    """Table row of one block, with the bytes of its state on this worker."""
    block, rank = placement.blocks[layer], placement.topology.local[0]
    cost, plan = placement.costs[layer], placement.plan
    state_bytes = cost.decomposition * plan.preconditions(rank, layer)
    state_bytes += sum(cost.factors[name] for name in plan.owns(rank, layer))
    groups = [group for state in states for group in state.averages]
    texts = {"A": "-", "G": "-"}
    for name, spec in block.factors.items():
        texts[name] = spec.text
        if not isinstance(spec, LowRank):
            continue
        for group in groups:
            if layer not in group.positions or name not in group.names:
                continue
            row = group.positions.index(layer)
            if group.weight[row] > 0:
                share = float(spec.explained(group.values()[name][row]))
                texts[name] = f"{spec.text} ({share:.0%} of trace)"
    cells = [
        block.path,
        block.kind,
        *texts.values(),
        f"{count_weights(block.variables):,}",
        bytes_text(state_bytes),
    ]
    if placement.topology.replicas > 1:
        by_name = plan.layers[layer].owners
        owners = dict.fromkeys(map(str, by_name.values()))
        if len(owners) > 1:
            owners = dict.fromkeys(f"{k}: {w}" for k, w in by_name.items())
        workers = map(str, plan.layers[layer].gradient_workers)
        cells += [", ".join(owners), ", ".join(workers)]
    return tuple(cells)
