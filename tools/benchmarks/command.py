"""What command lines that measure have in common."""

import argparse
import datetime
import importlib.metadata
import os
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
        **{
            name: importlib.metadata.version(name)
            for name in ("keras", "tensorflow")
        },
    }
