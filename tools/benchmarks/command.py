"""What command lines that measure have in common."""

import argparse
import datetime
import functools
import os
from importlib.metadata import packages_distributions, version
from typing import Any


def positive(text: str) -> int:
    """Parses a number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number above 0; received {text!r}"
        )
    return int(text)


def machine() -> dict[str, Any]:
    """What figures depend on."""
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        **{name: installed(name) for name in ("keras", "tensorflow")},
    }


@functools.cache
def installed(module: str) -> str | None:
    """Version of the package that has a module, which a nightly has, too."""
    packages = packages_distributions().get(module)
    return version(packages[0]) if packages else None
