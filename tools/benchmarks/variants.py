"""What is compared: optimizers, their arguments, a folder of the library."""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

FIRST_ORDER = ("sgd", "adam", "adamw", "muon")
FAMILIES = (
    *FIRST_ORDER,
    "kfac-SOLVER",
    *(f"fosi-{name}" for name in FIRST_ORDER),
    "bare-kfac",
    "bare-fosi",
)
# `--mixes` sets these while the training runs.
INTERVALS = ("factor_update_interval", "inverse_update_interval")


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer with its arguments, and where its library lies.

    Attributes:
        text: As on the command line.
        name: One of `FAMILIES`, with a solver in place of SOLVER.
        folder: What goes first on the module path, or None.
        arguments: Those of the optimizer's constructor.
    """

    text: str
    name: str
    folder: pathlib.Path | None
    arguments: dict[str, Any]

    @property
    def is_kfac(self) -> bool:
        """Whether intervals mean something to it."""
        return "kfac" in self.name


def parse(text: str) -> Variant:
    """Parses a variant that the benchmark can time.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    variant = parse_any(text)
    name = family = variant.name
    if "kfac-" in name and not name.endswith("kfac-"):
        family = name[: name.index("kfac-")] + "kfac-SOLVER"
    check_family(family, name, FAMILIES)
    for key in INTERVALS:
        if key in variant.arguments:
            raise argparse.ArgumentTypeError(f"{key} is set by --mixes")
    return variant


def check_family(family: str, name: str, families: Sequence[str]) -> None:
    """Refuses a variant of no known family.

    Raises:
        argparse.ArgumentTypeError: If it is none of them.
    """
    if family not in families:
        raise argparse.ArgumentTypeError(
            f"{name!r} is none of {', '.join(families)}"
        )


def parse_any(text: str) -> Variant:
    """Parses NAME[@FOLDER][:KEY=VALUE...].

    Raises:
        argparse.ArgumentTypeError: If it is not of that form.
    """
    head, *pairs = text.split(":")
    name, _, folder = head.partition("@")
    path = pathlib.Path(folder).resolve() if folder else None
    if path and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{folder!r} is no folder")
    return Variant(text, name, path, dict(_argument(pair) for pair in pairs))


def _argument(pair: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON if it is JSON, else as text."""
    key, equals, text = pair.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{pair!r} is not KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text
