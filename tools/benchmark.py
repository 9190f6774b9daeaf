"""Times training steps of optimizers against each other.

    python tools/benchmark.py                    # K-FAC and SGD on M1 to M4
    python tools/benchmark.py --models M1 --variants sgd kfac-inverse@../old
    python tools/benchmark.py --first-step 3 --models mlp-64x100 MobileNetV2
    python tools/benchmark.py --record           # tables of the documentation

Each variant runs in a process of its own; they take turns of a few steps, so
that all of them meet the same load of the machine. A variant is
NAME[@FOLDER][:KEY=VALUE...]: an optimizer, the folder that its library is
imported from (that of this script unless given), and arguments of its
constructor.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import results
from benchmarks import plots, report
from benchmarks.command import machine, positive
from benchmarks.data import MODELS, exists
from benchmarks.jobs import DiedError, Setting
from benchmarks.measurement import Row, measure, measure_first_steps
from benchmarks.phases import parse_mix
from benchmarks.task import MODES
from benchmarks.variants import FAMILIES, parse

RECORDED_MODELS = ["M1", "M2", "M3", "M4", "D"]
RECORDED_VARIANTS = [
    "sgd",
    "adam",
    "muon",
    "kfac-inverse",
    "kfac-inverse:step=spectral",
    # All rows of a batch, no sketches.
    "kfac-inverse:max_factor_dim=16384:factor_batch_fraction=1.0",
    "fosi-adam",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a variant has died, else 0."""
    options = parse_arguments(arguments)
    setting = Setting(
        options.batch,
        options.mode,
        options.threads,
        options.workers,
    )
    rows: list[Row] = []
    for model in options.models:
        try:
            new = measure_model(model, options, setting)
        except DiedError as error:
            sys.exit(f"{model}: {error}")
        print(report.text_table(new), flush=True)
        rows += new
        save(options, {"rows": rows})
    show(options, rows)
    return int(any("error" in row for row in rows))


def measure_model(
    model: str, options: argparse.Namespace, setting: Setting
) -> list[Row]:
    """Measures all variants on one model."""
    variants = [parse(text) for text in options.variants]
    if options.first_step:
        return measure_first_steps(model, variants, setting, options.first_step)
    return measure(
        model,
        variants,
        setting,
        [parse_mix(text) for text in options.mixes],
        options.rounds,
        options.turn,
    )


def show(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Writes all that the options ask for."""
    if not options.first_step:
        print(f"\n{report.kinds_table(rows)}")
    if options.workers > 1:
        print(f"\n{report.traffic_table(rows)}")
    if options.markdown:
        print(f"\n{report.markdown(rows)}")
    if options.record:
        results.replace("Time of a step", {"tables": report.tables(rows)})
    if options.plot and any("mixes" in row for row in rows):
        plots.save_steps(options.plot, rows)


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes what there is so far, with what it was measured on."""
    if options.json:
        facts = {"machine": machine(), "command": sys.argv[1:]}
        options.json.write_text(json.dumps(facts | result, indent=1))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"Variants: {', '.join(FAMILIES)}. Models: {', '.join(MODELS)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_measured(parser.add_argument_group("what is measured"))
    add_process(parser.add_argument_group("how it is run"))
    add_output(parser.add_argument_group("output"))
    options = parser.parse_args(arguments)
    if options.mode is None:
        options.mode = "fit" if options.workers > 1 else "function"
    if options.workers > 1 and options.mode != "fit":
        parser.error("several workers run in --mode fit only")
    if options.first_step and options.plot:
        parser.error("--first-step has no plot")
    names = RECORDED_MODELS[:4], ["sgd", "kfac-inverse", "kfac-eigen"]
    if options.record:
        names = RECORDED_MODELS, RECORDED_VARIANTS
    options.models = options.models or names[0]
    options.variants = options.variants or names[1]
    return options


def add_measured(group: Any) -> None:
    """Adds what is measured of which."""
    group.add_argument("--models", nargs="+", type=model, metavar="MODEL")
    group.add_argument("--variants", nargs="+", type=variant, metavar="VARIANT")
    group.add_argument(
        "--mixes",
        nargs="+",
        type=mix,
        default=["10,100", "1,10"],
        metavar="FACTOR,INVERSE",
        help="intervals of K-FAC's factors and decompositions (default: "
        "10,100 1,10)",
    )
    group.add_argument(
        "--first-step",
        type=positive,
        metavar="N",
        help="measure only the first step, of N fresh processes",
    )


def add_process(group: Any) -> None:
    """Adds how it is run."""
    for name, default, text in (
        ("rounds", 5, "intervals of each mix; a step's phase has their median"),
        ("turn", 10, "steps until it is the next variant's turn"),
        ("batch", 128, "rows of a batch, of all workers together"),
        ("threads", 2, "those of a process"),
        ("workers", 1, "processes that train a Keras variant together"),
    ):
        group.add_argument(
            f"--{name}",
            type=positive,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    group.add_argument(
        "--mode",
        choices=MODES,
        help="an own loop in a tf.function (default), train_on_batch, fit with "
        "a ragged last batch (default of several workers), or an own loop with "
        "an unknown number of rows",
    )


def add_output(group: Any) -> None:
    """Adds where results go."""
    group.add_argument("--json", type=pathlib.Path, metavar="FILE")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE")
    group.add_argument(
        "--markdown", action="store_true", help="print the tables of --record"
    )
    group.add_argument(
        "--record",
        action="store_true",
        help="write the tables into docs/results.json and its page; models and "
        "variants are then those of that page unless given",
    )


def model(text: str) -> str:
    """Checks the name of a model."""
    if not exists(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(MODELS)}"
        )
    return text


def variant(text: str) -> str:
    """Checks a variant."""
    return parse(text).text


def mix(text: str) -> str:
    """Checks intervals."""
    parse_mix(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
