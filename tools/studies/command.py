"""Arguments, versions and environments that the studies have in common."""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys
from importlib.metadata import packages_distributions, version
from typing import Any

STUDIES = pathlib.Path(__file__).parent
ROOT = STUDIES.parents[1]
# Modules of the scripts at the top of tools/, and of the examples.
sys.path += [str(ROOT / "tools"), str(ROOT / "examples")]


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer with its arguments and the folder of its library.

    Attributes:
        text: The variant as it was given on the command line.
        name: Name of the optimizer.
        folder: Folder to put first on the module path, or None.
        arguments: Arguments of the constructor.
    """

    text: str
    name: str
    folder: pathlib.Path | None
    arguments: dict[str, Any]


def parse_variant(text: str) -> Variant:
    """Parse NAME[@FOLDER][:KEY=VALUE...].

    Raises:
        argparse.ArgumentTypeError: If the text does not have this form.
    """
    head, *pairs = text.split(":")
    name, _, folder = head.partition("@")
    path = pathlib.Path(folder).resolve() if folder else None
    if path and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{folder!r} is no folder")
    return Variant(text, name, path, dict(map(key_value, pairs)))


def key_value(pair: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is JSON or, if it is not valid JSON, text.

    Raises:
        argparse.ArgumentTypeError: If the text does not have this form.
    """
    key, equals, text = pair.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"{pair!r} is not KEY=VALUE")
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def intervals(text: str) -> tuple[int, int]:
    """Parse FACTOR,INVERSE, two numbers of steps.

    Raises:
        argparse.ArgumentTypeError: If the text does not have this form.
    """
    parts = text.split(",")
    if len(parts) != 2 or not all(p.isdecimal() and int(p) for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not FACTOR,INVERSE, two numbers of steps"
        )
    return int(parts[0]), int(parts[1])


def positive(text: str) -> int:
    """Parse an integer above 0.

    Raises:
        argparse.ArgumentTypeError: If the text is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number above 0; received {text!r}"
        )
    return int(text)


def machine() -> dict[str, Any]:
    """Return the time, the load of the machine, and versions."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        **{name: installed(name) for name in ("keras", "tensorflow")},
    }


@functools.cache
def installed(module: str) -> str | None:
    """Return the version of the package that contains a module."""
    packages = packages_distributions().get(module)
    return version(packages[0]) if packages else None


def process_environment(
    threads: int, folder: pathlib.Path | None = None
) -> dict[str, str]:
    """Return the environment of a process that is measured, on the CPU.

    Args:
        threads: Threads of an operation.
        folder: Folder to put first on the module path, or None.
    """
    path = [folder, STUDIES, ROOT, os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if part),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": "2",
    }
