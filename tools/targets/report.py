"""The tables."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from targets.methods import is_baseline
from targets.plan import best_setting
from targets.problems import TINY, TINY_PROBLEMS
from targets.results import (
    TIE,
    Comparison,
    Row,
    compare,
    finals,
    geometric_means,
    judge,
    settings_of,
)
from targets.run import Run
from targets.study import Record, Records

# What the default of K-FAC is compared with, and so all other steps.
TODAY = "kfac:step=inner:rest=adam"
# Marks of a step that may stand in Adam's place with Adam's rate.
MOST_ABOVE, LEAST_BELOW = 1.02, 11

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
SIGNS = {TIE: "tie", "less": "**less**", "more": "more"}
ABOUT = (
    "Processor seconds on one thread to the final metric of the best baseline, "
    "seed by seed, without evaluation and first step; means and standard "
    "deviations. Settings were searched with a sixth of the training data held "
    "out; the test set was looked at once, with those in the table. Decay: "
    "what weight decay takes away of the weights over the training. Ratio: "
    "seconds over those of the baseline that is there first. A claim (less, "
    "more) takes (mean difference) * sqrt(n) of at least three standard "
    "deviations; all else is a tie. Keras' Muon leaves the output layer, "
    "convolutions, the projections of attention, embeddings, biases and scales "
    "to AdamW."
)
ABOUT_TINY = (
    "Training loss at the end, on up to 1,024 training examples, mean of the "
    "seeds with its standard error. Same batches and epochs for all, rates "
    "falling linearly to 0. Baselines have the best of their rates (*: the "
    "smallest or the largest of them). `rest=adam` is K-FAC with the Adam that "
    "was best alone for the weights that it does not cover; nothing else was "
    "searched."
)


def sections(records: Records) -> list[str]:
    """All tables in Markdown, with what goes with them."""
    parts: list[str] = []
    comparisons = list(compare(records.runs))
    if comparisons:
        parts += ["## Time to the best baseline's result"]
        parts += [
            markdown_table(*full_table(comparisons)),
            ABOUT,
            *means(comparisons),
        ]
    tiny = [r for r in records.runs if r["run"]["size"] == TINY]
    if tiny:
        parts += [
            "## Tiny problems",
            markdown_table(*tiny_table(tiny)),
            ABOUT_TINY,
        ]
        parts += [markdown_table(*marks(tiny))]
    if parts:
        parts += [*_sources(records)]
    return parts


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sources(records: Records) -> Iterator[str]:
    """Commands, versions and machines of what is in the tables."""
    yield "All records: `docs/trainings.json`. They are of:"
    for here in records.environments:
        versions = ", ".join(
            f"{name} {here[name]}"
            for name in ("tfkfac", "python", "tensorflow", "keras", "keras-hub")
            if here[name]
        )
        yield (
            f"- `{here['script']} {' '.join(here['arguments'])}`; {versions}; "
            f"{here['cores']} cores of {here['processor']}"
        )


# ------------------------------------------------------------------ full size
def full_table(comparisons: Sequence[Comparison]) -> Table:
    """All methods on all problems."""
    columns = (
        "method",
        "rate, batch, decay",
        "ends at",
        "CPU s to the target",
        "ratio",
        "claim",
    )
    rows: list[Sequence[str]] = []
    for comparison in comparisons:
        run = comparison.best.setting
        title = (
            f"**{run.problem}** ({run.size}, {run.data}), {run.row.metric}, "
            f"{len(comparison.seeds)} seeds"
        )
        rows.append([title, *[""] * 5])
        rows += [_line(row, comparison) for row in comparison.rows]
    return columns, rows


def _line(row: Row, comparison: Comparison) -> Sequence[str]:
    reached = [seconds for seconds in row.seconds if seconds is not None]
    missing = f"{len(reached)} of {len(row.seconds)} seeds"
    claim = SIGNS.get(row.claim, row.claim)
    if row.setting == comparison.best.setting:
        claim = "the target"
    return (
        f"`{row.setting.method}`",
        _settings(row.setting),
        spread(row.finals),
        spread(reached) if row.arrives else missing,
        spread(row.ratios) or "-",
        claim,
    )


def _settings(run: Run) -> str:
    parts = ["default" if run.rate is None else f"{run.rate:g}"]
    parts += [f"rest {run.rest:g}"] if run.rest is not None else []
    return ", ".join([*parts, f"{run.batch}", f"{run.decay:.0%}"])


def means(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yields the geometric mean of each of our methods."""
    for method, (mean, count) in geometric_means(comparisons).items():
        yield (
            f"`{method}`: geometric mean of the ratios {mean:.2f}, of {count} "
            f"of {len(comparisons)} problems."
        )


# ----------------------------------------------------------------------- tiny
def tiny_table(records: Iterable[Record]) -> Table:
    """Training losses of all methods."""
    ends = _tiny_ends(records)
    methods = list(dict.fromkeys(m for found in ends.values() for m in found))
    rows = [
        [problem, *(_end(found.get(method)) for method in methods)]
        for problem, found in ends.items()
    ]
    return ["problem", *(f"`{m}`" for m in methods)], rows


def marks(records: Iterable[Record]) -> Table:
    """Each of our methods against Adam, Muon and what is default today."""
    ends = {
        problem: {method: end[1] for method, end in found.items()}
        for problem, found in _tiny_ends(records).items()
        if "adam" in found
    }
    ours = dict.fromkeys(
        method
        for found in ends.values()
        for method in found
        if not is_baseline(method)
    )
    columns = (
        "method",
        "problems",
        f"below Adam (mark: {LEAST_BELOW})",
        f"most above Adam (mark: {MOST_ABOVE:g} times)",
        "geometric mean over Adam",
        "below Muon",
        "better, worse than today's step by three standard errors",
    )
    rows = [_mark(method, ends) for method in ours]
    return columns, rows


def _mark(
    method: str, ends: Mapping[str, Mapping[str, Sequence[float]]]
) -> Sequence[str]:
    here = {p: found for p, found in ends.items() if method in found}
    ratios = {
        problem: _ratio(found[method], found["adam"])
        for problem, found in here.items()
    }
    worst = max(ratios, key=lambda problem: ratios[problem])
    claims: dict[str, list[str]] = {"less": [], "more": [], TIE: []}
    for problem, found in here.items():
        if TODAY in found and method != TODAY:
            pairs = zip(found[method], found[TODAY], strict=True)
            claims[judge([a - b for a, b in pairs])].append(problem)
    muon = [found for found in here.values() if "muon" in found]
    below = sum(_ratio(f[method], f["muon"]) < 1 for f in muon)
    return (
        f"`{method}`",
        str(len(here)),
        str(sum(ratio < 1 for ratio in ratios.values())),
        f"{ratios[worst]:.3g} ({worst})",
        f"{statistics.geometric_mean(ratios.values()):.2g}",
        f"{below} of {len(muon)}",
        f"{len(claims['less'])}, {len(claims['more'])}"
        + f" ({', '.join(claims['more'])})" * bool(claims["more"]),
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.fmean(ours) / statistics.fmean(theirs)


def _tiny_ends(
    records: Iterable[Record],
) -> dict[str, dict[str, tuple[Run, Sequence[float]]]]:
    """By problem and method the best setting, and its losses by seed."""
    groups: dict[str, dict[str, list[Record]]] = {
        name: {} for name in TINY_PROBLEMS
    }
    for record in records:
        run = record["run"]
        if run["size"] == TINY:
            methods = groups[run["problem"]]
            methods.setdefault(run["method"], []).append(record)
    ends: dict[str, dict[str, tuple[Run, Sequence[float]]]] = {}
    for problem, methods in groups.items():
        for method, found in methods.items():
            best = best_setting(found)
            assert best is not None
            losses = [
                math.inf if end is None else end
                for end in finals(settings_of(found)[best])
            ]
            ends.setdefault(problem, {})[method] = best, losses
    return ends


def _end(end: tuple[Run, Sequence[float]] | None) -> str:
    """A mean with its standard error, and the rate of a baseline."""
    if end is None:
        return ""
    run, losses = end
    text = f"{statistics.fmean(losses):.3g}"
    if len(losses) > 1:
        error = statistics.stdev(losses) / math.sqrt(len(losses))
        text += f" ± {error:.1g}"
    if run.rate is None:
        return text
    rates = run.row.rates.get(run.method, (run.rate,))
    edge = "*" * (run.rate in (min(rates), max(rates)))
    return f"{text} ({run.rate:g}{edge})"


def spread(values: Sequence[Any]) -> str:
    """Mean and standard deviation."""
    if not values or None in values:
        return ""
    text = f"{statistics.fmean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text
