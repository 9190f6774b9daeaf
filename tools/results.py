"""Write the figures of the documentation from the records.

    python tools/results.py             # writes the page, and README's parts
    python tools/results.py --commands  # prints the command of each study

All figures go into docs/pages/results.md, the first table and the main claims
into README.md, charts into docs/pages/images. The records of
docs/trainings.json and docs/equal_seconds.json are trainings of
studies/time_to_target.py; docs/real_examples.json, docs/published.json and
docs/large_batches.json are written by the studies of these names.
docs/gauss_newton.json has the errors of a comparison, docs/results.json all
studies, each with its table, command, machine and commits.
"""

import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paths  # noqa: F401
from common.arguments import make_parser_of, parse_variant
from real_examples import FALLING
from targets import charts, report
from targets.report import markdown_table
from targets.study import EQUAL_SECONDS, TRAININGS, Records

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RECORDS = DOCS / "results.json"
MATRIX = DOCS / "matrix.json"
PAGE = DOCS / "pages" / "results.md"
IMAGES = DOCS / "pages" / "images"
RACERS = {
    "gauss_newton": "GaussNewton",
    "least_squares": "MINPACK's lm",
    "lbfgs": "L-BFGS-B",
    "tf_levenberg_marquardt": "tf-levenberg-marquardt",
    "adam": "Adam",
}
NAMES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "kfac": "`KFAC()`",
    "muon": "Muon",
    "gauss_newton": "`GaussNewton()`",
}
# Results of the authors.
PUBLISHED = {"nanogpt": "1.88", "poisson": "1e-6 to 1e-8", "heat": ""}
EQUAL = Records(EQUAL_SECONDS)
# Generated parts of the README: text between the comments `[start:NAME]` and
# `[end:NAME]`.
PARTS = {
    "headline": lambda: report.headline(EQUAL.runs),
    "muon": lambda: report.against_muon(EQUAL.runs, Records(TRAININGS).runs),
    "results": lambda: (
        f"{markdown_table(*report.summary(EQUAL.runs))}\n\n"
        f"{report.cost(EQUAL.runs)}"
    ),
}
ENDS = "loss", "validation"
Runs = Sequence[Mapping[str, Any]]  # records of real_examples.py


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser_of(__doc__)
    parser.add_argument("--commands", action="store_true")
    if parser.parse_args(arguments).commands:
        training = report.commands(Records(TRAININGS))
        equal = report.commands(EQUAL)
        print("\n".join([*training, *equal, *commands()]))
    else:
        write()


def write() -> None:
    """Write the page of results, the README's generated parts, and charts."""
    PAGE.write_text(page(json.loads(RECORDS.read_text())))
    README.write_text(with_parts(README.read_text()))
    charts.draw_seconds(EQUAL.runs, IMAGES / "seconds.svg")
    charts.draw_epochs(Records(TRAININGS).runs, IMAGES / "epochs.svg")


def commands() -> Iterator[str]:
    """Yield the command of each study of docs/results.json, and its title."""
    for study in json.loads(RECORDS.read_text())["studies"]:
        if "command" in study:
            yield f"# {study['title']}"
            yield study["command"]


def with_parts(text: str) -> str:
    """Return the README with its generated parts replaced."""
    for name, function in PARTS.items():
        start, end = (f"<!-- --8<-- [{m}:{name}] -->" for m in ("start", "end"))
        before, rest = text.split(start)
        _, after = rest.split(end)
        text = f"{before}{start}\n{function()}\n{end}{after}"
    return text


def page(records: Mapping[str, Any]) -> str:
    """Return the page of results in Markdown."""
    parts = [
        "<!-- Written by tools/results.py from the records. -->",
        "# Results",
        *records["about"],
        *report.sections(Records(TRAININGS)),
        *_matrix(),
        *(_study(study, records) for study in records["studies"]),
    ]
    return "\n\n".join(parts) + "\n"


def _study(study: Mapping[str, Any], records: Mapping[str, Any]) -> str:
    """Return a section: the legend with the machine, then the table."""
    source = (
        f"Machine: {records['machines'][study['machine']]}. "
        f"Recorded in: {', '.join(f'`{c}`' for c in study['commits'])}."
    )
    *texts, last = study["text"]
    parts = [f"## {study['title']}", *texts, f"{last} {source}"]
    for name, table in TABLES.items():
        if name in study:
            stored = json.loads((DOCS / study[name]).read_text())
            runs = stored if name == "races" else stored["records"]
            parts.append(markdown_table(*table(runs)))
    if "table" in study:
        parts.append(markdown_table(**study["table"]))
    return "\n\n".join(parts)


def _matrix() -> Iterator[str]:
    """Yield the section of the runs of `tools/matrix.sh`, if there are any."""
    if not MATRIX.exists():
        return
    yield "## Pythons, TensorFlow and Keras"
    yield (
        "Tests of a quick set (contracts with Keras and TensorFlow, oracles, "
        "saving, two workers) in separate environments, by "
        "`bash tools/matrix.sh`. Nightly versions may fail."
    )
    names = ("passed", "failed", "skipped")
    columns = ("Python", "TensorFlow", "Keras", *names)
    rows = [
        (
            row["python"],
            row.get("tensorflow") or f"nightly {row['tf-nightly']}",
            row.get("keras") or f"nightly {row['keras-nightly']}",
            *(str(row[name]) for name in names),
        )
        for row in json.loads(MATRIX.read_text())
    ]
    yield markdown_table(columns, rows)


def race_table(races: Runs) -> report.Table:
    """Return median errors at 6, 20 and 60 s by problem and optimizer."""
    marks = ("6 s", "20 s", "60 s")
    cells: dict[str, dict[str, str]] = {}
    for race in races:
        errors = [race["errors"].get(mark) for mark in marks]
        medians = [f"{statistics.median(e):.1e}" for e in errors if e]
        row = cells.setdefault(race["problem"], {})
        row[race["optimizer"]] = " / ".join(medians)
    rows = [
        (problem, *(row.get(racer, "") for racer in RACERS))
        for problem, row in cells.items()
    ]
    return ("problem", *RACERS.values()), rows


def published_table(
    records: Runs,
) -> report.Table:
    """Return a row for each benchmark, optimizer and number of steps.

    Of the learning rates the one with the most seeds has a row, then the best.
    """
    cases: dict[Any, dict[float | None, list[Mapping[str, Any]]]] = {}
    for record in records:
        name, errors = record["benchmark"], record["benchmark"] != "nanogpt"
        key = name, record["optimizer"], None if errors else record["steps"]
        rates = cases.setdefault(key, {})
        rates.setdefault(record.get("rate"), []).append(record)
    rows = []
    for (name, optimizer, steps), rates in cases.items():
        rate = max(
            rates, key=lambda r: (len(rates[r]), -_mean(rates[r], "result"))
        )
        ends = sorted(record["result"] for record in rates[rate])
        text = report.spread(ends)
        if steps is None:
            text = f"{statistics.median(ends):.1e}, largest {ends[-1]:.1e}"
            steps = f"{_mean(rates[rate], 'steps'):.0f}"
        title = NAMES[optimizer] + (f" ({rate:g})" if rate else "")
        row = name, PUBLISHED[name], title, str(steps), str(len(ends)), text
        rows.append((*row, f"{_mean(rates[rate], 'cpu_seconds'):.0f}"))
    columns = "benchmark", "published", "optimizer", "steps", "seeds"
    return (*columns, "result", "CPU s"), rows


def batches_table(
    records: Runs,
) -> report.Table:
    """Return mean and standard deviation of the steps, by size of a batch.

    "-" is for a target that a seed did not reach.
    """
    counts: dict[tuple[str, str], dict[int, list[float | None]]] = {}
    for record in records:
        row = counts.setdefault((record["problem"], record["optimizer"]), {})
        row.setdefault(record["batch"], []).append(record["steps"])
    sizes = sorted({record["batch"] for record in records})

    def cell(steps: Sequence[float | None]) -> str:
        found = [count for count in steps if count is not None]
        if len(found) < len(steps):
            return "-"
        spread = f" ± {statistics.stdev(found):.0f}" if len(found) > 1 else ""
        return f"{statistics.mean(found):.0f}{spread}"

    rows = [
        (problem, NAMES[name], *(cell(row[size]) for size in sizes))
        for (problem, name), row in counts.items()
    ]
    return ("problem", "optimizer", *map(str, sizes)), rows


def _short(method: str) -> str:
    """Return the name of a method and its learning rate."""
    variant = parse_variant(method)
    rate = variant.arguments.get("learning_rate", "")
    return f"{variant.name} {rate}".strip()


def _mean(records: Runs, name: str) -> float:
    return statistics.mean(record[name] for record in records)


def _ends(records: Runs) -> str:
    """Return the mean losses at the end."""
    return " / ".join(f"{_mean(records, name):.3g}" for name in ENDS)


def _warnings(records: Runs) -> set[str]:
    return set().union(*(record["warnings"] for record in records))


def _tuned(methods: Mapping[str, Runs], name: str) -> str:
    """Return the losses of the best rate, which alone has all seeds."""
    rates = [m for m in methods if m.startswith(name) and FALLING in m]
    if not rates:
        return ""
    best = max(rates, key=lambda method: len(methods[method]))
    rate = parse_variant(best).arguments["learning_rate"]
    return f"{_ends(methods[best])} ({rate})"


def examples_table(
    records: Runs,
) -> report.Table:
    """Return a row for each program, with means over the seeds."""
    programs: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for record in records:
        methods = programs.setdefault(record["program"], {})
        methods.setdefault(record["method"], []).append(record)
    rows: list[tuple[str, ...]] = []
    level = dict.fromkeys(ENDS, 0)
    for program, methods in programs.items():
        kfac, adam = methods["kfac"], methods["adam"]
        for name in ENDS:
            level[name] += _mean(kfac, name) <= _mean(adam, name)
        others = [
            f"{_ends(runs)} ({_short(method)})"
            for method, runs in methods.items()
            if method not in ("adam", "kfac") and FALLING not in method
        ]
        first = (f"{_mean(runs, 'first_step'):.1f}" for runs in (kfac, adam))
        rows.append(
            (
                program.replace("_", " "),
                f"{_mean(kfac, 'steps'):.0f}",
                f"{_mean(kfac, 'covered'):.0%}",
                _ends(kfac),
                _ends(adam),
                ", ".join(others),
                _tuned(methods, "adam"),
                _tuned(methods, "muon"),
                f"{_mean(kfac, 'step') / _mean(adam, 'step'):.2f}",
                " / ".join(first),
                str(len(_warnings(kfac) - _warnings(adam))),
            )
        )
    counts = " / ".join(map(str, level.values())) + f" of {len(rows)}"
    rows.append(("at or below Adam", "", "", counts, *[""] * 7))
    columns = ["program", "steps", "covered", "`KFAC()`", "Adam", "other"]
    columns += ["tuned Adam", "tuned Muon"]
    columns += ["CPU / Adam", "first step, CPU s", "warnings"]
    return columns, rows


# Tables of the studies, by the key that names their file of records.
TABLES: dict[str, Callable[[Runs], report.Table]] = {
    "races": race_table,
    "examples": examples_table,
    "published": published_table,
    "batches": batches_table,
}

if __name__ == "__main__":
    main()
