"""Records, charts, versions and environments for all studies."""

import argparse
import datetime
import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from typing import Any

STUDIES = pathlib.Path(__file__).parent
ROOT = STUDIES.parents[1]
sys.path.append(str(ROOT / "tools"))  # import modules from tools/, too


def read_records(path: pathlib.Path | None) -> list[dict[str, Any]]:
    """Return the records of a file, which may not exist yet."""
    if path is None or not path.exists():
        return []
    return list(json.loads(path.read_text())["records"])


def write_records(
    path: pathlib.Path, records: Iterable[dict[str, Any]]
) -> None:
    """Write a file of records, a line each, with the machine."""
    lines = ",\n".join(map(json.dumps, records))
    here = json.dumps(machine())
    path.write_text(f'{{"machine": {here},\n"records": [\n{lines}\n]}}\n')


def save_chart(figure: Any, path: pathlib.Path) -> None:
    """Write a chart, with equal bytes for equal records."""
    from matplotlib import rc_context

    figure.tight_layout()
    with rc_context({"svg.hashsalt": "", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


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
    """Return the environment variables of a process measured on the CPU.

    `threads` is the number of threads of an operation; `folder` comes first on
    the module path.
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
