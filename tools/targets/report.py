"""The tables."""

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from targets.methods import CONSTANT, is_baseline, is_constant, parse
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
    seconds_of,
    settings_of,
)
from targets.run import Run
from targets.study import Record, Records

# The default of K-FAC, which other steps are compared with: beside the best
# Adam, and as it is.
TODAY = "kfac:step=inner:rest=adam"
_PLAIN = "kfac:step=inner"
# Marks of a step that may stand in Adam's place with Adam's rate.
MOST_ABOVE, LEAST_BELOW = 1.02, 11

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
SIGNS = {TIE: "tie", "less": "**less**", "more": "more"}
ENDS = {TIE: "level", "less": "**better**", "more": "worse"}
ABOUT = (
    "Processor seconds on one thread until the mean of the seeds is at the "
    "target, the final metric of the best baseline, without evaluation and "
    "first step. Settings were searched with a sixth of the training data held "
    "out, and with small models; the rates of Adam and Muon, and K-FAC's "
    "batches and epochs, were searched again with the full ones. "
    "The test set chose none of them. Decay: what weight decay takes away of "
    "the weights over the training. Epochs: over those of the baselines; K-FAC "
    "has the setting that was, on the data held out, the first to end as well "
    "as the best baseline. Ratio: seconds over those of the baseline that is "
    "there first, with its standard error by leaving out one seed after the "
    "other. A claim (less, more; better, worse at the end) takes three "
    "standard errors; all else is a tie, or level. Keras' Muon leaves the "
    "output layer, convolutions, the projections of attention, embeddings, "
    "biases and scales to AdamW."
)
ABOUT_TINY = (
    "Training loss at the end, on up to 1,024 training examples: means of the "
    "seeds with standard errors; over Adam's: geometric means. Same batches "
    "and epochs for all, rates falling linearly to 0. Baselines have the best "
    "of four rates, and of more if that was the first or the last. `rest=adam` "
    "is K-FAC with the Adam that was best alone for the weights that it does "
    "not cover; nothing else was searched."
)
ABOUT_CONSTANT = (
    "The same at rates that do not fall, as where an optimizer is given by its "
    "name: Keras' Adam at its default of 0.001, K-FAC with all its defaults. "
    "Spectral steps do not get shorter by themselves, the default ones do."
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
            *_means(comparisons),
        ]
    if tiny := tiny_ends(records.runs):
        parts += ["## Tiny problems", markdown_table(*marks(tiny))]
        parts += [markdown_table(*tiny_table(tiny)), ABOUT_TINY]
    if tiny := tiny_ends(records.runs, constant=True):
        parts += ["## Tiny problems, constant rates"]
        parts += [
            markdown_table(*marks(tiny)),
            markdown_table(*tiny_table(tiny)),
        ]
        parts += [ABOUT_CONSTANT]
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
    for number in sorted({record["environment"] for record in records.runs}):
        here = records.environments[number]
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
        "rate, batch, decay, epochs",
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
    claim = SIGNS.get(row.claim, row.claim)
    if row.setting == comparison.best.setting:
        claim = "the target"
    return (
        f"`{row.setting.method}`",
        _settings(row.setting),
        _end(row),
        f"{row.seconds:.3g}" if row.seconds else "-",
        _ratio(row),
        claim,
    )


def _ratio(row: Row) -> str:
    if row.ratio is None:
        return "-"
    is_known = math.isfinite(row.error)
    return f"{row.ratio:.2f}" + f" ± {row.error:.2f}" * is_known


def _end(row: Row) -> str:
    """The metric at the end, and of ours how it compares to the target."""
    text = spread(row.finals)
    return text if not row.claim else f"{text}, {ENDS[row.end]}"


def _settings(run: Run) -> str:
    parts = ["default" if run.rate is None else f"{run.rate:g}"]
    parts += [f"rest {run.rest:g}"] if run.rest is not None else []
    parts += [f"{run.batch}", f"{run.decay:.0%}", f"{run.share:g}"]
    return ", ".join(parts)


def _means(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yields the geometric mean of each of our methods."""
    for method, (mean, count) in geometric_means(comparisons).items():
        yield (
            f"`{method}`: geometric mean of the ratios {mean:.2f}, of {count} "
            f"of {len(comparisons)} problems."
        )


def summary(records: Sequence[Record]) -> Table:
    """The table of the README: a row for each problem, at its largest size.

    It has those methods of ours that were run on all problems.
    """
    comparisons, adams = (
        _largest(compare(records, *target)) for target in ((), ("adam",))
    )
    adam_of = {_place(adam): adam.rows for adam in adams}
    counts = Counter(
        row.setting.method
        for comparison in comparisons
        for row in comparison.rows
        if not is_baseline(row.setting.method)
    )
    methods = [m for m in counts if counts[m] == len(comparisons)]
    columns = ["problem", "best baseline", *map(_title, methods)]
    rows = []
    for comparison in comparisons:
        run, best = comparison.best.setting, comparison.best
        to_best, to_adam = (
            {row.setting.method: row for row in found}
            for found in (comparison.rows, adam_of.get(_place(comparison), ()))
        )
        rows.append(
            [
                f"{run.problem} ({run.size}), {run.row.metric}",
                f"{run.method}: {spread(best.finals)}",
                *(_short(to_adam.get(m), to_best.get(m)) for m in methods),
            ]
        )
    means = [geometric_means(found) for found in (adams, comparisons)]
    cells = [
        " / ".join(
            f"{found[m][0]:.2f} ({found[m][1]})" if m in found else "-"
            for found in means
        )
        for m in methods
    ]
    rows.append(["geometric means (problems)", "", *cells])
    return columns, rows


def _largest(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Those of full size, and the small twins of problems without one."""
    found = list(comparisons)
    full = {_place(one)[0] for one in found if _place(one)[1] == "full"}
    return [
        one
        for one in found
        if _place(one)[1] == "full" or _place(one)[0] not in full
    ]


def _place(comparison: Comparison) -> tuple[str, str, str]:
    """Problem, size and data."""
    run = comparison.best.setting
    return run.problem, run.size, run.data


def _title(method: str) -> str:
    """What a method of ours is called where there is room for a few words."""
    arguments = dict(parse(method).arguments)
    step = arguments.pop("step", "inner")
    words = ["K-FAC" if step == "inner" else f"{step} steps"]
    words += [f"{name}={value}" for name, value in arguments.items()]
    return ", ".join(words)


def _short(to_adam: Row | None, to_best: Row | None) -> str:
    """Parts of Adam's time and of the best baseline's, and the end."""
    if to_adam is None or to_best is None:
        return ""
    parts = [
        "-" if row.ratio is None else f"{row.ratio:.2f}"
        for row in (to_adam, to_best)
    ]
    return f"{' / '.join(parts)}, {ENDS[to_best.end]}"


# ----------------------------------------------------------------------- tiny
@dataclasses.dataclass(frozen=True)
class End:
    """How a method ends on a tiny problem, with the best of its rates.

    Attributes:
        run: The setting.
        losses: Training loss, by seed.
        validation: Metric on other examples, by seed.
        seconds: Mean processor seconds.
    """

    run: Run
    losses: Mapping[int, float]
    validation: Sequence[float]
    seconds: float

    @property
    def mean(self) -> float:
        """Mean training loss."""
        return statistics.fmean(self.losses.values())


Ends = Mapping[str, Mapping[str, End]]


def tiny_ends(records: Iterable[Record], constant: bool = False) -> Ends:
    """The ends by problem and method, at falling rates or at constant ones."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        run = record["run"]
        if run["size"] == TINY and is_constant(run["method"]) == constant:
            method = run["method"].removesuffix(CONSTANT)
            groups[run["problem"], method].append(record)
    ends: dict[str, dict[str, End]] = {name: {} for name in TINY_PROBLEMS}
    for (problem, method), found in groups.items():
        best = best_setting(found)
        assert best is not None
        chosen = settings_of(found)[best]
        seeds = [record["run"]["seed"] for record in chosen]
        losses = [math.inf if end is None else end for end in finals(chosen)]
        ends[problem][method] = End(
            best,
            dict(zip(seeds, losses, strict=True)),
            [record["validation"] for record in chosen],
            seconds_of(chosen),
        )
    return {problem: found for problem, found in ends.items() if found}


def tiny_table(ends: Ends) -> Table:
    """Training losses, and below each the metric on other examples."""
    methods = dict.fromkeys(m for found in ends.values() for m in found)
    rows: list[Sequence[str]] = []
    for problem, found in ends.items():
        row = TINY_PROBLEMS[problem]
        here = [found.get(method) for method in methods]
        rows.append([f"{problem}, loss", *map(_loss, here)])
        rows.append([f"others, {row.validation}", *map(_validation, here)])
    return ["problem", *(f"`{method}`" for method in methods)], rows


def _loss(end: End | None) -> str:
    """A mean with its standard error, and the rate of a baseline."""
    if end is None:
        return ""
    text = f"{end.mean:.3g}"
    if len(end.losses) > 1:
        deviation = statistics.stdev(end.losses.values())
        text += f" ± {deviation / math.sqrt(len(end.losses)):.1g}"
    if end.run.rate is None:
        return text
    return f"{text} ({end.run.rate:g})"


def _validation(end: End | None) -> str:
    return f"{statistics.fmean(end.validation):.3g}" if end else ""


def marks(ends: Ends) -> Table:
    """Each of our methods against Adam, Muon and what is default today."""
    columns = (
        "method",
        "problems",
        f"below Adam (mark: {LEAST_BELOW})",
        f"most above Adam (mark: {MOST_ABOVE:g} times)",
        "loss over Adam's",
        "below Muon",
        "better and worse than today's step by three standard errors",
        "seconds over Adam's",
    )
    ours = dict.fromkeys(
        method
        for found in ends.values()
        for method in found
        if not is_baseline(method)
    )
    rows = []
    for method in ours:
        here = [f for f in ends.values() if method in f and "adam" in f]
        if here:
            rows.append(_mark(method, here))
    return columns, rows


def _mark(method: str, here: Sequence[Mapping[str, End]]) -> Sequence[str]:
    """The row of a method; means of ratios are geometric."""
    ratios = {
        f[method].run.problem: f[method].mean / f["adam"].mean for f in here
    }
    seconds = [f[method].seconds / f["adam"].seconds for f in here]
    worst = max(ratios, key=lambda problem: ratios[problem])
    muon = [f for f in here if "muon" in f]
    claims: dict[str, list[str]] = {"less": [], "more": [], TIE: []}
    for found in here:
        other = found.get(TODAY, found.get(_PLAIN))
        if other not in (None, found[method]):
            own, today = found[method].losses, other.losses
            differences = [own[s] - today[s] for s in own.keys() & today.keys()]
            claims[judge(differences)].append(found[method].run.problem)
    return (
        f"`{method}`",
        str(len(here)),
        str(sum(ratio < 1 for ratio in ratios.values())),
        f"{ratios[worst]:.3g} ({worst})",
        f"{statistics.geometric_mean(ratios.values()):.2g}",
        f"{sum(f[method].mean < f['muon'].mean for f in muon)} of {len(muon)}"
        * bool(muon),
        f"{len(claims['less'])}, {len(claims['more'])}"
        + f" ({', '.join(claims['more'])})" * bool(claims["more"]),
        f"{statistics.geometric_mean(seconds):.2g}",
    )


def spread(values: Sequence[Any]) -> str:
    """Mean and standard deviation."""
    if not values or None in values:
        return ""
    text = f"{statistics.fmean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text
