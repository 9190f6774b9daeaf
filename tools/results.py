"""Writes the figures of the documentation from the records.

    python tools/results.py

All go into docs/pages/results.md, the first table into README.md. A record of
docs/trainings.json is a training of time_to_target.py, one of
docs/gauss_newton.json the errors of an optimizer of examples/gauss_newton.py.
One of docs/results.json is another study: its tables as they were measured,
the command that repeats it, the machine, and the commits that its figures came
with.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from targets import report
from targets.report import markdown_table
from targets.study import Records, last_commit

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
RECORDS = DOCS / "results.json"
MATRIX = DOCS / "matrix.json"
TRAININGS = DOCS / "trainings.json"
PAGE = DOCS / "pages" / "results.md"
RACERS = {
    "gauss_newton": "**GaussNewton**",
    "least_squares": "MINPACK's lm",
    "lbfgs": "L-BFGS-B",
    "tf_levenberg_marquardt": "tf-levenberg-marquardt",
    "adam": "Adam",
}
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def main() -> None:
    """Writes the page and the table."""
    records = json.loads(RECORDS.read_text())
    PAGE.write_text(page(records))
    README.write_text(with_table(README.read_text()))


def replace(title: str, new: Mapping[str, Any]) -> None:
    """Puts values of this commit into a study, and writes all figures anew.

    Raises:
        ValueError: If there is no study with this title.
    """
    records = json.loads(RECORDS.read_text())
    found = [s for s in records["studies"] if s["title"] == title]
    if not found:
        raise ValueError(f"no study {title!r} in {RECORDS}")
    found[0].update(new, commits=[last_commit()])
    RECORDS.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    main()


def with_table(text: str) -> str:
    """A text with the first table between its two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    table = markdown_table(*report.summary(Records(TRAININGS).runs))
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def page(records: Mapping[str, Any]) -> str:
    """The page of all records."""
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
    """A section: text, tables, and where the figures come from."""
    parts = [f"## {study['title']}", *study["text"]]
    if "races" in study:
        races = json.loads((DOCS / study["races"]).read_text())
        parts.append(markdown_table(*race_table(races)))
    for table in study.get("tables", []):
        parts.append(markdown_table(table["columns"], table["rows"]))
        parts += [f"*{table['caption']}*"] if "caption" in table else []
    parts += study.get("notes", [])
    if "command" in study:
        parts.append(f"```text\n{study['command']}\n```")
    parts.append(
        f"Machine: {records['machines'][study['machine']]}. "
        f"Recorded in: {', '.join(f'`{c}`' for c in study['commits'])}."
    )
    return "\n\n".join(parts)


def _matrix() -> Iterator[str]:
    """The section of what `tools/matrix.sh` has run, if it has."""
    if not MATRIX.exists():
        return
    yield "## Pythons, TensorFlow and Keras"
    yield (
        "A quick set of tests (contracts with Keras and TensorFlow, oracles, "
        "saving, two workers) in environments of their own, by "
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


def race_table(
    races: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Median errors, a row for each problem and optimizer."""
    marks = ("6 s", "20 s", "60 s")
    order = {race["problem"]: None for race in races}
    rows = []
    for problem in order:
        for race in (one for one in races if one["problem"] == problem):
            found = [race["errors"].get(mark) for mark in marks]
            cells = [f"{statistics.median(e):.1e}" if e else "" for e in found]
            count = str(len(race["steps"]))
            rows.append((problem, RACERS[race["optimizer"]], *cells, count))
    return ("problem", "optimizer", *marks, "seeds"), rows


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    main()
