"""The tables of the trainings."""

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from targets.equal import TOLERANCE
from targets.methods import (
    KFAC,
    SCHEDULE_FREE,
    is_baseline,
    is_constant,
    is_untuned,
    parse,
)
from targets.plan import best_setting
from targets.problems import FULL_PROBLEMS, TINY, TINY_PROBLEMS
from targets.results import (
    TIE,
    Comparison,
    Row,
    compare,
    finals,
    geometric_means,
    judge,
    loss_of,
    seconds_of,
    settings_of,
)
from targets.run import FINAL, Run
from targets.study import EQUAL_SECONDS, Record, Records

# K-FAC with natural-gradient steps, and the best Adam for other weights.
NATURAL = "kfac:step=natural:rest=adam"

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
SIGNS = {TIE: "tie", "less": "**less**"}
ENDS = {TIE: "level", "less": "**better**", "more": "worse"}
TITLES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "muon": "Muon",
    SCHEDULE_FREE: "schedule-free AdamW",
}
ABOUT_EQUAL = """\
`KFAC()`, Adam and Muon: at equal epochs, and for the processor seconds of
`KFAC()`. For these the epochs of a baseline are multiplied by the ratio of the
seconds at equal epochs, which the same command measured (ratios within 10 % of
1 count as equal). Then the rate was searched again for the new length, on a
sixth of the training data and seed 0; the best rate is between two others.
Batches, weight decays and the rates at equal epochs are those of the next
section. `KFAC()` has no setting. Test results: mean and standard deviation of
seeds 5, 6 and 7, which tuned nothing; "better" and "worse" need three standard
errors. ResNet-20 was trained with seeds 5 and 6, and not with Muon. One thread;
other work ran beside. An update is a step with a batch. Fashion-MNIST is split
at random, with seed 0, into 60,000 and 10,000 images: its results do not
compare with those of the official split.
"""
CHART = (
    "![Curves of KFAC(), Muon and Adam over processor seconds on eight "
    "problems](images/seconds.svg)\n\n*Test metric over processor seconds, "
    "logarithmic: means of the seeds, trainings of equal processor seconds.*"
)
ABOUT = """\
Of an earlier version, with more baselines: final metric on the test set, mean
and standard deviation of five seeds. The best baseline is in bold; its final
metric is the target. Empty cells were not run.

Natural-gradient steps have a second figure: the ratio of their time to that of
the first baseline that reaches the target. Time is processor seconds on one
thread until the mean of the seeds reaches the target, without evaluation
and first step. The standard error of a ratio is the jackknife's over the seeds.
"Less", "more", "better" and "worse" need a difference of three standard errors;
otherwise it says "tie" or "level".

`KFAC()` has no setting, and Adam's batch and epochs. It has five seeds on the
full models and three on the small ones; on the ResNet-20 three and one. They
are compared with the same seeds of the best baseline. The ratio of its time is
that of seeds 3 and 4 (ResNet-20: seed 3), which one command trained with Adam,
Muon and `KFAC()`; other cells have no ratio. The ratios of natural-gradient
steps in these rows are those of the other seeds, trained on another machine.
The length of the steps of `KFAC()` in long runs (the constant 400) was chosen
on seeds 0 and 1 with full models, by this metric.

Settings were chosen on a sixth of the training data, held out, and with small
models; the test set was not used. The rates of Adam and Muon, and the batches
and epochs of natural-gradient steps, were searched again with the full models.
Natural-gradient steps have the default rate, and half or all of the epochs.
Their setting is the first one to end as well as the best baseline on the
held-out data. Keras' Muon leaves convolutions, attention projections,
embeddings, biases and scales to AdamW; the output layer is excluded, as its
documentation advises. The settings are in `docs/trainings.json`.
"""
ABOUT_TINY = """\
Final training loss, on up to 1,024 training examples: mean and standard error
over the seeds. After the semicolon: the mean of the metric on held-out examples
(the loss, unless the row says accuracy). In brackets: the learning rate of a
baseline. All methods have equal batches and epochs, and rates that fall
linearly to 0 where the column does not say that they are constant. Baselines
have the best of four rates, and of more if the best was the first or the last;
Adam at a constant rate has Keras' default of 0.001. Natural-gradient steps have
the default rate, and the best Adam as rest optimizer where its rate falls;
`KFAC()` has no setting. The last rows compare with Adam (tuned, falling rate);
means of ratios are geometric. The columns were measured on different machines,
so the ratios of processor seconds are rough.
"""


def sections(records: Records) -> list[str]:
    """Return a heading, a legend and a table for each study, in Markdown."""
    parts: list[str] = []
    if pairs := list(equal_seconds(Records(EQUAL_SECONDS).runs)):
        parts += ["## Equal processor seconds", CHART]
        parts += _paragraphs(ABOUT_EQUAL)
        parts.append(markdown_table(*equal_table(pairs)))
    if comparisons := list(compare(records.runs)):
        parts += ["## Time to the best baseline's result", *_paragraphs(ABOUT)]
        parts.append(markdown_table(*full_table(comparisons)))
    if tiny := tiny_ends(records.runs):
        parts += ["## Tiny problems", *_paragraphs(ABOUT_TINY)]
        parts.append(markdown_table(*tiny_table(tiny)))
    return parts


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a text, a line each."""
    return [" ".join(part.split()) for part in text.split("\n\n")]


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands(records: Records) -> Iterator[str]:
    """Yield the commands of the records, with versions and machines."""
    for number in sorted({record["environment"] for record in records.runs}):
        here = records.environments[number]
        versions = ", ".join(
            f"{name} {here[name]}"
            for name in ("tfkfac", "python", "tensorflow", "keras", "keras-hub")
            if here[name]
        )
        words = " ".join(here["arguments"])
        yield f"# {versions}; {here['cores']} cores of {here['processor']}"
        yield f"python {here['script']} {words}"


# ------------------------------------------------------------------ full size
def full_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a row for each problem, with a column for each method."""
    order = {name: index for index, name in enumerate(TITLES)}
    keys = dict.fromkeys(
        _column(row.setting)
        for comparison in comparisons
        for row in comparison.rows
    )
    columns = sorted(keys, key=lambda key: order.get(key[0], len(order)))
    rows = []
    for comparison in comparisons:
        run = comparison.best.setting
        cells = {
            _column(row.setting): _cell(row, comparison)
            for row in comparison.rows
        }
        name = f"{run.problem}, {run.size}: {run.row.metric}"
        rows.append([name, *(cells.get(key, "") for key in columns)])
    means = geometric_means(comparisons)
    texts = {m: f"{mean:.2f} ({n})" for m, (mean, n) in means.items()}
    last = "geometric mean of the ratios (problems)"
    cells = {(method, ""): text for method, text in texts.items()}
    rows.append([last, *(cells.get(key, "") for key in columns)])
    titles = [title(method) + share for method, share in columns]
    return ["problem", *titles], rows


def _column(setting: Run) -> tuple[str, str]:
    """Return the method, and its share of the epochs if not searched."""
    if not is_untuned(setting.method):
        return setting.method, ""
    is_short = setting.share != 1
    return KFAC, f", {setting.share:g} of the epochs" * is_short


def _cell(row: Row, comparison: Comparison) -> str:
    """Return the final metric; for K-FAC also the time ratio and the claims."""
    text = spread(row.finals)
    if row is comparison.best:
        return f"**{text}**"
    if is_baseline(row.setting.method):
        return text
    text += f", {ENDS[row.end]}"
    if not row.claim:
        return text
    if row.ratio is None:
        return f"{text}; {row.claim}"
    error = f" ± {row.error:.2f}" * math.isfinite(row.error)
    return f"{text}; {row.ratio:.2f}{error}, {SIGNS.get(row.claim, row.claim)}"


# -------------------------------------------------------------- equal seconds
class Pair(NamedTuple):
    """`KFAC()` and a baseline on a problem, with the same seeds.

    Attributes:
        kfac: Setting of `KFAC()`.
        baseline: Setting of the baseline.
        ends: Final metrics, by setting.
        seconds: Mean processor seconds of a training, by setting.
        end: "less" or "more" final loss of `KFAC()`, or "tie".
    """

    kfac: Run
    baseline: Run
    ends: Mapping[Run, Sequence[float | None]]
    seconds: Mapping[Run, float]
    end: str


def equal_seconds(records: Iterable[Record]) -> Iterator[Pair]:
    """Yield the comparisons of a problem: equal epochs, then equal seconds."""
    found = [record for record in records if record["run"]["phase"] == FINAL]
    groups = settings_of(found)
    ends = {run: finals(group) for run, group in groups.items()}
    seconds = {run: seconds_of(group) for run, group in groups.items()}
    for kfac in filter(lambda run: is_untuned(run.method), groups):
        rivals = [
            run
            for run in groups
            if is_baseline(run.method) and run.problem == kfac.problem
        ]
        for run in sorted(rivals, key=lambda run: (run.method, run.share != 1)):
            pairs = zip(ends[kfac], ends[run], strict=True)
            losses = [loss_of(kfac, a) - loss_of(run, b) for a, b in pairs]
            yield Pair(kfac, run, ends, seconds, judge(losses))


def equal_table(pairs: Sequence[Pair]) -> Table:
    """Return a row for each training of each problem."""
    rows = []
    for pair in pairs:
        for run in (pair.kfac, pair.baseline):
            row = [
                f"{run.problem}, {run.row.metric}",
                title(run.method) + (f" ({run.rate:g})" if run.rate else ""),
                budget(run),
                f"{pair.seconds[run]:.0f}",
                spread(pair.ends[run]),
                ENDS[pair.end] if run is pair.baseline else "",
            ]
            if row not in rows:
                rows.append(row)
    columns = ["problem", "optimizer (rate)", "budget (epochs, updates)"]
    return [*columns, "CPU s", "final result", "`KFAC()` ends"], rows


def at_equal_seconds(records: Iterable[Record]) -> dict[str, Pair]:
    """Return the comparison with the best baseline, by problem.

    Leave out a problem where a baseline was trained at equal epochs only.
    """
    groups: dict[str, dict[str, Pair | None]] = defaultdict(dict)
    for pair in equal_seconds(records):
        group, baseline = groups[pair.kfac.problem], pair.baseline
        ratio = pair.seconds[pair.kfac] / pair.seconds[baseline]
        is_equal = baseline.share != 1 or abs(ratio - 1) <= TOLERANCE
        group[baseline.method] = pair if is_equal else None

    def loss(pair: Pair) -> float:
        ends = pair.ends[pair.baseline]
        return statistics.fmean(loss_of(pair.baseline, end) for end in ends)

    best = {}
    for problem, group in groups.items():
        pairs = [pair for pair in group.values() if pair is not None]
        if len(pairs) == len(group):
            best[problem] = min(pairs, key=loss)
    return best


def of_equal_epochs(records: Iterable[Record]) -> list[Record]:
    """Return the records of trainings with all epochs of a problem."""
    return [record for record in records if record["run"]["share"] == 1]


def summary(records: Sequence[Record]) -> Table:
    """Return the README's table, from the records of equal seconds."""
    equal = at_equal_seconds(records)
    at_equal_epochs = {
        rival: {
            comparison.best.setting.problem: comparison
            for comparison in compare(of_equal_epochs(records), *rival)
        }
        for rival in ((), ("adam",))
    }
    columns = ["problem", "`KFAC()`: epochs, updates", "`KFAC()`: CPU s"]
    columns += ["`KFAC()`: final result"]
    columns += ["equal CPU s: best baseline", "`KFAC()` ends"]
    columns += ["equal epochs: best baseline", "`KFAC()` ends"]
    columns += ["CPU s to the best baseline's result (baseline = 1)"]
    columns += ["CPU s to Adam's result (Adam = 1)"]
    lines = []
    for problem in (name for name in FULL_PROBLEMS if name in equal):
        pair, best = equal[problem], at_equal_epochs[()][problem].best
        rows = [
            _rows(comparisons[problem])[KFAC]
            for comparisons in at_equal_epochs.values()
            if problem in comparisons
        ]
        share = f"{pair.baseline.row.epochs * pair.baseline.share:.3g} epochs"
        lines.append(
            [
                f"{problem}, {pair.kfac.row.metric}",
                budget(pair.kfac),
                f"{pair.seconds[pair.kfac]:.0f}",
                spread(pair.ends[pair.kfac]),
                f"{title(pair.baseline.method)}, {share}: "
                f"{spread(pair.ends[pair.baseline])}",
                ENDS[pair.end],
                f"{title(best.setting.method)}: {spread(best.finals)}",
                ENDS[rows[0].end],
                *(f"{r.ratio:.2f}" if r.ratio else "-" for r in rows),
            ]
        )
    return columns, lines


def budget(run: Run) -> str:
    """Return the number of epochs and updates."""
    return f"{run.row.epochs * run.share:.3g}, {run.count_steps():,}"


def cost(records: Iterable[Record]) -> str:
    """Return the processor seconds of `KFAC()`, compared with Adam's."""
    seconds: dict[Any, dict[str, float]] = defaultdict(dict)
    for record in of_equal_epochs(records):
        run = Run(**record["run"])
        if run.phase == FINAL:
            key = run.problem, run.seed, run.batch, record["environment"]
            seconds[key][run.method] = record["curve"]["cpu_seconds"][-1]
    ratios: dict[str, list[float]] = defaultdict(list)
    for (problem, *_), by_method in seconds.items():
        if {KFAC, "adam"} <= by_method.keys():
            ratios[problem].append(by_method[KFAC] / by_method["adam"])
    means = sorted(map(statistics.geometric_mean, ratios.values()))
    return (
        f"A step and a whole training of `KFAC()` cost {means[0]:.1f} to "
        f"{means[-1]:.1f} times the processor seconds of Adam's at equal "
        "batches and epochs (geometric mean "
        f"{statistics.geometric_mean(means):.1f}, without the trace)."
    )


# ------------------------------------------------------------------- sentences
def headline(records: Sequence[Record]) -> str:
    """Return the results of `KFAC()`, from the records of equal seconds."""
    equal = at_equal_seconds(records)
    ends = [pair.end for pair in equal.values()]
    others = [name for name in FULL_PROBLEMS if name not in equal]
    notes = [f"not run: {', '.join(others)}"] if others else []
    pairs = {(r["run"]["problem"], r["run"]["method"]) for r in records}
    notes += [
        f"{name}: Adam only" for name in equal if (name, "muon") not in pairs
    ]
    comparisons, adams = (
        list(compare(of_equal_epochs(records), *rival))
        for rival in ((), ("adam",))
    )
    at_epochs = [_rows(comparison)[KFAC].end for comparison in comparisons]
    mean, number = geometric_means(adams)[KFAC]
    note = f" ({'; '.join(notes)})" if notes else ""
    return (
        "At **equal processor seconds**, with its defaults, `KFAC()` ends "
        "better than the best of tuned Adam and Muon on "
        f"**{_counts(ends)}{note}. At equal epochs it ends better on "
        f"**{_counts(at_epochs)}. It reaches tuned Adam's result in "
        f"**{mean:.2f} of Adam's processor seconds** "
        f"(geometric mean of {number} problems)."
    )


def _counts(ends: Sequence[str]) -> str:
    """Return how often `KFAC()` ends better, level and worse."""
    counts = Counter(ends)
    return (
        f"{counts['less']} of {len(ends)} problems**, level on {counts[TIE]}, "
        f"worse on {counts['more']}"
    )


def against_muon(records: Sequence[Record], trainings: Sequence[Record]) -> str:
    """Return the results of `KFAC()`, compared with tuned Muon.

    Args:
        records: Records of equal seconds.
        trainings: Records with the tiny problems.
    """
    names: dict[str, list[str]] = {end: [] for end in ENDS}
    for comparison in compare(of_equal_epochs(records), "muon"):
        if row := _rows(comparison).get(KFAC):
            name = row.setting.problem
            if row.end == "more":
                name += f" ({spread(row.finals)}; Muon: "
                name += f"{spread(comparison.best.finals)})"
            names[row.end].append(name)
    tiny = {
        problem: (ends[KFAC], ends["muon"])
        for problem, ends in tiny_ends(trainings).items()
        if {KFAC, "muon"} <= ends.keys()
    }
    losing = [
        f"{problem} ({ours.mean:.3g}; Muon: {muon.mean:.3g})"
        for problem, (ours, muon) in tiny.items()
        if ours.mean >= muon.mean
    ]
    seconds = statistics.geometric_mean(
        ours.seconds / muon.seconds for ours, muon in tiny.values()
    )
    lists = {end: ", ".join(ns) or "none" for end, ns in names.items()}
    return (
        f"At equal epochs `KFAC()` ends better than tuned Muon on: "
        f"{lists['less']}. "
        f"Level: {lists[TIE]}. Worse: {lists['more']}. Its mean training loss "
        f"is lower on {len(tiny) - len(losing)} of {len(tiny)} tiny problems, "
        f"and higher on: {', '.join(losing) or 'none'}. The tiny trainings "
        f"take {seconds:.2g} times Muon's processor seconds (geometric mean, "
        "not all on one machine)."
    )


def _rows(comparison: Comparison) -> dict[str, Row]:
    """Return the rows of a comparison by method."""
    return {row.setting.method: row for row in comparison.rows}


def title(method: str) -> str:
    """Return the name of a method in the documentation."""
    if is_untuned(method):
        return "`KFAC()`" + method.removeprefix(KFAC).replace(":", ", ")
    variant = parse(method)
    arguments = dict(variant.arguments)
    if variant.name != KFAC and variant.name not in TITLES:
        return f"`{method}`"
    words = [TITLES.get(variant.name, "natural-gradient steps")]
    if arguments.pop("step", None) == "spectral":
        words = ["spectral steps"]
    # The text above the table names the rest optimizer.
    arguments.pop("rest", None)
    if arguments.pop("schedule", None):
        words.append("constant rate")
    words += [f"{name}={value}" for name, value in arguments.items()]
    return ", ".join(words)


# ----------------------------------------------------------------------- tiny
@dataclasses.dataclass(frozen=True)
class End:
    """The result of a method on a tiny problem, with its best rate.

    Attributes:
        run: The setting.
        losses: Training loss, by seed.
        validation: Metric on held-out examples, by seed.
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


def tiny_ends(records: Iterable[Record]) -> Ends:
    """Return the results by problem and method, constant rates last."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        run = record["run"]
        if run["size"] == TINY:
            groups[run["problem"], run["method"]].append(record)
    ends: dict[str, dict[str, End]] = {name: {} for name in TINY_PROBLEMS}
    for problem, method in sorted(groups, key=lambda key: is_constant(key[1])):
        group = groups[problem, method]
        best = best_setting(group)
        assert best is not None
        chosen = settings_of(group)[best]
        seeds = [record["run"]["seed"] for record in chosen]
        losses = [math.inf if end is None else end for end in finals(chosen)]
        ends[problem][method] = End(
            best,
            dict(zip(seeds, losses, strict=True)),
            [record["validation"] for record in chosen],
            seconds_of(chosen),
        )
    return {problem: row for problem, row in ends.items() if row}


def tiny_table(ends: Ends) -> Table:
    """Return a row for each problem, and comparisons with Adam below."""
    methods = list(dict.fromkeys(m for row in ends.values() for m in row))
    rows = []
    for problem, row in ends.items():
        accuracy = TINY_PROBLEMS[problem].validation == "accuracy"
        name = f"{problem}, accuracy" if accuracy else problem
        rows.append([name, *(_loss(row.get(method)) for method in methods)])
    names = "below Adam", "most over Adam", "loss / Adam", "CPU s / Adam"
    columns = [_against_adam(method, ends) for method in methods]
    rows += map(list, zip(names, *columns, strict=True))
    return ["problem", *map(title, methods)], rows


def _against_adam(method: str, ends: Ends) -> Sequence[str]:
    """Return the four comparisons of a method with Adam."""
    pairs = {
        problem: (row[method], row["adam"])
        for problem, row in ends.items()
        if method != "adam" and {method, "adam"} <= row.keys()
    }
    if not pairs:
        return [""] * 4
    ratios = {name: end.mean / adam.mean for name, (end, adam) in pairs.items()}
    seconds = [end.seconds / adam.seconds for end, adam in pairs.values()]
    worst = max(ratios, key=lambda problem: ratios[problem])
    below = sum(ratio < 1 for ratio in ratios.values())
    return [
        f"{below} of {len(ratios)}",
        f"{ratios[worst]:.3g} ({worst})",
        f"{statistics.geometric_mean(ratios.values()):.2g}",
        f"{statistics.geometric_mean(seconds):.2g}",
    ]


def _loss(end: End | None) -> str:
    """Return the loss with its standard error, the metric and the rate."""
    if end is None:
        return ""
    text = f"{end.mean:.3g}"
    if len(end.losses) > 1:
        deviation = statistics.stdev(end.losses.values())
        text += f" ± {deviation / math.sqrt(len(end.losses)):.1g}"
    text += f"; {statistics.fmean(end.validation):.3g}"
    return text if end.run.rate is None else f"{text} ({end.run.rate:g})"


def spread(values: Sequence[Any]) -> str:
    """Return mean and standard deviation."""
    if not values or None in values:
        return ""
    text = f"{statistics.fmean(values):.4g}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2g}"
    return text
